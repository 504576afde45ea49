"""Virtual GPUs: PyTorch devices on CPU cores, asynchronous and concurrent, as CUDA's are.

links      how fast bytes travel
engine     ops, streams and engines: what runs when
device     a device: engines, memory, random numbers, errors
tensor     VirtualTensor, and how an operator is issued
operators  copies and other operators that need more
module     torch.vgpu
comm       what nn.DataParallel needs
saving     what torch.save, torch.load and pickle need
private    what is private to torch
"""

import atexit
import os
import sys
import threading

from .links import PRESETS, Link, as_link

__all__ = ["PRESETS", "Link", "start_recording", "stop_recording", "virtual_gpus"]

_setting_up = threading.Lock()
_SAME = object()
SWITCH_INTERVAL = 1e-4  # seconds


def virtual_gpus(n, threads=None, memory=None, link=None, peer_link=_SAME):
    """Return `n` virtual GPUs: [device(type='vgpu', index=0), ...].

    `threads`: CPU threads that run a device's kernels (by default what the environment variable
    D2LPAR_THREADS says, or one). `memory`: its bytes (by default an equal share of this machine's).
    `link`: what copies from and to the CPU take, a `Link`, a preset's name, bytes/s, or None for
    what the copy itself takes here. `peer_link`: the same between devices (by default as `link`).
    Each may be one figure for all devices or a list of one for each. Called again, it gives the
    same devices, set to the new figures once they are idle.

    Raises ValueError or TypeError for figures that make no sense, RuntimeError on a version of
    torch on which virtual GPUs are not known to work.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"the number of virtual GPUs is a positive integer: got {n!r}")
    if threads is None:
        threads = _threads_of_the_environment()
    if memory is None:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // n
    if peer_link is _SAME:
        peer_link = link
    figures = {
        "threads": _for_each(n, "threads", threads, _positive_int),
        "memory": _for_each(n, "memory", memory, _positive_int),
        "link": _for_each(n, "link", link, lambda name, value: as_link(value)),
        "peer_link": _for_each(n, "peer_link", peer_link, lambda name, value: as_link(value)),
    }
    with _setting_up:
        from . import device as registry
        from . import engine

        if registry.devices:
            engine.check_process()
        else:
            from . import private

            private.register()
            # a worker that waits for Python's lock beside a busy main thread gets it after this
            sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL))
            atexit.register(_stop)
        for device, memory in zip(registry.devices, figures["memory"], strict=False):
            device.check_memory(memory)
        for index in range(n):
            settings = {name: values[index] for name, values in figures.items()}
            if index < len(registry.devices):
                registry.devices[index].configure(**settings)
            else:
                registry.devices.append(registry.Device(index, **settings))
        registry.count = n
        return [device.torch_device for device in registry.devices[:n]]


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


def _stop():
    from . import device as registry

    for device in registry.devices:
        for engine in device.engines:
            engine.stop()


def start_recording():
    """Return a list to which every op is appended as it finishes, until `stop_recording`."""
    from . import engine

    return engine.start_recording()


def stop_recording(recording):
    """Stop appending to `recording`. Synchronize first, or ops that still run are missing."""
    from . import engine

    engine.stop_recording(recording)
