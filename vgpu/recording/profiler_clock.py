"""Times of hosts and GPUs in torch's profiler, real or simulated.

On modelled GPUs all times are simulated. Those of the host are interpolated between the launches,
whose real and simulated times are both known.
"""

import time
from bisect import bisect_right

from vgpu.runtime import scheduler


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
