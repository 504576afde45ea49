"""Layouts of GPT on 2 to 512 A100s: modelled against 1,549 measured steps.

    python benchmarks/bench_layouts.py          # a few minutes of one core
    python benchmarks/bench_layouts.py t=16     # only rows with such a layout, one by one

The rows are those of `published/gpt.py`. Two numbers of `layout_search.py`
(d2lpar/chapters/planning_a_training_run) were fitted, the factor of MEGATRON_HOST and WHOLE_HEAD,
and to the rows of 2 GPUs only. Rows that differ in their layout alone are one choice: what it costs
is the measured time of the layout that is fastest in the model, over that of the fastest one. The
rank correlation is Spearman's, of modelled and measured times in a choice. The null model has
neither communication nor a host.
"""

import sys
import time
from collections import defaultdict
from statistics import fmean, median

from published import free, gpt
from report import nine_of_ten, ratio_row

from d2lpar.chapters.planning_a_training_run import rank_correlation

LEAST = 4  # layouts of a choice that counts


def errors_of(steps, machine=gpt.MACHINE):
    """Return the relative error of each step, a list."""
    return [gpt.step_seconds(step, machine) * 1e3 / step.milliseconds - 1 for step in steps]


def row(name, errors, null):
    """Print a row of a table of errors."""
    sizes = sorted(map(abs, errors))
    print(
        f"| {name} | {len(sizes)} | {fmean(sizes):.1%} | {median(sizes):.1%} "
        f"| {nine_of_ten(errors):.0%} | {fmean(errors):+.1%} "
        f"| {max(errors, key=abs):+.0%} | {fmean(map(abs, null)):.1%} |"
    )


def table(steps, errors, null):
    """Print errors by the number of GPUs, and by t, p and d of more than 2 GPUs."""
    print(
        "| rows | number | mean error | median | nine of ten within | bias | worst | null model |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    rows = list(zip(steps, errors, null, strict=True))
    several = [each for each in rows if each[0].gpus > 2]
    for name, of_axis in (("gpus", rows), ("t", several), ("p", several), ("d", several)):
        for value in sorted({getattr(step, name) for step, *_ in of_axis}):
            chosen = [each[1:] for each in of_axis if getattr(each[0], name) == value]
            called = f"{value} GPUs" if name == "gpus" else f"{name} = {value}"
            row(called, *zip(*chosen, strict=True))


def choices(steps, errors):
    """Return (cost, rank correlation) of each choice, a dict of lists by the number of GPUs."""
    tasks = defaultdict(list)
    for step, error in zip(steps, errors, strict=True):
        measured = step.milliseconds
        tasks[step.task].append(((1 + error) * measured, measured))
    found = defaultdict(list)
    for (_, gpus, _), times in tasks.items():
        if len(times) >= LEAST:
            fastest = min(measured for _, measured in times)
            cost = min(times)[1] / fastest - 1
            found[gpus].append((cost, rank_correlation(*zip(*times, strict=True))))
    return found


def choice_row(name, pairs):
    """Print a row of the table of choices."""
    costs, correlations = zip(*pairs, strict=True)
    print(
        f"| {name} | {len(costs)} | {fmean(costs):.1%} | {max(costs):.0%} "
        f"| {sum(cost == 0 for cost in costs) / len(costs):.0%} | {fmean(correlations):.2f} |"
    )


def chosen_by(words, steps):
    """Return the steps that have what the words say, "t=16" for example."""
    wanted = [word.split("=") for word in words]
    return [s for s in steps if all(getattr(s, name) == int(n) for name, n in wanted)]


def main():
    steps = chosen_by(sys.argv[1:], gpt.read())
    start, cpu = time.perf_counter(), time.process_time()
    errors = errors_of(steps)
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    if len(sys.argv) > 1:
        for error, step in sorted(zip(errors, steps, strict=True)):
            print(f"{error:+6.1%} {step}")
        return 0
    table(steps, errors, errors_of(steps, free(gpt.MACHINE)))
    print("\n| choices | number | cost | worst | fastest found | rank correlation |")
    print("| --- | --- | --- | --- | --- | --- |")
    found = choices(steps, errors)
    for gpus, pairs in sorted(found.items()):
        choice_row(f"{gpus} GPUs", pairs)
    every = sum(found.values(), [])
    choice_row("all", every)
    wall, cpu = (seconds / len(steps) * 1e3 for seconds in (wall, cpu))
    print(f"\nfor each row {wall:.0f} ms of wall clock, {cpu:.0f} ms of a core")
    sizes = [(step.gpus, abs(error)) for step, error in zip(steps, errors, strict=True)]
    few, many = ([e for n, e in sizes if n in gpus] for gpus in ((4, 8), (64, 256, 512)))
    kept = [
        ratio_row("mean error, 4 and 8 A100s", fmean(few), 0.08, at_least=False),
        ratio_row("mean error, 64 to 512", fmean(many), 0.10, at_least=False),
        ratio_row("cost of a choice", fmean(cost for cost, _ in every), 0.03, False, reached=0.05),
    ]
    return int(not all(kept))


if __name__ == "__main__":
    sys.exit(main())
