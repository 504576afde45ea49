"""The Gantt chart of a timeline."""

import itertools
from collections import defaultdict

from d2lpar.plotting.figures import KINDS, PHASES, WIDE, new_figure, style
from d2lpar.timelines.schedule import named_bar, remove_wide_texts
from vgpu.recording import lanes, union

_ENGINES = {
    "compute": "compute",
    "h2d": "copy from host",
    "d2h": "copy to host",
    "p2p": "copy to peer",
    "collectives": "collectives",
    "stream": "stream waits",
}
_GAP = 0.35  # between devices, in rows
_FEW = 60  # maximum number of spans in a row whose long spans get edges
PIXELS = 1500  # horizontal resolution of a chart
MIN_WIDTH = 4  # pixels: minimum width of an isolated span or one with edges


def plot_timeline(timeline, title=None, start=0.0, end=None, kinds=KINDS):
    """Return the figure of `Timeline.plot`, whose arguments it takes.

    Spans of one kind closer than a pixel are merged; an isolated short span is drawn wide enough
    to be visible. Collectives have edges, and so have long spans in a row of few.
    """
    end = timeline.seconds if end is None else end
    if not end > start:
        raise ValueError(f"end must be later than start: got {end} s and {start} s")
    unit, scale = ("s", 1.0) if end - start >= 5 else ("ms", 1e3)
    phases = lanes(mark for mark in timeline.marks if mark.end > start and mark.start < end)
    num_lanes = max((lane + 1 for lane, _ in phases), default=0)
    groups = rows_by_device(timeline, kinds)
    height = num_lanes + sum(len(rows) + _GAP for rows in groups)
    figure, [[axes]] = new_figure(figsize=(WIDE, 1.2 + 0.24 * height))
    with style():
        axes.set_xlim(start * scale, end * scale)
        axes.set_ylim(height, 0)
        modelled = f", modelled: {timeline.hardware}" if timeline.hardware else ""
        axes.set(xlabel=f"time ({unit}){modelled}", title=title)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.grid(True, axis="x")
        handles = _draw_groups(axes, groups, num_lanes, (start, end), scale)
        if num_lanes:
            axes.set_yticks(
                [num_lanes / 2, *axes.get_yticks()],
                ["host", *(label.get_text() for label in axes.get_yticklabels())],
            )
        handles += _draw_phases(figure, axes, phases, (start, end), scale)
        if handles:
            figure.legend(handles=handles, loc="outside lower center", ncols=min(5, len(handles)))
    return figure


def rows_by_device(timeline, kinds):
    """Return the rows of a chart, grouped by device: lists of pairs (label, spans)."""
    queues = defaultdict(list)
    for span in timeline.spans:
        if span.kind not in kinds:
            continue
        queues["host" if span.engine == "host" else (span.device, span.engine)].append(span)
    groups = []
    for device in timeline.devices:
        others = sorted({key[1] for key in queues if key[0] == device} - {*_ENGINES})
        known = _ENGINES | {engine: engine for engine in others}  # messages: "send 1"
        always = {"compute"} if "kernel" in kinds else set()
        engines = [e for e in known if e in always or (device, e) in queues]
        groups.append([(f"{device} {known[e]}", queues.get((device, e), [])) for e in engines])
    if "host" in queues:
        groups.append([("host waits", queues["host"])])
    return groups


def _draw_groups(axes, groups, top, part, scale):
    """Draw the rows below `top`; return the entries of the legend."""
    from matplotlib.patches import Patch

    start, end = part
    pixel = (end - start) / PIXELS
    ticks, handles = [], {}
    for number, rows in enumerate(groups):
        if number % 2 == 0:
            axes.axhspan(top, top + len(rows) + _GAP, color="#f5f5f5", zorder=0)
        for i, (label, spans) in enumerate(rows):
            middle = top + _GAP / 2 + i + 0.5
            ticks.append((middle, label))
            for kind, (colour, hatch, hatch_colour) in KINDS.items():
                seen = [s for s in spans if s.kind == kind and s.end >= start and s.start <= end]
                if not seen:
                    continue
                apart = seen
                if kind != "collective":
                    few = len(seen) <= _FEW
                    apart = [s for s in seen if few and s.end - s.start > MIN_WIDTH * pixel]
                alone = {id(span) for span in apart}
                short = union((span for span in seen if id(span) not in alone), gap=pixel)
                parts = sorted(
                    [(*part, 0.0) for part in short] + [(s.start, s.end, 0.8) for s in apart]
                )
                starts = [start for start, _, _ in parts[1:]] + [float("inf")]
                pieces = [
                    (scale * a, scale * max(b - a, pixel, min(MIN_WIDTH * pixel, (then - a) / 2)))
                    for (a, b, _), then in zip(parts, starts, strict=True)
                ]
                style = {"facecolor": colour, "hatch": hatch, "edgecolor": hatch_colour}
                if apart and not hatch:
                    style["edgecolor"] = "w"
                widths = [width for *_, width in parts]
                axes.broken_barh(pieces, (middle - 0.4, 0.8), linewidth=widths, zorder=3, **style)
                handles[kind] = Patch(label=kind, **style)
        top += len(rows) + _GAP
    axes.set_yticks([middle for middle, _ in ticks], [label for _, label in ticks])
    return [handles[kind] for kind in KINDS if kind in handles]


def _draw_phases(figure, axes, phases, part, scale):
    """Draw named bands on top of a chart; return legend entries for names that do not fit."""
    from matplotlib.patches import Patch

    names = list(dict.fromkeys(mark.name for _, mark in phases))
    looks = {
        name: {"facecolor": colour, "hatch": hatch, "edgecolor": "#a8a8a8"}
        for name, (colour, hatch) in zip(names, itertools.cycle(PHASES))
    }
    bars = []
    for lane, mark in phases:
        place = [scale * max(mark.start, part[0]), scale * min(mark.end, part[1])]
        bars.append(named_bar(axes, lane + 0.5, 0.86, place, mark.name))
        bars[-1][0].set(**looks[mark.name])
    fit = remove_wide_texts(figure, bars)
    return [Patch(label=name, **looks[name]) for name in names if name not in fit]
