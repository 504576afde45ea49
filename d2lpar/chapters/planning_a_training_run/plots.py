"""The figure of chapter 13: the seconds of a step over the micro-batch, a panel for each split."""

from math import ceil

from d2lpar.plotting.figures import MEASURED, PREDICTED, WIDE, new_figure, style

COLUMNS = 3


def plot_layouts(predicted, measured, label="predicted"):
    """Return a figure with a panel for each pair of t and p: seconds per step over micro-batches.

    Args:
        predicted: a dict from `Layout`s to predicted seconds per step.
        measured: a dict from `Layout`s to measured seconds per step.
        label: of the first in the legend, "modelled" for example.

    Raises:
        ValueError: nothing is predicted.
    """
    if not predicted:
        raise ValueError("predicted must not be empty")
    splits = list(dict.fromkeys((each.tensor, each.pipeline) for each in predicted))
    nrows = ceil(len(splits) / COLUMNS)
    figure, axes = new_figure(nrows, COLUMNS, (WIDE, 0.5 + 1.7 * nrows))
    panels = [panel for row in axes for panel in row]
    everything = [*predicted.values(), *measured.values()]
    bottom, top = min(everything) / 1.15, max(everything) * 1.15
    ticks = [y for y in (0.1, 0.2, 0.5, 1, 2, 4, 6, 10, 15, 30, 60) if bottom <= y <= top]
    sizes = sorted({each.micro_batch for each in [*predicted, *measured]})
    looks = (
        (predicted, {"label": label, "color": PREDICTED, "marker": "s", "linestyle": "--"}),
        (measured, {"label": "measured", "color": MEASURED, "marker": "o", "linestyle": "-"}),
    )
    with style():
        for panel, (t, p) in zip(panels, splits, strict=False):
            for seconds, look in looks:
                points = sorted(
                    (each.micro_batch, y)
                    for each, y in seconds.items()
                    if (each.tensor, each.pipeline) == (t, p)
                )
                x, y = zip(*points, strict=True) if points else ((), ())
                panel.plot(x, y, markersize=4, **look)
            panel.set(title=f"t = {t}, p = {p}", xscale="log", yscale="log")
            panel.set(xlim=(sizes[0] / 1.4, sizes[-1] * 1.4), xticks=sizes, xticklabels=sizes)
            panel.set(ylim=(bottom, top))
            panel.minorticks_off()
            panel.set_yticks(ticks, labels=ticks)
            panel.grid(True)
        for panel in panels[len(splits) :]:
            panel.set_visible(False)
        figure.supxlabel("sequences in a micro-batch", fontsize=9)
        figure.supylabel("a step (s)", fontsize=9)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure
