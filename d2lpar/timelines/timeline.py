"""Timeline: what ran where and when, recorded from a block and drawn."""

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
from vgpu.other_programs import look, while_timed
from vgpu.recording import chrome_trace, overlap, union

ENGINES = ("compute", "h2d", "d2h", "p2p", "collectives", "stream", "host")


class Mark(NamedTuple):
    """A stretch of the host's time that has a name; seconds from the timeline's start."""

    name: str
    start: float
    end: float


class Timeline:
    """Record what ran where and when on virtual GPUs and on CUDA GPUs, and draw it.

        with Timeline() as timeline:
            with timeline.mark("forward"):
                loss = net(X).sum()
        timeline.busy("vgpu:0")

    A rank may return its timeline, and `Timeline.merged` puts the timelines of all ranks on one
    axis. In a timeline from another process the names of devices stand for them.

    It waits for every device in use when its block begins and when it ends, so that it holds the
    work of the block, all of it and no other. An error in the block passes through; what ran before
    it is kept. As the last value of a cell it draws itself. On CUDA the profiler slows the issuing
    of work.

    Attributes:
        spans: what ran, as `Span`s ordered by start.
        marks: the phases that `mark` named, as tuples (name, start, end).
        devices: the devices in use, and others that something ran on.
        seconds: the time from start to end of the block.
        hardware: the modelled hardware, "8 x V100-SXM2-16GB" for example; "" on the wall clock.
    """

    def __init__(self):
        self.hardware = ""
        self._state = "not started"

    def __enter__(self):
        if self._state == "recording":
            raise RuntimeError("this timeline is recording already: make another one")
        self._spans, self._marks, self._devices, self._end = [], [], [], None
        synchronize()
        self._recorders = start_recorders()
        self.hardware = hardware_name()
        self._clock = clock_in_force()
        self._state = "recording"
        self._look = None if self.hardware else look()
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
            while_timed.add(self._look)
            self._state = "done"
            for stop, spans in self._recorders:
                stop(spans)
                self._spans += [_moved(span, self._origin) for span in spans]
            self._spans.sort(key=lambda span: (span.start, span.end))
            if kind is None and clock_in_force() is not self._clock:
                raise RuntimeError("virtual_gpus has changed the clock within this timeline")
            used = {*_accelerators(), *(span.device for span in self._spans)}
            on = [device for device in used if device.type != "cpu"]
            self._devices = sorted(on, key=lambda device: (device.type, device.index))

    @classmethod
    def of(cls, work, warmups=1):
        """Return the timeline of a call of `work()`, after `warmups` calls without one."""
        for _ in range(warmups):
            work()
        with cls() as timeline:
            work()
        return timeline

    @classmethod
    def merged(cls, timelines, kinds=KINDS):
        """Return one timeline of what several ranks of this machine did, on the clock they share.

        Its phases have the rank in front, "rank 1 forward". The waits of the hosts are left out.

        Args:
            timelines: the ranks' timelines, in the order of ranks; each has a GPU of its own.
            kinds: the kinds of spans to keep, for a figure about kernels and collectives only.

        Raises:
            ValueError: there is none, or a kind is unknown.
            RuntimeError: one has not ended.
        """
        timelines = list(timelines)
        if not timelines:
            raise ValueError("no timelines to merge")
        _check_kinds(kinds)
        spans, marks, devices = [], [], {}
        origin = min(timeline._origin for timeline in timelines)
        for rank, timeline in enumerate(timelines):
            delay = origin - timeline._origin
            ran = [s for s in timeline.spans if s.engine != "host" and s.kind in kinds]
            spans += [_moved(span, delay) for span in ran]
            for name, start, end in timeline.marks:
                marks.append(Mark(f"rank {rank} {name}", start - delay, end - delay))
            devices |= {str(span.device): span.device for span in ran}
        devices = [devices[name] for name in sorted(devices, key=_kind_and_index)]
        end = max(timeline._end for timeline in timelines)
        return cls.from_spans(spans, marks, devices, origin, end, timelines[0].hardware)

    @classmethod
    def from_spans(cls, spans, marks=(), devices=(), start=0.0, end=0.0, hardware=""):
        """Return a timeline of spans and phases that are known already.

        Args:
            spans, marks, devices, hardware: its attributes; times count from `start`.
            start, end: of its block, in seconds of `vgpu.clock`.
        """
        timeline = cls()
        timeline._spans = sorted(spans, key=lambda span: (span.start, span.end))
        timeline._marks, timeline._devices = list(marks), list(devices)
        timeline._origin, timeline._end = start, end
        timeline.hardware, timeline._state = hardware, "done"
        return timeline

    def __getstate__(self):
        """Return the state for another process, with names for devices that it may not know."""
        self._recorded()
        state = {name: value for name, value in vars(self).items() if name not in _OF_A_PROCESS}
        spans = [replace(span, **_named(span)) for span in self._spans]
        return state | {"_spans": spans, "_devices": list(map(str, self._devices))}

    def _recorded(self):
        """Raise RuntimeError unless the block has ended."""
        if self._state != "done":
            raise RuntimeError(f"the timeline is {self._state}: ask after the with block has ended")

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
        """Give the host's time in a block a name: a band above the rows of the figure.

        Raises:
            RuntimeError: the timeline is not recording.
        """
        if self._state != "recording":
            raise RuntimeError(f"the timeline is {self._state}: mark phases inside its with block")
        start = clock() - self._origin
        try:
            yield
        finally:
            self._marks.append(Mark(name, start, clock() - self._origin))

    def select(self, device=None, kind=None, stream=None, engine=None, name=None, mark=None):
        """Pick spans; every argument that is given narrows the choice.

        Args:
            device: a device or its name.
            kind: "kernel", "copy", "collective" or "wait".
            stream: number of a stream, or a stream of a virtual GPU.
            engine: "compute", "h2d", "d2h", "p2p", "collectives", "send 1" or "recv 1" (messages
                to and from a rank), "stream" or "host".
            name: a part of the name.
            mark: name of a phase: what the host issued in it, whenever it ran.

        Returns:
            A list of spans, ordered by start.

        Raises:
            ValueError: the device, kind, engine or phase is unknown.
        """
        spans = self.spans
        if device is not None:
            device = self._known(device)
            spans = [span for span in spans if span.device == device]
        if kind is not None:
            _check_one_of(kind, KINDS, "kind")
            spans = [span for span in spans if span.kind == kind]
        if engine is not None:
            known = dict.fromkeys([*ENGINES, *(span.engine for span in spans)])
            _check_one_of(engine, known, "engine")
            spans = [span for span in spans if span.engine == engine]
        if stream is not None:
            stream = getattr(stream, "stream_id", stream)
            spans = [span for span in spans if span.stream == stream]
        if name is not None:
            spans = [span for span in spans if name in span.name]
        if mark is not None:
            _check_one_of(mark, sorted({mark.name for mark in self.marks}), "phase")
            phases = [phase for phase in self.marks if phase.name == mark]
            spans = [
                span
                for span in spans
                if span.issued is not None and any(_issued_in(span, phase) for phase in phases)
            ]
        return list(spans)

    def busy(self, device, kind="kernel"):
        """Return the seconds in which a device ran at least one span of a kind."""
        return sum(end - start for start, end in union(self.select(device, kind)))

    def utilization(self, device):
        """Return the part of the timeline, 0 to 1, in which a device ran kernels."""
        return self.busy(device) / self.seconds

    def overlap(self, a, b):
        """Return the seconds in which both `a` and `b` were under way.

        Args:
            a, b: a device, which stands for its kernels, or a list of spans.
        """
        return overlap(*(self._spans_of(choice) for choice in (a, b)))

    def bytes_by_link(self):
        """Return the bytes that were copied, a dict from (source, target), both devices."""
        num_bytes = defaultdict(int)
        for span in self.select(kind="copy"):
            num_bytes[span.source, span.target] += span.num_bytes
        return dict(num_bytes)

    def _spans_of(self, choice):
        if isinstance(choice, str | torch.device):
            return self.select(choice, "kernel")
        return choice

    def _known(self, device):
        """Return the device of this timeline that is meant, or raise ValueError."""
        name = str(device)
        if ":" not in name:
            name = f"{name}:0"
        for known in self.devices:
            if str(known) == name:
                return known
        known = ", ".join(map(str, self.devices)) or "none"
        raise ValueError(f"no device {device} on this timeline; it knows {known}")

    def plot(self, title=None, start=0.0, end=None, kinds=KINDS):
        """Draw a Gantt chart: a row for each device and engine, and one for the waiting host.

        Args:
            title: the text above the chart.
            start, end: the part to draw, in seconds; all of it by default.
            kinds: the kinds of spans to draw, for a figure about kernels and copies only.

        Returns:
            A matplotlib figure.

        Raises:
            ValueError: the part is empty, or a kind is unknown.
        """
        _check_kinds(kinds)
        return plot_timeline(self, title, start, end, kinds)

    def export(self, path):
        """Write the timeline as a Chrome trace, which https://ui.perfetto.dev opens."""
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


def _issued_in(span, phase):
    """Tell whether the host issued something within a phase.

    On modelled GPUs a launch ends when its phase does and another begins; a wait begins then.
    """
    if span.kind == "wait":
        return phase.start <= span.issued < phase.end
    return phase.start < span.issued <= phase.end


def _accelerators():
    """Return the devices in use that are not the CPU."""
    return [device for device in try_all_gpus() if device.type != "cpu"]


def start_recorders():
    """Start to record the devices in use; return pairs (function to stop, list of records)."""
    sources = [vgpu]
    real = torch.cuda.is_initialized() or any(d.type == "cuda" for d in _accelerators())
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


_OF_A_PROCESS = ("_recorders", "_clock", "_look")


def _named(span):
    """Return the devices of a span by their names."""
    return {
        field: device and str(device)
        for field in ("device", "source", "target")
        for device in [getattr(span, field)]
    }


def _kind_and_index(name):
    """Return a key that sorts the names of devices by kind, then by number."""
    kind, _, index = name.partition(":")
    return kind, int(index or 0)


def _moved(span, origin):
    """Return `span` with its times counted from `origin`."""
    issued = None if span.issued is None else span.issued - origin
    return replace(span, start=span.start - origin, end=span.end - origin, issued=issued)


def _check_kinds(kinds):
    for kind in kinds:
        _check_one_of(kind, KINDS, "kind")


def _check_one_of(value, known, what):
    """Raise ValueError unless `value` is one of the known ones."""
    if value not in known:
        raise ValueError(f"unknown {what} {value!r}: choose one of {', '.join(known) or 'none'}")
