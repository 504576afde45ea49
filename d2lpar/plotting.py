"""Figures: the Animator, the Gantt chart of a timeline, and charts that the chapters share.

Figures are made without pyplot, so a cell shows each of them once. Lines differ by lightness and
dashes, bars by lightness and hatching: printed in grey they still can be told apart.
"""

import base64
import functools
import io
import sys
import time
from collections import defaultdict

from d2lpar.spans import lanes, union

STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
}
LINES = (
    ("#12355b", "-", "o"),
    ("#d1495b", "--", "s"),
    ("#66a182", "-.", "^"),
    ("#edae49", ":", "D"),
)

_KINDS = {  # kind: (colour, hatch, colour of the hatch)
    "kernel": ("#12355b", "", "#12355b"),
    "copy": ("#edae49", "/////", "#7a4f00"),
    "wait": ("#e4e4e4", ".....", "#8a8a8a"),
}
_PHASES = (
    ("#cfe0f1", ""),
    ("#f7dcb4", "//"),
    ("#cde7cf", ".."),
    ("#e5d3ea", "\\\\"),
    ("#eeeeee", "x"),
)
_ENGINES = {
    "compute": "compute",
    "h2d": "copy from host",
    "d2h": "copy to host",
    "p2p": "copy to peer",
    "stream": "stream waits",
}
_PAPER = {"facecolor": "w", "edgecolor": "none", "alpha": 0.8, "pad": 0.8}  # under a text
_GAP = 0.35  # between the devices of a Gantt chart, in rows
_PIXELS = 1500  # what a Gantt chart can tell apart from left to right
_SECONDS_BETWEEN_DRAWINGS = 0.5


def _style():
    """Return a context in which what is made looks as the chapters' figures do."""
    from matplotlib import rc_context

    return rc_context(STYLE)


@functools.cache
def _figure_class():
    from matplotlib import figure

    class Figure(figure.Figure):
        """A figure that shows itself as the value of a cell, with a text that never varies."""

        def __repr__(self):
            return "<Figure>"

        def _repr_mimebundle_(self, include=None, exclude=None):
            if not in_notebook():
                return {}
            picture = io.BytesIO()
            self.savefig(picture, format="png")
            encoded = base64.b64encode(picture.getvalue()).decode("ascii")
            return {"image/png": encoded, "text/plain": repr(self)}

    return Figure


def in_notebook():
    """Return whether the code runs in a Jupyter kernel, where a figure can be shown."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    return getattr(get_ipython(), "kernel", None) is not None


def new_figure(nrows=1, ncols=1, figsize=(3.5, 2.5)):
    """Make a figure in the style of the chapters.

    Args:
        nrows, ncols: how many axes.
        figsize: width and height, in inches.

    Returns:
        The figure and an array (nrows, ncols) of its axes.
    """
    with _style():
        figure = _figure_class()(figsize=figsize, dpi=120, layout="constrained")
        return figure, figure.subplots(nrows, ncols, squeeze=False)


class Animator:
    """A plot that grows while a loop runs.

    In a notebook it shows one output, which it updates in place, at most twice a second and at the
    end of the cell. Elsewhere it shows nothing: `fig` can be saved.

    Args:
        xlabel, ylabel, legend, xlim, ylim, xscale, yscale: of the axes.
        fmts: matplotlib's format of each curve; more curves than formats start over.
        nrows, ncols: how many axes; `add` draws in the first.
        figsize: width and height, in inches.

    Attributes:
        X, Y: the points so far, a list for each curve.
        fig, axes: the figure and the list of its axes.
    """

    def __init__(
        self,
        xlabel=None,
        ylabel=None,
        legend=None,
        xlim=None,
        ylim=None,
        xscale="linear",
        yscale="linear",
        fmts=("-", "m--", "g-.", "r:"),
        nrows=1,
        ncols=1,
        figsize=(3.5, 2.5),
    ):
        self.fig, axes = new_figure(nrows, ncols, figsize)
        self.axes = list(axes.flat)
        limits = {"xlim": xlim, "ylim": ylim}
        limits = {name: limit for name, limit in limits.items() if limit is not None}
        self.axes[0].set(xlabel=xlabel, ylabel=ylabel, xscale=xscale, yscale=yscale, **limits)
        self.axes[0].grid(True)
        self.legend, self.fmts = legend or [], fmts
        self.X, self.Y = [], []
        self._lines = []
        self._handle = None
        self._shown = 0.0
        self._flushes = False

    def add(self, x, y):
        """Add a point to each curve.

        Args:
            x: one number for all curves, or one for each.
            y: a number, or one for each curve; None leaves a curve as it is.

        Raises:
            ValueError: x and y are lists of different length.
        """
        y = _numbers(y)
        x = _numbers(x) if _is_list(x) else _numbers(x) * len(y)
        if len(x) != len(y):
            raise ValueError(f"x has {len(x)} numbers and y has {len(y)}: one for each curve")
        if len(y) > len(self._lines):
            self._add_lines(len(y))
        for i, (a, b) in enumerate(zip(x, y, strict=True)):
            if a is not None and b is not None:
                self.X[i].append(a)
                self.Y[i].append(b)
                self._lines[i].set_data(self.X[i], self.Y[i])
        self.axes[0].relim()
        self.axes[0].autoscale_view()
        if in_notebook():
            self._show_soon()

    def _add_lines(self, num_lines):
        """Have as many curves as `num_lines`."""
        with _style():
            for i in range(len(self._lines), num_lines):
                self.X.append([])
                self.Y.append([])
                self._lines += self.axes[0].plot([], [], self.fmts[i % len(self.fmts)])
            if self.legend:
                self.axes[0].legend(
                    self._lines[: len(self.legend)], self.legend[:num_lines], frameon=True
                )

    def _show_soon(self):
        """Show the plot now, or at the end of the cell if it was shown a moment ago."""
        if time.monotonic() - self._shown >= _SECONDS_BETWEEN_DRAWINGS:
            self._show()
        elif not self._flushes:
            from IPython import get_ipython

            get_ipython().events.register("post_run_cell", self._flush)
            self._flushes = True

    def _flush(self, *_):
        from IPython import get_ipython

        get_ipython().events.unregister("post_run_cell", self._flush)
        self._flushes = False
        self._show()

    def _show(self):
        from IPython.display import display

        if self._handle is None:
            self._handle = display(self.fig, display_id=True)
        else:
            self._handle.update(self.fig)
        self._shown = time.monotonic()


def _is_list(value):
    """Return whether a value holds one number for each curve."""
    return hasattr(value, "__len__") and getattr(value, "ndim", 1) > 0


def _numbers(values):
    """Return a list of floats; None stays."""
    values = values if _is_list(values) else [values]
    return [None if value is None else float(value) for value in values]


def bars(labels, predicted, measured, ylabel, title=None):
    """Draw predictions beside what was measured.

    Args:
        labels: a name for each pair of bars.
        predicted, measured: numbers, one for each label; a None leaves its bar out.
        ylabel: quantity and unit.
        title: what stands above.

    Returns:
        A figure.

    Raises:
        ValueError: there are not as many numbers as labels.
    """
    for name, values in (("predicted", predicted), ("measured", measured)):
        if len(values) != len(labels):
            raise ValueError(f"{len(values)} {name} values for {len(labels)} labels")
    figure, [[axes]] = new_figure(figsize=(max(3.5, 1.2 * len(labels) + 1.5), 2.8))
    with _style():
        for shift, name, values, (colour, hatch) in (
            (-0.2, "predicted", predicted, ("#e4e4e4", "////")),
            (0.2, "measured", measured, ("#12355b", "")),
        ):
            there = [(i + shift, float(v)) for i, v in enumerate(values) if v is not None]
            places, heights = zip(*there, strict=True) if there else ((), ())
            drawn = axes.bar(
                places, heights, 0.38, label=name, color=colour, hatch=hatch, edgecolor="#12355b"
            )
            axes.bar_label(drawn, labels=[f"{height:.3g}" for height in heights], padding=2)
        axes.set_xticks(range(len(labels)), labels)
        axes.set(ylabel=ylabel, title=title)
        axes.margins(y=0.12)
        axes.grid(True, axis="y")
        figure.legend(loc="outside lower center", ncols=2)
    return figure


def stacks(rows, ylabel, title=None):
    """Draw bars made of parts, one on top of the other.

    Args:
        rows: a dict from the name of a bar to a dict from the names of its parts, the same for all
            bars, to numbers.
        ylabel: quantity and unit.
        title: what stands above.

    Returns:
        A figure.

    Raises:
        ValueError: the bars have different parts.
    """
    names = list(next(iter(rows.values()), {}))
    for label, parts in rows.items():
        if list(parts) != names:
            raise ValueError(f"bar {label!r} has the parts {list(parts)}, the first has {names}")
    figure, [[axes]] = new_figure(figsize=(max(3.5, 1.2 * len(rows) + 1.5), 2.8))
    with _style():
        bottom = [0.0] * len(rows)
        for i, name in enumerate(names):
            colour, hatch, edge = list(_KINDS.values())[i % len(_KINDS)]
            heights = [float(parts[name]) for parts in rows.values()]
            look = {"color": colour, "hatch": hatch, "edgecolor": edge, "label": name}
            axes.bar(list(rows), heights, 0.6, bottom, **look)
            bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
        axes.set(ylabel=ylabel, title=title)
        axes.grid(True, axis="y")
        figure.legend(loc="outside lower center", ncols=len(names))
    return figure


def curves(x, ys, xlabel, ylabel, ideal=None, title=None, xscale="linear", yscale="linear"):
    """Draw curves over one axis, and the ideal dashed.

    Args:
        x: numbers.
        ys: a dict from the name of a curve to its numbers, one for each of `x`.
        xlabel, ylabel: quantities and units.
        ideal: numbers of the ideal curve.
        title: what stands above.
        xscale, yscale: "linear" or "log".

    Returns:
        A figure.

    Raises:
        ValueError: a curve has not as many numbers as `x`.
    """
    for name, y in [*ys.items(), *([("ideal", ideal)] if ideal is not None else [])]:
        if len(y) != len(x):
            raise ValueError(f"curve {name!r} has {len(y)} values, x has {len(x)}")
    figure, [[axes]] = new_figure(figsize=(4.5, 3))
    with _style():
        for i, (name, y) in enumerate(ys.items()):
            colour, dashes, marker = LINES[i % len(LINES)]
            axes.plot(x, y, dashes, color=colour, marker=marker, markersize=4, label=name)
        if ideal is not None:
            axes.plot(x, ideal, color="#777777", linestyle=(0, (6, 4)), linewidth=1, label="ideal")
        axes.set(xlabel=xlabel, ylabel=ylabel, title=title, xscale=xscale, yscale=yscale)
        if len(x) <= 12:
            axes.set_xticks(x, [f"{value:g}" for value in x])
            axes.set_xticks([], minor=True)
        axes.grid(True)
        figure.legend(loc="outside lower center", ncols=3)
    return figure


def agreement(runs, quantity, band=0.15):
    """Draw what was measured over what was predicted, and a band around where both are equal.

    Args:
        runs: a dict from a name to pairs (predicted, measured).
        quantity: quantity and unit, for both axes.
        band: half the width of the band, as a part of the prediction.

    Returns:
        A figure.

    Raises:
        ValueError: there is no pair.
    """
    numbers = [float(number) for pairs in runs.values() for pair in pairs for number in pair]
    if not numbers:
        raise ValueError(f"agreement draws pairs of numbers: got {runs}")
    ends = [0.0, 1.1 * max(numbers)]
    figure, [[axes]] = new_figure(figsize=(4.5, 3.4))
    with _style():
        low, high = ([factor * end for end in ends] for factor in (1 - band, 1 + band))
        axes.fill_between(ends, low, high, color="#e4e4e4", linewidth=0, label=f"{band:.0%} off")
        axes.plot(ends, ends, color="#777777", linestyle=(0, (6, 4)), linewidth=1, label="ideal")
        for i, (name, pairs) in enumerate(runs.items()):
            colour, _, marker = LINES[i % len(LINES)]
            x, y = zip(*pairs, strict=True) if pairs else ((), ())
            axes.plot(x, y, marker, color=colour, markersize=5, label=name)
        axes.set(xlim=(min(0, *numbers), ends[1]), ylim=(min(0, *numbers), ends[1]))
        axes.set(xlabel=f"predicted {quantity}", ylabel=f"measured {quantity}")
        axes.grid(True)
        figure.legend(loc="outside lower center", ncols=3)
    return figure


def progress(iterable, description="", total=None):
    """Pass on the items of an iterable under a progress bar of plain text.

    Args:
        iterable: what to loop over.
        description: what stands before the bar.
        total: number of items, where the iterable has no length.

    Returns:
        A generator of the items. The bar goes to stderr and ends on a line without times, so that
        two runs of a notebook leave the same text.
    """
    from tqdm import tqdm

    bar = "{desc}{percentage:3.0f}%|{bar:30}| {n_fmt}/{total_fmt}"
    if total is None:
        total = len(iterable) if hasattr(iterable, "__len__") else None
    with tqdm(
        total=total,
        desc=f"{description}: " if description else "",
        bar_format=bar + " [{elapsed}<{remaining}]",
        mininterval=0.25,
        file=sys.stderr,
        ascii=False,
    ) as display:
        try:
            for item in iterable:
                yield item
                display.update()
        finally:
            display.bar_format = bar


def gantt(timeline, title=None, start=0.0, end=None):
    """Draw a timeline: what every engine of every device did, and when.

    Spans of one kind that lie closer than the picture can show are drawn as one.

    Args:
        timeline: a recorded `d2lpar.timing.Timeline`.
        title: what stands above the chart.
        start, end: the part to draw, in seconds; all of it by default.

    Returns:
        A figure.

    Raises:
        ValueError: the part is empty.
    """
    end = timeline.seconds if end is None else end
    if not end > start:
        raise ValueError(f"nothing to draw from {start} s to {end} s")
    unit, scale = ("s", 1.0) if end - start >= 5 else ("ms", 1e3)
    phases = lanes(mark for mark in timeline.marks if mark.end > start and mark.start < end)
    num_lanes = max((lane + 1 for lane, _ in phases), default=0)
    groups = _groups(timeline)
    height = num_lanes + sum(len(rows) + _GAP for rows in groups)
    figure, [[axes]] = new_figure(figsize=(8, 1.2 + 0.24 * height))
    with _style():
        axes.set_xlim(start * scale, end * scale)
        axes.set_ylim(height, 0)
        axes.set(xlabel=f"time ({unit})", title=title)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.grid(True, axis="x")
        handles = _draw_groups(axes, groups, num_lanes, (start, end), scale)
        handles += _draw_phases(figure, axes, phases, (start, end), scale)
        if handles:
            figure.legend(handles=handles, loc="outside lower center", ncols=min(5, len(handles)))
    return figure


def _groups(timeline):
    """Return the rows of a chart, grouped by device: lists of pairs (label, spans)."""
    queues = defaultdict(list)
    for span in timeline.spans:
        queues["host" if span.engine == "host" else (span.device, span.engine)].append(span)
    groups = []
    for device in timeline.devices:
        engines = [e for e in _ENGINES if e == "compute" or (device, e) in queues]
        groups.append([(f"{device} {_ENGINES[e]}", queues.get((device, e), [])) for e in engines])
    if "host" in queues:
        groups.append([("host waits", queues["host"])])
    return groups


def _draw_groups(axes, groups, top, part, scale):
    """Draw the rows below `top`; return what the legend needs."""
    from matplotlib.patches import Patch

    start, end = part
    pixel = (end - start) / _PIXELS
    ticks, handles = [], {}
    for number, rows in enumerate(groups):
        if number % 2 == 0:
            axes.axhspan(top, top + len(rows) + _GAP, color="#f5f5f5", zorder=0)
        for i, (label, spans) in enumerate(rows):
            middle = top + _GAP / 2 + i + 0.5
            ticks.append((middle, label))
            for kind, (colour, hatch, hatch_colour) in _KINDS.items():
                seen = [s for s in spans if s.kind == kind and s.end >= start and s.start <= end]
                if not seen:
                    continue
                pieces = [(scale * a, scale * max(b - a, pixel)) for a, b in union(seen, gap=pixel)]
                style = {"facecolor": colour, "hatch": hatch, "edgecolor": hatch_colour}
                axes.broken_barh(pieces, (middle - 0.4, 0.8), linewidth=0, zorder=3, **style)
                handles[kind] = Patch(label=kind, **style)
        top += len(rows) + _GAP
    axes.set_yticks([middle for middle, _ in ticks], [label for _, label in ticks])
    return [handles[kind] for kind in _KINDS if kind in handles]


def _draw_phases(figure, axes, phases, part, scale):
    """Draw named bands on top of a chart; return legend entries of names that found no room."""
    from matplotlib.patches import Patch

    names = list(dict.fromkeys(mark.name for _, mark in phases))
    bands = {name: _PHASES[i % len(_PHASES)] for i, name in enumerate(names)}
    texts = []
    for lane, mark in phases:
        colour, hatch = bands[mark.name]
        start, end = scale * max(mark.start, part[0]), scale * min(mark.end, part[1])
        rectangle = axes.barh(
            lane + 0.5,
            end - start,
            0.86,
            start,
            color=colour,
            hatch=hatch,
            edgecolor="#a8a8a8",
            linewidth=0.5,
            zorder=3,
        )[0]
        text = axes.text(
            (start + end) / 2, lane + 0.5, mark.name, ha="center", va="center", fontsize=8, zorder=4
        )
        texts.append((mark.name, rectangle, text))
    figure.draw_without_rendering()
    named = set()
    for name, rectangle, text in texts:
        if text.get_window_extent().width < rectangle.get_window_extent().width:
            named.add(name)
        else:
            text.remove()
    return [
        Patch(label=name, facecolor=bands[name][0], hatch=bands[name][1], edgecolor="#a8a8a8")
        for name in names
        if name not in named
    ]


def schedule(rows, title=None):
    """Draw who did what when: a row for each name, a bar for each mark.

    The first word of a mark's name chooses the colour; what follows it, a number say, is written
    into the bar where there is room, and so are names of one word.

    Args:
        rows: a dict from what stands before a row to its marks, with `name`, `start` and `end` in
            seconds. The time axis begins with the first of all.
        title: what stands above the chart.

    Returns:
        A figure.

    Raises:
        ValueError: there is nothing to draw.
    """
    from matplotlib.patches import Patch

    marks = [mark for row in rows.values() for mark in row]
    if not marks:
        raise ValueError(f"no marks to draw in {len(rows)} rows")
    start, end = min(mark.start for mark in marks), max(mark.end for mark in marks)
    unit, scale = ("s", 1.0) if end - start >= 5 else ("ms", 1e3)
    words = list(dict.fromkeys(mark.name.split()[0] for mark in marks))
    looks = {word: _PHASES[i % len(_PHASES)] for i, word in enumerate(words)}
    figure, [[axes]] = new_figure(figsize=(8, 1.2 + 0.3 * len(rows)))
    texts = []
    with _style():
        axes.set(xlabel=f"time ({unit})", title=title, ylim=(len(rows), 0))
        axes.set_xlim(0, (end - start) * scale)
        axes.set_yticks([i + 0.5 for i in range(len(rows))], list(rows))
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.grid(True, axis="x")
        for i, row in enumerate(rows.values()):
            for lane, mark in lanes(row):
                height = 0.84 / (1 + max(lane for lane, _ in lanes(row)))
                left, right = (scale * (moment - start) for moment in (mark.start, mark.end))
                word, _, rest = mark.name.partition(" ")
                colour, hatch = looks[word]
                middle = i + 0.08 + (lane + 0.5) * height
                bar = axes.barh(middle, right - left, 0.95 * height, left, color=colour)[0]
                bar.set(hatch=hatch, edgecolor="#606060", linewidth=0.5, zorder=3)
                text = axes.text((left + right) / 2, middle, rest or word, fontsize=8, zorder=4)
                text.set(ha="center", va="center", bbox=_PAPER)
                texts.append((bar, text))
        handles = [
            Patch(label=word, facecolor=looks[word][0], hatch=looks[word][1], edgecolor="#606060")
            for word in words
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(5, len(handles)))
    figure.draw_without_rendering()
    for bar, text in texts:
        if text.get_window_extent().width > bar.get_window_extent().width:
            text.remove()
    return figure
