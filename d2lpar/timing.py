"""Clocks for work that runs elsewhere: Timer, Benchmark and Timeline."""

import itertools
import time

from d2lpar.devices import synchronize


class Timer:
    """A stop watch that keeps every time it took; it runs from its making on."""

    def __init__(self):
        self.times = []
        self.start()

    def start(self):
        """Start, or start again."""
        self._started = time.perf_counter()

    def stop(self):
        """Keep and return the seconds since the last start."""
        self.times.append(time.perf_counter() - self._started)
        return self.times[-1]

    def avg(self):
        """Return the mean of the times, in seconds.

        Raises:
            ValueError: nothing was timed yet.
        """
        if not self.times:
            raise ValueError("no times yet: call stop() first")
        return sum(self.times) / len(self.times)

    def sum(self):
        """Return the sum of the times, in seconds."""
        return sum(self.times)

    def cumsum(self):
        """Return the running sums of the times, a list of seconds."""
        return list(itertools.accumulate(self.times))


class Benchmark:
    """Print how long a block took, the work that it left on the devices included.

    Args:
        description: what stands before the seconds.
        sync: wait for every device in use before the clock starts and before it is read. Without,
            the clock sees only how long it took to issue the work.

    Attributes:
        seconds: what was measured; None until the block has ended well.
    """

    def __init__(self, description="Done", sync=True):
        self.description = description
        self.sync = sync
        self.seconds = None

    def __enter__(self):
        self.seconds = None
        if self.sync:
            synchronize()
        self.timer = Timer()
        return self

    def __exit__(self, kind, error, traceback):
        if kind is not None:
            return
        if self.sync:
            synchronize()
        self.seconds = self.timer.stop()
        print(f"{self.description}: {self.seconds:.4f} sec")
