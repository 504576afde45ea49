"""Virtual GPUs: PyTorch devices on CPU cores, asynchronous and concurrent, as CUDA's are.

A room for each subject; the first module of a room says what the others are:

    runtime      when work runs: devices, streams, engines, the scheduler
    tensors      what work is done on: tensors, values, memory
    operators    from a call of an operator to an op
    modelled     GPUs that are modelled: a simulated clock, kernels, links, hosts
    distributed  process groups: the backend "vccl"
    processes    `launch`, and one rank of a job
    recording    what devices did, and how torch's tools show it
    cuda         programs that say "cuda": `vgpu run`, `vgpu doctor`
    private      all that the engine takes from torch's private interface

Beside them torch_module (the module `torch.vgpu`), process_limits (the cores and the memory that
this process may use), other_programs (what others take of them) and dispatch (the part of torch's
private interface that others may use).
"""

import importlib
import os

_PUBLIC = {
    # devices
    "virtual_gpus": "runtime.device_setup",  # make n virtual GPUs, or modelled ones
    "requested_gpus": "runtime.device_setup",  # what VGPU_DEVICES asks for
    "devices_in_use": "runtime.registry",  # the virtual GPUs of this process
    "describe_device": "runtime.identity",  # what a device is, in words
    "synchronize": "runtime.registry",  # wait for the work of devices, by default of all
    "place": "runtime.registry",  # put a modelled GPU into another machine
    "set_thread_count": "runtime.engines",  # threads of the kernels that this thread runs
    "cores_of_this_process": "process_limits",  # how many cores this process may use
    "memory_of_this_process": "process_limits",  # how many bytes it may use
    # time
    "clock": "runtime.clocks",  # the seconds of the clock in force
    "clock_in_force": "runtime.clocks",  # which clock that is
    "hardware_name": "runtime.clocks",  # the hardware that is modelled, "" if none is
    "host_takes": "runtime.clocks",  # let a modelled host take some seconds
    "held_back": "runtime.interrupts",  # a block that Ctrl-C does not interrupt
    # what is modelled
    "Link": "modelled.links",  # how fast bytes travel
    "PRESETS": "modelled.links",  # links that are sold, or were measured
    "GPUS": "modelled.datasheets",  # GPUs as their data sheets describe them
    "Host": "modelled.host",  # what the host takes to run a program
    "EAGER": "modelled.host",  # the host of eager training code
    "Machine": "modelled.hardware",  # GPUs, and what joins them
    "MACHINES": "modelled.hardware",  # machines that are sold
    "Scaled": "modelled.hardware",  # a GPU whose kernels take longer, or less long
    "as_machine": "modelled.hardware",  # a machine, from its name or its GPU's
    # processes
    "launch": "processes.launcher",  # call a function in several processes
    "equal_ranks": "distributed.equal_ranks",  # one modelled GPU stands for many
    "CollectiveBytes": "distributed.collective_bytes",  # what collectives send
    "figures_of_ranks": "runtime.device_setup",  # how the ranks of a launch make their GPUs
    # recordings
    "Span": "recording.spans",  # one op: what ran, where and when
    "start_recording": "runtime.scheduler",  # record the spans of all devices
    "stop_recording": "runtime.scheduler",  # stop, and return them
}

__all__ = list(_PUBLIC)
_ROOMS = (
    *("cuda", "dispatch", "distributed", "modelled", "operators", "other_programs"),
    *("private", "process_limits", "processes", "recording", "runtime", "tensors", "torch_module"),
)


def __getattr__(name):
    """Load a public name, or a room, when it is first used."""
    if name in _PUBLIC:
        module = importlib.import_module(f"{__name__}.{_PUBLIC[name]}")
        value = globals()[name] = getattr(module, name)
        return value
    if name in _ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted({*__all__, *_ROOMS})


if os.environ.get("VGPU_CUDA"):  # under `vgpu run`, where `import torch` loads a part of vgpu
    importlib.import_module("torch")
