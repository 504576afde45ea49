"""Devices: real GPUs where the machine has them, virtual ones where it does not."""

import os
import platform
import re

import torch

from .other_programs import taken_now
from .virtual import (
    cores_of_this_process,
    hardware_name,
    memory_of_this_process,
    registry,
    virtual_gpus,
)


def _virtual():
    """Return the virtual GPUs that are in use; asking does not switch them on."""
    return [device.torch_device for device in registry.devices[: registry.count]]


def _has_used_virtual():
    """Return whether this process has used virtual GPUs.

    From then on torch computes no gradients on real ones: autograd asks for the streams of one
    device type only, see https://github.com/pytorch/pytorch/issues/161129.
    """
    return bool(registry.devices)


def _gpus():
    return _virtual() or [torch.device("cuda", i) for i in range(torch.cuda.device_count())]


def num_gpus():
    """Return the number of GPUs: of virtual ones once they are on, otherwise of real ones."""
    return len(_gpus())


def try_gpu(i=0):
    """Return GPU `i` if there is one, otherwise the CPU.

    Raises:
        ValueError: `i` is not an integer, 0 or more.
    """
    if isinstance(i, bool) or not isinstance(i, int) or i < 0:
        raise ValueError(f"the index of a GPU is an integer, 0 or more: got {i!r}")
    gpus = _gpus()
    return gpus[i] if i < len(gpus) else torch.device("cpu")


def try_all_gpus():
    """Return all GPUs, or [cpu] if there is none."""
    return _gpus() or [torch.device("cpu")]


def ensure_gpus(n, **options):
    """Return `n` GPUs and say in one line which: real ones where the machine has `n`, else virtual.

    A process that has used virtual GPUs gets no real ones any more: torch would not compute
    gradients on them. The environment variable D2LPAR_DEVICES overrides the choice: `cuda` (real
    ones or an error), `vgpu` (`n` virtual ones), `vgpu:4` (four virtual ones, whatever `n` is), or
    the name of a GPU or machine to model, such as `v100` or `v100:8`. The options do not apply to
    real and to modelled GPUs, which have memory and links of their own.

    Args:
        n: the number of GPUs.
        **options: threads, memory, link, peer_link, for `virtual_gpus`.

    Raises:
        ValueError: `n` or the variable has another value.
        RuntimeError: the variable says `cuda`, and the machine has fewer than `n`, or this process
            has used virtual GPUs.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"the number of GPUs is a positive integer: got {n!r}")
    devices = _virtual()
    if len(devices) >= n and devices[0].type == "cuda":
        print(f"{_count(n, 'virtual GPU')} in the place of CUDA's (d2lpar run)")
        return devices[:n]
    choice, kind, number = _choice()
    if kind not in ("", "cuda", "vgpu"):
        try:
            devices = virtual_gpus(int(number or n), model=kind)
        except ValueError as error:
            raise ValueError(f"D2LPAR_DEVICES={choice}: {error}") from None
        print(f"modelled: {hardware_name()} (D2LPAR_DEVICES={choice})")
        return devices
    real = torch.cuda.device_count()
    if kind == "cuda" and real < n:
        raise RuntimeError(f"D2LPAR_DEVICES={choice} asks for {n} real GPUs; there are {real}")
    one_kind = "torch computes no gradients on real GPUs in a process that has used virtual ones"
    if kind == "cuda" and _has_used_virtual():
        raise RuntimeError(f"D2LPAR_DEVICES={choice}: {one_kind}; restart it")
    if kind == "cuda" or (not kind and real >= n and not _has_used_virtual()):
        names = {torch.cuda.get_device_name(i) for i in range(n)}
        print(f"{_count(n, 'real GPU')}: {', '.join(sorted(names))}")
        return [torch.device("cuda", i) for i in range(n)]
    n = int(number) if number else n
    devices = virtual_gpus(n, **options)
    why = f"this machine has {_count(real, 'real GPU') if real else 'no real GPU'}"
    if kind:
        why = f"D2LPAR_DEVICES={choice}"
    elif real >= n:
        why = one_kind
    threads = sum(torch.vgpu.get_device_properties(d).multi_processor_count for d in devices)
    print(
        f"{_count(n, 'virtual GPU')} on {_count(threads, 'thread')} of "
        f"{_count(cores_of_this_process(), 'CPU core')} ({why})"
    )
    return devices


def _choice():
    """Return D2LPAR_DEVICES, and the kind and the number, or None, of devices in it."""
    choice = os.environ.get("D2LPAR_DEVICES", "")
    known = re.fullmatch(r"([^:]*)(?::([1-9][0-9]*))?", choice)
    if not known or (known[2] and known[1] in ("", "cuda")):
        raise ValueError(f"D2LPAR_DEVICES is cuda, vgpu, vgpu:N, GPU or GPU:N, not {choice!r}")
    return choice, *known.groups()


def virtual_choice(n):
    """Return the arguments of `virtual_gpus` that D2LPAR_DEVICES asks for, for at least `n` GPUs.

    Raises ValueError as `ensure_gpus` does.
    """
    _, kind, number = _choice()
    figures = {"n": max(n, int(number or n))}
    return figures if kind in ("", "cuda", "vgpu") else figures | {"model": kind}


def _count(number, noun):
    return f"{number} {noun}{'s' if number != 1 else ''}"


def synchronize(*devices):
    """Wait for the work of `devices`; without arguments, for the work of every GPU in use.

    A bare `torch.cuda.synchronize()` waits for the current device only.
    """
    if not devices:
        devices = _virtual()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            devices += [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    for device in map(torch.device, devices):
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)


class Description:
    """A table of facts that shows itself in a notebook and in a terminal."""

    def __init__(self, rows):
        self.rows = rows

    def __repr__(self):
        width = max(len(name) for name, _ in self.rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in self.rows)

    def _repr_markdown_(self):
        lines = ["| | |", "| --- | --- |"]
        return "\n".join(lines + [f"| {name} | {value} |" for name, value in self.rows])


def describe(*devices):
    """Return a table of the hardware and the versions at hand.

    Where other programs take much of the cores, a row says so; it looks for 0.2 s.

    Args:
        *devices: the devices to list; by default every GPU in use.
    """
    from . import __version__

    rows, facts = [], {}
    for device in devices or _gpus():
        device = torch.device(device)
        if device.type == "cpu":
            continue
        properties = torch.get_device_module(device).get_device_properties(device)
        found = registry.find(device) if registry.is_virtual(device) else None
        name = properties.name  # the product's, although it is only modelled
        if found is not None and found.model is not None:
            name = f"Modelled {found.model.gpu.name}"
        text = f"{name}, {properties.total_memory / 2**30:.1f} GiB"
        if found is not None:
            text += f", link to the CPU: {found.link or 'unlimited'}"
            if found.peer_link is not found.link:
                text += f", to other devices: {found.peer_link or 'unlimited'}"
            if found.model is not None:
                facts |= dict(found.model.machine.rows())
        rows.append((str(device), text))
    rows += facts.items()
    cores, memory = cores_of_this_process(), memory_of_this_process() / 2**30
    rows.append(("CPU", f"{_cpu_name()}, {cores} cores, {memory:.1f} GiB"))
    if not hardware_name():
        rows += [("busy", f"{sentence} just now") for sentence in taken_now().sentences()]
    software = (
        f"d2lpar {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    )
    rows.append(("software", software))
    return Description(rows)


def _cpu_name():
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
