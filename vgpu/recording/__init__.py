"""What devices did, and how torch's tools show it.

spans           what a recording holds
intervals       sums over spans
profiling       what torch's profiler shows
profiler_clock  the times that it shows
history         what the memory of a device did, for https://pytorch.org/memory_viz
chrome_trace    a recording as a file for Perfetto
"""

from vgpu.recording.chrome_trace import chrome_trace
from vgpu.recording.intervals import lanes, overlap, union
from vgpu.recording.spans import Span

__all__ = ["Span", "chrome_trace", "lanes", "overlap", "union"]
