"""Choose devices: real GPUs where the machine has them, virtual ones otherwise."""

import torch

from vgpu import (
    cores_of_this_process,
    devices_in_use,
    hardware_name,
    requested_gpus,
    virtual_gpus,
)

# https://github.com/pytorch/pytorch/issues/161129
NO_GRADIENTS = "torch computes no gradients on real GPUs in a process that has used virtual ones"


def try_all_gpus():
    """Return a list of all GPUs, or [cpu] if there are none.

    These are the virtual GPUs if any are in use, otherwise the real ones.
    """
    return _all_gpus() or [torch.device("cpu")]


def try_gpu(i=0):
    """Return GPU `i` if it exists, otherwise the CPU.

    Raises:
        ValueError: `i` is not a non-negative integer.
    """
    if isinstance(i, bool) or not isinstance(i, int) or i < 0:
        raise ValueError(f"the index of a GPU must be a non-negative integer: got {i!r}")
    gpus = _all_gpus()
    return gpus[i] if i < len(gpus) else torch.device("cpu")


def num_gpus():
    """Return the number of GPUs: virtual ones if any are in use, otherwise real ones."""
    return len(_all_gpus())


def _all_gpus():
    real = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return devices_in_use() or real


def ensure_gpus(n, **options):
    """Return `n` GPUs, real ones if the machine has `n`, else virtual ones, and print which.

    The environment variable VGPU_DEVICES overrides the choice: `cuda` (real GPUs or an error),
    `vgpu` (`n` virtual GPUs), `vgpu:4` (always four), or the name of a GPU or machine to model,
    such as `v100` or `v100:8`. A process that has used virtual GPUs always gets virtual ones:
    torch would compute no gradients on real ones.

    Args:
        n: the number of GPUs.
        **options: threads, memory, link and peer_link of virtual GPUs, see `virtual_gpus`; ignored
            for real and modelled GPUs.

    Raises:
        ValueError: `n` is not a positive integer, or VGPU_DEVICES has an unknown value.
        RuntimeError: VGPU_DEVICES is `cuda`, and the machine has fewer than `n` GPUs or this
            process has used virtual ones.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"the number of GPUs must be a positive integer: got {n!r}")

    # 1. Under `vgpu run` "cuda" means virtual GPUs.
    devices = devices_in_use()
    if len(devices) >= n and devices[0].type == "cuda":
        print(f"{_count(n, 'virtual GPU')} in the place of CUDA's (vgpu run)")
        return devices[:n]

    # 2. Modelled GPUs, if VGPU_DEVICES names a GPU or a machine.
    text, kind, number = requested_gpus()
    if kind not in ("", "cuda", "vgpu"):
        try:
            devices = virtual_gpus(number or n, model=kind)
        except ValueError as error:
            raise ValueError(f"VGPU_DEVICES={text}: {error}") from None
        print(f"modelled: {hardware_name()} (VGPU_DEVICES={text})")
        return devices

    # 3. Real GPUs, unless VGPU_DEVICES or virtual GPUs rule them out.
    num_real = torch.cuda.device_count()
    has_used_virtual = bool(devices_in_use(ever=True))
    if kind == "cuda" and num_real < n:
        raise RuntimeError(f"VGPU_DEVICES={text} requires {n} real GPUs: found {num_real}")
    if kind == "cuda" and has_used_virtual:
        raise RuntimeError(f"VGPU_DEVICES={text}: {NO_GRADIENTS}; restart it")
    if kind != "vgpu" and num_real >= n and not has_used_virtual:
        names = {torch.cuda.get_device_name(i) for i in range(n)}
        print(f"{_count(n, 'real GPU')}: {', '.join(sorted(names))}")
        return [torch.device("cuda", i) for i in range(n)]

    # 4. Virtual GPUs.
    if kind:
        reason = f"VGPU_DEVICES={text}"
    elif num_real >= n:
        reason = NO_GRADIENTS
    else:
        reason = f"this machine has {_count(num_real, 'real GPU') if num_real else 'no real GPU'}"
    devices = virtual_gpus(number or n, **options)
    threads = sum(torch.vgpu.get_device_properties(d).multi_processor_count for d in devices)
    cores = f"{_count(threads, 'thread')} of {_count(cores_of_this_process(), 'CPU core')}"
    print(f"{_count(len(devices), 'virtual GPU')} on {cores} ({reason})")
    return devices


def _count(number, noun):
    """Return a number with a noun: "1 core", "2 cores"."""
    return f"{number} {noun}{'s' if number != 1 else ''}"
