"""Published measurements, and the programs that predict them on modelled GPUs."""

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace

import d2lpar
from vgpu import Link, clock
from vgpu.modelled.hardware import Machine, Scaled

FREE = Link(1e30)
ROUNDS, NEAR = 12, 0.01  # of the search for a factor

CLASSES = (
    "launch-bound",
    "one GPU",
    "data parallel, one machine",
    "data parallel, several machines",
    "tensor parallel",
    "pipeline",
    "mixed",
    "memory",
)


@dataclass(frozen=True)
class Row:
    """A published measurement.

    Attributes:
        family: the program and its source; rows of one family are seen, or unseen, together.
        kind: one of CLASSES.
        machine: the `Machine` on which it was measured.
        gpus: the number of GPUs.
        published: seconds of a step, or bytes for rows of the class "memory".
        program: a function of a `Machine` and a number of GPUs that returns what it predicts.
        source: where the figure stands.
        alone: what the same source publishes for one GPU, to which one factor on all kernel times
            is fitted; None where nothing is fitted.
    """

    family: str
    kind: str
    machine: Machine
    gpus: int
    published: float
    program: Callable
    source: str
    alone: float | None = None


def modelled(n, machine, room=1):
    """Return `n` modelled GPUs without values, with `room` times the memory that they have."""
    gc.collect()  # the network before this one
    memory = room * machine.gpu.memory
    return d2lpar.virtual_gpus(n, model=machine, memory=memory, values=False)


def seconds_of(step):
    """Return the modelled seconds of a step that has run once before."""
    step()
    d2lpar.synchronize()
    start = clock()
    step()
    d2lpar.synchronize()
    return clock() - start


def predicted(row):
    """Return what modelled GPUs predict for a `Row`, with one factor on kernels if it gives one."""
    machine = row.machine if row.alone is None else fitted(row)
    return row.program(machine, row.gpus)


def fitted(row):
    """Return the machine of a `Row` with a factor on all kernels: one GPU takes what is published.

    Raises:
        ValueError: no factor comes within 1 % of it.
    """
    factor = 1.0
    for _ in range(ROUNDS):
        machine = replace(row.machine, gpu=Scaled(row.machine.gpu, factor))
        found = row.program(machine, 1)
        if abs(found / row.alone - 1) < NEAR:
            return machine
        factor *= row.alone / found
    raise ValueError(f"no factor on the kernels of {row.family} makes {row.alone} s of {found} s")


def without_communication(row):
    """Return what the null model predicts: as `predicted`, on a `free` machine."""
    return predicted(replace(row, machine=free(row.machine)))


def free(machine):
    """Return a machine on which what joins GPUs, and the host, are for nothing."""
    gpu = replace(machine.gpu, peer_link=FREE, collective_link=None)
    return replace(machine, gpu=gpu, host=0.0, network=machine.network and FREE)
