"""Layouts combine tensor, data and pipeline parallelism on the GPUs of a job.

`candidates` enumerates layouts, `why_not` explains why one is unsuitable, `layouts` returns the
suitable ones, and `sweep` runs a training step on modelled GPUs for each.
"""

import gc
import itertools
from dataclasses import dataclass, replace

from d2lpar.devices import virtual_gpus
from d2lpar.memory_use import peak_bytes
from d2lpar.timelines.timeline import Timeline
from vgpu import as_machine, equal_ranks, move_to_machine

AXES = ("tensor", "data", "pipeline")  # the first varies fastest with the rank
UNLIMITED = 2**50  # bytes of memory, to measure steps that need more than there is


@dataclass(frozen=True)
class Layout:
    """The degrees of tensor, pipeline and data parallelism of a job, and its micro-batches.

    In the order of ranks the tensor coordinate varies fastest, then data, then pipeline, as in
    Megatron-LM: the ranks of a tensor group are adjacent, and consecutive stages are
    `tensor * data` ranks apart.

    Attributes:
        tensor: t, the number of ranks that share each layer.
        pipeline: p, the number of stages.
        data: d, the number of replicas that share the batch.
        micro_batch: examples per micro-batch.
        recompute: whether backward recomputes the activations of each layer instead of storing
            them.
        zero: the stage of ZeRO (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054). With 1
            each of the d replicas stores and updates 1/d of the optimizer's state, with 0 all of
            it. Stages 2 and 3, which communicate in each micro-batch, are not supported.

    Raises:
        ValueError: a number is not a positive integer, or `zero` is not 0 or 1.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    micro_batch: int = 1
    recompute: bool = False
    zero: int = 0

    def __post_init__(self):
        for name in (*AXES, "micro_batch"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} of a Layout must be a positive integer: got {value!r}")
        if self.zero not in (0, 1):
            raise ValueError(f"zero of a Layout must be 0 or 1: got {self.zero!r}")

    def __str__(self):
        text = f"t{self.tensor} p{self.pipeline} d{self.data}, micro-batch {self.micro_batch}"
        text += ", recomputing" if self.recompute else ""
        return text + (f", ZeRO {self.zero}" if self.zero else "")

    @property
    def gpus(self):
        """The number of GPUs, t p d."""
        return self.tensor * self.pipeline * self.data

    def micro_batches(self, batch):
        """Return the number of micro-batches per replica in a step of `batch` examples.

        Raises:
            ValueError: the batch is not divisible.
        """
        share = self.data * self.micro_batch
        if batch % share:
            raise ValueError(
                f"batch must be divisible by {self.data} replicas times micro-batches of "
                f"{self.micro_batch}: got {batch}"
            )
        return batch // share

    def ranks_of(self, rank, axis):
        """Return the group of a rank, a list: the ranks that differ from it in `axis` only.

        Args:
            rank: a rank.
            axis: "tensor", "data" or "pipeline".

        Raises:
            ValueError: the rank is out of range, or the axis unknown.
        """
        if axis not in AXES:
            raise ValueError(f"axis must be one of {', '.join(AXES)}: got {axis!r}")
        if not 0 <= rank < self.gpus:
            raise ValueError(f"the rank must be 0 to {self.gpus - 1}: got {rank}")
        stride = {"tensor": 1, "data": self.tensor, "pipeline": self.tensor * self.data}[axis]
        size = getattr(self, axis)
        first = rank - rank // stride % size * stride
        return [first + i * stride for i in range(size)]


def candidates(gpus, micro_batches=(1, 2, 4, 8), recompute=(False, True), zero=(0,)):
    """Return a list of all `Layout`s of a number of GPUs, suitable or not.

    Args:
        gpus: the number of GPUs.
        micro_batches, recompute, zero: the values of these attributes to try.
    """
    divisors = [n for n in range(1, gpus + 1) if gpus % n == 0]
    return [
        Layout(t, p, gpus // (t * p), micro_batch, again, stage)
        for t, p in itertools.product(divisors, divisors)
        if gpus % (t * p) == 0
        for micro_batch, again, stage in itertools.product(micro_batches, recompute, zero)
    ]


def why_not(layout, *, batch, layers, heads, gpus_per_machine=8):
    """Return the reason why a layout is unsuitable for a transformer, or None.

    Args:
        layout: a `Layout`.
        batch: sequences per step.
        layers: number of layers, divided among the stages.
        heads: number of attention heads, divided among the ranks of a tensor group.
        gpus_per_machine: the limit of t, because the allreduces of tensor parallelism cannot be
            hidden and must stay within a machine; None for no limit.
    """
    t, p, share = layout.tensor, layout.pipeline, layout.data * layout.micro_batch
    if heads % t:
        return f"{heads} attention heads do not divide among t = {t}"
    if layers % p:
        return f"{layers} layers do not divide among p = {p} stages"
    if gpus_per_machine is not None and gpus_per_machine % t:
        return f"t = {t} does not fit into machines of {gpus_per_machine} GPUs"
    if batch % share:
        return (
            f"a batch of {batch} does not divide among d = {layout.data} replicas in micro-batches "
            f"of {layout.micro_batch}"
        )
    return None


def layouts(gpus, *, batch, layers, heads, gpus_per_machine=8, **choices):
    """Return a list of the layouts that are suitable for a transformer, see `why_not`.

    Args:
        gpus: the number of GPUs.
        batch, layers, heads, gpus_per_machine: as in `why_not`.
        **choices: `micro_batches`, `recompute` and `zero` as in `candidates`.
    """
    sizes = {"batch": batch, "layers": layers, "heads": heads}
    sizes["gpus_per_machine"] = gpus_per_machine
    return [each for each in candidates(gpus, **choices) if why_not(each, **sizes) is None]


@dataclass(frozen=True)
class Planned:
    """A layout, and the cost of one step on modelled GPUs.

    Attributes:
        layout: the `Layout`.
        seconds: modelled seconds per step; None if it did not run.
        num_bytes: peak memory that a GPU needs for it; None if it did not run.
        idle: the mean fraction of time, 0 to 1, in which a GPU runs no kernel: it waits for other
            stages, messages, collectives or its host. None if it is unknown.
        mfu: utilization, the FLOPs of the network over those of the GPUs at their half-precision
            peak (Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, appendix B), without
            recomputation; None if the FLOPs are unknown.
        refused: the reason why the layout cannot be used, or None.
    """

    layout: Layout
    seconds: float | None
    num_bytes: int | None = None
    idle: float | None = None
    mfu: float | None = None
    refused: str | None = None


def sweep(step, layouts, batch, model="dgxa100"):
    """Run a training step for each layout on modelled GPUs without values.

    Each stage has one modelled GPU, `vgpu:0` to `vgpu:{p - 1}`, which stands for the t d GPUs of
    the stage, and its own host. This process is rank 0 of a default process group of `layout.gpus`
    equal ranks, see `vgpu.equal_ranks`: an allreduce in a group of `layout.ranks_of(0, axis)` takes
    the time of that group. Messages between stages in different machines use the network.

    A step that needs more memory than the GPU has still runs, but is refused in its row.

    Args:
        step: a function of a `Layout` that returns a function of m, which runs a step of m
            micro-batches. That is called with m = 1 as a warm-up; if there are many micro-batches,
            with 2 p and 2 p + 1, and the rest is extrapolated.
        layouts: a list of `Layout`s.
        batch: examples per step.
        model: a machine, see `virtual_gpus`.

    Returns:
        A list of `Planned` without `idle` and `mfu`, in the order of `layouts`.

    Raises:
        ValueError: the batch is not divisible.
    """
    machine = as_machine(model)
    return [_planned(step, layout, machine, batch) for layout in layouts]


def _planned(step, layout, machine, batch):
    gc.collect()  # frees the network of the previous layout
    devices, count, seconds = _stages(layout, machine), layout.micro_batches(batch), []

    def work():
        seconds.append(_seconds(step(layout), count, 2 * layout.pipeline))

    with equal_ranks(layout.gpus):
        num_bytes = max(peak_bytes(work, devices))
    refused = refusal_of_memory(num_bytes, machine.gpu)
    return Planned(layout, seconds[0], num_bytes, refused=refused)


def refusal_of_memory(num_bytes, gpu):
    """Return the reason if a GPU has less memory than `num_bytes`, or None if it has enough."""
    if num_bytes <= gpu.memory:
        return None
    return f"it needs {num_bytes / 1e9:.1f} GB, and {gpu.name} has {gpu.memory / 1e9:.1f} GB"


def _stages(layout, machine):
    """Return a modelled GPU for each stage, with unlimited memory and its own host."""
    p, stride = layout.pipeline, layout.tensor * layout.data
    # One process launches for all p stages in turn, so its host must be p times as fast.
    host = machine.host.scaled(1 / p, machine.host.source) if p > 1 else machine.host
    model = replace(machine, host=host)
    devices = virtual_gpus(p, model=model, memory=UNLIMITED, values=False)
    for stage, device in enumerate(devices):  # ranks of stages are `stride` apart
        move_to_machine(device, stage * stride // (machine.gpus or layout.gpus))
    return devices


def _seconds(run, count, few):
    """Return the seconds of `run(count)`, extrapolated linearly from `run(few)`."""
    run(1)
    if count <= few + 1:
        return Timeline.of(lambda: run(count), warmups=0).seconds
    some, more = (Timeline.of(lambda m=m: run(m), warmups=0).seconds for m in (few, few + 1))
    return some + (count - few) * (more - some)
