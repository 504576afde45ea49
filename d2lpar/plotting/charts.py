"""Charts that the chapters share: bars, stacked bars, curves, named points, and single runs."""

import itertools
import statistics

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
from d2lpar.virtual import hardware_name


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
        _draw_curves(axes, x, ys, ideal)
        axes.set(xlabel=xlabel, ylabel=ylabel, title=title, xscale=xscale, yscale=yscale)
        if len(x) <= 12:
            axes.set_xticks(x, [f"{value:g}" for value in x])
            axes.set_xticks([], minor=True)
        elif xscale == "linear" and all(float(value).is_integer() for value in x):
            axes.xaxis.get_major_locator().set_params(integer=True)
        if yscale == "log":
            _write_plain_numbers(axes.yaxis)
        axes.grid(True)
        figure.legend(
            loc="outside lower center", ncols=3 if max(map(len, ys), default=0) < 16 else 2
        )
    return figure


def plot_scaling(counts, speed_ups):
    """Return a figure of speed-ups and, beside them, of efficiencies over the number of devices.

    Args:
        counts: numbers of devices.
        speed_ups: a dict from the name of a curve to its speed-ups, one for each of `counts`.

    Raises:
        ValueError: a curve does not have as many numbers as `counts`.
    """
    for name, values in speed_ups.items():
        if len(values) != len(counts):
            raise ValueError(f"curve {name!r} has {len(values)} values, counts has {len(counts)}")
    figure, [both] = new_figure(1, 2, figsize=(WIDE, 3))
    modelled = f", modelled: {hardware_name()}" if hardware_name() else ""
    efficiencies = {
        name: [S / k for S, k in zip(values, counts, strict=True)]
        for name, values in speed_ups.items()
    }
    with style():
        for axes, ylabel, ys, ideal in (
            (both[0], "speed-up", speed_ups, counts),
            (both[1], "efficiency", efficiencies, [1] * len(counts)),
        ):
            _draw_curves(axes, counts, ys, ideal)
            axes.set(xlabel="number of devices", ylabel=ylabel, ylim=(0, None))
            axes.set_xticks(counts)
            axes.grid(True)
        figure.suptitle(f"Scaling{modelled}")
        figure.legend(*both[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def _draw_curves(axes, x, ys, ideal):
    """Draw the curves of the dict `ys` over `x`, and the ideal one dashed unless it is None."""
    for (name, y), (colour, dashes, marker) in zip(ys.items(), _looks(ys), strict=True):
        axes.plot(x, y, dashes, color=colour, marker=marker, markersize=4, label=name)
    if ideal is not None:
        axes.plot(x, ideal, color=IDEAL, linestyle=(0, (6, 4)), linewidth=1, label="ideal")


def _write_plain_numbers(axis):
    """Label the ticks of a logarithmic axis 20 and 0.3 instead of with powers of ten."""
    from matplotlib.ticker import LogFormatter

    class Plain(LogFormatter):
        def __call__(self, x, pos=None):
            return super().__call__(x, pos) and f"{x:g}"  # no label where ticks are close

    axis.set_major_formatter(Plain())
    axis.set_minor_formatter(Plain(labelOnlyBase=False))


_LOOKS = {  # looks of the first group of curves, and of the second
    "measured": (LINES[0], (MEASURED, "-.", "D")),
    "predicted": (LINES[1], (PREDICTED, ":", "^")),
}
_LOOKS["modelled"] = _LOOKS["measured"]  # a figure has one or the other


def _looks(names):
    """Return colour, dashes and marker for each name.

    "measured", "modelled" and "predicted", also in a group as in "ring, measured", have one colour
    each; groups differ in dashes and markers.
    """
    pairs = [name.rpartition(", ")[::2] for name in names]  # group and role
    groups = list(dict.fromkeys(group for group, role in pairs if role in _LOOKS))
    looks = [role in _LOOKS and _LOOKS[role][groups.index(group) % 2] for group, role in pairs]
    free = itertools.cycle([line for line in LINES if line not in looks])
    return [look or next(free) for look in looks]


def plot_points(groups, xlabel, ylabel, xscale="linear", yscale="linear", joined=False):
    """Return a figure of points, each with its name beside it.

    Args:
        groups: a dict from the name of a group to a dict from the names of its points to (x, y).
            Names stand to the left of the first group's points, to the right of all others.
        xlabel, ylabel: quantities and units. A linear y axis begins at 0, a linear x axis has
            whole numbers.
        xscale, yscale: "linear" or "log".
        joined: whether a line joins the points of a group.

    Raises:
        ValueError: a group has no point.
    """
    figure, [[axes]] = new_figure(figsize=(6, 3.4))
    with style():
        for i, (group, points) in enumerate(groups.items()):
            if not points:
                raise ValueError(f"group {group!r} has no point")
            colour, dashes, marker = LINES[i % len(LINES)]
            x, y = zip(*points.values(), strict=True)
            look = {"linestyle": dashes if joined else "none", "marker": marker}
            axes.plot(x, y, color=colour, label=group, **look)
            shift, side = (-7, "right") if i == 0 and len(groups) > 1 else (7, "left")
            look = {"ha": side, "color": colour, "fontsize": 8, "textcoords": "offset points"}
            for name, at in points.items():
                axes.annotate(name, at, (shift, 4 if joined else -3), **look)
        axes.set(xlabel=xlabel, ylabel=ylabel, xscale=xscale, yscale=yscale, xmargin=0.2)
        if xscale == "log":
            _write_plain_numbers(axes.xaxis)
        else:
            axes.xaxis.get_major_locator().set_params(integer=True)
        if yscale == "linear":
            axes.set_ylim(bottom=0)
        axes.grid(True)
        if len(groups) > 1:
            figure.legend(loc="outside lower center", ncols=3)
    return figure


def plot_layouts(plans, measured, memory, names):
    """Return a figure of what layouts take: the seconds of a step over the memory of a GPU.

    A predicted layout is a circle with its t in it, or a square if it has a pipeline. A line joins
    layouts that differ in the micro-batch alone. Where a step was measured, a thin line leads to
    it. Layouts that need more memory than there is lie on grey.

    Args:
        plans: a list of `d2lpar.parallel.layouts.Planned`, with seconds and bytes.
        measured: a dict from a layout to the seconds that its step took.
        memory: bytes of a GPU.
        names: a dict from a name to the layout that it stands beside.

    Raises:
        ValueError: there are no plans, or a name is that of a layout without a plan.
    """
    rows = {plan.layout: (plan.num_bytes / 1e9, plan.seconds) for plan in plans}
    if not rows:
        raise ValueError("there are no plans to draw")
    for name, layout in names.items():
        if layout not in rows:
            raise ValueError(f"{name!r} is {layout}, which has no plan")
    curves = {}  # layouts that differ in the micro-batch alone
    for layout in sorted(rows, key=lambda layout: layout.micro_batch):
        key = layout.recompute, layout.pipeline, layout.tensor
        curves.setdefault(key, []).append(layout)
    centred = {"ha": "center", "va": "center_baseline"}
    figure, [[axes]] = new_figure(figsize=(WIDE, 4.4))
    with style():
        for (recompute, pipeline, tensor), layouts in curves.items():
            x, y = zip(*(rows[layout] for layout in layouts), strict=True)
            look = {"color": PREDICTED, "linestyle": "-" if recompute else (0, (1, 2))}
            look |= {"marker": "o" if pipeline == 1 else "s", "markersize": 8}
            axes.plot(x, y, linewidth=0.8, markerfacecolor="white", **look)
            for at in zip(x, y, strict=True):
                axes.text(*at, tensor, fontsize=5.5, clip_on=True, **centred)
        for layout, seconds in measured.items():
            if layout in rows:
                x, y = rows[layout]
                axes.plot([x, x], [y, seconds], color=MEASURED, linewidth=0.6, zorder=1)
                axes.plot(x, seconds, "D", color=MEASURED, markersize=3.5)
        middle = statistics.median(y for _, y in rows.values())
        for name, layout in names.items():
            shift = (24, 30) if rows[layout][1] > middle else (-64, -18)  # away from the others
            look = {"arrowprops": {"arrowstyle": "->", "color": "black"}, "fontsize": 8}
            axes.annotate(name, rows[layout], shift, textcoords="offset points", **look)
        for marker, dashes, words in (
            ("o", "-", "predicted, p = 1"),
            ("s", "-", "predicted, p > 1"),
            ("", (0, (1, 2)), "not recomputed"),
        ):
            look = {"color": PREDICTED, "linestyle": dashes, "markerfacecolor": "white"}
            axes.plot([], [], marker=marker, label=words, **look)
        axes.plot([], [], "D", color=MEASURED, label="measured", linestyle="none")
        most, gigabytes = memory / 1e9, "memory of a GPU (GB)"
        axes.set(xlabel=gigabytes, ylabel="a step (s)", yscale="log", xlim=(0, 1.25 * most))
        axes.axvspan(most, 1.25 * most, color="#e4e4e4", zorder=0)
        at = {"transform": axes.get_xaxis_transform(), "va": "top", "fontsize": 8}
        axes.text(1.02 * most, 0.96, "does not fit", **at)
        _write_plain_numbers(axes.yaxis)
        axes.grid(True)
        axes.margins(y=0.1)
        figure.legend(loc="outside lower center", ncols=4)
    return figure


def plot_runs(runs, xlabel, ylabel, curve):
    """Return a figure with a point for each run, and the number of those without a result.

    Both axes are logarithmic. A run without a result has the number infinity. For each x with such
    runs "3 of 20" stands in a row of its own at the top.

    Args:
        runs: a dict from (group, x) to the numbers of its runs.
        xlabel, ylabel: quantities and units.
        curve: the numbers of a curve, one for each x that occurs, from the least to the largest.

    Raises:
        ValueError: the curve does not have as many numbers as there are x.
    """
    ticks = sorted({x for _, x in runs})
    if len(curve) != len(ticks):
        raise ValueError(f"the curve has {len(curve)} values, there are {len(ticks)} x")
    top = 3 * max(n for numbers in runs.values() for n in numbers if n < float("inf"))
    groups = list(dict.fromkeys(group for group, _ in runs))
    figure, [[axes]] = new_figure(figsize=(5.6, 3.8))
    with style():
        axes.plot(ticks, curve, color="k", linewidth=1, label="formula")
        for (group, x), numbers in runs.items():
            i = groups.index(group)
            colour, _, marker = LINES[i % len(LINES)]
            at = x * 1.07 ** (i - 1)  # beside the other groups
            there = [n for n in numbers if n < float("inf")]
            look = {"marker": marker, "linestyle": "none", "markersize": 4}
            axes.plot([at] * len(there), there, color=colour, label=group, **look)
            if len(there) < len(numbers):
                lost = f"{len(numbers) - len(there)} of {len(numbers)}"
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
