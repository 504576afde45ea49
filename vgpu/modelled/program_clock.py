"""Simulated time for programs on modelled GPUs: `time.time`, `timeit` and similar functions.

After `enable()`, while a `Simulation` is in force, the functions of `_CLOCKS` and the timer of
`timeit` return simulated seconds, also in modules that have imported them. Modules of Python
itself, of torch, vgpu and d2lpar read the real clock, for time-outs, logs and waits.

`time.sleep` sleeps, and also advances the thread's simulated clock: a loop that polls and sleeps
must end, and a sleep in place of work must take simulated time. A loop that reads the clock and
waits otherwise, for an event, a child or asyncio, would not end: see `_Waiting`.
"""

import math
import os
import sys
import threading
import time
import timeit

from vgpu.runtime import scheduler

# Host time of a clock reading. A call took 0.12 µs, a counting loop around it 0.2 to 0.3 µs
# (CPython 3.11, busy machine). A polling loop calls more, such as the query of an event, which
# takes as long in `Simulation.poll`.
SECONDS_OF_A_READING = 1e-6
TICKS = 2**28  # per second: sums with whole seconds are exact, so differences are reproducible
FRACTIONS = 2**22  # of a second; finer ones exceed the precision of `time.time`
NANOSECONDS = 10**9
WAIT = 1e-3  # real seconds between two readings, without GPU work, that count as a wait
WAITS = 20  # consecutive waits after which real time counts; more than in a training step
_CLOCKS = "time time_ns perf_counter perf_counter_ns process_time process_time_ns".split()
_REAL_TIME_PACKAGES = {*sys.stdlib_module_names, "torch", "vgpu", "d2lpar"} - {"timeit"}
_TORCH_TIMER = "torch.utils.benchmark"
_PYTHON_FOLDER = os.path.dirname(os.__file__) + os.sep
_known = {}  # name of a module -> whether it reads the simulated clock


def _reads_simulated_time(name):
    """Return whether a module, given by its `__name__`, reads the simulated clock."""
    if not isinstance(name, str):
        return True
    simulated = _known.get(name)
    if simulated is None:
        root = name.partition(".")[0]
        own = root in _REAL_TIME_PACKAGES
        if own and root in sys.stdlib_module_names:  # a program may have its own profile.py
            file = getattr(sys.modules.get(root), "__file__", None)
            own = file is None or file.startswith(_PYTHON_FOLDER)
        simulated = _known[name] = not own or name.startswith(_TORCH_TIMER)
    return simulated


def _is_simulated_now(frame):
    """Return whether the code of a frame, the caller, reads the simulated clock now.

    In a fork, such as a DataLoader worker, nothing advances that clock.
    """
    if not scheduler.clock.is_modelled or scheduler.in_fork():
        return False
    return frame is None or _reads_simulated_time(frame.f_globals.get("__name__"))


class _StandIn:
    """Replaces a function of `time`, `real`; as a class attribute it does not become a method."""

    def __init__(self, name):
        self.real = getattr(time, name)
        self.__name__ = self.__qualname__ = name
        self.__module__, self.__doc__ = "time", self.real.__doc__

    def __reduce__(self):
        return self.__name__


class _Waiting(threading.local):
    """Real seconds that the main thread has spent reading the clock without work in between.

    Other threads inherit this offset until their first reading, and follow the simulated clock from
    then on: a watchdog would find the main thread too slow otherwise.
    """

    by_main_thread = 0.0

    def __init__(self):
        self._seconds, self._waits, self._model, self._real = self.by_main_thread, 0, None, 0.0

    def seconds(self, model):
        """Return the offset for a reading, at `model` seconds of the thread's clock."""
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


class _ClockFunction(_StandIn):
    def __init__(self, name):
        super().__init__(name)
        self._units = NANOSECONDS if name.endswith("_ns") else 1  # in a second
        self._began = 0

    def start(self):
        """Set the start, a second or two after the real clock: a program may have read that before.

        Each process has its own fraction of a second, because ranks derive seeds and file names
        from the time.
        """
        of_process = os.getpid() % FRACTIONS / FRACTIONS
        began = (math.ceil(self.real() / self._units) + of_process) * self._units
        self._began = began if self._units == 1 else round(began)

    def __call__(self):
        if not _is_simulated_now(sys._getframe().f_back):
            return self.real()
        clock = scheduler.clock
        waited = _waiting.seconds(clock.now())
        clock.advance(SECONDS_OF_A_READING)
        now = round((clock.now() + waited) * TICKS) / TICKS
        return self._began + (now if self._units == 1 else round(now * self._units))


class _SleepFunction(_StandIn):
    def __call__(self, seconds):
        self.real(seconds)
        if _is_simulated_now(sys._getframe().f_back):
            scheduler.clock.advance(float(seconds))


_waiting = _Waiting()
_clocks = [_ClockFunction(name) for name in _CLOCKS]
_replacements = [*_clocks, _SleepFunction("sleep")]
_with_defaults = timeit.Timer.__init__, timeit.timeit, timeit.repeat
enabled = False  # whether programs read the simulated clock; set by `enable`
_changed = []  # (namespace, name, replacement)


def enable():
    """Let programs read the simulated clock, now and whenever a `Simulation` is in force."""
    global enabled
    enabled = True
    if scheduler.clock.is_modelled:
        start()


def start():
    """Replace the functions, if enabled: a `Simulation` is in force from now on."""
    if not enabled or _changed:
        return
    for clock in _clocks:
        clock.start()
    replacements = {id(each.real): each for each in _replacements}
    for name, module in list(sys.modules.items()):
        namespace = getattr(module, "__dict__", None)
        if namespace is None or name != "time" and not _reads_simulated_time(name):
            continue
        for key, value in list(namespace.items()):
            if id(value) in replacements:
                namespace[key] = replacements[id(value)]
                _changed.append((namespace, key, replacements[id(value)]))
    for function in _with_defaults:
        defaults = function.__defaults__
        function.__defaults__ = tuple(replacements.get(id(value), value) for value in defaults)


def stop():
    """Restore the functions, except where the program has replaced them since."""
    while _changed:
        namespace, key, replacement = _changed.pop()
        if namespace.get(key) is replacement:
            namespace[key] = replacement.real
    for function in _with_defaults:
        defaults = function.__defaults__
        function.__defaults__ = tuple(v.real if isinstance(v, _StandIn) else v for v in defaults)
