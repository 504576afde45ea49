"""The virtual GPUs of this process, and their device type."""

import torch

from vgpu.runtime import scheduler
from vgpu.runtime.scheduler import WALL_CLOCK, in_fork, wait_for_ops
from vgpu.runtime.threads import thread

devices = []  # all devices created so far; the first `count` are in use
count = 0
device_type = "vgpu"  # as programs spell it


def rename(name):
    """Set the device type to `name`, such as "cuda", before any device exists.

    Tensors, streams, spans and errors use it; "vgpu" remains valid. RuntimeError if there are
    devices already.
    """
    global device_type
    if devices:
        raise RuntimeError(
            f"cannot rename to {name!r}: {len(devices)} virtual GPUs already exist as {device_type}"
        )
    device_type = name
    scheduler.error_name = "CUDA" if name == "cuda" else name


def is_virtual(where):
    return where.type == device_type or where.type == "vgpu"


def with_program_type(device):
    """Return a device of torch's C++ code with the type that programs use."""
    return torch.device(device_type, device.index) if device.type == "vgpu" else device


def devices_in_use(ever=False):
    """Return the virtual GPUs of this process, a list of `torch.device`, without creating any.

    Args:
        ever: include devices that a later call of `virtual_gpus` with a smaller number dropped.
    """
    return [device.torch_device for device in (devices if ever else devices[:count])]


def move_to_machine(where, machine):
    """Move a modelled GPU to machine number `machine`, from 0, of its cluster."""
    find(where).model.machine_index = machine


def synchronize(*devices):
    """Wait for the work of `devices`, by default of every GPU in use.

    A bare `torch.cuda.synchronize()` waits for the current device only.
    """
    if not devices:
        devices = devices_in_use()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            devices += [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    for device in map(torch.device, devices):
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)


def wait_for_all_devices():
    """Wait for all streams of all devices; errors are reported at the next synchronize."""
    for device in () if in_fork() else devices:
        for stream in device.streams:
            wait_for_ops(stream.tail(), device.torch_device)


def use_wall_clock():
    """Switch all devices back to real time.

    An interrupted switch to a model leaves devices with a model but no simulation.
    """
    modelled = [device for device in devices if device.model is not None]
    if modelled or scheduler.clock is not WALL_CLOCK:
        wait_for_all_devices()
        for device in modelled:
            device.run_by(None)
        scheduler.clock.stop()
        scheduler.clock = WALL_CLOCK
    WALL_CLOCK.start()


def find(where):
    """Return the `Device` of a `torch.device`, a name or an index; the current one for None.

    Raises RuntimeError, as on CUDA, without such a device, ValueError for another type.
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
    """Return the calling thread's current `Device`; RuntimeError if it is no longer in use."""
    index = thread.device
    if not index < count:
        raise RuntimeError(
            f"{scheduler.error_name} error: no device {device_type}:{index}; there are {count} "
            "virtual GPUs"
        )
    return devices[index]


device_was_set = False  # whether a thread has set its current device
