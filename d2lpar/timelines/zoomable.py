"""A timeline to zoom into with the mouse, in JupyterLab; elsewhere it is the picture."""

from d2lpar.plotting.figures import KINDS
from d2lpar.timelines.gantt import rows_by_device

VEGA_LITE = "application/vnd.vegalite.v5+json"
MAX_SPANS = 1000  # about 100 KB in the notebook


class Zoomable:
    """What the cell of a notebook shows: a Vega-Lite chart, and the picture beside it.

    Args:
        timeline: a recorded `d2lpar.Timeline`.
        kinds: of the spans to draw.
        max_spans: how many of them at most, the longest.
    """

    def __init__(self, timeline, kinds, max_spans=MAX_SPANS):
        self.timeline, self.kinds, self.max_spans = timeline, kinds, max_spans

    def chart(self):
        """Return the Vega-Lite chart, a dict: a bar for each span, in the rows of `plot`."""
        timeline = self.timeline
        bars = [_bar("host", "phase", mark) for mark in timeline.marks]
        for rows in rows_by_device(timeline, self.kinds):
            bars += [_bar(row, span.kind, span) for row, spans in rows for span in spans]
        shown = sorted(bars, key=lambda bar: bar["start"] - bar["end"])[: self.max_spans]
        left_out = len(bars) - len(shown)
        title = ["drag to move, turn the wheel to zoom, double-click to go back"]
        if left_out:
            title.append(f"{left_out:,} of {len(bars):,} spans are left out, the shortest ones")
        modelled = f", modelled: {timeline.hardware}" if timeline.hardware else ""
        known = {"phase": "#a9c4e0", **{kind: colour for kind, (colour, *_) in KINDS.items()}}
        colours = {kind: known[kind] for kind in known if any(bar["kind"] == kind for bar in bars)}
        wheel = {"type": "interval", "encodings": ["x"]}
        time = {"field": "start", "type": "quantitative", "title": f"time (ms){modelled}"}
        return {
            "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
            "title": {"text": title, "fontSize": 11, "fontWeight": "normal"},
            "background": "white",
            "width": 640,
            "height": {"step": 24},
            "data": {"values": shown},
            "params": [{"name": "zoom", "bind": "scales", "select": wheel}],
            "mark": {"type": "bar", "clip": True, "stroke": "white", "strokeWidth": 0.5},
            "encoding": {
                "x": time | {"scale": {"domain": [0, _milliseconds(timeline.seconds)]}},
                "x2": {"field": "end"},
                "y": {
                    "field": "row",
                    "type": "nominal",
                    "title": None,
                    "sort": list(dict.fromkeys(bar["row"] for bar in bars)),
                    "axis": {"labelLimit": 200},
                },
                "color": {
                    "field": "kind",
                    "type": "nominal",
                    "title": None,
                    "scale": {"domain": list(colours), "range": list(colours.values())},
                },
                "tooltip": [
                    {"field": "name"},
                    {"field": "kind"},
                    {"field": "start", "title": "start (ms)"},
                    {"field": "end", "title": "end (ms)"},
                ],
            },
        }

    def _repr_mimebundle_(self, include=None, exclude=None):
        picture = self.timeline.plot(kinds=self.kinds)._repr_mimebundle_()
        return {VEGA_LITE: self.chart(), **picture} if picture else {}


def _bar(row, kind, span):
    start, end = _milliseconds(span.start), _milliseconds(span.end)
    return {"row": row, "kind": kind, "name": span.name, "start": start, "end": end}


def _milliseconds(seconds):
    return round(1e3 * seconds, 4)
