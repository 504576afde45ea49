"""Work of virtual GPUs in torch's profiler.

Kernels are added to the profiler's events of the host, each below the operator that launched it,
and to the exported trace. On modelled GPUs all times are simulated. Those of the host are
interpolated between the launches, whose real and simulated times are both known.
"""

import re
import time
from bisect import bisect_left, bisect_right
from itertools import accumulate

from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent, Interval

from vgpu.runtime import registry, scheduler

_KINDS = {"GPU_MEMCPY": ("copy",), "CONCURRENT_KERNEL": ("kernel", "collective")}
_DISPATCH = "PythonSubclass"  # the dispatcher's call of `VirtualTensor.__torch_dispatch__`
_OWN = "vgpu/"  # in names and stacks of this package's functions
_ENGINE = re.compile(re.escape(_OWN) + r"runtime/engines\.py\(\d+\): _run$")  # main function
_DIRECTIONS = {"h2d": "HtoD", "d2h": "DtoH", "p2p": "PtoP"}


class ProfiledWork:
    """A recording of the GPUs' work, from its creation until `stop`.

    `activities` are names of Kineto's, "GPU_MEMCPY" and "CONCURRENT_KERNEL"; None for all.
    """

    def __init__(self, activities=None):
        names = _KINDS if activities is None else activities
        self._kinds = {kind for name in names for kind in _KINDS.get(name, ())}
        self._clock = ProfilerClock()
        self._spans = scheduler.start_recording()

    def stop(self):
        """Wait for the GPUs, like the profiler on CUDA, and stop."""
        if isinstance(self._spans, list):
            registry.wait_for_all_devices()
            scheduler.stop_recording(self._spans)
            kept = (span for span in self._spans if span.kind in self._kinds)
            begun = self._clock.wall
            kept = (span for span in kept if span.launched >= begun)  # like CUPTI
            self._spans = tuple(sorted(kept, key=lambda span: span.launched))
            self._clock.follow(self._spans)

    def _of_host(self, events, marks):
        """Return pairs (event, (begin, end)) without the events that only virtual GPUs have.

        These are Python code of an operator, such as shape inference, except for operators that it
        issues, and the threads of engines. `marks` are tuples, one for each event: begin and end in
        ns, thread, name, whether it is a function of Python.
        """
        launches = list(map(self._clock.launch, self._spans))
        threads = {thread for *_, thread, name, _ in marks if _ENGINE.search(name)}
        until, ours = {}, set()
        for number in sorted(range(len(marks)), key=lambda i: (marks[i][0], -marks[i][1])):
            begin, end, thread, name, is_python = marks[number]
            inside = end <= until.get(thread, 0)
            if name == _DISPATCH:
                until[thread] = max(end, until.get(thread, 0))
            issues = bisect_left(launches, begin) < bisect_right(launches, end)
            if name == _DISPATCH or (inside and (is_python or not issues)):
                ours.add(number)
            elif thread in threads or (is_python and _OWN in name):
                ours.add(number)
        pairs = enumerate(zip(events, marks, strict=True))
        return [(event, mark[:2]) for number, (event, mark) in pairs if number not in ours]

    def with_events(self, events, start, shows_host):
        """Return the host's `FunctionEvent`s, in microseconds from `start`, and those of the GPUs.

        `start` is in ns from the epoch. Without `shows_host`, those of the host are left out.
        """
        start -= self._clock.unix
        spans = [(start + e.time_range.start * 1e3, start + e.time_range.end * 1e3) for e in events]
        marks = [
            (*span, event.thread, event.name, getattr(event, "is_python_function", False))
            for span, event in zip(spans, events, strict=True)
        ]
        kept = self._of_host(events, marks)
        owners = _Owners([(event, span) for event, span in kept if not event.is_async])
        last = max((event.id for event, _ in kept), default=0)
        found, added = [event for event, _ in kept] if shows_host else [], []
        for number, span in enumerate(self._spans, last + 1):
            owner = owners.find(self._clock.launch(span))
            index, name = span.device.index, _name(span)
            begin, end = ((t - start) / 1e3 for t in self._clock.on_gpu(span))
            if owner is not None:
                owner.append_kernel(name, index, end - begin)
            where = {"device_type": DeviceType.CUDA, "device_index": index, "use_device": "cuda"}
            where |= {"thread": span.stream, "device_resource_id": span.stream, "input_shapes": []}
            event = FunctionEvent(number, name, start_us=begin, end_us=end, stack=[], **where)
            # not an argument in torch 2.11
            event.linked_correlation_id = 0 if owner is None else owner.id
            added.append(event)
        for event, span in kept:
            event.stack = [line for line in event.stack if _OWN not in line]
            event.time_range = Interval(*((self._clock.on_host(t) - start) / 1e3 for t in span))
        found += added
        found.sort(key=lambda event: (event.time_range.start, -event.time_range.end))
        return found

    def add_to(self, trace, shows_host):
        """Add the GPUs' work to a trace written by Kineto, a dict."""
        base = trace.get("baseTimeNanoseconds", 0) - self._clock.unix
        events = trace["traceEvents"]
        complete = [event for event in events if event["ph"] == "X"]
        marks = []
        for event in complete:
            begin = base + event["ts"] * 1e3
            is_python = event.get("cat") == "python_function"
            end = base + (event["ts"] + event["dur"]) * 1e3
            marks.append((begin, end, event["tid"], event["name"], is_python))
        kept = self._of_host(complete, marks)
        left_out = {id(event) for event in complete} - {id(event) for event, _ in kept}
        events[:] = [event for event in events if id(event) not in left_out]
        owners = _Owners([(event, span) for event, span in kept if event.get("cat") == "cpu_op"])
        of_span = [owners.find(self._clock.launch(span)) for span in self._spans]
        for event in events:
            if event["ph"] != "M" and "ts" in event:
                begin, end = event["ts"], event["ts"] + event.get("dur", 0)
                moments = (self._clock.on_host(base + t * 1e3) for t in (begin, end))
                begin, end = ((moment - base) / 1e3 for moment in moments)
                event["ts"] = begin
                if "dur" in event:
                    event["dur"] = end - begin
        if not shows_host:
            events[:] = [event for event in events if event["ph"] == "M"]
        for number, (span, owner) in enumerate(zip(self._spans, of_span, strict=True), 1):
            events += self._events_of(span, number, owner if shows_host else None, base)
        for device in registry.devices[: registry.count]:
            events += _labels(device)
        if self._clock.is_modelled:
            trace["modelled"] = f"all times are those of a model: {self._clock.hardware}"

    def _events_of(self, span, number, launch, base):
        """Return the event of a span, and the arrow from its launch."""
        index = span.device.index
        begin, end = ((t - base) / 1e3 for t in self._clock.on_gpu(span))
        thread = {"pid": index, "tid": span.stream}
        arguments = {"device": index, "stream": span.stream, "correlation": number}
        if span.kind == "copy":
            arguments["bytes"] = span.num_bytes
        events = [{"ph": "X", "name": _name(span), "ts": begin, "dur": end - begin, **thread}]
        events[0] |= {"cat": "gpu_memcpy" if span.kind == "copy" else "kernel", "args": arguments}
        if launch is not None:
            arguments["External id"] = launch.get("args", {}).get("External id", 0)
            arrow = {"cat": "ac2g", "name": "ac2g", "id": number}
            source = {"pid": launch["pid"], "tid": launch["tid"], "ts": launch["ts"]}
            events.append({"ph": "s", **arrow, **source})
            events.append({"ph": "f", "bp": "e", **arrow, **thread, "ts": begin})
        return events


class ProfilerClock:
    """The current clock for a profiler, in ns since the creation of this object.

    In ns from the epoch, a float would have errors of 256 ns.

    Attributes:
        unix, wall: time of creation in ns from the epoch, and in seconds of the wall clock.
        hardware: the modelled hardware, or "".
    """

    def __init__(self):
        self._clock = scheduler.clock
        self.is_modelled = self._clock.is_modelled
        self.hardware = self._clock.name if self.is_modelled else ""
        self.unix, self.wall = _unix_and_wall()
        self._model = self._clock.now()

    def launch(self, span):
        """Return the wall-clock time of a span's launch, in ns."""
        return (span.launched - self.wall) * 1e9

    def follow(self, spans):
        """Compute the points of interpolation for `on_host` from the spans recorded so far."""
        points = [(0.0, 0.0)]
        for span in spans if self.is_modelled else ():
            wall, model = self.launch(span), (span.issued - self._model) * 1e9
            if wall > points[-1][0] and model > points[-1][1]:  # clocks of other threads may lag
                points.append((wall, model))
        wall = (time.perf_counter() - self.wall) * 1e9
        model = (self._clock.now() - self._model) * 1e9
        points.append((max(wall, points[-1][0] + 1), max(model, points[-1][1] + 1)))
        self._walls, self._models = zip(*points, strict=True)

    def on_host(self, wall):
        """Return the ns to show for a wall-clock time of the host, in ns."""
        if not self.is_modelled or wall < 0:  # the profiler itself
            return wall
        index = min(bisect_right(self._walls, wall), len(self._walls) - 1)
        (a, b), (c, d) = (each[index - 1 : index + 1] for each in (self._walls, self._models))
        return c + (wall - a) / (b - a) * (d - c)

    def on_gpu(self, span):
        """Return the ns to show for the start and the end of a span."""
        origin = self._model if self.is_modelled else self.wall
        return (span.start - origin) * 1e9, (span.end - origin) * 1e9


def _unix_and_wall():
    """Return `time.time_ns` and `time.perf_counter` at the same moment.

    Another thread may run between the two calls, so the closest of a few readings is returned.
    """
    readings = []
    for _ in range(5):
        before, unix, after = time.perf_counter(), time.time_ns(), time.perf_counter()
        readings.append((after - before, unix, (before + after) / 2))
    return min(readings)[1:]


class _Owners:
    """Finds the innermost of many intervals around a point, given (owner, (begin, end))."""

    def __init__(self, pairs):
        pairs = sorted(pairs, key=lambda pair: (pair[1][0], -pair[1][1]))
        self._owners = [owner for owner, _ in pairs]
        self._begins = [begin for _, (begin, _) in pairs]
        self._ends = [end for _, (_, end) in pairs]
        self._latest = list(accumulate(self._ends, max))

    def find(self, point):
        index = bisect_right(self._begins, point) - 1
        while index >= 0 and self._latest[index] >= point:
            if self._ends[index] >= point:
                return self._owners[index]
            index -= 1
        return None


def _name(span):
    return f"Memcpy {_DIRECTIONS[span.engine]}" if span.engine in _DIRECTIONS else span.name


def _labels(device):
    what = {"ph": "M", "pid": device.index, "tid": 0}
    yield {**what, "name": "process_name", "args": {"name": "python"}}
    yield {**what, "name": "process_labels", "args": {"labels": f"GPU {device.index}"}}
    yield {**what, "name": "process_sort_index", "args": {"sort_index": 5_000_000 + device.index}}
