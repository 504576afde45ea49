"""What holds a virtual GPU while a test looks, so that no test depends on how fast a machine is."""

import contextlib
import threading
import time

import pytest
import torch

import d2lpar
from vgpu import start_recording, stop_recording
from vgpu.distributed import process_group
from vgpu.runtime import engines, registry, scheduler
from vgpu.runtime.scheduler import Op
from vgpu.runtime.streams import StreamQueue
from vgpu.runtime.threads import current_frames

_blocked = []  # engines that run, or will run, a gate that is closed


class Gate:
    """A kernel that runs until it is opened, at the latest at the end of the block.

    Before it opens at the end of the block, whatever can run without it runs: what should have
    waited for the gate and did not is seen.
    """

    def __init__(self, device, stream=None):
        found = registry.find(device)
        self.open = threading.Event()
        self.engine = found.compute
        stream = found.current_stream() if stream is None else stream._stream
        _blocked.append(self.engine)
        self.op = stream.issue(Op("gate", "kernel", self.engine, self._work))

    def _work(self, op):
        if not self.open.wait(30):
            raise TimeoutError("nobody opened the gate")

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if not self.open.is_set():
            if exception == (None, None, None):
                run_what_can()
            self.let_go()

    def let_go(self):
        if not self.open.is_set():
            _blocked.remove(self.engine)
            self.open.set()

    @contextlib.contextmanager
    def opened_later(self):
        """Open it as soon as this thread waits for it; after the block it must be open."""
        host, given_up = threading.get_ident(), threading.Event()

        def watch():
            while not given_up.is_set():
                if is_stuck(host):
                    self.let_go()
                    return
                time.sleep(1e-4)

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
            assert self.open.is_set(), "the host did not wait"
        finally:
            given_up.set()
            thread.join()


def is_stuck(host):
    """Return whether a thread waits for an op that cannot run before a gate is opened."""
    op = awaited_by(host)
    if op is None:
        return False
    run_what_can()
    return op is awaited_by(host) and not op.done


def awaited_by(host):
    """Return the op that a thread waits for in `WallClock.wait`, or None."""
    frame = frame_in(host, scheduler.WALL_CLOCK.wait)
    return None if frame is None else frame.f_locals.get("op")


def frame_in(host, function):
    """Return the frame of `function` if a thread waits in it, or None.

    Only its innermost frame is looked at, or the one that waits by `scheduler.pass_gate`: those
    outside may end at any moment.
    """
    frame = current_frames().get(host)
    if frame is not None and frame.f_code is scheduler.pass_gate.__code__:
        frame = frame.f_back
    if frame is not None and frame.f_code is function.__code__:
        return frame


def run_what_can():
    """Wait until every op has run that does not wait for a gate.

    An op that was given to an engine last is ready last: when it runs, all that were ready have
    run. These may have made others ready elsewhere, so it is repeated until nothing else has run.
    """
    before = {}
    while True:
        started = [engine for device in registry.devices for engine in device.engines]
        started = [engine for engine in started if engine.started and engine not in _blocked]
        seen = {}
        marks = [_mark(engine, seen) for engine in started]
        for mark in marks:
            assert mark.wait(30), "an engine does not go on"
        if all(seen[engine] == before.get(engine, -1) + 1 for engine in started):
            return
        before = seen


def _mark(engine, seen):
    """Issue an op that notes how many ops of an engine have run; return its event."""
    event = threading.Event()

    def work(op):
        seen[engine] = engine.finished
        event.set()

    StreamQueue(engine.device, -1).issue(Op("mark", "setting", engine, work))
    return event


class HeldLink:
    """Copies that have a link, of any device, arrive when this is opened, at the latest at the end
    of the block. For `monkeypatch`."""

    def __init__(self, monkeypatch):
        self.open = threading.Event()
        self.reached = threading.Event()  # is a copy under way?
        monkeypatch.setattr(engines, "sleep_until", self.sleep_until)

    def sleep_until(self, moment):
        self.reached.set()
        if not self.open.wait(30):
            raise TimeoutError("nobody opened the link")

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.open.set()


@contextlib.contextmanager
def held_collectives():
    """Keep the link of this rank's collectives busy until the block ends, at least.

    Gives an Event that is set once the first of them is under way.
    """
    under_way, ended, sleep_until = threading.Event(), threading.Event(), process_group.sleep_until

    def sleep_until_then(moment):
        under_way.set()
        if not ended.wait(30):
            raise TimeoutError("the block does not end")
        sleep_until(moment)

    process_group.sleep_until = sleep_until_then
    try:
        yield under_way
    finally:
        process_group.sleep_until = sleep_until
        ended.set()


class LateClock:
    """A wall clock that moves only when an engine sleeps, which wakes up late, or a test moves it.

    For `monkeypatch`.
    """

    LATE = 2e-4  # seconds

    def __init__(self, monkeypatch):
        self.now = time.perf_counter()
        for engine in (engine for device in registry.devices for engine in device.engines):
            for name in ("_free_at", "_last_end"):  # in the test by this clock, then as before
                monkeypatch.setattr(engine, name, 0.0)
        monkeypatch.setattr(engines, "perf_counter", self.read)
        monkeypatch.setattr(scheduler, "perf_counter", self.read)
        monkeypatch.setattr(engines, "sleep_until", self.sleep_until)

    def read(self):
        return self.now

    def sleep_until(self, moment):
        self.now = max(self.now, moment) + self.LATE


@contextlib.contextmanager
def recorded():
    """Give a list that holds, after the block, a Span for each op that ran in it."""
    spans = start_recording()
    try:
        yield spans
        d2lpar.synchronize()
    finally:
        stop_recording(spans)


def named(recording, name):
    return [op for op in recording if op.name == name]


def overlap(first, second):
    return min(first.end, second.end) > max(first.start, second.start)


@contextlib.contextmanager
def in_thread(function):
    """Run `function` in another thread beside the block; raise here what it raised."""
    errors = []

    def run():
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield thread
    thread.join(30)
    assert not thread.is_alive(), "the other thread did not end"
    if errors:
        raise errors[0]


def in_threads(functions):
    """Run functions in threads at the same time; raise here what one of them raised."""
    with contextlib.ExitStack() as stack:
        for function in functions:
            stack.enter_context(in_thread(function))


# For a test that cannot run `elsewhere`
only_here = pytest.mark.parametrize("here_and_elsewhere", ["here"], indirect=True)


def elsewhere(function):
    """Call a function in another thread, whose current streams are no default streams.

    Raise here what it raised, and if something has run on a default stream.
    """
    devices = registry.devices_in_use()

    def run():
        for device in reversed(devices):
            torch.vgpu.set_stream(torch.vgpu.Stream(device))
        function()

    with recorded() as spans:
        in_threads([run])
    on_gpus = (span for span in spans if span.device in devices and span.kind != "wait")
    misplaced = {span.name for span in on_gpus if not span.stream}
    assert not misplaced, misplaced


def error_of(function, *args, **kwargs):
    """Return the exception that a call raises, or None."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return error
