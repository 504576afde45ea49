"""Published measurements, and the programs that predict them on modelled GPUs."""

import gc
import inspect
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import d2lpar
from vgpu import Link, Machine, clock

from .hardware import machine_named

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


# Seconds of a step, or bytes, from what a source publishes
UNITS = {
    "s": lambda value, gpus, given: value,
    "ms": lambda value, gpus, given: value * 1e-3,
    "a second": lambda value, gpus, given: 1 / value,
    "examples/s": lambda value, gpus, given: gpus * given["batch"] / value,
    "tokens/s": lambda value, gpus, given: gpus * given["batch"] * given["length"] / value,
    "tokens/s of a GPU": lambda value, gpus, given: given["batch"] * given["length"] / value,
    "GiB": lambda value, gpus, given: value * 2**30,
    "MiB": lambda value, gpus, given: value * 2**20,
    "GB": lambda value, gpus, given: value * 1e9,
}
FIELDS = (
    *("family", "kind", "machine", "gpus", "program", "source", "what", "where"),
    *("unit", "value", "alone", "steps", "steps_alone", "batch", "length", "tokens"),
)


def read(path, programs, units=None):
    """Yield the `Row`s of a file of tables, and check that all of its fields are known.

    A table has fields that all of its rows share, the names of the others (`columns`) and a list
    of them for each of its `rows`:

        family, source: texts, in which fields may stand in braces, as {gpus}; `what` and `where`
            are for that only.
        kind: one of CLASSES; by default "one GPU" or "data parallel", in one or several machines.
        machine: a name in `hardware.toml` or vgpu, of a machine or of the GPU of one.
        value, unit: what the source publishes; see UNITS.
        steps: how many steps that is of, by default one.
        batch, length, tokens: sizes of a GPU's batch and of an epoch, for units and programs.
        alone, steps_alone: the same for one GPU; 0 where nothing is fitted.
        program: one of `programs`. What else the row has are its arguments.

    Args:
        path: of a TOML file.
        programs: a dict of functions that make the program of a row.
        units: a dict of units that only this file has.
    """
    for table in tomllib.loads(Path(path).read_text(encoding="utf-8"))["table"]:
        columns, rows = table.pop("columns"), table.pop("rows")
        for line in rows:
            given = table | dict(zip(columns, line, strict=True))
            yield _row(given, programs[given["program"]], UNITS | (units or {}))


def _row(given, make_program, units):
    gpus, steps, alone = given["gpus"], given.get("steps", 1), given.get("alone")
    machine, to_seconds = machine_named(given["machine"], gpus), units[given["unit"]]
    taken = inspect.signature(make_program).parameters
    unknown = [name for name in given if name not in FIELDS and name not in taken]
    if unknown:
        raise ValueError(f"{given['program']} takes no {', '.join(unknown)}: {given}")
    program = make_program(**{name: given[name] for name in taken if name in given})
    where = "several machines" if gpus > (machine.gpus or gpus) else "one machine"
    return Row(
        given["family"].format(**given),
        given.get("kind") or ("one GPU" if gpus == 1 else f"data parallel, {where}"),
        machine,
        gpus,
        to_seconds(given["value"], gpus, given) / steps,
        program,
        given["source"].format(**given),
        to_seconds(alone, 1, given) / given.get("steps_alone", steps) if alone else None,
    )


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
        machine = replace(row.machine, gpu=row.machine.gpu.scaled(factor))
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
