"""Recordings of devices, and their presentation in torch's tools.

intervals     union, overlap and lanes of spans
profiling     events of GPUs for torch's profiler, and their times
history       history of a device's memory, for https://pytorch.org/memory_viz
chrome_trace  export of a recording to Perfetto
"""

from vgpu.recording.chrome_trace import chrome_trace
from vgpu.recording.intervals import lanes, overlap, union
from vgpu.runtime.spans import Span

__all__ = ["Span", "chrome_trace", "lanes", "overlap", "union"]
