"""Machines fitted to measurements: on a GPU whose times are by hand, and on a program that runs."""

import pytest
import torch
import torch.distributed as dist
from modelling import schedule
from torch import nn

import d2lpar
from vgpu import clock, equal_ranks, virtual_gpus
from vgpu.modelled.fitting import fit
from vgpu.modelled.hardware import MACHINES, Machine
from vgpu.modelled.host import EAGER


def step_seconds(machine, batch_size):
    """Return the modelled seconds of a training step of a small network."""
    (device,) = virtual_gpus(1, model=machine, values=False)
    layers = (layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.ReLU()))
    net = nn.Sequential(*layers).to(device)
    x = torch.empty(batch_size, 1024, device=device)
    for _ in range(2):
        d2lpar.synchronize()
        begun = clock()
        net(x).sum().backward()
        d2lpar.synchronize()
    return clock() - begun


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.7])
def test_one_measurement_gives_a_factor_on_kernels(factor):
    large = 2**16
    measured = {large: factor * step_seconds("a100", large)}
    machine = fit("a100", step_seconds, measured)
    assert step_seconds(machine, large) == pytest.approx(measured[large], rel=0.01)
    assert machine.host is not None and machine.host.operator == EAGER.operator
    assert machine.gpu.factor == pytest.approx(factor, rel=0.02), "kernels take all of the time"


@pytest.mark.parametrize("of_host", [0.4, 1.0, 3.0])
@pytest.mark.parametrize("of_kernels", [0.6, 1.5])
def test_two_measurements_give_a_factor_on_kernels_and_one_on_the_host(of_kernels, of_host):
    """The large one is bound by kernels, the small one by the host."""
    large, small = 2**17, 8
    measured = {
        small: of_host * step_seconds("a100", small),
        large: of_kernels * step_seconds("a100", large),
    }
    machine = fit("a100", step_seconds, measured)
    for batch_size, seconds in measured.items():
        assert step_seconds(machine, batch_size) == pytest.approx(seconds, rel=0.01)
    assert machine.gpu.factor == pytest.approx(of_kernels, rel=0.05)
    for name in ("operator", "module", "autograd"):
        factor = getattr(machine.host, name) / getattr(EAGER, name)
        assert factor == pytest.approx(of_host, rel=0.05)
    assert machine.host.source == f"fitted, {factor:.3g} times {EAGER}"


def test_a_part_that_no_factor_changes_is_left_out_of_it():
    """Half a second whatever the kernels take: it needs several rounds to come within 1 %."""
    machine = fit("a100", lambda machine, key: machine.gpu.factor + 0.5, {1: 2.0})
    assert machine.gpu.factor + 0.5 == pytest.approx(2.0, rel=0.01)


def test_a_fitted_machine_is_otherwise_what_it_was():
    machine = fit("dgxa100", step_seconds, {2**16: 0.1})
    ours = MACHINES["dgxa100"]
    assert (machine.gpus, machine.network, machine.network_cards) == (8, ours.network, 8)
    assert (machine.gpu.memory, machine.gpu.link) == (ours.gpu.memory, ours.gpu.link)
    assert machine.gpu.collective_link is ours.gpu.collective_link
    assert machine.name == "dgxa100" and "kernels x " in machine.gpu.name
    assert len(virtual_gpus(2, model=machine)) == 2


def never(machine, key):
    raise AssertionError("the program was run")


@pytest.mark.parametrize(
    "measured", [{}, {1: 0.1, 2: 0.2, 3: 0.3}, {1: 0.0}, {1: 0.1, 2: -0.2}, {1: float("nan")}]
)
def test_measurements_that_make_no_sense_are_refused_and_named(measured):
    with pytest.raises(ValueError, match="one or two positive measurements") as raised:
        fit("a100", never, measured)
    assert str(raised.value).endswith(f"got {measured}")


def test_measurements_that_no_factors_make_are_named_with_what_was_found():
    """The program takes a second whatever the machine is."""
    with pytest.raises(ValueError, match="no factors make") as raised:
        fit("a100", lambda machine, key: 1.0, {64: 0.5})
    for word in ("{64: 0.5}", "{64: 1.0}", "busy"):
        assert word in str(raised.value)


def test_a_host_that_is_measured_cannot_be_fitted_to_a_measurement():
    with pytest.raises(TypeError, match="got host measured"):
        fit(Machine("a100", host="measured"), never, {1: 0.1})


def kernel_beside_a_collective(machine):
    """Return how much longer a kernel takes while the sum of eight GPUs is under way."""
    (device,) = virtual_gpus(1, model=machine, values=False)
    large, x = torch.empty(2**30, device=device), torch.empty(2**22, device=device)
    d2lpar.synchronize()
    with equal_ranks(8), schedule() as found:
        x.add_(1)
        d2lpar.synchronize()
        work = dist.all_reduce(large, async_op=True)
        x.add_(1)
        work.wait()
    alone, beside = (end - start for _, engine, start, end in found if engine == "compute")
    return beside / alone


def test_a_collective_takes_multiprocessors_from_a_fitted_gpu_too():
    """It catches a fitted machine whose kernels are as fast beside a collective as alone."""
    machine = fit("dgxa100", lambda machine, key: machine.gpu.factor, {1: 2.0})
    assert machine.gpu.multiprocessors == 108, "NVIDIA A100 data sheet"
    ours = kernel_beside_a_collective("dgxa100")
    assert ours > 1.05
    assert kernel_beside_a_collective(machine) == pytest.approx(ours, rel=1e-9)
