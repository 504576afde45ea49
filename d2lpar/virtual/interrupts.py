"""Interrupts that wait until they do no harm."""

import contextlib
import signal
import threading


@contextlib.contextmanager
def held_back(note=lambda: None):
    """Hold an interrupt (Ctrl-C) back until the block has ended, then raise KeyboardInterrupt.

    An error that the block raises after the interrupt is dropped. In a thread that is not the main
    one, and where somebody else handles interrupts, this does nothing.

    Args:
        note: a function that is called as soon as the interrupt comes.

    Raises:
        KeyboardInterrupt: there was an interrupt.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not in_main_thread() or handler is not signal.default_int_handler:
        yield
        return
    interrupted = False

    def hold(*_):
        nonlocal interrupted
        interrupted = True
        note()

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    except Exception:
        if not interrupted:
            raise
    finally:
        signal.signal(signal.SIGINT, handler)
    if interrupted:
        raise KeyboardInterrupt


def in_main_thread():
    """Return whether this is the thread that may handle signals."""
    return threading.current_thread() is threading.main_thread()
