"""Where Python raises KeyboardInterrupt, and how to delay it.

A signal only sets a flag. The handler, and with it KeyboardInterrupt, runs when the main thread
next checks that flag:

- where a Python function begins (RESUME), at a jump backwards (JUMP_BACKWARD, in 3.11 also
  POP_JUMP_BACKWARD_IF_*), and after a call of a function in C or of a class (CALL*, in 3.11 also
  PRECALL). Source: `CHECK_EVAL_BREAKER` in CPython's Python/ceval.c (3.11) and Python/bytecodes.c
  (3.12, 3.13).
- in C code that checks for signals (`PyErr_CheckSignals`): `str` and `repr` (Objects/object.c), and
  blocking calls that a signal ends.

So consecutive stores, and the call of a function in C after them, are *one step*: either all of it
has happened or none. A function that is one step is decorated with `one_step`. Comments mark the
steps within longer functions, where another call would slow down each operator or each allocation:
`StreamQueue.issue` (streams.py), and `allocate` and `note_freed` of device_memory.py.

No other thread runs within a step, because the same check hands over the interpreter's lock. No
garbage is collected within it: 3.11 collects where a container is created, and a step creates none;
3.12 and 3.13 collect at that check. A `with` statement acquires a lock and enters the block that
releases it in one step, too (BEFORE_WITH does not check).

Three traps:

- In 3.12 and 3.13 no handler covers the jump backwards from an `if` that ends a loop, or from a
  condition of `while` (`normalize_jumps_in_block` in Python/flowgraph.c, CPython's issue 108214).
  An interrupt there leaves a `with` block around the loop without its `__exit__`. So such a loop is
  a function of its own.
- The function in C must not call Python. From 3.12 on `_thread.start_new_thread` does: it first
  calls the functions of `sys.addaudithook`, such as filelock's, and an interrupt in one of them
  starts no thread.
- Python drops exceptions of destructors and of weak references' callbacks, interrupts too. So
  virtual GPUs have functions in C there; `notebook.py` handles the destructors of others.

`tests/vgpu/test_interrupts.py` checks this on the Python that runs it, and disassembles each
function that is one step.
"""

import contextlib
import signal
import threading

steps = []  # the functions that are one step


def one_step(function):
    """Declare that a function is one step, and return it unchanged.

    Its body loads and stores, and may end with one call of a function in C, such as a method of a
    list or a deque. An interrupt comes before all of it, or after all of it.
    """
    steps.append(function)
    return function


@contextlib.contextmanager
def defer_interrupts(note=lambda: None):
    """Delay an interrupt (Ctrl-C) until the block has ended, then raise KeyboardInterrupt.

    `note` is called when the interrupt comes; an error of the block after that is dropped. Outside
    the main thread, and if other code handles interrupts, this does nothing.
    """
    handler = signal.getsignal(signal.SIGINT)
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or handler is not signal.default_int_handler:
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
