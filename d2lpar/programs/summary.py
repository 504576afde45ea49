"""What `d2lpar run` makes of the reports of all ranks: a summary for reading, and one trace."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

MIB = 2**20
COPY_ENGINES = ("h2d", "d2h", "p2p")


def read_reports(folder):
    """Return the reports in a folder, dicts, ordered by rank; see `report`."""
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in Path(folder).glob("*.json")]
    return sorted(reports, key=lambda report: (_rank_of(report), report["pid"]))


def _rank_of(report):
    return -1 if report["rank"] is None else report["rank"]


def summary(reports, gpus, seconds, code):
    """Return a summary of what the processes of a command did, a text of several lines.

    Args:
        reports: what `read_reports` returned.
        gpus: how many GPUs each process saw.
        seconds: how long the command took by the wall clock.
        code: its exit code.
    """
    modelled = next((report["modelled"] for report in reports if report["modelled"]), "")
    what = f"{modelled}, modelled" if modelled else _count(gpus, "virtual GPU")
    lines = [
        f"d2lpar run: {what}; {_count(len(reports), 'process', 'es')} used them; "
        f"{seconds:.1f} s, exit code {code}"
    ]
    if not reports:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        lines.append(
            "no process said that it gave them work; if one did, is d2lpar installed in the Python "
            "that the command runs?"
            if visible is None
            else f"no process gave them work; CUDA_VISIBLE_DEVICES is {visible!r}"
        )
        return "\n".join(lines)
    clock = "times of the model" if modelled else "times of the wall clock"
    rows = [("rank", "device", "ops", "kernels", "copies", "host waits", "peak MiB", "busy")]
    for report in reports:
        for device, figures in report["devices"].items():
            busy = figures["busy"]
            kernels, elapsed = busy.get("compute", 0.0), report["end"] - report["begin"]
            rows.append(
                (
                    _name(report),
                    device,
                    f"{figures['ops']}",
                    _time(kernels),
                    _time(sum(busy.get(engine, 0.0) for engine in COPY_ENGINES)),
                    _time(report["waiting"]),
                    f"{figures['peak'] / MIB:.1f}",
                    f"{kernels / elapsed:.0%}" if elapsed else "",
                )
            )
    lines += _table(rows)
    rows = [("rank", "link", "copies", "MB", "time")]
    for report in reports:
        for source, target, num_bytes, taken, copies in report["links"]:
            link = f"{source} -> {target}" if source != target else f"{source}, collectives"
            rows.append((_name(report), link, f"{copies}", f"{num_bytes / 1e6:.3f}", _time(taken)))
    if len(rows) > 1:
        lines += ["", *_table(rows)]
    rows = [("rank", "steps", "a step", "steps/s")]
    for report in reports:
        if report["step_seconds"]:
            step = report["step_seconds"]
            rows.append((_name(report), f"{report['steps']}", _time(step), f"{1 / step:.4g}"))
    if len(rows) > 1:
        lines += ["", *_table(rows)]
    lines.append(
        f"({clock}; busy: share of the time from the first op to the last in which kernels ran)"
    )
    for report in reports:
        if not report["ended"]:
            lines.append(
                f"rank {_name(report)} (process {report['pid']}) did not end by itself: "
                "its figures may lack its last second"
            )
    return "\n".join(lines)


def _name(report):
    return "-" if report["rank"] is None else str(report["rank"])


def _time(seconds):
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.3f} ms"


def _count(number, noun, plural="s"):
    return f"{number} {noun}{'' if number == 1 else plural}"


def _table(rows):
    """Return rows of texts as lines, each column as wide as its widest text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [text.rjust(width) for text, width in zip(row, widths, strict=True)]
        lines.append("  ".join(["", *cells]))
    return lines


def write_trace(path, reports, folder, began):
    """Write what all ranks did as one trace in Chrome's Trace Event Format.

    Args:
        path: where to write it.
        reports: what `read_reports` returned.
        folder: where the processes left their spans.
        began: when the command was started, by the wall clock; a trace of modelled GPUs begins
            when their clock does.
    """
    from d2lpar.timelines.chrome_trace import chrome_trace

    events = []
    for place, report in enumerate(reports):
        spans = _spans(Path(folder, f"{report['pid']}.spans"), 0.0 if report["modelled"] else began)
        devices = sorted({span.device for span in spans if span.engine != "host"})
        timeline = SimpleNamespace(spans=spans, marks=[], devices=devices)
        who = f"rank {_name(report)}, " if report["rank"] is not None else ""
        first = place * MOST_PROCESSES
        events += chrome_trace(timeline, who, first)["traceEvents"]
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)


MOST_PROCESSES = 1000  # of a rank in a trace: the host and its devices
SPAN = (
    "name",
    "kind",
    "device",
    "stream",
    "engine",
    "start",
    "end",
    "issued",
    "num_bytes",
    "source",
    "target",
)


def _spans(path, began):
    """Return the spans that a process left, their times counted from `began`."""
    if not path.exists():
        return []
    spans = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            span = SimpleNamespace(**dict(zip(SPAN, json.loads(line), strict=True)))
        except ValueError:  # the process was killed while it wrote the line
            continue
        span.start -= began
        span.end -= began
        span.issued = None if span.issued is None else span.issued - began
        spans.append(span)
    return spans
