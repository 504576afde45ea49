"""Charts that the chapters share: bars and curves."""

import itertools

from d2lpar.plotting.figures import IDEAL, LINES, MEASURED, PREDICTED, WIDE, new_figure, style
from vgpu import hardware_name


def plot_bars(labels, predicted, measured, ylabel, title=None):
    """Return a bar chart of predicted beside measured (on modelled GPUs: modelled) numbers.

    Args:
        labels: a name for each pair of bars.
        predicted, measured: numbers, one per label; None draws no bar.
        ylabel: quantity and unit.

    Raises:
        ValueError: the numbers and the labels differ in length.
    """
    for name, values in (("predicted", predicted), ("measured", measured)):
        if len(values) != len(labels):
            raise ValueError(
                f"{name} must have {len(labels)} values, one per label: got {len(values)}"
            )
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


def plot_curves(x, ys, xlabel, ylabel, ideal=None, title=None, xscale="linear", yscale="linear"):
    """Return a figure of curves.

    Args:
        x: a list of numbers.
        ys: a dict from names to curves, each a list of one number per x.
        xlabel, ylabel: quantities and units.
        ideal: an ideal curve, drawn dashed.
        xscale, yscale: "linear" or "log".

    Raises:
        ValueError: a curve and `x` differ in length.
    """
    for name, y in [*ys.items(), *([("ideal", ideal)] if ideal is not None else [])]:
        if len(y) != len(x):
            raise ValueError(f"curve {name!r} must have {len(x)} values, one per x: got {len(y)}")
    figure, [[axes]] = new_figure(figsize=(4.5, 3))
    with style():
        for (name, y), (colour, dashes, marker) in zip(ys.items(), _line_styles(ys), strict=True):
            axes.plot(x, y, dashes, color=colour, marker=marker, markersize=4, label=name)
        if ideal is not None:
            axes.plot(x, ideal, color=IDEAL, linestyle=(0, (6, 4)), linewidth=1, label="ideal")
        axes.set(xlabel=xlabel, ylabel=ylabel, title=title, xscale=xscale, yscale=yscale)
        if len(x) <= 12:
            axes.set_xticks(x, [f"{value:g}" for value in x])
            axes.set_xticks([], minor=True)
        elif xscale == "linear" and all(float(value).is_integer() for value in x):
            axes.xaxis.get_major_locator().set_params(integer=True)
        if yscale == "log":
            write_plain_numbers(axes.yaxis)
        axes.grid(True)
        columns = 3 if max(map(len, ys), default=0) < 16 else 2
        figure.legend(loc="outside lower center", ncols=columns)
    return figure


def write_plain_numbers(axis):
    """Label the ticks of a logarithmic axis with 20 or 0.3 instead of powers of ten."""
    from matplotlib.ticker import LogFormatter

    class Plain(LogFormatter):
        def __call__(self, x, pos=None):
            return super().__call__(x, pos) and f"{x:g}"  # "" where ticks are close

    axis.set_major_formatter(Plain())
    axis.set_minor_formatter(Plain(labelOnlyBase=False))


_ROLES = {  # line styles in the first and in the second group of curves
    "measured": (LINES[0], (MEASURED, "-.", "D")),
    "predicted": (LINES[1], (PREDICTED, ":", "^")),
}
_ROLES["modelled"] = _ROLES["measured"]  # never both in one figure


def _line_styles(names):
    """Return colour, dashes and marker of each curve.

    The names "measured", "modelled" and "predicted", alone or as in "ring, measured", have fixed
    colours; groups such as "ring" differ in dashes and markers.
    """
    pairs = [name.rpartition(", ")[::2] for name in names]  # group and role
    groups = list(dict.fromkeys(group for group, role in pairs if role in _ROLES))
    styles = [role in _ROLES and _ROLES[role][groups.index(group) % 2] for group, role in pairs]
    free = itertools.cycle([line for line in LINES if line not in styles])
    return [chosen or next(free) for chosen in styles]
