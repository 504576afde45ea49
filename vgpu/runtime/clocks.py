"""The current clock: the wall clock, or the simulated clock of modelled GPUs."""

from vgpu.runtime import scheduler


def clock():
    """Return the seconds of the current clock: `time.perf_counter`, or the modelled GPUs' clock.

    Each thread has its own modelled clock. It starts at 0 when `virtual_gpus` is called, and
    advances at each operator launch, wait, event query and `host_takes`, but not by `time.sleep` or
    other host work; `%timeit` and tqdm read the wall clock, except under `vgpu run --model`
    (`program_clock.py`). A new thread inherits the time of its start; joining a thread waits for
    its clock, but receiving its results through a queue or a future does not.
    """
    return scheduler.clock.now()


def host_takes(seconds):
    """Advance a modelled clock by `seconds` for host work, such as loading a batch.

    Only the calling thread's clock advances; in another process, such as a DataLoader's worker, the
    call has no effect. On the wall clock it does nothing: there the work itself takes time.

    Raises:
        ValueError: `seconds` is negative or infinite.
    """
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"seconds must be finite and not negative: got {seconds}")
    scheduler.clock.advance(seconds)


def clock_in_force():
    """Return the current clock object; each change of the clock creates a new one."""
    return scheduler.clock


def hardware_name():
    """Return the modelled hardware, such as "8 x V100-SXM2-16GB"; "" on the wall clock."""
    return scheduler.clock.name
