"""A machine made to fit what was measured on one GPU: a factor on kernels, and one on the host."""

from dataclasses import replace

from vgpu.modelled.hardware import Scaled, as_machine
from vgpu.modelled.host import Host

_ROUNDS, _NEAR = 12, 0.01


def fit(model, program, measured):
    """Return a `Machine` on which a program takes the seconds that were measured on one GPU.

        machine = fit("a100", step_seconds, {256: 0.31, 1: 0.042})  # by batch size

    One measurement gives a factor on the times of all kernels. Two, a large batch and a small one,
    give a factor on what the host takes, too.

    Args:
        model: a machine or a GPU, as for `virtual_gpus`, whose host is a `Host`.
        program: a function of a `Machine` and of a key of `measured` that returns modelled seconds.
        measured: a dict of one or two measurements: seconds by what `program` is called with.

    Raises:
        ValueError: there are not one or two measurements, one is not positive, or no factors come
            within 1 % of them.
        TypeError: the host of the model is measured.
    """
    machine = as_machine(model)
    if not isinstance(machine.host, Host):
        raise TypeError(f"what is fitted has a Host of known seconds: got {machine.host}")
    if not 1 <= len(measured) <= 2 or not all(taken > 0 for taken in measured.values()):
        raise ValueError(f"one or two positive measurements are fitted: got {measured}")
    large, *small = sorted(measured, key=measured.get, reverse=True)
    gpu, host, kernels, issuing = machine.gpu, machine.host, 1.0, 1.0
    for _ in range(_ROUNDS):
        fitted = replace(
            machine,
            gpu=Scaled(gpu, kernels),
            host=host.scaled(issuing, f"fitted, {issuing:.3g} times {host}"),
        )
        found = {key: program(fitted, key) for key in measured}
        if all(abs(found[key] / measured[key] - 1) < _NEAR for key in measured):
            return fitted
        kernels *= measured[large] / found[large]
        for key in small:
            issuing *= measured[key] / found[key]
    raise ValueError(
        f"no factors make {measured} of {found}: with two measurements, the GPU should be busy all "
        "the time in one, and wait for the host in the other"
    )
