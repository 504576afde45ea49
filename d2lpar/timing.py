"""Time work on devices, and print predicted beside measured numbers.

On modelled GPUs all seconds are modelled seconds.
"""

import itertools
import math
import statistics
import textwrap

import torch

from d2lpar.plotting.progress import progress
from vgpu import clock, clock_in_force, hardware_name, synchronize
from vgpu.other_programs import read_cpu_times, while_timed

WIDTH = 72  # characters per line: what a notebook shows in a window of 1024 pixels


class Timer:
    """A stopwatch that starts on creation and records every measured time.

    Attributes:
        times: the measured times, a list of seconds.
    """

    def __init__(self):
        self.times = []
        self.start()

    def start(self):
        """Start or restart the stopwatch."""
        self._cpu_before = None if hardware_name() else read_cpu_times()
        self._clock, self._started = clock_in_force(), clock()

    def stop(self):
        """Record and return the seconds since the last start.

        Raises:
            RuntimeError: `virtual_gpus` has changed the clock since the last start.
        """
        if clock_in_force() is not self._clock:
            raise RuntimeError(
                "virtual_gpus has changed the clock since this timer started: restart the timer"
            )
        self.times.append(clock() - self._started)
        while_timed.add(self._cpu_before)  # for the warning that `compare` prints
        return self.times[-1]

    def avg(self):
        """Return the mean of the times, in seconds; raise ValueError if there are none."""
        if not self.times:
            raise ValueError("no times yet: call stop() first")
        return sum(self.times) / len(self.times)

    def sum(self):
        """Return the sum of the times, in seconds."""
        return sum(self.times)

    def cumsum(self):
        """Return the cumulative sums of the times, a list of seconds."""
        return list(itertools.accumulate(self.times))


class Benchmark:
    """Print how long a `with` block takes, including the work it launches on the devices.

    Args:
        description: the text printed before the seconds.
        sync: whether to wait for all devices in use at the start and at the end of the block.
            With False, only the time to launch the work is measured.

    Attributes:
        seconds: the measured time; None until the block ends without an error.
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
        hardware = hardware_name()
        modelled = f" (modelled: {hardware})" if hardware else ""
        print(f"{self.description}: {self.seconds:.4f} sec{modelled}")


def best_seconds(work, repeats=3):
    """Return the seconds of the fastest of `repeats` calls of `work()`, after a warm-up call.

    The work that a call launches on the devices is included.

    Raises:
        ValueError: `repeats` is less than 1.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1: got {repeats}")
    timer = Timer()
    for _ in range(repeats + 1):
        _time(timer, work)
    return min(timer.times[1:])


def seconds_in_turn(ways, rounds=5):
    """Time several functions in turn; return the median seconds of each, and print a table.

    Each round calls every function once, so changes of the clock rate or of the load affect all
    alike. A warm-up round comes first. The work that a call launches on the devices is included.
    The table has median, minimum and maximum; with tqdm, a progress bar appears after 2 s.

    Args:
        ways: a dict from names to functions without arguments.
        rounds: the number of rounds, without the warm-up.

    Returns:
        A dict from names to median seconds.

    Raises:
        ValueError: `rounds` is less than 1.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1: got {rounds}")
    timers = {name: Timer() for name in ways}
    for _ in progress(range(rounds + 1), "rounds", delay=2):
        for name, way in ways.items():
            _time(timers[name], way)
    width = max(24, *(len(name) for name in ways))
    modelled = f"  (modelled: {hardware_name()})" if hardware_name() else ""
    print(f"{f'seconds, {rounds} rounds':<{width}}   median    least     most{modelled}")
    medians = {}
    for name, timer in timers.items():
        times = timer.times[1:]
        medians[name] = statistics.median(times)
        numbers = (medians[name], min(times), max(times))
        print(f"{name:<{width}}", *(f"{_short(number):>8}" for number in numbers))
    return medians


def _time(timer, work):
    """Record the seconds of `work()` in a `Timer`, including the work it launches on devices."""
    synchronize()
    timer.start()
    work()
    synchronize()
    timer.stop()


def product_flops(device, size=1000):
    """Return the FLOP/s of a device in matrix products.

    That is 2 size**3 divided by the seconds of a product of two square matrices, the best of 8.
    """
    A = torch.randn(size, size, device=device)
    return 2 * size**3 / best_seconds(lambda: A @ A, repeats=8)


def compare(what, predicted, measured, unit="s"):
    """Print a predicted and a measured number, and their ratio, measured / predicted.

    A name too long for a line of 72 characters gets its own line. On modelled GPUs the line says
    "modelled" instead of "measured", and names the hardware. On others a second line warns if other
    programs took so much CPU time that a ratio may change by 15 %, in any `Timer`, `Benchmark` or
    `Timeline` since the last call.

    Args:
        what: the text before the numbers.
        predicted, measured: numbers.
        unit: the unit, printed after each number.
    """
    hardware = hardware_name()
    kind = "modelled" if hardware else "measured"
    if hardware:
        what = f"{what} ({hardware})"
    ratio = _short(measured / predicted, 2) if predicted else "-"
    numbers = f"predicted {_short(predicted):>6} {kind} {_short(measured):>6} {unit:<2}"
    numbers += f" ratio {ratio}"
    for text in (numbers, " ".join(numbers.split())):  # in columns, or without their blanks
        if len(f"{what} {text}") <= WIDTH:
            lines = [f"{what} {text:>{WIDTH - 1 - len(what)}}"]
            break
    else:
        lines = textwrap.wrap(what, WIDTH)
        lines += [f"{line:>{WIDTH}}" for line in textwrap.wrap(numbers, WIDTH)]
    print("\n".join(lines))
    if not hardware:
        for sentence in while_timed.sentences():
            print(f"{sentence} while this ran")
    while_timed.clear()


def _short(number, decimals=None):
    """Format a number with four significant digits or `decimals`; integers in full."""
    size = abs(number)
    if size and not 1e-6 <= size < 1e9:
        return f"{number:.3e}"
    if decimals is None:
        whole = float(number).is_integer()
        decimals = 0 if whole else max(0, 3 - math.floor(math.log10(size)))
    return f"{number:,.{decimals}f}"
