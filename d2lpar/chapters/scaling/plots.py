"""Figure of chapter 12: single runs and a formula."""

from statistics import mean

from d2lpar.plotting.charts import write_plain_numbers
from d2lpar.plotting.figures import LINES, MEASURED, PREDICTED, new_figure, style


def plot_runs(runs, xlabel, ylabel, formula):
    """Return a log-log figure of measured runs, their means and a formula.

    Args:
        runs: a dict from (group, x) to the results of its runs, a list.
        xlabel, ylabel: quantities and units.
        formula: a function of x, through the means at the least and the largest x.
    """
    ticks = sorted({x for _, x in runs})
    xs = [ticks[0] * (ticks[-1] / ticks[0]) ** (i / 50) for i in range(51)]
    groups = list(dict.fromkeys(group for group, _ in runs))
    figure, [[axes]] = new_figure(figsize=(5, 3.3))
    through = f"formula, through {ticks[0]:g} and {ticks[-1]:g}"
    with style():
        axes.plot(xs, [formula(x) for x in xs], "--", color=PREDICTED, label=through)
        for (group, x), numbers in runs.items():
            i = groups.index(group)
            at = x * 1.07 ** (i - 1)  # next to the other groups
            look = {"marker": LINES[i % len(LINES)][2], "linestyle": "none", "alpha": 0.4}
            label = f"{group}, measured"
            axes.plot([at] * len(numbers), numbers, color=MEASURED, label=label, **look)
            axes.scatter(at, mean(numbers), 250, "k", marker="_", zorder=3, label="mean")
        axes.set(xlabel=xlabel, ylabel=ylabel, xscale="log", yscale="log")
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
        axes.set_xticks([], minor=True)
        write_plain_numbers(axes.yaxis)
        axes.grid(True)
        handles = dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2)
    return figure
