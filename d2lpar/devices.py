"""Devices: real GPUs where the machine has them, virtual ones where it does not."""

import platform

import torch

from vgpu import (
    cores_of_this_process,
    describe_device,
    devices_in_use,
    hardware_name,
    other_programs,
    requested_gpus,
    virtual_gpus,
)


def _has_used_virtual():
    """Return whether this process has used virtual GPUs.

    From then on torch computes no gradients on real ones: autograd asks for the streams of one
    device type only, see https://github.com/pytorch/pytorch/issues/161129.
    """
    return bool(devices_in_use(ever=True))


def _gpus():
    count = torch.cuda.device_count()
    return devices_in_use() or [torch.device("cuda", i) for i in range(count)]


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
    gradients on them. The environment variable VGPU_DEVICES overrides the choice: `cuda` (real
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
    devices = devices_in_use()
    if len(devices) >= n and devices[0].type == "cuda":
        print(f"{_count(n, 'virtual GPU')} in the place of CUDA's (vgpu run)")
        return devices[:n]
    choice, kind, number = requested_gpus()
    if kind not in ("", "cuda", "vgpu"):
        try:
            devices = virtual_gpus(number or n, model=kind)
        except ValueError as error:
            raise ValueError(f"VGPU_DEVICES={choice}: {error}") from None
        print(f"modelled: {hardware_name()} (VGPU_DEVICES={choice})")
        return devices
    real = torch.cuda.device_count()
    if kind == "cuda" and real < n:
        raise RuntimeError(f"VGPU_DEVICES={choice} asks for {n} real GPUs; there are {real}")
    one_kind = "torch computes no gradients on real GPUs in a process that has used virtual ones"
    if kind == "cuda" and _has_used_virtual():
        raise RuntimeError(f"VGPU_DEVICES={choice}: {one_kind}; restart it")
    if kind == "cuda" or (not kind and real >= n and not _has_used_virtual()):
        names = {torch.cuda.get_device_name(i) for i in range(n)}
        print(f"{_count(n, 'real GPU')}: {', '.join(sorted(names))}")
        return [torch.device("cuda", i) for i in range(n)]
    n = number or n
    devices = virtual_gpus(n, **options)
    why = f"this machine has {_count(real, 'real GPU') if real else 'no real GPU'}"
    if kind:
        why = f"VGPU_DEVICES={choice}"
    elif real >= n:
        why = one_kind
    threads = sum(torch.vgpu.get_device_properties(d).multi_processor_count for d in devices)
    print(
        f"{_count(n, 'virtual GPU')} on {_count(threads, 'thread')} of "
        f"{_count(cores_of_this_process(), 'CPU core')} ({why})"
    )
    return devices


def _count(number, noun):
    return f"{number} {noun}{'s' if number != 1 else ''}"


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
    from d2lpar import __version__

    rows, facts = [], {}
    for device in map(torch.device, devices or _gpus()):
        if device.type != "cpu":
            text, of_machine = describe_device(device)
            rows.append((str(device), text))
            facts |= dict(of_machine)
    rows += facts.items()
    rows.append(("CPU", describe_device("cpu")[0]))
    if not hardware_name():
        taken = other_programs.taken_now()
        rows += [("busy", f"{sentence} just now") for sentence in taken.sentences()]
    software = (
        f"d2lpar {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    )
    rows.append(("software", software))
    return Description(rows)
