"""The summary and the trace of `vgpu run`, from the reports of all processes."""

import json
import os
import textwrap
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

WIDTH = 100  # of a summary, in characters
RAY_WORKER = "Ray worker"
COPY_ENGINES = ("h2d", "d2h", "p2p")


def read_reports(folder):
    """Return the reports in a folder, a list of dicts, by start time of the process."""
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in Path(folder).glob("*.json")]
    return sorted(reports, key=lambda report: (report["started"], report["pid"]))


def summary(reports, gpus, seconds, code, clock="model", values=True):
    """Return the summary of a command's processes, a text of several lines.

    `reports` are those of `read_reports`; the command took `seconds` and returned `code`.
    """
    modelled = next((report["modelled"] for report in reports if report["modelled"]), "")
    gpus = f"{gpus} x virtual GPU"
    if modelled:
        gpus = (
            f"{modelled}, modelled{'' if values else ', no values'}; the program's clock: {clock}"
        )
    used = f"processes that used them: {len(reports)}"
    head = f"vgpu run: {gpus}\n{used}; {seconds:.1f} s, exit code {code}\n"
    if not reports:
        return head + _why_unused(code)
    tables = (_table(reports, *table) for table in TABLES)
    clock = "times of the model" if modelled else "times of the wall clock"
    notes = [f"({clock}; busy: share of the time from first to last op in which kernels ran)"]
    notes += _ends(reports)
    lines = "\n\n".join(filter(None, tables)).splitlines()
    return head + "\n".join([*lines, *map(_wrapped, notes)])


def _ends(reports):
    notes = []
    for report in reports:
        who = "process" if report["rank"] is None else f"rank {report['rank']}, process"
        who = f"{who} {report['pid']} ({report['name']})"
        if report["error"]:
            notes.append(f"{who} ended with an error: {report['error']}")
        elif not report["ended"] and report["name"] != RAY_WORKER:
            notes.append(
                f"{who} was killed, or left without Python's clean-up: its figures may lack its "
                "last second"
            )
    if any(report["name"] == RAY_WORKER and not report["ended"] for report in reports):
        notes.append("Ray kills its workers, as usual: their figures may lack their last second")
    return notes


def _wrapped(text):
    return textwrap.fill(text, WIDTH, subsequent_indent="  ")


def _why_unused(code):
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return _wrapped(f"no process gave them work; CUDA_VISIBLE_DEVICES is {visible!r}")
    if code:
        return "the command failed before any process gave them work: see its own error"
    return _wrapped(
        "no process gave them work; if one should have, is d2lpar installed in the Python that the "
        "command runs?"
    )


def _devices(report):
    for device, figures in report["devices"].items():
        busy = figures["busy"]
        kernels, elapsed = busy.get("compute", 0.0), report["end"] - report["begin"]
        copies = sum(busy.get(engine, 0.0) for engine in COPY_ENGINES)
        times = map(_time, (kernels, copies, report["waiting"]))
        share = f"{kernels / elapsed:.0%}" if elapsed else ""
        yield device, str(figures["ops"]), *times, _bytes(figures["peak"]), share


def _links(report):
    for source, target, num_bytes, taken, copies in report["links"]:
        link = f"{source} -> {target}" if source != target else f"{source}, collectives"
        yield link, str(copies), f"{num_bytes / 1e6:.3f}", _time(taken)


def _steps(report):
    if step := report["step_seconds"]:
        yield str(report["steps"]), _time(step), f"{1 / step:.4g}"


TABLES = (
    (_devices, "device", "ops", "kernels", "copies", "host waits", "peak", "busy"),
    (_links, "link", "copies", "MB", "time"),
    (_steps, "steps", "a step (median)", "steps/s"),
)


def _names(reports):
    """Return {pid: name}; processes with equal rank and name get their pid as a prefix."""
    number = Counter((report["rank"], report["name"]) for report in reports)
    return {
        report["pid"]: f"{report['pid']}: {report['name']}"
        if number[report["rank"], report["name"]] > 1
        else report["name"]
        for report in reports
    }


def _name(report):
    return "-" if report["rank"] is None else str(report["rank"])


def _time(seconds):
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.3f} ms"


def _bytes(number):
    """Format a number of bytes in the largest unit in which it is at least 1."""
    exponent, unit = max((e, unit) for e, unit in enumerate(UNITS) if number >= 1024**e or e == 0)
    return f"{number / 1024**exponent:.1f} {unit}" if exponent else f"{number} B"


UNITS = "B", "KiB", "MiB", "GiB", "TiB"


def _table(reports, rows_of, *head):
    """Format the rows of all reports in aligned columns, between their ranks and processes.

    The last column is truncated at the width of a summary.
    """
    names = _names(reports)
    rows = [
        (_name(report), *row, names[report["pid"]]) for report in reports for row in rows_of(report)
    ]
    if not rows:
        return ""
    *columns, last = zip(("rank", *head, "process"), *rows, strict=True)
    widths = [max(map(len, column)) for column in columns]
    lines = ["  ".join(["", *map(str.rjust, row, widths)]) for row in zip(*columns, strict=True)]
    left = max(WIDTH - len(lines[0]) - 2, 1)
    cut = (text if len(text) <= left else f"{text[: left - 1]}…" for text in last)
    return "\n".join(f"{line}  {text}" for line, text in zip(lines, cut, strict=True))


def write_trace(path, reports, folder, began):
    """Write one trace of all ranks in Chrome's Trace Event Format.

    Times count from `began`, `perf_counter()` at the start of the command; on modelled GPUs from 0
    of their clock.
    """
    from vgpu.recording.chrome_trace import NVTX_KINDS, chrome_trace

    events = []
    for index, report in enumerate(reports):
        spans = _spans(Path(folder, f"{report['pid']}.spans"), 0.0 if report["modelled"] else began)
        on_gpus = (span for span in spans if span.kind not in NVTX_KINDS)
        devices = sorted({span.device for span in on_gpus if span.engine != "host"})
        timeline = SimpleNamespace(spans=spans, marks=[], devices=devices)
        who = f"rank {_name(report)}, " if report["rank"] is not None else ""
        first = index * MAX_TRACE_PROCESSES
        events += chrome_trace(timeline, who, first)["traceEvents"]
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)


MAX_TRACE_PROCESSES = 1000  # of a rank in a trace: one for the host, one for each device
SPAN = tuple("name kind device stream engine start end issued num_bytes source target".split())


def _spans(path, began):
    """Return the spans of a process, with times counted from `began`."""
    if not path.exists():
        return []
    spans = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            span = SimpleNamespace(**dict(zip(SPAN, json.loads(line), strict=True)))
        except ValueError:  # an incomplete line of a killed process
            continue
        span.start -= began
        span.end -= began
        span.issued = None if span.issued is None else span.issued - began
        spans.append(span)
    return spans
