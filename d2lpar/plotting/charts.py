"""Charts that the chapters share: bars, stacked bars, curves, named points, and single runs."""

import itertools

from d2lpar.plotting.figures import (
    IDEAL,
    KINDS,
    LINES,
    MEASURED,
    PREDICTED,
    WIDE,
    new_figure,
    style,
)
from vgpu import hardware_name


def plot_bars(labels, predicted, measured, ylabel, title=None):
    """Return a figure of predicted beside measured or, while GPUs are modelled, modelled numbers.

    Args:
        labels: a name for each pair of bars.
        predicted, measured: numbers, one for each label; a None leaves its bar out.
        ylabel: quantity and unit.

    Raises:
        ValueError: there are not as many numbers as labels.
    """
    for name, values in (("predicted", predicted), ("measured", measured)):
        if len(values) != len(labels):
            raise ValueError(f"{len(values)} {name} values for {len(labels)} labels")
    kind = "modelled" if hardware_name() else "measured"
    figure, [[axes]] = new_figure(figsize=(min(WIDE, max(3.5, 1.2 * len(labels) + 1.5)), 2.8))
    with style():
        for shift, name, values, look in (
            (-0.2, "predicted", predicted, {"color": "w", "hatch": "////", "edgecolor": PREDICTED}),
            (0.2, kind, measured, {"color": MEASURED, "edgecolor": MEASURED}),
        ):
            there = [(i + shift, float(v)) for i, v in enumerate(values) if v is not None]
            places, heights = zip(*there, strict=True) if there else ((), ())
            drawn = axes.bar(places, heights, 0.38, label=name, **look)
            axes.bar_label(drawn, labels=[f"{height:.3g}" for height in heights], padding=2)
        axes.set_xticks(range(len(labels)), labels)
        axes.set(ylabel=ylabel, title=title)
        axes.margins(y=0.12)
        axes.grid(True, axis="y")
        figure.legend(loc="outside lower center", ncols=2)
    return figure


def plot_stacks(rows, ylabel, title=None):
    """Return a figure of bars made of parts, stacked.

    Args:
        rows: a dict from the name of a bar to a dict from the names of its parts, the same for all
            bars, to numbers.
        ylabel: quantity and unit.

    Raises:
        ValueError: the bars have different parts.
    """
    names = list(next(iter(rows.values()), {}))
    for label, parts in rows.items():
        if list(parts) != names:
            raise ValueError(f"bar {label!r} has the parts {list(parts)}, the first has {names}")
    figure, [[axes]] = new_figure(figsize=(min(WIDE, max(3.5, 1.2 * len(rows) + 1.5)), 2.8))
    with style():
        bottom = [0.0] * len(rows)
        for i, name in enumerate(names):
            colour, hatch, edge = list(KINDS.values())[i % len(KINDS)]
            heights = [float(parts[name]) for parts in rows.values()]
            look = {"color": colour, "hatch": hatch, "edgecolor": edge, "label": name}
            axes.bar(list(rows), heights, 0.6, bottom, **look)
            bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
        axes.set(ylabel=ylabel, title=title)
        axes.grid(True, axis="y")
        figure.legend(loc="outside lower center", ncols=len(names))
    return figure


def plot_curves(x, ys, xlabel, ylabel, ideal=None, title=None, xscale="linear", yscale="linear"):
    """Return a figure of curves over one axis, the ideal one dashed.

    Args:
        x: numbers.
        ys: a dict from the name of a curve to its numbers, one for each of `x`.
        xlabel, ylabel: quantities and units.
        ideal: numbers of the ideal curve.
        xscale, yscale: "linear" or "log".

    Raises:
        ValueError: a curve does not have as many numbers as `x`.
    """
    for name, y in [*ys.items(), *([("ideal", ideal)] if ideal is not None else [])]:
        if len(y) != len(x):
            raise ValueError(f"curve {name!r} has {len(y)} values, x has {len(x)}")
    figure, [[axes]] = new_figure(figsize=(4.5, 3))
    with style():
        draw_curves(axes, x, ys, ideal)
        axes.set(xlabel=xlabel, ylabel=ylabel, title=title, xscale=xscale, yscale=yscale)
        if len(x) <= 12:
            axes.set_xticks(x, [f"{value:g}" for value in x])
            axes.set_xticks([], minor=True)
        elif xscale == "linear" and all(float(value).is_integer() for value in x):
            axes.xaxis.get_major_locator().set_params(integer=True)
        if yscale == "log":
            write_plain_numbers(axes.yaxis)
        axes.grid(True)
        figure.legend(
            loc="outside lower center", ncols=3 if max(map(len, ys), default=0) < 16 else 2
        )
    return figure


def draw_curves(axes, x, ys, ideal):
    """Draw the curves of the dict `ys` over `x`, and the ideal one dashed unless it is None."""
    for (name, y), (colour, dashes, marker) in zip(ys.items(), looks_of(ys), strict=True):
        axes.plot(x, y, dashes, color=colour, marker=marker, markersize=4, label=name)
    if ideal is not None:
        axes.plot(x, ideal, color=IDEAL, linestyle=(0, (6, 4)), linewidth=1, label="ideal")


def write_plain_numbers(axis):
    """Label the ticks of a logarithmic axis 20 and 0.3 instead of with powers of ten."""
    from matplotlib.ticker import LogFormatter

    class Plain(LogFormatter):
        def __call__(self, x, pos=None):
            return super().__call__(x, pos) and f"{x:g}"  # no label where ticks are close

    axis.set_major_formatter(Plain())
    axis.set_minor_formatter(Plain(labelOnlyBase=False))


LOOKS = {  # looks of the first group of curves, and of the second
    "measured": (LINES[0], (MEASURED, "-.", "D")),
    "predicted": (LINES[1], (PREDICTED, ":", "^")),
}
LOOKS["modelled"] = LOOKS["measured"]  # a figure has one or the other


def looks_of(names):
    """Return colour, dashes and marker for each name.

    "measured", "modelled" and "predicted", also in a group as in "ring, measured", have one colour
    each; groups differ in dashes and markers.
    """
    pairs = [name.rpartition(", ")[::2] for name in names]  # group and role
    groups = list(dict.fromkeys(group for group, role in pairs if role in LOOKS))
    looks = [role in LOOKS and LOOKS[role][groups.index(group) % 2] for group, role in pairs]
    free = itertools.cycle([line for line in LINES if line not in looks])
    return [look or next(free) for look in looks]
