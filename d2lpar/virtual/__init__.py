"""Virtual GPUs: PyTorch devices on CPU cores, asynchronous and concurrent, as CUDA's are.

An operator travels downwards through these:

    tensor      VirtualTensor: what user code sees
    issuing     from a call of an operator to an op: keys, new plans, running at once
    plans       what an operator gives, once for each combination of inputs
    copies      copies; operators: the others that need more than a plan
    device      a device: engines, streams, random numbers, errors; what a thread has chosen
    memory      layouts, values, and the accounting of memory
    generators  random numbers in the order of issue
    engines     what runs an op: threads
    scheduler   when an op runs: streams, and what waits for what

While GPUs are modelled:

    simulation  when ops run, and the clock of the host
    model       what a device is then: a GPU in a machine, and the links that it shares
    hardware    the figures of GPUs, machines and links, and the time of a kernel
    kernels     what a kernel has to do: products and bytes

Beside them:

    links       how fast bytes travel
    limits      the cores and the memory that this process may use
    spans       what a recording holds
    vgpu        torch.vgpu
    backward    backward on the streams of forward
    comm        what nn.DataParallel needs
    autocast, lazy, recurrent, saving, sync_batch_norm: the parts of torch that have these names
    as_cuda     virtual GPUs that torch calls "cuda"
    storages    memory that is given back while tensors still use it
    interrupts  holding Ctrl-C back; notebook: what a Jupyter kernel needs
    imports     changing a module once it is imported
    private     what is private to torch: names, registration, patches
    setup       making all of it known to torch
"""

import contextlib
import os
import sys
import threading
import time
import warnings

from .limits import cores_of_this_process, memory_of_this_process
from .links import PRESETS, Link, as_link
from .spans import Span

__all__ = [
    "PRESETS",
    "Link",
    "Span",
    "calibrate",
    "clock",
    "equal_ranks",
    "hardware_name",
    "host_takes",
    "start_recording",
    "stop_recording",
    "virtual_gpus",
]

_setting_up = threading.Lock()
_UNSAID = object()
MAX_DEVICES = 128  # the index of a torch.device is a signed byte
SHARE_OF_MEMORY = 0.8  # of what this process may use, for all devices together


def virtual_gpus(
    n, threads=None, memory=None, link=_UNSAID, peer_link=_UNSAID, model=None, values=True
):
    """Return `n` virtual GPUs: [device(type='vgpu', index=0), ...].

    `threads`, `memory`, `link` and `peer_link` are each one value for all devices, or a list with
    one value for each device.

    With `model` they are modelled GPUs: the same operators, but all time is that of a simulation,
    which takes the seconds of each kernel and copy from the figures of real hardware. Then `Timer`,
    `Benchmark`, `Timeline` and `clock` tell the model's time, which begins at 0 with this call.

    When it is called again, it returns the same devices: it waits for their work, sets them to the
    new values, and lifts the limit of `torch.vgpu.set_per_process_memory_fraction`. Without `model`
    they are back on the wall clock.

    Args:
        n: how many.
        threads: CPU threads that run a device's kernels; by default what the environment variable
            D2LPAR_THREADS says, or one.
        memory: bytes of a device; by default an equal share of 80 % of what this process may use,
            or what the modelled GPU has.
        link: how fast bytes are copied from and to the CPU: a `Link`, a preset's name, bytes per
            second, or None for copies that take only as long as the CPU takes to write them, or no
            time on modelled GPUs. By default None, or that of the modelled GPU.
        peer_link: the same between devices; by default as `link`, or that of the modelled GPU.
        model: a GPU ("p100", "v100", "v100-32gb", "t4", "rtx4090", "a100", "a100-40gb", "h100",
            "h200", a `hardware.GPU` or a `Calibration`), or a list of GPUs, one for each device; or
            a machine ("dgx1", "p3.16xlarge", "bigbasin", "dgxa100" or a `hardware.Machine`).
        values: False to compute no values on modelled GPUs: shapes, bytes, memory and time only.
            Then `.item()` waits and gives nan, and what needs a value to go on raises RuntimeError.

    Raises:
        ValueError: a value is out of range, there are more than 128 devices, a list does not have
            `n` values, no link and no hardware has the name, a device holds more bytes than its new
            `memory`, `values` is False without a `model`, or `n` GPUs need several machines and
            these have no network.
        TypeError: `threads` or `memory` is not a whole number, or a link or a model is none of the
            above.
        RuntimeError: virtual GPUs are not known to work on this version of torch, another package
            has added a device type to torch, or this process is a fork of one with virtual GPUs.
        torch.AcceleratorError: work that was issued to a device before has failed.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"the number of virtual GPUs is a positive integer: got {n!r}")
    if n > MAX_DEVICES:
        raise ValueError(
            f"torch counts devices up to {MAX_DEVICES}: got {n}; one modelled GPU can stand for "
            "many equal ones, see d2lpar.virtual.equal_ranks"
        )
    if not isinstance(values, bool):
        raise TypeError(f"values is True or False: got {values!r}")
    if threads is None:
        threads = _threads_of_the_environment()
    given = {"threads": threads, "link": link, "peer_link": peer_link}
    given = {name: value for name, value in given.items() if value is not _UNSAID}
    if memory is not None:
        given |= {"memory": memory}
    if model is not None:
        given |= {"model": model, "values": values}
    machines = None
    if model is not None:
        from .hardware import machines_of

        machines = machines_of(n, _for_each(n, "model", model, lambda name, value: value))
        gpus = [machine.gpu for machine in machines]
        memory = [gpu.memory for gpu in gpus] if memory is None else memory
        link = [gpu.link for gpu in gpus] if link is _UNSAID else link
        if peer_link is _UNSAID and any(gpu.peer_link for gpu in gpus):
            links = _for_each(n, "link", link, lambda name, value: value)
            peer_link = [gpu.peer_link or link for gpu, link in zip(gpus, links, strict=True)]
    elif not values:
        raise ValueError("virtual GPUs compute values by the wall clock: values=False needs model")
    if memory is None:
        memory = int(SHARE_OF_MEMORY * memory_of_this_process()) // n
    link = None if link is _UNSAID else link
    peer_link = link if peer_link is _UNSAID else peer_link
    figures = {
        "threads": _for_each(n, "threads", threads, _positive_int),
        "memory": _for_each(n, "memory", memory, _positive_int),
        "link": _for_each(n, "link", link, lambda name, value: as_link(value)),
        "peer_link": _for_each(n, "peer_link", peer_link, lambda name, value: as_link(value)),
    }
    if machines is None:
        _warn_of_crowding(sum(figures["threads"]))
    with _setting_up:
        from . import device as registry
        from . import scheduler

        if registry.devices:
            scheduler.check_process()
        else:
            from . import setup

            setup.register()
            setup.note_forks()
        in_use = registry.devices[:n]
        for device, memory in zip(in_use, figures["memory"], strict=False):
            device.check_memory(memory)
        for device in in_use:  # before anything changes: this may raise, or be interrupted
            device.synchronize()
        registry.keep_time_by_the_wall_clock()
        for index in range(n):
            settings = {name: values[index] for name, values in figures.items()}
            if index < len(registry.devices):
                registry.devices[index].configure(**settings)
            else:
                registry.devices.append(registry.Device(index, **settings))
        registry.count = n
        if machines is not None:
            from .model import keep_time_by_a_model

            keep_time_by_a_model(registry.devices[:n], machines, values)
    _last_call[:] = [(n, given)]
    # Not within `with`: an interrupt after the call that makes the list would leave it locked.
    return [device.torch_device for device in registry.devices[:n]]


def figures_of_ranks(nproc):
    """Return the arguments of `virtual_gpus` with which each of `nproc` processes shall call it.

    They are those of the last call here; None where there was none.

    Raises:
        ValueError: that was a call with a list of figures for fewer than `nproc` devices.
    """
    if not _last_call:
        return None
    n, figures = _last_call[-1]
    if nproc <= n:
        return {"n": n, **figures}
    lists = [name for name, value in figures.items() if isinstance(value, (list, tuple))]
    if lists:
        raise ValueError(
            f"{nproc} ranks have {nproc} virtual GPUs, but {lists[0]} was given for {n} of them"
        )
    return {"n": nproc, **figures}


_last_call = []  # of `virtual_gpus`: the number of devices and the other arguments; at most one


def calibrate(program, device="vgpu:0", repeats=3):
    """Time the kernels of a program, one at a time, on one device; simulations can then use them.

        times = calibrate(step, "vgpu:0")       # alone, by the wall clock
        devices = virtual_gpus(8, model=times)  # eight of it, on a machine with enough cores

    After each operator the host waits, so that nothing else runs beside a kernel.

    Args:
        program: a function without arguments that works on `device`. It is called `repeats` + 2
            times.
        device: a virtual GPU by the wall clock, or a CUDA GPU.
        repeats: how often each kernel is timed at least; the median counts.

    Returns:
        A `Calibration`.

    Raises:
        ValueError: there are fewer than one repeat, the device is neither, it is modelled, or the
            program gave it no kernels.
    """
    from .calibration import calibrate

    return calibrate(program, device, repeats)


@contextlib.contextmanager
def equal_ranks(k):
    """Let one modelled GPU stand for `k` equal ranks of a job, within a block.

        (device,) = virtual_gpus(1, model="dgxa100", values=False)
        with equal_ranks(1024):
            net = DistributedDataParallel(net.to(device))  # a step takes that of 1,024 GPUs

    Ranks that do the same at the same time take equally long, so it is enough to run one of them.
    In the block this process is rank 0 of the default process group, whose collectives take the
    time of `k` ranks and give what they give where all ranks have the same values. Ranks with
    shards, as in `fully_shard`, differ in their values, so that only time, bytes and memory are
    those of `k` ranks. The group has the backend "vccl" and torch's fake store.

    Args:
        k: number of ranks.

    Raises:
        ValueError: `k` is not a positive whole number, or there is a default process group already.
        RuntimeError: no GPUs are modelled.
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ValueError(f"the number of ranks is a positive whole number: got {k!r}")
    if clock_in_force() is None:
        raise RuntimeError("equal ranks need a modelled GPU: call virtual_gpus(1, model=...) first")
    import torch.distributed as dist

    from . import private

    dist.init_process_group("vccl", store=private.fake_store(), rank=0, world_size=k)
    try:
        yield
    finally:
        dist.destroy_process_group()


def clock():
    """Return seconds of the clock in force: `time.perf_counter`, or that of modelled GPUs.

    A modelled clock is that of the calling thread. It begins at 0 when `virtual_gpus` is called,
    and advances with the launch of each operator, by waiting, by asking whether an event was
    reached, and by `host_takes`. `time.sleep` and other work of the host take no time of it, and
    `%timeit` and tqdm go on telling the wall clock's. A thread's clock begins when the thread is
    started, and whoever joins it waits for it. A result that is handed over otherwise, by a queue
    or a future, does not move the clock of who receives it.
    """
    scheduler = sys.modules.get(f"{__name__}.scheduler")  # asking does not switch devices on
    return time.perf_counter() if scheduler is None else scheduler.now()


def host_takes(seconds):
    """Let work of the host, such as loading a batch, take `seconds` of a modelled clock.

    By the wall clock this does nothing: there the work itself counts. It counts for the thread that
    calls it; in a process of its own, as in a worker of a DataLoader, it is lost.

    Args:
        seconds: how long, not negative.

    Raises:
        ValueError: `seconds` is negative or infinite.
    """
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"the seconds of work must not be negative or infinite: got {seconds}")
    scheduler = sys.modules.get(f"{__name__}.scheduler")
    if scheduler is not None and scheduler.simulation is not None:
        scheduler.simulation.advance(seconds)


def clock_in_force():
    """Return what keeps the time: None for the wall clock, otherwise an object of this model."""
    scheduler = sys.modules.get(f"{__name__}.scheduler")
    return None if scheduler is None else scheduler.simulation


def hardware_name():
    """Return what is modelled, "8 x V100-SXM2-16GB" for example; "" by the wall clock."""
    scheduler = sys.modules.get(f"{__name__}.scheduler")
    return "" if scheduler is None or scheduler.simulation is None else scheduler.simulation.name


def _warn_of_crowding(threads):
    cores = cores_of_this_process()
    if threads > 8 * cores:
        warnings.warn(
            f"{threads} threads of virtual GPUs share {cores} CPU cores: together they compute no "
            f"faster than {cores}",
            stacklevel=3,
        )


def _threads_of_the_environment():
    text = os.environ.get("D2LPAR_THREADS") or "1"
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"D2LPAR_THREADS is a positive whole number, not {text!r}")
    return int(text)


def _for_each(n, name, value, check):
    values = list(value) if isinstance(value, (list, tuple)) else [value] * n
    if len(values) != n:
        raise ValueError(f"{len(values)} figures of {name} for {n} virtual GPUs: {values}")
    return [check(name, value) for value in values]


def _positive_int(name, value):
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} of a virtual GPU is a whole number: got {value!r}")
    if value < 1:
        raise ValueError(f"{name} of a virtual GPU must be positive: got {value}")
    return value


def start_recording():
    """Return a list to which a `Span` is appended for each op that ends, until `stop_recording`."""
    from . import scheduler

    return scheduler.start_recording()


def stop_recording(recording):
    """Stop appending to `recording`; synchronize before, or the ops that still run are missing.

    Args:
        recording: a list that `start_recording` returned.

    Raises:
        ValueError: it is not a recording under way.
    """
    from . import scheduler

    scheduler.stop_recording(recording)
