"""The clock that a program reads while GPUs are modelled: `time.time`, `timeit` and their kin.

After `tell_programs()` these tell the seconds of the model while a `Simulation` keeps the time:
`time.time`, `time.perf_counter`, `time.process_time`, what ends in `_ns`, and the timer of
`timeit`, which `torch.utils.benchmark` uses, too. They are replaced in the modules that have
imported them already, and put back when the wall clock is in force again.

A module of Python itself, of torch, of vgpu or of d2lpar reads the real clock as before: its
time-outs, the stamps of logs, waits for other processes. `time.monotonic` and `datetime`
are always real.

`time.sleep` sleeps as before. It also advances the clock of the thread, because a loop that polls
and sleeps has to end, and because a sleep that stands for work takes its time in the model, too.
A loop that reads the clock and waits otherwise, for an event, a child or asyncio, would not end: so
`_Waiting` adds real time to what such a loop in the main thread is told, and nothing to the model.
"""

import math
import os
import sys
import threading
import time
import timeit

from vgpu.runtime import scheduler

# What reading a clock takes the host. A call took 0.12 µs, and a loop around it that counts
# 0.2 to 0.3 µs (CPython 3.11, measured on a busy machine); one that polls calls more, such as the
# query of an event, which takes as long in `Simulation.poll`.
SECONDS_OF_A_READING = 1e-6
TICKS = 2**28  # in a second: sums with whole seconds are exact, so differences are always the same
FRACTIONS = 2**22  # of a second; more would be lost in `time.time`, and with them exact differences
NANOSECONDS = 10**9
WAIT = 1e-3  # real seconds between two readings, without work for a GPU, that count as a wait
WAITS = 20  # in a row, after which real time counts; a step of training reads the clock less often
_CLOCKS = "time time_ns perf_counter perf_counter_ns process_time process_time_ns".split()
# What reads the real clock.
_REAL = {*sys.stdlib_module_names, "torch", "vgpu", "d2lpar"} - {"timeit"}
_TORCHS_OWN_TIMER = "torch.utils.benchmark"
_PYTHONS_FOLDER = os.path.dirname(os.__file__) + os.sep
_known = {}  # name of a module -> whether it reads the clock of the model


def _is_told(name):
    """Return whether a module, given by its `__name__`, reads the clock of the model."""
    if not isinstance(name, str):
        return True
    told = _known.get(name)
    if told is None:
        root = name.partition(".")[0]
        own = root in _REAL
        if own and root in sys.stdlib_module_names:  # unless a program has a profile.py, say
            file = getattr(sys.modules.get(root), "__file__", None)
            own = file is None or file.startswith(_PYTHONS_FOLDER)
        told = _known[name] = not own or name.startswith(_TORCHS_OWN_TIMER)
    return told


def _model_tells(frame):
    """Return whether the code of a frame, the caller, reads the clock of the model now.

    In a fork, such as a worker of a DataLoader, nothing advances that clock.
    """
    if not scheduler.clock.is_modelled or scheduler.in_fork():
        return False
    return frame is None or _is_told(frame.f_globals.get("__name__"))


class _Stand:
    """What stands for a function of `time`. As an attribute of a class it does not become a method.

    Attributes:
        real: that function.
    """

    def __init__(self, name):
        self.real = getattr(time, name)
        self.__name__ = self.__qualname__ = name
        self.__module__, self.__doc__ = "time", self.real.__doc__

    def __reduce__(self):
        return self.__name__


class _Waiting(threading.local):
    """The real seconds for which the main thread has read the clock and only waited in between.

    Another thread is told those until it first reads the clock, and the model's time from then on:
    one that watches over the main thread would find that this one takes too long.
    """

    by_main_thread = 0.0

    def __init__(self):
        self._seconds, self._waits, self._model, self._real = self.by_main_thread, 0, None, 0.0

    def seconds(self, model):
        """Return them at a reading, at `model` seconds of the thread's clock."""
        if threading.current_thread() is threading.main_thread():
            real = time.monotonic()
            if model != self._model:
                self._waits = 0
            elif real - self._real > WAIT:
                self._waits += 1
                if self._waits > WAITS:
                    self._seconds += real - self._real
                    _Waiting.by_main_thread = self._seconds
            self._model, self._real = model + SECONDS_OF_A_READING, real
        return self._seconds


class _Clock(_Stand):
    def __init__(self, name):
        super().__init__(name)
        self._units = NANOSECONDS if name.endswith("_ns") else 1  # in a second
        self._began = 0

    def start(self):
        """Let it begin within a second or two of the real clock, so that dates are today's.

        It is later: a program may have read the clock before it imported torch. Each process has
        another fraction of the second, because ranks take seeds and the names of files from it.
        """
        of_process = os.getpid() % FRACTIONS / FRACTIONS
        began = (math.ceil(self.real() / self._units) + of_process) * self._units
        self._began = began if self._units == 1 else round(began)

    def __call__(self):
        if not _model_tells(sys._getframe().f_back):
            return self.real()
        clock = scheduler.clock
        waited = _waiting.seconds(clock.now())
        clock.advance(SECONDS_OF_A_READING)
        now = round((clock.now() + waited) * TICKS) / TICKS
        return self._began + (now if self._units == 1 else round(now * self._units))


class _Sleep(_Stand):
    def __call__(self, seconds):
        self.real(seconds)
        if _model_tells(sys._getframe().f_back):
            scheduler.clock.advance(float(seconds))


_waiting = _Waiting()
_clocks = [_Clock(name) for name in _CLOCKS]
_stands = [*_clocks, _Sleep("sleep")]
_with_defaults = timeit.Timer.__init__, timeit.timeit, timeit.repeat
_wanted = False
_changed = []  # (namespace, name, what stands there)


def tell_programs():
    """Let programs read the clock of the model, now and whenever a `Simulation` keeps the time."""
    global _wanted
    _wanted = True
    if scheduler.clock.is_modelled:
        start()


def start():
    """Replace the functions, if that was asked for: a `Simulation` keeps the time from now on."""
    if not _wanted or _changed:
        return
    for clock in _clocks:
        clock.start()
    stands = {id(stand.real): stand for stand in _stands}
    for name, module in list(sys.modules.items()):
        namespace = getattr(module, "__dict__", None)
        if namespace is None or name != "time" and not _is_told(name):
            continue
        for key, value in list(namespace.items()):
            if id(value) in stands:
                namespace[key] = stands[id(value)]
                _changed.append((namespace, key, stands[id(value)]))
    for function in _with_defaults:
        defaults = function.__defaults__
        function.__defaults__ = tuple(stands.get(id(value), value) for value in defaults)


def stop():
    """Put back what `start` has replaced, unless the program has replaced it since."""
    while _changed:
        namespace, key, stand = _changed.pop()
        if namespace.get(key) is stand:
            namespace[key] = stand.real
    for function in _with_defaults:
        defaults = function.__defaults__
        function.__defaults__ = tuple(v.real if isinstance(v, _Stand) else v for v in defaults)
