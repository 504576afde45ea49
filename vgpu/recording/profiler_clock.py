"""The times that torch's profiler shows of hosts and GPUs: by the wall clock, or the model's.

On modelled GPUs all times are those of the model. The host's are then found by the launches, of
which both the wall clock's time and the model's are known: in between, time passes evenly.
"""

import time
from bisect import bisect_right

from vgpu.runtime import scheduler


class ProfilerClock:
    """The clock in force, as a profiler shows its times: ns from the moment when this was made.

    With ns from the epoch, a float would be off by 256 ns.

    Attributes:
        unix: that moment in ns from the epoch.
        wall: the same in seconds of the wall clock.
        is_modelled: whether GPUs are modelled.
        hardware: the modelled hardware, "" if none is.
    """

    def __init__(self):
        self._clock = scheduler.clock
        self.is_modelled = self._clock.is_modelled
        self.hardware = self._clock.name if self.is_modelled else ""
        self.unix, self.wall = _unix_and_wall()
        self._model = self._clock.now()

    def launch(self, span):
        """Return the ns at which a span was launched, by the wall clock."""
        return (span.launched - self.wall) * 1e9

    def follow(self, spans):
        """Find in the spans recorded until now the points between which `on_host` interpolates."""
        points = [(0.0, 0.0)]
        for span in spans if self.is_modelled else ():
            wall, model = self.launch(span), (span.issued - self._model) * 1e9
            if wall > points[-1][0] and model > points[-1][1]:  # other threads may be behind
                points.append((wall, model))
        wall = (time.perf_counter() - self.wall) * 1e9
        model = (self._clock.now() - self._model) * 1e9
        points.append((max(wall, points[-1][0] + 1), max(model, points[-1][1] + 1)))
        self._walls, self._models = zip(*points, strict=True)

    def on_host(self, wall):
        """Return the ns to show for those at which the host did something."""
        if not self.is_modelled:
            return wall
        if wall < 0:  # the profiler itself
            return wall
        place = min(bisect_right(self._walls, wall), len(self._walls) - 1)
        (a, b), (c, d) = (each[place - 1 : place + 1] for each in (self._walls, self._models))
        return c + (wall - a) / (b - a) * (d - c)

    def on_gpu(self, span):
        """Return the ns to show for the start and the end of a span."""
        origin = self._model if self.is_modelled else self.wall
        return (span.start - origin) * 1e9, (span.end - origin) * 1e9


def _unix_and_wall():
    """Return `time.time_ns` and `time.perf_counter` at one moment.

    Another thread may run between the two calls; of a few readings the closest one counts.
    """
    readings = []
    for _ in range(5):
        before, unix, after = time.perf_counter(), time.time_ns(), time.perf_counter()
        readings.append((after - before, unix, (before + after) / 2))
    return min(readings)[1:]
