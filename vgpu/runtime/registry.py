"""The virtual GPUs of this process, and the name by which programs know them."""

import torch

from vgpu.runtime import scheduler
from vgpu.runtime.scheduler import WALL_CLOCK, in_fork, wait_all
from vgpu.runtime.threads import thread

devices = []  # every device ever made; the first `count` of them are in use
count = 0
device_type = "vgpu"  # what programs call them


def rename(name):
    """Make "cuda", for example, the name of the devices besides "vgpu", before there are any.

    Tensors, streams, spans and errors then use it.

    Raises:
        RuntimeError: there are devices already.
    """
    global device_type
    if devices:
        raise RuntimeError(f"{len(devices)} virtual GPUs are {device_type} devices already")
    device_type = name
    scheduler.error_name = "CUDA" if name == "cuda" else name


def is_virtual(where):
    return where.type == device_type or where.type == "vgpu"


def devices_in_use(ever=False):
    """Return the virtual GPUs of this process, a list of `torch.device`; asking makes none.

    Args:
        ever: also those that were in use before a call of `virtual_gpus` with a smaller number.
    """
    return [device.torch_device for device in (devices if ever else devices[:count])]


def place(where, machine):
    """Put a modelled GPU into another machine: number `machine`, from 0, of its cluster."""
    find(where).model.host = machine


def synchronize(*devices):
    """Wait for the work of `devices`; without arguments, for the work of every GPU in use.

    A bare `torch.cuda.synchronize()` waits for the current device only.
    """
    if not devices:
        devices = devices_in_use()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            devices += [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    for device in map(torch.device, devices):
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)


def wait_for_all():
    """Wait for all streams of all devices; errors are left for the next synchronize."""
    for device in () if in_fork() else devices:
        for stream in device.streams:
            wait_all(stream.tail(), device.torch_device)


def keep_time_by_the_wall_clock():
    """Have threads run the later ops of all devices, and the wall clock keep the time.

    A change to a model that was interrupted leaves devices with a model and no simulation.
    """
    modelled = [device for device in devices if device.model is not None]
    if modelled or scheduler.clock is not WALL_CLOCK:
        wait_for_all()
        for device in modelled:
            device.run_by(None)
        scheduler.clock.stop()
        scheduler.clock = WALL_CLOCK
    WALL_CLOCK.start()


def find(where):
    """Return the `Device` of a `torch.device`, its name or its index; the current one for None.

    Raises:
        RuntimeError: there is no such device, as on CUDA.
        ValueError: it is a device of another type.
    """
    if where is None:
        return current()
    index = where
    if not isinstance(where, int):
        where = torch.device(where)
        if not is_virtual(where):
            raise ValueError(f"Expected a {device_type} device, but got: {where}")
        index = where.index
        if index is None:
            return current()
    if not 0 <= index < count:
        raise RuntimeError(
            f"{scheduler.error_name} error: invalid device ordinal: {device_type}:{index} of "
            f"{count} virtual GPUs"
        )
    return devices[index]


def current():
    """Return the calling thread's current `Device`; RuntimeError where it is no longer in use."""
    index = thread.device
    if not index < count:
        raise RuntimeError(
            f"{scheduler.error_name} error: no device {device_type}:{index}; there are {count} "
            "virtual GPUs"
        )
    return devices[index]


chosen = False  # whether a thread has made a device its current one
