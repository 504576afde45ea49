"""What tests of processes and of interrupts wait for."""

import os
import threading
import time
from pathlib import Path


def is_alive(pid):
    """Return whether there is such a process, and it has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # it has gone, or goes while it is read
        return False


def wait_for_threads(read, seconds=10):
    """Wait until what `read()` returns ends with all of a list of threads by faulthandler.

    The main thread is its last, and began with a module, run as such or by `python -m`.
    """
    ends = " in <module>\n", " in _run_module_as_main\n"
    deadline = time.monotonic() + seconds
    while not read().endswith(ends) and time.monotonic() < deadline:
        time.sleep(0.01)


def wait_until(condition, seconds=120):
    """Wait until `condition()` is true; fail after some seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def note_when_in(path, name, num_collectives=0):
    """Write this process's id to a file once one of its threads is in a function of this name.

    Args:
        path: of the file, which appears as a whole.
        name: of the function.
        num_collectives: how many collectives this rank must have started, too.
    """

    def is_there():
        from torch.distributed import group

        from vgpu.runtime.threads import current_frames

        frames = [*current_frames().values()]
        while frames:
            if name in {frame.f_code.co_name for frame in frames}:
                return group.WORLD._get_sequence_number_for_group() == num_collectives
            frames = [frame.f_back for frame in frames if frame.f_back]

    def watch():
        while not is_there():
            time.sleep(0.001)
        part = path.with_suffix(".part")
        part.write_text(str(os.getpid()))
        part.rename(path)

    threading.Thread(target=watch, daemon=True).start()


def free_starting_threads():
    """Let threads begin that would wait for ever, with what they were given.

    An interrupt right behind `with self._cond:` in Thread.start leaves that lock locked: Python's
    flaw. To be called when no thread can be about to start.
    """
    for thread in list(threading._limbo):
        lock = thread._started._cond._lock
        if lock.locked():
            lock.release()
