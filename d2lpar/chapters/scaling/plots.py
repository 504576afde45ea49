"""Figure of chapter 12: single runs and a formula."""

from statistics import median

from d2lpar.plotting.charts import write_plain_numbers
from d2lpar.plotting.figures import LINES, new_figure, style


def plot_runs(runs, xlabel, ylabel, curve):
    """Return a log-log figure of runs, their medians and a curve.

    Args:
        runs: a dict from (group, x) to the results of its runs, a list.
        xlabel, ylabel: quantities and units.
        curve: a curve, one number for each x, in ascending order of x.

    Raises:
        ValueError: the length of `curve` is not the number of x.
    """
    ticks = sorted({x for _, x in runs})
    if len(curve) != len(ticks):
        raise ValueError(f"curve must have {len(ticks)} values, one per x: got {len(curve)}")
    groups = list(dict.fromkeys(group for group, _ in runs))
    figure, [[axes]] = new_figure(figsize=(5, 3.3))
    with style():
        axes.plot(ticks, curve, color="k", linewidth=1, marker="x", label="formula")
        for (group, x), numbers in runs.items():
            i = groups.index(group)
            colour, _, marker = LINES[i % len(LINES)]
            at = x * 1.07 ** (i - 1)  # next to the other groups
            look = {"marker": marker, "linestyle": "none", "markersize": 4}
            axes.plot([at] * len(numbers), numbers, color=colour, label=group, **look)
            axes.scatter(at, median(numbers), 250, "k", marker="_", zorder=3, label="median")
        axes.set(xlabel=xlabel, ylabel=ylabel, xscale="log", yscale="log")
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
        axes.set_xticks([], minor=True)
        write_plain_numbers(axes.yaxis)
        axes.grid(True)
        handles = dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2)
    return figure
