"""Machines that can be modelled: GPUs, the links that they share, and the host."""

from dataclasses import dataclass, replace

from vgpu.modelled.datasheets import GPUS
from vgpu.modelled.host import EAGER, as_host
from vgpu.modelled.links import PRESETS, Link, as_link


class Scaled:
    """A GPU whose kernels take `factor` times as long: one number, fitted to one measurement.

    Args:
        gpu: a `GPU`, or the name of one.
        factor: a positive number.

    Raises:
        ValueError: `factor` is not positive, or no GPU has the name.
    """

    def __init__(self, gpu, factor):
        if not factor > 0:
            raise ValueError(f"the factor of a GPU's times must be positive: got {factor}")
        self._gpu = gpu = as_gpu(gpu)
        self.factor = factor
        self.name = f"{gpu.name}, kernels x {factor:.3g}"
        self.memory, self.link, self.peer_link = gpu.memory, gpu.link, gpu.peer_link
        self.collective_link = getattr(gpu, "collective_link", None)
        self.identity = getattr(gpu, "identity", None)
        self.multiprocessors = getattr(gpu, "multiprocessors", None)

    def rows(self):
        """Return rows of a table about it: pairs of strings."""
        return [*self._gpu.rows(), ("scaled", f"kernels take {self.factor:.4g} times as long")]

    def kernel_seconds(self, kernel):
        """Return how long a `Kernel` takes."""
        return self.factor * self._gpu.kernel_seconds(kernel)


@dataclass(frozen=True)
class Machine:
    """Machines with several GPUs, and what joins them.

    Args:
        gpu: a `GPU`, its name, or an object with the attributes of one; see `as_gpu`.
        gpus: how many each machine has; None for all in one.
        gpus_per_switch: how many share one PCIe link to the CPU.
        network: the `Link` of each of its network cards; None where there is one machine.
        network_cards: how many network cards a machine has; GPUs next to each other share one.
        host: what the host takes to issue an operator: a `Host`, seconds, or "eager" for training
            code of modules.
        name: the name to print.
        source: where the figures come from.
    """

    gpu: object
    gpus: int | None = None
    gpus_per_switch: int = 1
    network: Link | None = None
    network_cards: int = 1
    host: object = EAGER
    name: str = ""
    source: str = "the caller"

    def rows(self):
        """Return rows of a table about it: pairs of strings."""
        facts = [f"{self.host.describe()} ({self.host.source})"]
        if self.gpus is not None:
            facts.append(f"{self.gpus} GPUs in each, {self.gpus_per_switch} on a link to the CPU")
        if self.network is not None:
            facts.append(f"{self.network_cards} x network {self.network}")
        return [*self.gpu.rows(), (self.name or "machine", "; ".join(facts))]

    def __post_init__(self):
        object.__setattr__(self, "gpu", as_gpu(self.gpu))
        object.__setattr__(self, "network", as_link(self.network))
        object.__setattr__(self, "host", as_host(self.host))
        for name in ("gpus", "gpus_per_switch", "network_cards"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} of a Machine is a positive whole number: got {value!r}")


_OF_A_GPU = ("kernel_seconds", "link", "memory", "name", "peer_link", "rows")


def as_gpu(gpu):
    """Return a GPU given by its name in `GPUS`, or as an object with the attributes of one.

    Raises:
        ValueError: no GPU has this name.
        TypeError: `gpu` is none of these.
    """
    if isinstance(gpu, str):
        if gpu.lower() not in GPUS:
            what = "a machine, not a GPU" if gpu.lower() in MACHINES else "not a known GPU"
            raise ValueError(f"{gpu!r} is {what}; GPUs are {', '.join(GPUS)}")
        return GPUS[gpu.lower()]
    missing = [name for name in _OF_A_GPU if not hasattr(gpu, name)]
    if missing:
        raise TypeError(
            f"a GPU is the name of one, or an object with {', '.join(_OF_A_GPU)}: got {gpu!r}, "
            f"without {', '.join(missing)}"
        )
    return gpu


def as_machine(model):
    """Return a `Machine` given as such, by its name, or as its only GPU (see `as_gpu`).

    Raises:
        ValueError: neither a GPU nor a machine has this name.
        TypeError: `model` is none of these.
    """
    if isinstance(model, Machine):
        return model
    if isinstance(model, str):
        if model.lower() in MACHINES:
            return MACHINES[model.lower()]
        if model.lower() not in GPUS:
            known = ", ".join((*GPUS, *MACHINES))
            raise ValueError(f"no GPU and no machine named {model!r}; there are {known}")
    return Machine(model)


def machines_of(n, models, host=None):
    """Return the `Machine` of each of `n` devices, for `n` models: all the same, or GPUs.

    A `host` that is given, see `Machine`, takes the place of its own.

    Raises:
        ValueError: there are more GPUs than in one machine and no network, or machines differ.
        TypeError: a model is none of these; see `as_machine`.
    """
    machines = [as_machine(model) for model in models]
    if host is not None:
        host = as_host(host)
        machines = [replace(machine, host=host) for machine in machines]
    first = machines[0]
    if any(replace(machine, gpu=first.gpu) != first for machine in machines):
        raise ValueError("devices of several kinds of machines: give one Machine, or GPUs")
    if first.gpus is not None and n > first.gpus and first.network is None:
        raise ValueError(
            f"{n} devices need several machines of {first.gpus}, and they have no network"
        )
    return machines


MACHINES = {
    machine.name: machine
    for machine in (
        Machine(
            "v100",
            8,
            2,
            PRESETS["infiniband-edr-collectives"],
            4,
            name="dgx1",
            source="NVIDIA DGX-1 guide",
        ),
        Machine("v100", 8, 2, PRESETS["25gbe-collectives"], name="p3.16xlarge", source="AWS"),
        Machine(
            "p100",
            8,
            2,
            PRESETS["50gbe-collectives"],
            name="bigbasin",
            source="Goyal et al. 2017, section 4",
        ),
        Machine(
            "a100",
            8,
            2,
            PRESETS["infiniband-hdr-collectives"],
            8,
            name="dgxa100",
            source="NVIDIA DGX A100 guide",
        ),
        Machine(
            "h100",
            8,
            1,
            PRESETS["infiniband-ndr-collectives"],
            8,
            name="dgxh100",
            source="NVIDIA DGX H100 guide",
        ),
    )
}
