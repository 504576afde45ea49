"""Virtual GPUs: PyTorch devices on CPU cores, asynchronous and concurrent like CUDA's.

A folder for each subject; its `__init__.py` describes the modules:

    devices      what a device consists of, and `virtual_gpus`
    runtime      streams, engines, the scheduler, clocks
    tensors      tensors, values, memory
    operators    from a call of an operator to an op
    modelled     modelled GPUs: a simulated clock, kernels, links, hosts
    distributed  process groups: the backend "vccl"
    processes    `launch`, and one rank of a job
    recording    spans of devices, and torch's tools that show them
    cuda         CUDA programs: `vgpu run`, `vgpu doctor`
    private      all uses of torch's private interface

Also: torch_vgpu (the module `torch.vgpu`), process_limits (cores and memory of this process),
other_programs (the share of the cores that other programs take) and torch_internals (the part of
torch's private interface for use outside of vgpu).
"""

import importlib
import importlib.util
import os

_PUBLIC = {
    # devices
    "virtual_gpus": "devices.device_setup",  # create n virtual or modelled GPUs
    "requested_gpus": "devices.device_setup",  # the devices of VGPU_DEVICES
    "devices_in_use": "runtime.registry",  # the virtual GPUs of this process
    "synchronize": "runtime.registry",  # wait for the work of devices, by default of all
    "move_to_machine": "runtime.registry",  # move a modelled GPU to another machine
    "cores_of_this_process": "process_limits",  # number of cores this process may use
    "memory_of_this_process": "process_limits",  # bytes this process may use
    # time
    "clock": "runtime.clocks",  # the seconds of the current clock
    "clock_in_force": "runtime.clocks",  # an object that each change of the clock replaces
    "hardware_name": "runtime.clocks",  # the modelled hardware, "" if none
    "host_takes": "runtime.clocks",  # advance the clock of a modelled host
    "defer_interrupts": "runtime.interrupts",  # a block at whose end Ctrl-C takes effect
    # models
    "Link": "modelled.links",  # bandwidth and latency between devices
    "PRESETS": "modelled.links",  # links of products, or measured
    "GPU": "modelled.modelled_gpu",  # a GPU by its data sheet
    "GPUS": "modelled.datasheets",  # GPUs by their data sheets
    "Host": "modelled.host",  # time that the host takes for a program
    "EAGER": "modelled.host",  # the host of eager training code
    "Machine": "modelled.hardware",  # GPUs and the links between them
    "MACHINES": "modelled.hardware",  # machines on the market
    "as_machine": "modelled.hardware",  # a machine, from its name or its GPU's
    # processes
    "launch": "processes.launcher",  # call a function in several processes
    "equal_ranks": "distributed.equal_ranks",  # one modelled GPU in place of many
    "CollectiveBytes": "distributed.collective_bytes",  # count the bytes handed to collectives
    # recordings
    "Span": "runtime.spans",  # one op: name, device, start, end
    "start_recording": "runtime.scheduler",  # a list that receives the span of each op
    "stop_recording": "runtime.scheduler",  # end a recording of start_recording
}

__all__ = list(_PUBLIC)


def __getattr__(name):
    """Load a public name, or a room, when it is first used."""
    if name in _PUBLIC:
        module = importlib.import_module(f"{__name__}.{_PUBLIC[name]}")
        value = globals()[name] = getattr(module, name)
        return value
    if importlib.util.find_spec(f"{__name__}.{name}"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted(__all__)


# Under `vgpu run` torch comes first: at the end of its import it imports modules of vgpu.
if os.environ.get("VGPU_CUDA"):
    importlib.import_module("torch")
