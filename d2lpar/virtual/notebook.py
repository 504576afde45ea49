"""What a Jupyter kernel needs: a stopped cell says where it stopped, and leaves nothing behind.

Only public interfaces of IPython are used.
"""

import os
import sys
from types import TracebackType

from . import device as registry

_HERE = os.path.dirname(__file__) + os.sep


def adapt_to_notebook():
    """Let the IPython shell, if this runs in one, start cells afresh and shorten tracebacks.

    A cell begins outside of all `with` blocks of streams and devices that a cell before it left
    entered. A traceback has no frames of virtual GPUs.
    """
    if "IPython" in sys.modules:
        shell = sys.modules["IPython"].get_ipython()
        if shell is not None:
            shell.events.register("pre_run_cell", lambda info: registry.leave_all())
            if not shell.custom_exceptions:
                shell.set_custom_exc((BaseException,), _show)


def _show(shell, kind, error, traceback, tb_offset=None):
    """Show an error as IPython does, without the frames of virtual GPUs."""
    if issubclass(kind, SyntaxError):
        shell.showsyntaxerror()
        return
    hide_frames(error)
    shell.showtraceback((kind, error, error.__traceback__), tb_offset, running_compiled_code=True)


def hide_frames(error):
    """Take the frames of virtual GPUs out of the tracebacks of an error and of its causes."""
    while error is not None:
        entries, entry = [], error.__traceback__
        while entry is not None:
            entries.append(entry)
            entry = entry.tb_next
        shown = [e for e in entries if not e.tb_frame.f_code.co_filename.startswith(_HERE)]
        traceback = None
        for entry in reversed(shown):
            frame, line = entry.tb_frame, entry.tb_lineno
            if line is None:  # an interrupt came where code has no line; IPython asks for one
                line = frame.f_code.co_firstlineno
            traceback = TracebackType(traceback, frame, entry.tb_lasti, line)
        error.__traceback__ = traceback
        error = error.__cause__ or error.__context__
