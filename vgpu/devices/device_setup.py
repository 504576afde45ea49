"""`virtual_gpus`: creates and configures the devices, and selects their clock."""

import os
import re
import threading
import warnings
from dataclasses import replace

import torch

from vgpu.devices.device import Device
from vgpu.modelled.hardware import machines_of
from vgpu.modelled.links import as_link
from vgpu.process_limits import cores_of_this_process, memory_of_this_process
from vgpu.runtime import registry, scheduler

MAX_DEVICES = 128  # the index of a torch.device is a signed byte
SHARE_OF_MEMORY = 0.8  # of this process's memory, divided among all devices
_NOT_GIVEN = object()
_setting_up = threading.Lock()
_last_call = []  # at most one item: (n, other arguments) of the last call of `virtual_gpus`


def virtual_gpus(
    n,
    threads=None,
    memory=None,
    link=_NOT_GIVEN,
    peer_link=_NOT_GIVEN,
    model=None,
    values=True,
    host=None,
):
    """Return `n` virtual GPUs: [device(type='vgpu', index=0), ...].

    `threads`, `memory`, `link`, `peer_link`: one value for all devices, or a list of `n`.

    With `model` they are modelled GPUs: the same operators, in time simulated from the figures of
    real hardware. `Timer`, `Benchmark`, `Timeline` and `clock` then read the simulated time, which
    starts at 0 with this call.

    A later call returns the same devices: it waits for their work, applies the new settings, and
    lifts the limit of `torch.vgpu.set_per_process_memory_fraction`. Without `model` they return to
    the wall clock.

    Args:
        n: the number of GPUs.
        threads: CPU threads of a device's kernels; by default the environment variable
            VGPU_THREADS, or one.
        memory: bytes of a device; by default an equal share of 80 % of this process's memory, or
            the memory of the modelled GPU.
        link: speed of copies from and to the CPU: a `Link`, a preset's name, bytes per second, or
            None for no limit (modelled copies then take no time). By default None, or the link of
            the modelled GPU.
        peer_link: the same between devices; by default `link`, or that of the modelled GPU.
        model: a GPU (its name in `vgpu.GPUS`, or a `GPU` of your own), or a list of GPUs, one for
            each device; or a machine (its name in `vgpu.MACHINES`, or a `vgpu.Machine`).
        values: False to compute no values on modelled GPUs: shapes, bytes, memory and time only.
            Only small tensors computed from small tensors then have values, see `small_bytes` in
            `cells.py`. Larger tensors: `.item()` blocks and returns nan; copies on the CPU hold
            nan, or the minimum for integers; operators that need values raise RuntimeError.
        host: seconds that the host of modelled GPUs takes to issue an operator, see
            `hardware.Machine`; by default those of the machine.

    Raises:
        ValueError: a value is out of range, there are more than 128 devices, a list does not have
            `n` values, no link or hardware has the name, a device has more bytes in use than its
            new `memory`, `values=False` or `host` is given without `model`, or `n` GPUs need
            several machines without a network.
        TypeError: an argument is of the wrong type.
        RuntimeError: this version of torch is not supported, another package has registered a
            device type, or this process is a fork of one with virtual GPUs.
        torch.AcceleratorError: earlier work on a device has failed.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"the number of virtual GPUs must be a positive integer: got {n!r}")
    if n > MAX_DEVICES:
        raise ValueError(
            f"n must be at most {MAX_DEVICES} devices: got {n}; one modelled GPU can represent "
            "many equal ones, see vgpu.equal_ranks"
        )
    if not isinstance(values, bool):
        raise TypeError(f"values must be True or False: got {values!r}")
    if model is None and not values:
        raise ValueError("values=False requires model=: without it the work must run")
    if model is None and host is not None:
        raise ValueError(f"host={host!r} requires model=: without it the host takes its own time")
    if threads is None:
        text = os.environ.get("VGPU_THREADS") or "1"
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"VGPU_THREADS must be a positive whole number: got {text!r}")
        threads = int(text)
    given = {"threads": threads, "memory": memory, "link": link, "peer_link": peer_link}
    given |= {"model": model, "values": values, "host": host}
    given = {name: value for name, value in given.items() if value is not _NOT_GIVEN}
    machines = None if model is None else machines_of(n, _one_per_device(n, "model", model), host)
    settings = _settings(n, machines, threads, memory, link, peer_link)
    if machines is None:
        total, cores = sum(settings["threads"]), cores_of_this_process()
        if total > 8 * cores:
            warnings.warn(
                f"{total} threads of virtual GPUs share {cores} CPU cores, and are no faster "
                f"than {cores} threads",
                stacklevel=2,
            )
    with _setting_up:
        _configure(n, settings)
        if machines is not None:
            from vgpu.modelled.model import use_model_clock

            use_model_clock(registry.devices[:n], machines, values)
    _last_call[:] = [(n, given)]
    # Outside `with`: an interrupt after this call would leave the lock held.
    return [device.torch_device for device in registry.devices[:n]]


def _settings(n, machines, threads, memory, link, peer_link):
    """Return the arguments of `n` `Device`s, a dict of lists; `machines` is None or a list."""
    if peer_link is not _NOT_GIVEN:  # a new object even if equal to the GPU's link
        given = map(as_link, _one_per_device(n, "peer_link", peer_link))
        peer_link = [each if each is None else replace(each) for each in given]
    if machines is not None:
        gpus = [machine.gpu for machine in machines]
        memory = [gpu.memory for gpu in gpus] if memory is None else memory
        link = [gpu.link for gpu in gpus] if link is _NOT_GIVEN else link
        if peer_link is _NOT_GIVEN and any(gpu.peer_link for gpu in gpus):
            links = _one_per_device(n, "link", link)
            peer_link = [gpu.peer_link or link for gpu, link in zip(gpus, links, strict=True)]
    if memory is None:
        memory = int(SHARE_OF_MEMORY * memory_of_this_process()) // n
    link = None if link is _NOT_GIVEN else link
    peer_link = link if peer_link is _NOT_GIVEN else peer_link
    settings = {"threads": threads, "memory": memory, "link": link, "peer_link": peer_link}
    lists = {name: _one_per_device(n, name, value) for name, value in settings.items()}
    for name in ("threads", "memory"):
        lists[name] = [_positive_int(name, value) for value in lists[name]]
    for name in ("link", "peer_link"):
        lists[name] = [*map(as_link, lists[name])]
    return lists


def _configure(n, settings):
    """Configure `n` devices, on the wall clock; create those that do not exist yet."""
    if registry.devices:
        scheduler.check_not_forked()
    else:
        from vgpu.devices import backend

        backend.register()
        backend.note_forks()
    in_use = registry.devices[:n]
    for device, memory in zip(in_use, settings["memory"], strict=False):
        device.check_memory(memory)
    for device in in_use:  # before anything changes: this may raise, or be interrupted
        device.synchronize()
    registry.use_wall_clock()
    for index in range(n):
        own = {name: values[index] for name, values in settings.items()}
        if index < len(registry.devices):
            registry.devices[index].configure(**own)
        else:
            where = torch.device(registry.device_type, index)
            registry.devices.append(Device(where, **own))
    registry.count = n
    torch.vgpu.default_generators[:] = [device.generator for device in registry.devices[:n]]


def requested_gpus():
    """Parse the environment variable VGPU_DEVICES, such as "vgpu:4".

    Returns the value; the part before the colon, "", "cuda", "vgpu" or a model's name; and the
    number after it, or None. ValueError if the variable has another form.
    """
    choice = os.environ.get("VGPU_DEVICES", "")
    known = re.fullmatch(r"([^:]*)(?::([1-9][0-9]*))?", choice)
    if not known or (known[2] and known[1] in ("", "cuda")):
        raise ValueError(f"VGPU_DEVICES must be cuda, vgpu, vgpu:N, GPU or GPU:N: got {choice!r}")
    return choice, known[1], int(known[2]) if known[2] else None


def requested_settings(n):
    """Return the arguments of `virtual_gpus` for VGPU_DEVICES and at least `n` GPUs."""
    _, kind, number = requested_gpus()
    settings = {"n": max(n, number or n)}
    return settings if kind in ("", "cuda", "vgpu") else settings | {"model": kind}


def settings_of_ranks(nproc):
    """Return the arguments of the last `virtual_gpus` for `nproc` processes; None without one.

    Raises ValueError if that call had a list of values for fewer devices.
    """
    if not _last_call:
        return None
    n, settings = _last_call[-1]
    if nproc <= n:
        return {"n": n, **settings}
    lists = [name for name, value in settings.items() if isinstance(value, (list, tuple))]
    if lists:
        raise ValueError(
            f"{lists[0]} must have a value for each of {nproc} ranks: got {n} in virtual_gpus"
        )
    return {"n": nproc, **settings}


def _one_per_device(n, name, value):
    values = list(value) if isinstance(value, (list, tuple)) else [value] * n
    if len(values) != n:
        raise ValueError(
            f"{name} must be one value, or {n} for {n} virtual GPUs: got {len(values)}, {values}"
        )
    return values


def _positive_int(name, value):
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} of a virtual GPU must be a whole number: got {value!r}")
    if value < 1:
        raise ValueError(f"{name} of a virtual GPU must be a positive whole number: got {value}")
    return value
