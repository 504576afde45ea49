"""Span: a stretch of time in which something was busy. A recording and a timeline hold spans."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time in which an engine, a stream or the host was busy with one thing.

    Attributes:
        name: the operator ("aten.mm"), or the kernel on CUDA.
        kind: "kernel", "copy", "collective" (from when this rank is ready for it) or "wait"; or, of
            a program under `vgpu run`, a "range" or a "mark" of `torch.cuda.nvtx`.
        device: where it ran; for a wait of the host, the device waited for (the CPU if unknown).
        stream: number of the stream; 0 is the default stream.
        engine: "compute", "h2d", "d2h" or "p2p"; for collectives "collectives", "send 1" or
            "recv 1"; for waits "host" or "stream", who waited; for ranges the row to show them in.
        start, end: seconds from the start of the clock or of the timeline.
        issued: when the host asked for it, in the same seconds; None if unknown.
        num_bytes: bytes that a copy moved, or that a rank sent in a collective.
        launched: the same in seconds of `time.perf_counter`; None if unknown.
        source, target: devices that a copy comes from and goes to; for a collective this rank's.
    """

    name: str
    kind: str
    device: torch.device
    stream: int
    engine: str
    start: float
    end: float
    issued: float | None = None
    num_bytes: int = 0
    source: torch.device | None = None
    target: torch.device | None = None
    launched: float | None = None

    @property
    def seconds(self):
        """The seconds that it took."""
        return self.end - self.start
