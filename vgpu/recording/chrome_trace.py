"""Export of a timeline to a Chrome trace, for https://ui.perfetto.dev."""

from collections import defaultdict

from vgpu.recording.intervals import lanes

NVTX_KINDS = "range", "mark"  # kinds of spans recorded by `torch.cuda.nvtx`
ANY_THREAD = "ranges, any thread"  # the row of ranges that need not be nested


def chrome_trace(timeline, prefix="", first=0):
    """Return a timeline in Chrome's Trace Event Format: devices are processes, queues threads.

    Args:
        timeline: a `Timeline`, or another object with `spans`, `marks` and `devices`.
        prefix, first: prefix of the processes' names, and number of the first process.
    """
    events = []
    threads = defaultdict(list)
    for span in timeline.spans:
        if span.engine == "host":
            threads["host", "waits"].append(span)
        elif span.kind in NVTX_KINDS:
            threads["host", span.engine].append(span)
        else:
            threads[str(span.device), f"{span.engine}, stream {span.stream}"].append(span)
    for mark in timeline.marks:
        threads["host", "phases"].append(mark)
    processes = ["host", *map(str, timeline.devices)]
    for pid, process in enumerate(processes, first):
        events.append(_metadata("process_name", pid, 0, name=prefix + process))
        events.append(_metadata("process_sort_index", pid, 0, sort_index=pid))
        tid = 0
        for thread in sorted(name for owner, name in threads if owner == process):
            spans = threads[process, thread]
            if getattr(spans[0], "kind", None) in NVTX_KINDS and thread != ANY_THREAD:
                dealt = [(0, span) for span in spans]  # viewers draw nested spans below
            else:
                dealt = lanes(spans)
            for lane in range(1 + max(lane for lane, _ in dealt)):
                name = f"{thread} ({lane + 1})" if lane else thread
                events.append(_metadata("thread_name", pid, tid + lane, name=name))
            events += [_complete(span, pid, tid + lane) for lane, span in dealt]
            tid += 1 + max(lane for lane, _ in dealt)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _metadata(kind, pid, tid, **arguments):
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": arguments}


def _complete(span, pid, tid):
    """Return the "complete" event of a span or a mark, in microseconds."""
    if getattr(span, "kind", "phase") == "mark":
        row = {"pid": pid, "tid": tid, "s": "t"}
        return {"name": span.name, "cat": "mark", "ph": "i", "ts": span.start * 1e6, **row}
    arguments = {}
    if getattr(span, "issued", None) is not None:
        arguments["issued_us"] = span.issued * 1e6
    if getattr(span, "source", None) is not None:
        arguments["bytes"] = span.num_bytes
        arguments |= {"source": str(span.source), "target": str(span.target)}
    event = {"name": span.name, "cat": getattr(span, "kind", "phase"), "ph": "X"}
    times = {"ts": span.start * 1e6, "dur": (span.end - span.start) * 1e6}
    return {**event, **times, "pid": pid, "tid": tid, "args": arguments}
