"""A step of GPT in any layout, put together from programs that run on one modelled GPU.

A layer, the head, a message, and the sum of gradients with the optimizer are programs of a
Megatron's rank (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053). Each runs once on one
modelled GPU that stands for its equals. How often each counts is the formula of a pipeline that
runs one forward and one backward in turn (Narayanan et al. 2021, https://arxiv.org/abs/2104.04473).
`benchmarks/bench_layouts.py` holds the steps against 1,549 measured ones.
"""

from dataclasses import replace

from d2lpar.chapters.planning_a_training_run.layouts import (
    Planned,
    candidates,
    refusal_of_memory,
    why_not,
)
from d2lpar.chapters.planning_a_training_run.program_costs import (
    head_cost,
    layer_cost,
    message_seconds,
    update_cost,
)
from d2lpar.plotting.progress import progress
from vgpu import as_machine

# A layer of Megatron-DeepSpeed keeps its host busy for longer than other eager
# programs do.
MEGATRON_HOST = as_machine("a100").host.scaled(
    1.6, "1.6 times eager, fitted to rows of GPT on 2 A100s"
)
# The head of a rank that does not share it takes longer there than its kernels should: fitted to
# the same rows. It grows with width and tokens; the cause is not known.
WHOLE_HEAD = 1.45


def step_of(gpt, layout, batch, machine):
    """Return what a step of `batch` sequences takes with a layout, a `Planned`.

    The first stage holds the activations of p micro-batches, the last one those of one and the
    scores; the greater sum counts. All figures are those that modelled GPUs report.

    Args:
        gpt: a `GPT`.
        layout: a `Layout` for which `why_not` returns None.
        batch: sequences of a step.
        machine: a `Machine`.
    """
    t, p, d, micro = layout.tensor, layout.pipeline, layout.data, layout.micro_batch
    m, stage = layout.micro_batches(batch), gpt.layers / p
    size = gpt.width, gpt.heads, gpt.length, micro, t
    layer = layer_cost(machine, *size, layout.recompute)
    head = head_cost(machine, gpt.width, gpt.vocabulary, gpt.length, micro, t)
    parameters = int(12 * stage * gpt.width**2 / t + gpt.vocabulary * gpt.width / t)
    update = update_cost(machine, parameters, t, d, p, layout.zero)
    passes = m + p - 1
    # Only the last stage has the head, so the others fill and drain without it.
    seconds = passes * stage * layer.seconds + m * head.seconds * (WHOLE_HEAD if t == 1 else 1)
    seconds += update.seconds
    if p > 1:  # activations forward, gradients back
        num_bytes = gpt.length * micro * gpt.width * 2
        seconds += 2 * passes * message_seconds(machine, num_bytes, t, d)
    busy = m * (stage * layer.busy + head.busy / p) + update.busy
    first = min(p, m) * stage * layer.kept + layer.peak
    last = stage * layer.kept + max(layer.peak, head.peak)
    num_bytes = int(update.kept + max(first, last, update.peak))
    mfu = gpt.flops(batch) / (seconds * layout.gpus * machine.gpu.peaks["float16"])
    refused = refusal_of_memory(num_bytes, machine.gpu)
    return Planned(layout, seconds, num_bytes, 1 - busy / seconds, mfu, refused)


def plan(gpt, gpus, batch, model="dgxa100", zero=0):
    """Return a `Planned` for every layout of a GPT on a number of GPUs, refused ones too: a list.

    Args:
        gpt: a `GPT`.
        gpus: the number of GPUs.
        batch: sequences of a step.
        model: a machine, see `d2lpar.virtual_gpus`; its host is that of Megatron.
        zero: the stage of ZeRO, 0 or 1.

    Raises:
        ValueError: there is no such machine or stage, or `gpus` need several and it has no network.
    """
    machine = replace(as_machine(model), host=MEGATRON_HOST)
    if machine.gpus is not None and gpus > machine.gpus and machine.network is None:
        raise ValueError(f"{gpus} GPUs need several machines of {machine.gpus} with a network")
    rows = []
    sizes = {"batch": batch, "layers": gpt.layers, "heads": gpt.heads}
    for layout in progress(candidates(gpus, zero=(zero,)), "layouts"):
        reason = why_not(layout, **sizes, gpus_per_machine=machine.gpus)
        if reason:
            rows.append(Planned(layout, None, refused=reason))
        else:
            rows.append(step_of(gpt, layout, batch, machine))
    return rows
