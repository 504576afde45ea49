"""Integration into Jupyter kernels, by public interfaces of IPython only."""

import signal
import sys
import threading
import time
from _thread import start_new_thread
from collections import Counter
from functools import partial
from traceback import walk_stack
from types import TracebackType

from vgpu.runtime import registry, scheduler, threads

_launched = {}  # engine -> number of ops issued to it when a cell was stopped


def adapt_to_notebook():
    """Register hooks with the IPython shell, if this process has one.

    Each cell starts outside the `with` blocks of streams and devices that an earlier cell left
    open. A cell that waits for operators launched before a stop reports them. Tracebacks have no
    frames of virtual GPUs. An interrupt in a destructor is not lost.
    """
    if "IPython" in sys.modules:
        shell = sys.modules["IPython"].get_ipython()
        if shell is not None:
            shell.events.register("pre_run_cell", lambda info: threads.leave_all())
            shell.events.register("post_run_cell", _record_launches_at_stop)
            scheduler.at_long_wait = _report_pending_launches
            if not shell.custom_exceptions:
                shell.set_custom_exc((BaseException,), _show)
            if sys.platform != "win32":  # it has no pthread_kill
                sys.unraisablehook = partial(_interrupt_again, sys.unraisablehook)


def _record_launches_at_stop(result):
    if isinstance(getattr(result, "error_in_exec", None), KeyboardInterrupt):
        for device in registry.devices:
            _launched.update((engine, engine.issued) for engine in device.engines)


def _report_pending_launches():
    """Print, once after a stop, which devices are still busy with operators launched before it.

    As on CUDA a launch cannot be cancelled, so a cell that waits for it would seem to hang.
    """
    launched, left = {**_launched}, Counter()
    _launched.clear()
    for engine, number in launched.items():
        left[engine.device] += max(0, number - engine.finished - len(engine.ends))
    names, number = [str(device.torch_device) for device in +left], left.total()
    if names:
        print(
            f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} still working off "
            f"{number:,} operator{'s' * (number != 1)} launched before the stop"
        )


def _interrupt_again(hook, unraisable):
    """Interrupt the main thread again after Python dropped an interrupt in a destructor.

    pyzmq checks for signals in the destructor of a message (`_check_rc` in `Frame.__dealloc__`).
    From Python 3.12 on the traceback of a stopped cell keeps the kernel's messages alive until the
    garbage collector frees them during a later cell: one press of the stop button in 20 to 60 would
    be lost, whatever the cell does. `hook` is the `sys.unraisablehook` for other exceptions.
    """
    if sys.platform != "win32" and unraisable.exc_type is KeyboardInterrupt:
        start_new_thread(_interrupt_main_thread, ())
    else:
        hook(unraisable)


def _interrupt_main_thread():
    """Interrupt the main thread once it has left `_interrupt_again`, which would drop it."""
    main = threading.main_thread().ident
    hook = _interrupt_again.__code__
    while any(each.f_code is hook for each, _ in walk_stack(threads.current_frames()[main])):
        time.sleep(0.001)
    signal.pthread_kill(main, signal.SIGINT)


def _show(shell, kind, error, traceback, tb_offset=None):
    """Show an error like IPython, without frames of virtual GPUs."""
    if issubclass(kind, SyntaxError):
        shell.showsyntaxerror()
        return
    hide_frames(error)
    shell.showtraceback((kind, error, error.__traceback__), tb_offset, running_compiled_code=True)


def hide_frames(error):
    while error is not None:
        shown, entry = [], error.__traceback__
        while entry is not None:
            if not entry.tb_frame.f_code.co_filename.startswith(scheduler.PACKAGE):
                shown.append(entry)
            entry = entry.tb_next
        traceback = None
        for entry in reversed(shown):
            frame, line = entry.tb_frame, entry.tb_lineno
            if line is None:  # interrupted at code without a line, which IPython requires
                line = frame.f_code.co_firstlineno
            traceback = TracebackType(traceback, frame, entry.tb_lasti, line)
        error.__traceback__ = traceback
        error = error.__cause__ or error.__context__
