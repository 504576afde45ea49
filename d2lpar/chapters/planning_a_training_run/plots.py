"""The figure of chapter 13: predicted over measured seconds of a step, a marker for each t."""

from d2lpar.plotting.figures import IDEAL, LINES, new_figure, style

LOOKS = (*((color, marker) for color, _, marker in LINES), ("#5e4b8b", "v"))


def plot_layouts(predicted, measured, label="predicted", fitted=None):
    """Return a figure with a point for each layout; on the diagonal both times are the same.

    Args:
        predicted: a dict from `Layout`s to predicted seconds per step.
        measured: a dict from the same `Layout`s to measured seconds per step.
        label: what the first are, "modelled" for example.
        fitted: the `Layout` whose measured step went into the predictions, drawn as a ring; or
            None.

    Raises:
        ValueError: the two have not the same layouts, or none.
    """
    if not predicted or predicted.keys() != measured.keys():
        counts = f"got {len(predicted)} and {len(measured)}"
        raise ValueError(
            f"predicted and measured must have the same layouts, at least one: {counts}"
        )
    figure, [[axes]] = new_figure(1, 1, (5.2, 4.6))
    everything = [*predicted.values(), *measured.values()]
    limits = min(everything) / 1.15, max(everything) * 1.1
    ticks = [y for y in (0.1, 0.2, 0.5, 1, 2, 3, 4, 6, 10, 15, 30) if limits[0] <= y <= limits[1]]
    degrees = sorted({each.tensor for each in predicted})

    def name(text, each, x, y):  # beside a layout's mark, by x and y points
        options = {"xytext": (x, y), "textcoords": "offset points", "va": "center"}
        at = measured[each], predicted[each]
        axes.annotate(text, at, ha="right" if y > 0 else "center", **options)

    with style():
        axes.set_title(f"{len(measured)} layouts, logarithmic axes")
        axes.plot(limits, limits, color=IDEAL, linewidth=1)
        axes.set(xscale="log", yscale="log", xlim=limits, ylim=limits)
        for t, (color, marker) in zip(degrees, LOOKS, strict=False):
            same = sorted((each for each in predicted if each.tensor == t), key=measured.get)
            some = [each for each in same if each != fitted]
            x, y = ([seconds[each] for each in some] for seconds in (measured, predicted))
            axes.plot(x, y, color=color, marker=marker, linestyle="", label=f"t = {t}")
            for each in same:
                if each.pipeline > 1:
                    name(f"p = {each.pipeline}", each, -8, 10)
        if fitted:
            point = [measured[fitted]], [predicted[fitted]]
            axes.plot(*point, "o", markersize=9, color="black", fillstyle="none", label="fitted")
        far = [each for each in measured if measured[each] > 1.35 * predicted[each]]
        for i, each in enumerate(sorted(far, key=measured.get)):
            place = (14, 12) if i % 2 else (0, -14)
            name(f"micro-batch {each.micro_batch}", each, *place)
        axes.legend(loc="upper left")
        axes.text(0.97, 0.03, f"{label} too low", ha="right", transform=axes.transAxes)
        axes.text(0.72, 0.8, f"{label} = measured", ha="right", transform=axes.transAxes)
        axes.set(xlabel="a step, measured (s)", ylabel=f"a step, {label} (s)")
        axes.minorticks_off()
        axes.set(xticks=ticks, xticklabels=ticks, yticks=ticks, yticklabels=ticks)
        axes.grid(True)
    return figure
