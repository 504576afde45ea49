"""Timeline: record a block of code and draw what ran where and when."""

import contextlib
import json
from collections import defaultdict
from dataclasses import replace
from typing import NamedTuple

import torch

import vgpu
from d2lpar.devices import try_all_gpus
from d2lpar.plotting.figures import KINDS, in_notebook
from d2lpar.timelines.gantt import plot_timeline
from vgpu import clock, clock_in_force, hardware_name, synchronize
from vgpu.other_programs import read_cpu_times, while_timed
from vgpu.recording import chrome_trace, overlap, union

ENGINES = ("compute", "h2d", "d2h", "p2p", "collectives", "stream", "host")


class Mark(NamedTuple):
    """A named interval, in seconds from the start of the timeline."""

    name: str
    start: float
    end: float


class Timeline:
    """Record what virtual and CUDA GPUs run during a block, and draw it.

        with Timeline() as timeline:
            with timeline.mark("forward"):
                loss = net(X).sum()
        timeline.busy("vgpu:0")

    Both ends of the block synchronize all devices, so a timeline contains exactly the work of the
    block; after an error, what ran before. As the last value of a cell it draws itself. A rank can
    return it: pickling replaces devices by their names. On CUDA the profiler slows launches down.

    Attributes:
        spans: a list of `Span`s, what ran, sorted by start.
        marks: a list of `Mark`s, the phases named by `mark`.
        devices: the devices in use, and all others that ran something.
        seconds: the duration of the block.
        hardware: the modelled hardware, for example "8 x V100-SXM2-16GB"; "" on the wall clock.
    """

    def __init__(self):
        self.hardware = ""
        self._state = "not started"

    def __enter__(self):
        if self._state == "recording":
            raise RuntimeError("this timeline is recording already: create another one")
        self._spans, self._marks, self._devices, self._end = [], [], [], None
        synchronize()
        self._recorders = start_recorders()
        self.hardware = hardware_name()
        self._clock = clock_in_force()
        self._state = "recording"
        self._cpu_before = None if self.hardware else read_cpu_times()
        self._origin = clock()
        return self

    def __exit__(self, kind, error, traceback):
        try:
            synchronize()
        except Exception:
            if kind is None:
                raise
        finally:
            self._end = clock()
            while_timed.add(self._cpu_before)
            self._state = "done"
            for stop, spans in self._recorders:
                stop(spans)
                self._spans += [_shifted(span, self._origin) for span in spans]
            self._spans.sort(key=lambda span: (span.start, span.end))
            if kind is None and clock_in_force() is not self._clock:
                raise RuntimeError("virtual_gpus has changed the clock within this timeline")
            used = {*try_all_gpus(), *(span.device for span in self._spans)}
            used = [device for device in used if device.type != "cpu"]
            self._devices = sorted(used, key=lambda device: (device.type, device.index))

    @classmethod
    def of(cls, work, warmups=1):
        """Return the timeline of one call of `work()`, after `warmups` unrecorded calls."""
        for _ in range(warmups):
            work()
        with cls() as timeline:
            work()
        return timeline

    def __getstate__(self):
        """Return the state to pickle, with devices as strings: another process may lack them.

        Devices that ran nothing, such as those of other ranks, are left out.
        """
        self._recorded()
        state = {name: value for name, value in vars(self).items() if name not in _OF_A_PROCESS}
        spans = [replace(span, **_named(span)) for span in self._spans]
        ran = {span.device for span in self._spans}
        devices = [str(device) for device in self._devices if device in ran]
        return state | {"_spans": spans, "_devices": devices}

    def _recorded(self):
        """Raise RuntimeError unless the block has ended."""
        if self._state != "done":
            raise RuntimeError(f"the timeline is {self._state}: the with block must have ended")

    @property
    def spans(self):
        self._recorded()
        return self._spans

    @property
    def marks(self):
        self._recorded()
        return self._marks

    @property
    def devices(self):
        self._recorded()
        return self._devices

    @property
    def seconds(self):
        self._recorded()
        return self._end - self._origin

    @contextlib.contextmanager
    def mark(self, name):
        """Name the host's time in a block, a phase; the figure shows it as a band on top.

        Raises:
            RuntimeError: the timeline is not recording.
        """
        if self._state != "recording":
            raise RuntimeError(f"the timeline is {self._state}: mark phases in its with block")
        start = clock() - self._origin
        try:
            yield
        finally:
            self._marks.append(Mark(name, start, clock() - self._origin))

    def select(self, device=None, kind=None, stream=None, engine=None, name=None, mark=None):
        """Return the spans that match all given arguments, sorted by start.

        Args:
            device: a device or its name.
            kind: "kernel", "copy", "collective" or "wait".
            stream: a stream of a virtual GPU, or the number of a stream.
            engine: "compute", "h2d", "d2h", "p2p", "collectives", "send 1" or "recv 1" (messages
                to and from rank 1), "stream" or "host".
            name: a substring of the name.
            mark: the name of a phase: selects what the host launched in it, whenever it ran.

        Raises:
            ValueError: the device, kind, engine or phase is unknown.
        """
        if kind is not None:
            _check_one_of(kind, KINDS, "kind")
        if engine is not None:
            known = dict.fromkeys([*ENGINES, *(span.engine for span in self.spans)])
            _check_one_of(engine, known, "engine")
        if mark is not None:
            _check_one_of(mark, sorted({mark.name for mark in self.marks}), "phase")
        phases = [phase for phase in self.marks if phase.name == mark]
        places = device, getattr(stream, "device", None)  # others have streams of its number
        places = {self._known(place) for place in places if place is not None}
        stream = getattr(stream, "stream_id", stream)
        return [
            span
            for span in self.spans
            if places <= {span.device}
            and kind in (None, span.kind)
            and engine in (None, span.engine)
            and stream in (None, span.stream)
            and (name is None or name in span.name)
            and (mark is None or any(_launched_in(span, phase) for phase in phases))
        ]

    def busy(self, device, kind="kernel"):
        """Return the seconds in which a device ran at least one span of a kind."""
        return sum(end - start for start, end in union(self.select(device, kind)))

    def utilization(self, device):
        """Return the fraction of the time, 0 to 1, in which a device ran kernels."""
        return self.busy(device) / self.seconds

    def overlap(self, a, b):
        """Return the seconds in which `a` and `b` ran at the same time.

        Args:
            a, b: a device, for all its kernels, or a list of spans.
        """
        is_device = str | torch.device
        sets = [self.select(x, "kernel") if isinstance(x, is_device) else x for x in (a, b)]
        return overlap(*sets)

    def bytes_by_link(self):
        """Return the copied bytes, a dict from pairs of devices (source, target)."""
        num_bytes = defaultdict(int)
        for span in self.select(kind="copy"):
            num_bytes[span.source, span.target] += span.num_bytes
        return dict(num_bytes)

    def _known(self, device):
        """Return the device of this timeline with a name, or raise ValueError."""
        name = str(device) if ":" in str(device) else f"{device}:0"
        for known in self.devices:
            if str(known) == name:
                return known
        known = ", ".join(map(str, self.devices)) or "none"
        raise ValueError(f"no device {device} on this timeline: choose one of {known}")

    def plot(self, title=None, start=0.0, end=None, kinds=KINDS):
        """Return a Gantt chart: a row for each engine of each device, and one for host waits.

        Args:
            title: the text above the chart.
            start, end: the interval to draw, in seconds; by default all.
            kinds: the kinds of spans to draw.

        Raises:
            ValueError: the interval is empty, or a kind is unknown.
        """
        for kind in kinds:
            _check_one_of(kind, KINDS, "kind")
        return plot_timeline(self, title, start, end, kinds)

    def export(self, path):
        """Write a Chrome trace to the file `path`; https://ui.perfetto.dev opens it."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump(chrome_trace(self), file)

    def __repr__(self):
        if self._state != "done":
            return f"Timeline({self._state})"
        on = f"{len(self.spans)} spans on {len(self.devices)} devices"
        if self.hardware:
            return f"Timeline({on}, {self.seconds:.4g} s, modelled: {self.hardware})"
        return f"Timeline({on}, {self.seconds:.2f} s)"

    def _repr_mimebundle_(self, include=None, exclude=None):
        if self._state != "done" or not in_notebook():
            return {}
        return {**self.plot()._repr_mimebundle_(), "text/plain": "<Timeline>"}


def _launched_in(span, phase):
    """Return whether the host launched a span within a phase.

    On modelled GPUs a launch can end exactly with its phase; a wait can begin exactly then.
    """
    if span.issued is None:
        return False
    if span.kind == "wait":
        return phase.start <= span.issued < phase.end
    return phase.start < span.issued <= phase.end


def start_recorders():
    """Start recording the devices in use; return pairs (stop function, list of records)."""
    sources = [vgpu]
    real = torch.cuda.is_initialized() or any(d.type == "cuda" for d in try_all_gpus())
    if real and not any(d.type == "cuda" for d in vgpu.devices_in_use(ever=True)):
        from d2lpar.timelines import cuda_spans as cuda

        sources.append(cuda)
    recorders = []
    try:
        for source in sources:
            recorders.append((source.stop_recording, source.start_recording()))
    except BaseException:
        for stop, records in recorders:
            stop(records)
        raise
    return recorders


_OF_A_PROCESS = ("_recorders", "_clock", "_cpu_before")  # attributes that are not pickled


def _named(span):
    """Return the device fields of a span as strings."""
    devices = {field: getattr(span, field) for field in ("device", "source", "target")}
    return {field: device and str(device) for field, device in devices.items()}


def _shifted(span, origin):
    """Return a span with times relative to `origin`."""
    issued = None if span.issued is None else span.issued - origin
    return replace(span, start=span.start - origin, end=span.end - origin, issued=issued)


def _check_one_of(value, known, what):
    """Raise ValueError unless `value` is in `known`."""
    if value not in known:
        raise ValueError(f"unknown {what} {value!r}: choose one of {', '.join(known) or 'none'}")
