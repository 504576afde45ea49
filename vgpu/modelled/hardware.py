"""Machines that can be modelled: GPUs, shared links, and the host."""

from dataclasses import dataclass, replace

from vgpu.modelled.datasheets import GPUS
from vgpu.modelled.host import EAGER, as_host
from vgpu.modelled.links import PRESETS, Link, as_link
from vgpu.modelled.modelled_gpu import GPU


@dataclass(frozen=True)
class Machine:
    """Equal machines with several GPUs, and their network.

    Args:
        gpu: a `GPU`, or its name.
        gpus: number of GPUs in each machine; None for one machine with all GPUs.
        gpus_per_switch: number of GPUs that share one PCIe link to the CPU.
        network: the `Link` of each network card; None for a single machine.
        network_cards: number of network cards of a machine; neighbouring GPUs share one.
        host: host time of an operator: a `Host`, seconds, or "eager" for training code of modules.
        name: the name to print.
        source: the source of the figures.
    """

    gpu: object
    gpus: int | None = None
    gpus_per_switch: int = 1
    network: Link | None = None
    network_cards: int = 1
    host: object = EAGER
    name: str = ""
    source: str = "the caller"

    def __post_init__(self):
        object.__setattr__(self, "gpu", as_gpu(self.gpu))
        object.__setattr__(self, "network", as_link(self.network))
        object.__setattr__(self, "host", as_host(self.host))
        for name in ("gpus", "gpus_per_switch", "network_cards"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(
                    f"{name} of a Machine must be a positive whole number: got {value!r}"
                )


def as_gpu(gpu):
    """Return a `GPU`, given as such or by its name in `GPUS`.

    Raises ValueError for an unknown name, TypeError for another object.
    """
    if isinstance(gpu, GPU):
        return gpu
    if not isinstance(gpu, str):
        raise TypeError(f"a GPU must be a vgpu.GPU or a name: got {gpu!r}")
    if gpu.lower() not in GPUS:
        known = f"GPUs are {', '.join(GPUS)}; machines are {', '.join(MACHINES)}"
        raise ValueError(f"no GPU named {gpu!r}; {known}")
    return GPUS[gpu.lower()]


def as_machine(model):
    """Return a `Machine`, given as such, by name, or by its GPU; raises what `as_gpu` does."""
    if isinstance(model, str) and model.lower() in MACHINES:
        return MACHINES[model.lower()]
    return model if isinstance(model, Machine) else Machine(model)


def machines_of(n, models, host=None):
    """Return the `Machine` of each of `n` devices, given `n` models: equal machines, or GPUs.

    `host`, if given, replaces that of the machine, see `Machine`. Raises what `as_gpu` does, and
    ValueError if there are more GPUs than in one machine and no network, or machines differ.
    """
    machines = [as_machine(model) for model in models]
    if host is not None:
        host = as_host(host)
        machines = [replace(machine, host=host) for machine in machines]
    first = machines[0]
    if any(replace(machine, gpu=first.gpu) != first for machine in machines):
        raise ValueError("all devices must have the same Machine: got several; give one, or GPUs")
    if first.gpus is not None and n > first.gpus and first.network is None:
        raise ValueError(
            f"network must be given for {n} devices in machines of {first.gpus} GPUs: got None"
        )
    return machines


MACHINES = {
    name: Machine(
        gpu, 8, per_switch, PRESETS[f"{network}-collectives"], cards, name=name, source=source
    )
    for name, gpu, per_switch, network, cards, source in (
        ("dgx1", "v100", 2, "infiniband-edr", 4, "NVIDIA DGX-1 guide"),
        ("p3.16xlarge", "v100", 2, "25gbe", 1, "AWS"),
        ("bigbasin", "p100", 2, "50gbe", 1, "Goyal et al. 2017, section 4"),
        ("dgxa100", "a100", 2, "infiniband-hdr", 8, "NVIDIA DGX A100 guide"),
        ("dgxh100", "h100", 1, "infiniband-ndr", 8, "NVIDIA DGX H100 guide"),
    )
}
