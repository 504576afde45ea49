"""Figures of chapter 12: named points, and single runs."""

from statistics import median

from d2lpar.plotting.charts import write_plain_numbers
from d2lpar.plotting.figures import LINES, new_figure, style


def plot_points(points, xlabel, ylabel):
    """Return a figure of points that are joined by a line and labelled with their names.

    Args:
        points: a dict from names of points to (x, y).
        xlabel, ylabel: quantities and units. The x axis is logarithmic, the y axis begins at 0.
    """
    figure, [[axes]] = new_figure(figsize=(6, 3.4))
    with style():
        colour, dashes, marker = LINES[0]
        axes.plot(*zip(*points.values(), strict=True), dashes, color=colour, marker=marker)
        look = {"color": colour, "fontsize": 8, "textcoords": "offset points"}
        for name, at in points.items():
            axes.annotate(name, at, (7, 4), **look)
        axes.set(xlabel=xlabel, ylabel=ylabel, xscale="log", xmargin=0.2)
        write_plain_numbers(axes.xaxis)
        axes.set_ylim(bottom=0)
        axes.grid(True)
    return figure


def plot_runs(runs, xlabel, ylabel, curve):
    """Return a log-log figure of runs and their medians, with counts of runs without a result.

    Args:
        runs: a dict from (group, x) to the results of its runs, a list; a run without a result is
            infinity and counted in the top row, as in "3 of 20".
        xlabel, ylabel: quantities and units.
        curve: a curve, one number for each x, in ascending order of x.

    Raises:
        ValueError: the length of `curve` is not the number of x.
    """
    ticks = sorted({x for _, x in runs})
    if len(curve) != len(ticks):
        raise ValueError(f"curve must have {len(ticks)} values, one per x: got {len(curve)}")
    top = 3 * max(n for numbers in runs.values() for n in numbers if n < float("inf"))
    groups = list(dict.fromkeys(group for group, _ in runs))
    figure, [[axes]] = new_figure(figsize=(5.6, 3.8))
    with style():
        axes.plot(ticks, curve, color="k", linewidth=1, marker="x", label="formula")
        for (group, x), numbers in runs.items():
            i = groups.index(group)
            colour, _, marker = LINES[i % len(LINES)]
            at = x * 1.07 ** (i - 1)  # next to the other groups
            results = [n for n in numbers if n < float("inf")]
            look = {"marker": marker, "linestyle": "none", "markersize": 4}
            axes.plot([at] * len(results), results, color=colour, label=group, **look)
            if median(numbers) < float("inf"):
                axes.scatter(at, median(numbers), 250, "k", marker="_", zorder=3, label="median")
            if len(results) < len(numbers):
                lost = f"{len(numbers) - len(results)} of {len(numbers)}"
                side = "left" if i == len(groups) - 1 else "right"
                axes.text(at, top, lost, ha=side, va="center", color=colour)
        axes.set(xlabel=xlabel, ylabel=ylabel, xscale="log", yscale="log")
        axes.set(xlim=(ticks[0] / 1.3, ticks[-1] * 1.7), ylim=(None, 1.6 * top))
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
        axes.set_xticks([], minor=True)
        if any(n == float("inf") for numbers in runs.values() for n in numbers):
            marks = [n for n in (20, 50, 100, 200, 500) if n < top / 1.5]
            axes.set_yticks([*marks, top], [*map(str, marks), "not\nreached"])
            axes.set_yticks([], minor=True)
        axes.grid(True)
        handles = dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2)
    return figure
