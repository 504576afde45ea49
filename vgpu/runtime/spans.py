"""Span: an item of recordings and timelines."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Span:
    """A time interval of one activity of an engine, a stream or the host.

    Attributes:
        name: the operator ("aten.mm"), or the kernel on CUDA.
        kind: "kernel", "copy", "collective" (from when this rank is ready for it) or "wait"; or, of
            a program under `vgpu run`, a "range" or a "mark" of `torch.cuda.nvtx`.
        device: its device; for a wait of the host, the device waited for (the CPU if unknown).
        stream: number of the stream; 0 is the default stream.
        engine: "compute", "h2d", "d2h" or "p2p"; for collectives "collectives", "send 1" or
            "recv 1"; for waits "host" or "stream", which waited; for ranges their row.
        start, end: seconds from the start of the clock or of the timeline.
        issued: time of issue by the host, in the same seconds; None if unknown.
        num_bytes: bytes that a copy moved, or that a rank sent in a collective.
        source, target: devices of a copy; for a collective this rank's.
        launched: time of issue in seconds of `time.perf_counter`; None if unknown.
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
        return self.end - self.start
