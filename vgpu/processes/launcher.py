"""`launch(fn, nproc)` calls a function, which a notebook may define, in several processes."""

import difflib
import inspect
import linecache
import tempfile
from pathlib import Path

import cloudpickle

from vgpu.devices.device_setup import settings_of_ranks
from vgpu.processes.rank import dumps
from vgpu.runtime.interrupts import defer_interrupts

TIMEOUT = 30.0  # seconds; under torchrun, where machines start one by one, it is 120
_OPTIONS = ("nproc", "timeout", "max_restarts")
_OTHER_NAMES = ("n", "num_processes", "nproc_per_node", "world_size")  # of nproc, elsewhere


def launch(fn, *args, nproc=2, timeout=TIMEOUT, max_restarts=0, **kwargs):
    """Call `fn(*args, **kwargs)` in `nproc` processes that form a process group.

        def train(lr):
            rank = torch.distributed.get_rank()
            ...
        results = launch(train, 0.1, nproc=2)

    The group is set up before the call and destroyed after it. Each process has its own GPU as its
    current device: a CUDA GPU with NCCL if the machine has `nproc` of them, otherwise a virtual GPU
    with vccl, configured like the virtual GPUs of this process, if there are any. The output of
    the ranks appears here, line by line, with the rank in front. Function, arguments and results
    are pickled by value. Processes share neither virtual GPUs nor a CUDA context with this one, so
    pass and return the `.cpu()` of a tensor on a virtual GPU. On Windows and macOS the processes
    are spawned, which takes seconds.

    Args:
        fn: the function; it may be defined in a notebook.
        nproc: number of processes.
        timeout: seconds that a collective may wait for all ranks, and that the last rank may return
            after the first. Ranks that work alone for longer need more.
        max_restarts: how often all ranks are restarted after a failure. `fn` is called again, and
            may resume from a checkpoint.
        *args: for `fn`.
        **kwargs: for `fn`. `nproc`, `timeout` and `max_restarts` are reserved: pass parameters
            of `fn` with these names by position or with `functools.partial`.

    Returns:
        The results of `fn`, a list with one value for each rank.

    Raises:
        ValueError: `nproc`, `timeout` or `max_restarts` is out of range.
        TypeError: `fn` does not take these arguments, or something cannot be pickled, such as a
            tensor on a virtual GPU.
        TimeoutError: ranks, which are named, did not arrive at a collective or at the end.
        RuntimeError: a rank was killed, or its exception cannot be pickled.
        KeyboardInterrupt: reports where the ranks were, and which ones others waited for. A second
            interrupt ends them at once.
        Exception: the exception of the first rank that failed, with its traceback as a note. The
            other ranks are stopped.
    """
    _check(fn, args, kwargs, nproc, timeout, max_restarts)
    call = _pickled_call(fn, args, kwargs, settings_of_ranks(nproc))
    from vgpu.processes.agent import Agent  # loads much of torch.distributed

    with tempfile.TemporaryDirectory(prefix="vgpu-launch-", ignore_cleanup_errors=True) as folder:
        Path(folder, "call").write_bytes(call)
        agent = Agent(folder, nproc, timeout, max_restarts)
        try:
            with defer_interrupts(agent.interrupt):
                agent.run()
        except KeyboardInterrupt:  # raised again below, without torch's traceback
            agent.error = KeyboardInterrupt(agent.where)
        finally:
            agent.kill()
            agent.output.close()
        if agent.error is None:
            return agent.results()
        error, agent.error = agent.error, None  # the error must not keep the agent alive
        try:
            raise error
        finally:
            del error, agent


def _check(fn, args, kwargs, nproc, timeout, max_restarts):
    if not callable(fn):
        raise TypeError(f"fn must be a function: got {fn!r}")
    if isinstance(nproc, bool) or not isinstance(nproc, int) or nproc < 1:
        raise ValueError(f"nproc must be a positive integer: got {nproc!r}")
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        raise ValueError(f"timeout must be a positive number of seconds: got {timeout!r}")
    if isinstance(max_restarts, bool) or not isinstance(max_restarts, int) or max_restarts < 0:
        raise ValueError(f"max_restarts must be a non-negative integer: got {max_restarts!r}")
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some functions in C have no signature
        return
    name = _name(fn)
    try:
        given = {*signature.bind_partial(*args, **kwargs).arguments, *getattr(fn, "keywords", ())}
        reserved = {*_OPTIONS} & {*signature.parameters} - given
        if not reserved:
            signature.bind(*args, **kwargs)
            return
    except TypeError as error:
        hint = ". launch passes no rank: call torch.distributed.get_rank()"
        if "unexpected" in str(error):
            hint = _similar_keyword(kwargs, signature.parameters)
        raise TypeError(f"invalid arguments for {name}{signature}: {error}{hint}") from None
    option = min(reserved)
    raise TypeError(
        f"{name} has a parameter {option}, a name that launch reserves: "
        f"pass it by position, or launch functools.partial({name}, {option}=...)"
    )


def _similar_keyword(kwargs, known):
    """Return "; did you mean ...?" for the first unknown keyword that is close to a known one."""
    for word in kwargs:
        near = difflib.get_close_matches(word, [*_OPTIONS, *known], n=1)
        if word not in known and (word in _OTHER_NAMES or near):
            return f"; did you mean {'nproc' if word in _OTHER_NAMES else near[0]}, not {word}?"
    return ""


def _name(fn):
    return getattr(fn, "__name__", None) or getattr(getattr(fn, "func", fn), "__name__", repr(fn))


def _pickled_call(fn, args, kwargs, settings):
    """Return the call as bytes, with the source lines of notebook cells for tracebacks."""
    try:
        call = dumps((fn, args, kwargs))
    except Exception as error:
        named = {"the function": fn, **{f"argument {i}": value for i, value in enumerate(args)}}
        for name, value in {**named, **{f"argument {k}": v for k, v in kwargs.items()}}.items():
            try:
                dumps(value)
            except Exception as reason:
                kind = _name(fn) if value is fn else f"a {type(value).__name__}"
                raise TypeError(f"{name}, {kind}, cannot be pickled: {reason}") from reason
        raise TypeError(f"the call cannot be pickled: {error}") from error
    sources = {
        name: entry
        for name, entry in linecache.cache.items()
        if len(entry) == 4 and entry[1] is None  # a notebook cell, not a file
    }
    return cloudpickle.dumps((sources, settings, call))
