"""`launch(fn, nproc)` calls a function, which a notebook may define, in several processes.

torch's elastic agent (`agent`) starts the processes, and each of them runs `rank`. The function,
its arguments and the results travel by value, through files in a temporary folder.
"""

import difflib
import inspect
import linecache
import tempfile
from pathlib import Path

import cloudpickle

from vgpu import figures_of_ranks
from vgpu.processes.rank import dumps
from vgpu.runtime.interrupts import held_back

TIMEOUT = 30.0  # seconds; under torchrun, where machines start one by one, it is 120
_OPTIONS = ("nproc", "timeout", "max_restarts")
_ELSEWHERE = ("n", "num_processes", "nproc_per_node", "world_size")  # what others call nproc


def launch(fn, *args, nproc=2, timeout=TIMEOUT, max_restarts=0, **kwargs):
    """Call `fn(*args, **kwargs)` in `nproc` processes that form a process group.

        def train(lr):
            rank = torch.distributed.get_rank()
            ...
        results = launch(train, 0.1, nproc=2)

    The group is set up before the call and taken down after it. Each process has a GPU of its own,
    its current device: with NCCL where the machine has `nproc` CUDA GPUs, otherwise a virtual GPU
    with the backend vccl, configured like the virtual GPUs of this process, if it has any. What the
    ranks print appears here, line by line, with the rank in front. The function, its arguments and
    the results are copies, pickled by value; the processes share neither virtual GPUs nor a CUDA
    context with this one, so pass and return the `.cpu()` of a tensor on a virtual GPU. On Windows
    and macOS the processes are spawned, which takes seconds.

    Args:
        fn: the function; it may be defined in a notebook.
        nproc: number of processes.
        timeout: how many seconds a collective may wait for all ranks, and the last rank to return
            may lag behind the first. Ranks that work alone for longer need more.
        max_restarts: how often all ranks start again after one has failed. `fn` is called anew, and
            may resume from a checkpoint that it wrote.
        *args: for `fn`.
        **kwargs: for `fn`. `nproc`, `timeout` and `max_restarts` are `launch`'s own: give
            parameters of `fn` that have these names by position or with `functools.partial`.

    Returns:
        What `fn` returned, a list with one value for each rank.

    Raises:
        ValueError: `nproc`, `timeout` or `max_restarts` is out of range.
        TypeError: `fn` does not take these arguments, or something cannot be pickled, such as a
            tensor on a virtual GPU.
        TimeoutError: ranks did not arrive at a collective or at the end; says which ones.
        RuntimeError: a rank was killed, or raised what cannot be pickled.
        KeyboardInterrupt: says where the ranks were when it came, and which ones others waited for.
            A second interrupt does not wait until they have said so.
        Exception: what the first rank that failed raised, with its traceback as a note. The
            others are stopped.
    """
    _check(fn, args, kwargs, nproc, timeout, max_restarts)
    call = _pickled_call(fn, args, kwargs, figures_of_ranks(nproc))
    from vgpu.processes.agent import Agent  # loads much of torch.distributed

    with tempfile.TemporaryDirectory(prefix="vgpu-launch-", ignore_cleanup_errors=True) as folder:
        Path(folder, "call").write_bytes(call)
        agent = Agent(folder, nproc, timeout, max_restarts)
        try:
            with held_back(agent.interrupt):
                agent.run()
        except KeyboardInterrupt:  # its traceback is of torch's agent
            agent.error = KeyboardInterrupt(agent.where)
        finally:
            agent.kill()
            agent.output.close()
        if agent.error is None:
            return agent.results()
        error, agent.error = agent.error, None  # whoever keeps the error should not keep the agent
        try:
            raise error
        finally:
            del error, agent


def _check(fn, args, kwargs, nproc, timeout, max_restarts):
    """Raise for what `launch` cannot do."""
    if not callable(fn):
        raise TypeError(f"launch calls a function: got {fn!r}")
    if isinstance(nproc, bool) or not isinstance(nproc, int) or nproc < 1:
        raise ValueError(f"nproc, the number of processes, is a positive integer: got {nproc!r}")
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        raise ValueError(f"timeout is a positive number of seconds: got {timeout!r}")
    if isinstance(max_restarts, bool) or not isinstance(max_restarts, int) or max_restarts < 0:
        raise ValueError(f"max_restarts is an integer, 0 or more: got {max_restarts!r}")
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some functions written in C have none
        return
    name = _name(fn)
    try:
        given = {*signature.bind_partial(*args, **kwargs).arguments}
    except TypeError as error:
        unexpected = "unexpected" in str(error)
        hint = _similar_keyword(kwargs, signature.parameters) if unexpected else ""
        raise TypeError(f"{name}{signature} cannot be called so: {error}{hint}") from None
    for option in _OPTIONS:
        if option in signature.parameters and option not in given | {*getattr(fn, "keywords", ())}:
            raise TypeError(
                f"{name} has a parameter {option}, a name that launch uses itself: "
                f"give it by position, or launch functools.partial({name}, {option}=...)"
            )
    missing = [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.name not in given
        and parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if missing:
        raise TypeError(
            f"{name}{signature} cannot be called without {', '.join(missing)}: launch passes its "
            "arguments on, but no rank; a rank calls torch.distributed.get_rank()"
        )


def _similar_keyword(kwargs, known):
    """Return a question that suggests a known name for the first keyword that is close to one."""
    for word in kwargs:
        near = difflib.get_close_matches(word, [*_OPTIONS, *known], n=1)
        if word not in known and (word in _ELSEWHERE or near):
            return f"; did you mean {'nproc' if word in _ELSEWHERE else near[0]}, not {word}?"
    return ""


def _name(fn):
    return getattr(fn, "__name__", None) or getattr(getattr(fn, "func", fn), "__name__", repr(fn))


def _pickled_call(fn, args, kwargs, figures):
    """Return what a worker needs, as bytes, with the source lines of cells for tracebacks."""
    try:
        call = dumps((fn, args, kwargs))
    except Exception as error:
        named = {"the function": fn, **{f"argument {i}": value for i, value in enumerate(args)}}
        for name, value in {**named, **{f"argument {k}": v for k, v in kwargs.items()}}.items():
            try:
                dumps(value)
            except Exception as reason:
                kind = _name(fn) if value is fn else f"a {type(value).__name__}"
                raise TypeError(
                    f"{name}, {kind}, cannot be sent to other processes: {reason}"
                ) from reason
        raise TypeError(f"the call cannot be sent to other processes: {error}") from error
    sources = {
        name: entry
        for name, entry in linecache.cache.items()
        if len(entry) == 4 and entry[1] is None  # not from a file: a cell
    }
    return cloudpickle.dumps((sources, figures, call))
