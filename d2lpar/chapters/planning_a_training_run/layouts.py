"""Layouts: how a job's GPUs share a network by tensor, data and pipeline parallelism at once.

`candidates` counts the layouts of a number of GPUs up, `why_not` says what speaks against one,
`layouts` returns the others, and `sweep` runs a step of yours on modelled GPUs for each of them.
"""

import contextlib
import functools
import gc
import itertools
from dataclasses import dataclass, replace

import torch

from d2lpar.devices import virtual_gpus
from d2lpar.plotting.progress import progress as shown
from d2lpar.timelines.timeline import Timeline
from vgpu import as_machine, equal_ranks, place

AXES = ("tensor", "data", "pipeline")  # in the order in which ranks count them
UNLIMITED = 2**50  # bytes of memory, so that a step that needs too much tells how much it needs


@dataclass(frozen=True)
class Layout:
    """How the GPUs of a job share a network and a batch.

    Ranks count the tensor coordinate first, then data, then pipeline, as in Megatron-LM: the
    ranks of a tensor group are neighbours, and the stages of a pipeline are `tensor * data` apart.

    Attributes:
        tensor: t, how many ranks share each layer.
        pipeline: p, the number of stages.
        data: d, the number of replicas, which share the batch.
        micro_batch: how many examples pass through a stage at a time.
        recompute: whether backward runs each layer forward again, instead of keeping what it needs.
        zero: the stage of ZeRO (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054). With 1
            each of the d replicas keeps and updates a d-th of the optimizer's state, with 0 all of
            it. Stages 2 and 3 send in each micro-batch and are not offered.

    Raises:
        ValueError: a number is not a positive integer, or there is no such stage of ZeRO.
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
                raise ValueError(f"{name} of a Layout is a positive whole number: got {value!r}")
        if self.zero not in (0, 1):
            raise ValueError(f"zero of a Layout is 0 or 1: got {self.zero!r}")

    def __str__(self):
        text = f"t{self.tensor} p{self.pipeline} d{self.data}, micro-batch {self.micro_batch}"
        text += ", recomputing" if self.recompute else ""
        return text + (f", ZeRO {self.zero}" if self.zero else "")

    @property
    def gpus(self):
        """The number of GPUs, t p d."""
        return self.tensor * self.pipeline * self.data

    def micro_batches(self, batch):
        """Return how many micro-batches pass through each pipeline in a step of `batch` examples.

        Raises:
            ValueError: they do not come out even.
        """
        share = self.data * self.micro_batch
        if batch % share:
            raise ValueError(
                f"a batch of {batch} does not divide among {self.data} replicas in micro-batches "
                f"of {self.micro_batch}"
            )
        return batch // share

    def place(self, rank):
        """Return the coordinates of a rank, (tensor, data, pipeline), each from 0.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= rank < self.gpus:
            raise ValueError(f"{self.gpus} GPUs have ranks 0 to {self.gpus - 1}: got {rank}")
        stage, rest = divmod(rank, self.tensor * self.data)
        replica, part = divmod(rest, self.tensor)
        return part, replica, stage

    def ranks_of(self, rank, axis):
        """Return the group of a rank: those that differ from it in one coordinate, in its order.

        Args:
            rank: the rank.
            axis: that coordinate, "tensor", "data" or "pipeline".

        Raises:
            ValueError: there is no such rank, or no such axis.
        """
        if axis not in AXES:
            raise ValueError(f"an axis is one of {', '.join(AXES)}: got {axis!r}")
        place = dict(zip(AXES, self.place(rank), strict=True))
        stride = {"tensor": 1, "data": self.tensor, "pipeline": self.tensor * self.data}[axis]
        first = rank - place[axis] * stride
        return [first + i * stride for i in range(getattr(self, axis))]


def candidates(gpus, micro_batches=(1, 2, 4, 8), recompute=(False, True), zero=(0,)):
    """Return every `Layout` of a number of GPUs, whether it suits a network or not: a list.

    Args:
        gpus: the number of GPUs.
        micro_batches: the micro-batches to try.
        recompute: whether to recompute: the choices to try.
        zero: the stages of ZeRO to try, 0 and 1.
    """
    divisors = [n for n in range(1, gpus + 1) if gpus % n == 0]
    return [
        Layout(t, p, gpus // (t * p), micro_batch, again, stage)
        for t, p in itertools.product(divisors, divisors)
        if gpus % (t * p) == 0
        for micro_batch, again, stage in itertools.product(micro_batches, recompute, zero)
    ]


def why_not(layout, *, batch, layers, heads, gpus_per_machine=8):
    """Return a sentence that says why a layout does not suit a transformer, or None if it does.

    Args:
        layout: a `Layout`.
        batch: sequences of a step.
        layers: how many layers the stages share.
        heads: how many heads of attention the ranks of a tensor group share.
        gpus_per_machine: tensor parallelism stays within a machine of so many GPUs, because its
            sums cannot be hidden; None if it need not.
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
    """Return the layouts of a number of GPUs that suit a transformer; see `why_not`: a list.

    Args:
        gpus: the number of GPUs.
        batch, layers, heads, gpus_per_machine: as in `why_not`.
        **choices: `micro_batches`, `recompute` and `zero` of `candidates`.
    """
    sizes = {"batch": batch, "layers": layers, "heads": heads}
    sizes["gpus_per_machine"] = gpus_per_machine
    return [each for each in candidates(gpus, **choices) if why_not(each, **sizes) is None]


@dataclass(frozen=True)
class Planned:
    """A layout, and what one step takes with it on modelled GPUs.

    Attributes:
        layout: the `Layout`.
        seconds: modelled seconds of a step; None if it did not run.
        num_bytes: the most bytes that a GPU holds for it; None if it did not run.
        idle: the part of the time, 0 to 1, in which a GPU runs no kernel, on average: it waits for
            other stages, for messages and sums, or for its host.
        mfu: utilization, the FLOPs of the network over those of the GPUs at their peak in half
            precision (Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, appendix B).
            Recomputing does not count as FLOPs of the network. None if these are not known.
        refused: a sentence that says why the layout cannot be used, or None.
    """

    layout: Layout
    seconds: float | None
    num_bytes: int | None = None
    idle: float | None = None
    mfu: float | None = None
    refused: str | None = None


def sweep(
    step,
    layouts,
    *,
    model="dgxa100",
    batch=None,
    flops=None,
    progress=True,
):
    """Run a training step of yours for each layout, on modelled GPUs without values.

    For each layout there is one modelled GPU for each stage, `vgpu:0` to `vgpu:{p - 1}`, and this
    process is rank 0 of a default process group of `layout.gpus` equal ranks, see
    `vgpu.equal_ranks`: each GPU stands for the t d GPUs of its stage. Each stage has a
    host of its own, and messages between stages go over the network where stages are in different
    machines. Tensors of one device whose group is `layout.ranks_of(0, axis)` are summed in the time
    of that group.

    A step needs more memory than there is: it runs all the same, and is refused in its row.

    Args:
        step: a function of a `Layout` that runs one step, and returns nothing. If setting up shall
            not count, it returns a function of m that runs a step of m micro-batches. That runs
            with one to warm up; with many micro-batches it runs with 2 p and 2 p + 1 of them, and
            the others take as long as the last one.
        layouts: a list of `Layout`s.
        model: a machine, see `virtual_gpus`.
        batch: examples of a step, where `step` returns a function of m.
        flops: the FLOPs of the network in a step, over all GPUs, for `Planned.mfu`; for a
            transformer of P parameters about 6 P for each token.
        progress: show a progress bar, where tqdm is installed.

    Returns:
        A list of `Planned`, one for each layout, in its order.

    Raises:
        ValueError: a step returns a function and there is no `batch`, or it does not divide.
    """
    machine = as_machine(model)
    layouts = list(layouts)
    bar = shown(layouts, "layouts") if progress else layouts
    with _older_objects_left_alone():
        return [_planned(step, layout, machine, batch, flops) for layout in bar]


@contextlib.contextmanager
def _older_objects_left_alone():
    """Keep garbage collections off what exists already, which takes them longer than a step."""
    if gc.get_freeze_count():  # somebody does so already
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _planned(step, layout, machine, batch, flops):
    gc.collect()  # the network of the layout before this one
    devices = _stages(layout, machine)
    accel = torch.get_device_module(devices[0])
    before = [accel.memory_allocated(device) for device in devices]  # what the caller keeps there
    with equal_ranks(layout.gpus):
        for device in devices:
            accel.reset_peak_memory_stats(device)
        whole, run = timed(functools.partial(step, layout))
        if run is None:
            seconds, busy = whole
        elif batch is None:
            raise ValueError("a step that returns a function of m needs sweep(..., batch=...)")
        else:
            seconds, busy = _of_many(run, layout.micro_batches(batch), 2 * layout.pipeline)
        peaks = map(accel.max_memory_allocated, devices)
        num_bytes = max(peak - held for peak, held in zip(peaks, before, strict=True))
        del run
    gpu = machine.gpu
    refused = refusal_of_memory(num_bytes, gpu)
    used = [each for each in busy if each]
    idle = 1 - sum(used) / len(used) / seconds if used else 1.0
    mfu = None
    if flops is not None:
        mfu = flops / (seconds * layout.gpus * gpu.peaks["float16"])
    return Planned(layout, seconds, num_bytes, idle, mfu, refused)


def refusal_of_memory(num_bytes, gpu):
    """Return a sentence if a GPU has less memory than `num_bytes`, or None if it has enough."""
    if num_bytes <= gpu.memory:
        return None
    return f"it needs {num_bytes / 1e9:.1f} GB, and {gpu.name} has {gpu.memory / 1e9:.1f} GB"


def _stages(layout, machine):
    """Return a modelled GPU for each stage, with unlimited memory and a host of its own."""
    p, stride = layout.pipeline, layout.tensor * layout.data
    # This process issues for all stages in turn, where each has a process that does.
    host = machine.host.scaled(1 / p, machine.host.source) if p > 1 else machine.host
    model = replace(machine, host=host)
    devices = virtual_gpus(p, model=model, memory=UNLIMITED, values=False)
    for stage, device in enumerate(devices):  # their ranks are `stride` apart
        place(device, stage * stride // (machine.gpus or layout.gpus))
    return devices


def timed(work):
    """Run `work()`; return (seconds, busy seconds of each device), and its result."""
    with Timeline() as timeline:
        result = work()
    busy = [timeline.busy(device) for device in timeline.devices]
    return (timeline.seconds, busy), result


def _of_many(run, count, few):
    """Return seconds and busy seconds of `run(count)`, which grow evenly from `run(few)` on."""
    run(1)
    if count <= few + 1:
        return timed(lambda: run(count))[0]
    (some, busy), _ = timed(lambda: run(few))
    (more, busier), _ = timed(lambda: run(few + 1))
    left = count - few
    seconds = some + left * (more - some)
    return seconds, [a + left * (b - a) for a, b in zip(busy, busier, strict=True)]
