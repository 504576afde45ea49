"""The command `d2lpar plan`: print a table of the fastest layouts of a GPT on a cluster."""

from collections import Counter

from d2lpar.chapters.planning_a_training_run.gpt import GPT, SIZES
from d2lpar.chapters.planning_a_training_run.layout_search import plan
from vgpu import as_machine

# Results of benchmarks/bench_layouts.py by number of A100s: mean error of a step, and mean slowdown
# of the predicted fastest layout over the measured fastest; from 64 GPUs on over all four choices.
FOUND = {
    2: (0.052, 0.017),
    4: (0.061, 0.045),
    8: (0.082, 0.074),
    64: (0.095, 0.013),
    256: (0.063, 0.013),
    512: (0.068, 0.013),
}
DAY, HOUR = 86_400, 3600
SHOWN = 10  # number of layouts to print


def gpt_of(parameters):
    """Return the `GPT` of Narayanan et al. 2021 that is nearest to a number of parameters.

    Raises:
        ValueError: the nearest differs by more than 10 %.
    """
    billions = parameters / 1e9
    nearest = min(SIZES, key=lambda size: abs(size - billions))
    if abs(nearest - billions) > 0.1 * billions:
        known = ", ".join(f"{size:g}B" for size in SIZES)
        raise ValueError(
            f"the shape of a GPT of {billions:g}B parameters is not known, only those of {known}: "
            "give --layers, --width and --heads"
        )
    return SIZES[nearest]


def _heading(gpt, gpus, batch, machine, zero):
    text = (
        f"GPT of {gpt.parameters / 1e9:.1f} billion parameters ({gpt.layers} layers of "
        f"{gpt.width}, {gpt.heads} heads, {gpt.length} tokens), {batch} sequences a step, "
        f"{gpus} x {machine.gpu.name}"
    )
    return text + (f", ZeRO {zero}" if zero else "")


def _table(rows, gpt, batch, machine, tokens, price):
    """Yield the lines of the table."""
    memory = f"GB of {machine.gpu.memory / 1e9:.0f}"
    heading = f"{'t':>4}{'p':>4}{'d':>5}{'micro-batch':>13}{'recompute':>11}{'s a step':>10}"
    heading += f"{'MFU':>7}{memory:>11}{'idle':>7}"
    heading += f"{'days':>9}" if tokens else ""
    yield heading + (f"{'cost':>14}" if tokens and price is not None else "")
    for row in rows:
        each = row.layout
        line = f"{each.tensor:4}{each.pipeline:4}{each.data:5}{each.micro_batch:13}"
        line += f"{'yes' if each.recompute else 'no':>11}{row.seconds:10.2f}{row.mfu:7.1%}"
        line += f"{row.num_bytes / 1e9:11.1f}{row.idle:7.0%}"
        if tokens:
            seconds = tokens / (batch * gpt.length) * row.seconds
            line += f"{seconds / DAY:9.1f}"
            if price is not None:
                line += f"{seconds / HOUR * each.gpus * price:14,.0f}"
        yield line


def _refusals(rows, machine):
    """Yield a line with the number of refused layouts for each reason, most frequent first."""
    of_memory = f"a GPU needs more memory than the {machine.gpu.memory / 1e9:.1f} GB that it has"
    reasons = Counter(
        row.refused if row.seconds is None else of_memory for row in rows if row.refused
    )
    yield f"Refused: {reasons.total()} of {len(rows)} layouts."
    for reason, count in reasons.most_common():
        yield f"{count:5}  {reason}"


def _what_it_is(gpus, machine, zero):
    """Return the caption: the numbers are modelled; how accurate such numbers were."""
    text = "Modelled, not measured: steps of Megatron's GPT in half precision. "
    if not machine.gpu.name.startswith("A100"):
        return text + f"No step on a {machine.gpu.name} has been held against it."
    nearest = min(FOUND, key=lambda known: abs(known - gpus))
    error, cost = FOUND[nearest]
    without = " and taken to be without ZeRO" if zero else ""
    return text + (
        f"Steps measured on {nearest} A100s, all with recomputation{without}, differed by "
        f"{error:.1%} on average, and layouts chosen so were {cost:.1%} slower than the fastest "
        "measured ones (docs/planning.md)."
    )


def run(options, refuse):
    """Print the fastest layouts of a GPT, the refused ones, and the accuracy of the numbers.

    Args:
        options: the parsed command line.
        refuse: a function of an error message that ends the command.

    Returns:
        The exit code of `d2lpar plan`: 1 if no layout can be used.
    """
    sizes = {name: getattr(options, name) for name in ("layers", "width", "heads")}
    given = [name for name, value in sizes.items() if value is not None]
    try:
        if options.parameters is not None:
            if given:
                refuse(f"give --parameters or --{', --'.join(given)}, not both")
            sizes = vars(gpt_of(options.parameters))
        elif len(given) < len(sizes):
            refuse("which GPT? Give --parameters, or --layers, --width and --heads")
        extents = {"length": options.length, "vocabulary": options.vocabulary}
        gpt = GPT(**sizes | extents)
        machine = as_machine(options.model)
        rows = plan(gpt, options.gpus, options.batch, machine, zero=options.zero)
    except ValueError as error:
        refuse(str(error))
    good = sorted((row for row in rows if row.refused is None), key=lambda row: row.seconds)
    print(_heading(gpt, options.gpus, options.batch, machine, options.zero))
    if good:
        shown = good[:SHOWN], gpt, options.batch, machine, options.tokens, options.price
        print(*_table(*shown), sep="\n")
    print(*_refusals(rows, machine), sep="\n")
    print(_what_it_is(options.gpus, machine, options.zero))
    return 0 if good else 1
