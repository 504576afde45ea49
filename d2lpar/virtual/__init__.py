"""Virtual GPUs: PyTorch devices on CPU cores, asynchronous and concurrent, as CUDA's are.

An operator travels downwards through these:

    tensor      VirtualTensor: what user code sees
    issuing     from a call of an operator to an op: keys, new plans, running at once
    plans       the results of an operator, worked out once for each combination of inputs
    copies      copies; operators: the others that need more than a plan
    threads     the device and the streams that a thread has chosen
    device      a device: engines, streams, random numbers, errors; registry: all of them
    cells       layouts and values; memory: the accounting of memory
    generators  random numbers: a seed and an offset, as on CUDA
    engines     the threads that run ops
    streams     the queues that ops are issued to
    scheduler   when an op runs, and what waits for what

While GPUs are modelled:

    simulation  when ops run, and the clock of the host
    program_clock  what `time.time` and its kin tell programs under `d2lpar run --model`
    model       the model of a device: a GPU in a machine, and the links that it shares
    hardware    machines, and how models are found by name
    host        what the host takes to run a program; fitting: hosts and GPUs that fit measurements
    modelled_gpu  a GPU as its data sheet describes it, and the time of a kernel
    datasheets  the published figures of GPUs
    calibration times of kernels that were measured
    kernels     the work of a kernel: products and bytes
    caching     the memory that CUDA's allocator would reserve

Beside them:

    device_setup  virtual_gpus: how many devices, and their figures
    links       how fast bytes travel: wires as they are sold, and as they were measured
    clocks      the clock in force, as a program sees it
    process_limits  the cores and the memory that this process may use
    spans       what a recording holds; profiling: how torch's profiler shows it
    history     what the memory of a device did, for https://pytorch.org/memory_viz
    identity    what a device says that it is: name, compute capability, properties
    vgpu        the module torch.vgpu: streams, events, memory and devices, as in torch.cuda
    backward    backward on the streams of forward
    attention   scaled_dot_product_attention as one kernel
    comm        scatter, gather, broadcast and reduce for nn.DataParallel
    autocast, lazy, recurrent, saving, sync_batch_norm: the parts of torch that have these names
    as_cuda     virtual GPUs that torch calls "cuda"
    storages    memory that is given back while tensors still use it
    interrupts  where Ctrl-C can strike, and holding it back; notebook: what a Jupyter kernel needs
    private     all that uses torch's private interface, a module for each subject
    backend     making all of it known to torch
"""

import importlib

from .clocks import clock, clock_in_force, hardware_name, host_takes
from .device_setup import figures_of_ranks, virtual_gpus
from .links import PRESETS, Link
from .process_limits import cores_of_this_process, memory_of_this_process
from .scheduler import start_recording, stop_recording
from .spans import Span

_LOADED_ON_USE = {
    "Host": "host",
    "calibrate": "calibration",
    "equal_ranks": "distributed.equal_ranks",
    "fit": "fitting",
}

__all__ = [
    "PRESETS",
    "Host",
    "Link",
    "Span",
    "calibrate",
    "clock",
    "clock_in_force",
    "cores_of_this_process",
    "equal_ranks",
    "figures_of_ranks",
    "fit",
    "hardware_name",
    "host_takes",
    "memory_of_this_process",
    "start_recording",
    "stop_recording",
    "virtual_gpus",
]


def __getattr__(name):
    if name not in _LOADED_ON_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LOADED_ON_USE[name]}"), name)
