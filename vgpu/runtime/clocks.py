"""The clock in force: the wall clock, or the clock of modelled GPUs."""

from vgpu.runtime import scheduler


def clock():
    """Return the seconds of the clock in force: `time.perf_counter`, or the modelled GPUs' clock.

    Each thread has its own modelled clock. It begins at 0 when `virtual_gpus` is called, and
    advances with the launch of each operator, by waiting, by asking whether an event was reached,
    and by `host_takes`, but not by `time.sleep` or other work of the host; `%timeit` and tqdm read
    the wall clock, except under `vgpu run --model` (`program_clock.py`). A thread's clock begins
    when the thread is started, and joining the thread waits for it. A result handed over otherwise,
    by a queue or a future, does not move the receiver's.
    """
    return scheduler.clock.now()


def host_takes(seconds):
    """Advance a modelled clock by `seconds` for work of the host, such as loading a batch.

    It counts for the calling thread only, and is lost in another process, such as a DataLoader's
    worker. On the wall clock this does nothing: there the work itself counts.

    Raises:
        ValueError: `seconds` is negative or infinite.
    """
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"the seconds of work must not be negative or infinite: got {seconds}")
    scheduler.clock.advance(seconds)


def clock_in_force():
    """Return the object that keeps the time: another one after each change of the clock."""
    return scheduler.clock


def hardware_name():
    """Return the modelled hardware, "8 x V100-SXM2-16GB" for example; "" on the wall clock."""
    return scheduler.clock.name
