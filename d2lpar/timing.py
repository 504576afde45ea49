"""Clocks for work that runs elsewhere, and predicted numbers beside measured ones.

While GPUs are modelled, all seconds are modelled seconds.
"""

import itertools
import math
import statistics
import textwrap

import torch

from d2lpar.plotting.progress import progress
from vgpu import clock, clock_in_force, hardware_name, synchronize
from vgpu.other_programs import look, while_timed

WIDTH = 72  # characters of a line: a window of 1024 pixels shows no more beside a notebook


class Timer:
    """A stopwatch that starts when it is made and keeps every time it took."""

    def __init__(self):
        self.times = []
        self.start()

    def start(self):
        """Start, or start again."""
        self._look = None if hardware_name() else look()
        self._clock, self._started = clock_in_force(), clock()

    def stop(self):
        """Keep and return the seconds since the last start.

        Raises RuntimeError if `virtual_gpus` has changed the clock since then.
        """
        if clock_in_force() is not self._clock:
            raise RuntimeError(
                "virtual_gpus has changed the clock since this timer was started: start it again"
            )
        self.times.append(clock() - self._started)
        while_timed.add(self._look)
        return self.times[-1]

    def avg(self):
        """Return the mean of the times, in seconds; raise ValueError before the first one."""
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
    """Print how long a block took, including the work that it left on the devices.

    Args:
        description: the text before the seconds.
        sync: wait for every device in use before the clock starts and before it is read. Without,
            the clock sees only how long it took to issue the work.

    Attributes:
        seconds: the measured time; None until the block has ended without an error.
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
    """Return the seconds of the fastest of `repeats` calls of `work()`, after one to warm up.

    Each includes the work that the call leaves on the devices. Raises ValueError if `repeats` is
    less than 1.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1: got {repeats}")
    timer = Timer()
    for _ in range(repeats + 1):
        _time(timer, work)
    return min(timer.times[1:])


def _time(timer, work):
    """Add the seconds of `work()` to a timer, those of what it leaves on the devices included."""
    synchronize()
    timer.start()
    work()
    synchronize()
    timer.stop()


def product_flops(device, size=1000):
    """Return the floating-point operations per second of a device in matrix products.

    That is 2 size^3 over the seconds of a product of square matrices, the best of eight.
    """
    A = torch.randn(size, size, device=device)
    return 2 * size**3 / best_seconds(lambda: A @ A, repeats=8)


def compare(what, predicted, measured, unit="s"):
    """Print a predicted number beside the measured one, and measured over predicted.

    Lines have at most 72 characters: a long name stands on a line of its own. While GPUs are
    modelled it says "modelled" instead of "measured", and which hardware. Otherwise, if other
    programs took enough of the cores to change a ratio by 15 %, while a `Timer`, a `Benchmark` or a
    `Timeline` ran that has ended since the last call, another line says so.

    Args:
        what: stands before the numbers.
        predicted: a number.
        measured: a number.
        unit: stands after the numbers.
    """
    hardware = hardware_name()
    kind = "modelled" if hardware else "measured"
    if hardware:
        what = f"{what} ({hardware})"
    ratio = _short(measured / predicted, 2) if predicted else "-"
    numbers = f"predicted {_short(predicted):>6} {kind} {_short(measured):>6} {unit:<2}"
    numbers += f" ratio {ratio}"
    for text in (numbers, " ".join(numbers.split())):
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
    """Write a number with four significant digits, or some decimals; whole numbers in full."""
    size = abs(number)
    if size and not 1e-6 <= size < 1e9:
        return f"{number:.3e}"
    if decimals is None:
        whole = float(number).is_integer()
        decimals = 0 if whole else max(0, 3 - math.floor(math.log10(size)))
    return f"{number:,.{decimals}f}"


def seconds_in_turn(ways, rounds=5):
    """Time several ways of doing something in turn, and return the median seconds of each.

    Each round calls one way after the other, so that whatever changes on the machine meanwhile, a
    clock rate or another program, meets all of them alike. A round before the first warms up.
    Seconds include the work that a call leaves on the devices. A table shows the median, the least
    and the most seconds of each way. Where tqdm is installed, a progress bar shows the rounds once
    they have taken two seconds.

    Args:
        ways: a dict from the name of a way to a function without arguments.
        rounds: how many rounds count.

    Returns:
        A dict from the names to seconds.

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
