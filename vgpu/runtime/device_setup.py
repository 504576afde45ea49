"""`virtual_gpus`: how many there are, their figures, and the clock that they keep."""

import os
import re
import threading
import warnings
from dataclasses import replace

import torch

from vgpu.modelled.hardware import machines_of
from vgpu.modelled.links import as_link
from vgpu.process_limits import cores_of_this_process, memory_of_this_process
from vgpu.runtime import registry, scheduler
from vgpu.runtime.device import Device

MAX_DEVICES = 128  # the index of a torch.device is a signed byte
SHARE_OF_MEMORY = 0.8  # the part of what this process may use that all devices get together
_UNSAID = object()
_setting_up = threading.Lock()
_last_call = []  # at most one: the number of devices and the other arguments of `virtual_gpus`


def virtual_gpus(
    n,
    threads=None,
    memory=None,
    link=_UNSAID,
    peer_link=_UNSAID,
    model=None,
    values=True,
    host=None,
):
    """Return `n` virtual GPUs: [device(type='vgpu', index=0), ...].

    `threads`, `memory`, `link`, `peer_link`: one value for all devices, or a list of `n`.

    With `model` they are modelled GPUs: the same operators, but their time is simulated, from the
    figures of real hardware. `Timer`, `Benchmark`, `Timeline` and `clock` then read the model's
    time, which begins at 0 with this call.

    Called again, it returns the same devices: it waits for their work, sets them to the new values,
    and lifts the limit of `torch.vgpu.set_per_process_memory_fraction`. Without `model` they are
    back on the wall clock.

    Args:
        n: the number of GPUs.
        threads: CPU threads that run a device's kernels; by default the environment variable
            VGPU_THREADS, or one.
        memory: bytes of a device; by default an equal share of 80 % of what this process may use,
            or what the modelled GPU has.
        link: how fast bytes are copied from and to the CPU: a `Link`, a preset's name, bytes per
            second, or None for copies that take only as long as the CPU takes to write them, or no
            time on modelled GPUs. By default None, or the link of the modelled GPU.
        peer_link: the same between devices; by default `link`, or the modelled GPU's own.
        model: a GPU (its name in `vgpu.GPUS`, or a `GPU` of your own), or a list of GPUs, one for
            each device; or a machine (its name in `vgpu.MACHINES`, or a `vgpu.Machine`).
        values: False to compute no values on modelled GPUs: shapes, bytes, memory and time only.
            Only small tensors that follow from small ones have values then, see `small_bytes` in
            `cells.py`. Of the others `.item()` waits and gives nan, copies to the CPU hold nan, or
            of whole numbers the least, and what needs a value to go on raises RuntimeError.
        host: what the host of modelled GPUs takes to issue an operator, see `hardware.Machine`; by
            default the machine's own.

    Raises:
        ValueError: a value is out of range, there are more than 128 devices, a list does not have
            `n` values, no link and no hardware has the name, a device holds more bytes than its new
            `memory`, `values` is False or `host` is given without a `model`, or `n` GPUs need
            several machines and these have no network.
        TypeError: an argument is of the wrong type.
        RuntimeError: virtual GPUs are not known to work on this version of torch, another package
            has added a device type to torch, or this process is a fork of one with virtual GPUs.
        torch.AcceleratorError: work that was issued to a device before has failed.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"the number of virtual GPUs is a positive integer: got {n!r}")
    if n > MAX_DEVICES:
        raise ValueError(
            f"torch counts devices up to {MAX_DEVICES}: got {n}; one modelled GPU can stand for "
            "many equal ones, see vgpu.equal_ranks"
        )
    if not isinstance(values, bool):
        raise TypeError(f"values is True or False: got {values!r}")
    if model is None and not values:
        raise ValueError("values=False needs model: otherwise devices take the time to compute")
    if model is None and host is not None:
        raise ValueError(f"host={host!r} needs model: otherwise the host takes its own time")
    if threads is None:
        threads = _threads_of_the_environment()
    given = {"threads": threads, "link": link, "peer_link": peer_link}
    given = {name: value for name, value in given.items() if value is not _UNSAID}
    if memory is not None:
        given |= {"memory": memory}
    if model is not None:
        given |= {"model": model, "values": values}
    if host is not None:
        given |= {"host": host}
    machines = None if model is None else machines_of(n, _for_each(n, "model", model), host)
    figures = _figures(n, machines, threads, memory, link, peer_link)
    if machines is None:
        warn_of_crowding(sum(figures["threads"]))
    with _setting_up:
        _configure(n, figures)
        if machines is not None:
            from vgpu.modelled.model import keep_time_by_a_model

            keep_time_by_a_model(registry.devices[:n], machines, values)
    _last_call[:] = [(n, given)]
    # Not within `with`: an interrupt after the call that makes the list would leave it locked.
    return [device.torch_device for device in registry.devices[:n]]


def _figures(n, machines, threads, memory, link, peer_link):
    """Return the arguments of `n` `Device`s, a dict of lists; `machines` is None or a list."""
    if peer_link is not _UNSAID:  # even one that is equal to the GPU's own is another one
        given = map(as_link, _for_each(n, "peer_link", peer_link))
        peer_link = [each if each is None else replace(each) for each in given]
    if machines is not None:
        gpus = [machine.gpu for machine in machines]
        memory = [gpu.memory for gpu in gpus] if memory is None else memory
        link = [gpu.link for gpu in gpus] if link is _UNSAID else link
        if peer_link is _UNSAID and any(gpu.peer_link for gpu in gpus):
            links = _for_each(n, "link", link)
            peer_link = [gpu.peer_link or link for gpu, link in zip(gpus, links, strict=True)]
    if memory is None:
        memory = int(SHARE_OF_MEMORY * memory_of_this_process()) // n
    link = None if link is _UNSAID else link
    peer_link = link if peer_link is _UNSAID else peer_link
    return {
        "threads": [_positive_int("threads", value) for value in _for_each(n, "threads", threads)],
        "memory": [_positive_int("memory", value) for value in _for_each(n, "memory", memory)],
        "link": [as_link(value) for value in _for_each(n, "link", link)],
        "peer_link": [as_link(value) for value in _for_each(n, "peer_link", peer_link)],
    }


def _configure(n, figures):
    """Give `n` devices their figures and the wall clock; make those that do not exist yet."""
    if registry.devices:
        scheduler.check_process()
    else:
        from vgpu.runtime import backend

        backend.register()
        backend.note_forks()
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
            where = torch.device(registry.device_type, index)
            registry.devices.append(Device(where, **settings))
    registry.count = n


def requested_gpus():
    """Return what the environment variable VGPU_DEVICES asks for: a text, a kind and a number.

    Returns:
        The value itself; the part before the colon, "", "cuda", "vgpu" or a name of a model; and
        the number after it, None where there is none.

    Raises:
        ValueError: the variable has another form.
    """
    choice = os.environ.get("VGPU_DEVICES", "")
    known = re.fullmatch(r"([^:]*)(?::([1-9][0-9]*))?", choice)
    if not known or (known[2] and known[1] in ("", "cuda")):
        raise ValueError(f"VGPU_DEVICES must be cuda, vgpu, vgpu:N, GPU or GPU:N: got {choice!r}")
    return choice, known[1], int(known[2]) if known[2] else None


def requested_figures(n):
    """Return the arguments of `virtual_gpus` that VGPU_DEVICES asks for, for at least `n` GPUs.

    Raises:
        ValueError: as `requested_gpus`.
    """
    _, kind, number = requested_gpus()
    figures = {"n": max(n, number or n)}
    return figures if kind in ("", "cuda", "vgpu") else figures | {"model": kind}


def figures_of_ranks(nproc):
    """Return arguments of `virtual_gpus` for each of `nproc` processes: those of its last call.

    Returns:
        A dict; None where `virtual_gpus` was not called.

    Raises:
        ValueError: that call had a list of figures for fewer than `nproc` devices.
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


def warn_of_crowding(threads):
    """Warn if virtual GPUs have many more threads than there are cores."""
    cores = cores_of_this_process()
    if threads > 8 * cores:
        warnings.warn(
            f"{threads} threads of virtual GPUs share {cores} CPU cores: together they compute no "
            f"faster than {cores}",
            stacklevel=3,
        )


def _threads_of_the_environment():
    text = os.environ.get("VGPU_THREADS") or "1"
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"VGPU_THREADS is a positive whole number, not {text!r}")
    return int(text)


def _for_each(n, name, value):
    values = list(value) if isinstance(value, (list, tuple)) else [value] * n
    if len(values) != n:
        raise ValueError(f"{len(values)} figures of {name} for {n} virtual GPUs: {values}")
    return values


def _positive_int(name, value):
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} of a virtual GPU is a whole number: got {value!r}")
    if value < 1:
        raise ValueError(f"{name} of a virtual GPU must be positive: got {value}")
    return value
