"""Replaces the names of `torch.cuda`, and "nccl", by virtual GPUs; see `switch_on`.

A name of `torch.cuda`

- becomes the same name of `torch.vgpu`, if there is one;
- otherwise becomes an entry of the tables below, which may do nothing;
- otherwise needs a real GPU, and raises NotImplementedError.
"""

import re
from types import SimpleNamespace

import torch
import torch.distributed as dist

from vgpu import torch_vgpu
from vgpu.cuda import cuda_device, only_cuda
from vgpu.cuda.nvtx import replace_nvtx
from vgpu.cuda.only_cuda import refusing
from vgpu.distributed import BACKEND
from vgpu.private.cuda import (
    remove_privateuse1_tests,
    replace_in_cuda,
    replace_private_names,
    skip_initialization,
)
from vgpu.private.dtensor import patch_dtensor_class
from vgpu.private.kineto import patch_profiler
from vgpu.private.patching import replace
from vgpu.private.process_groups import patch_process_groups
from vgpu.recording import history, profiling
from vgpu.runtime import registry

NANOSECOND = 1e-9  # duration of a cycle for `torch.cuda._sleep`
NCCL_VERSION = (2, 27, 0)  # a version with bfloat16, which programs check


def switch_on(gpus, visible=None, values=True):
    """Make `torch.cuda` and the device "cuda" refer to virtual GPUs, in all of this process.

    `gpus` has kind and number, "vgpu:4" or "v100:4"; `visible` the indices of visible GPUs, "0,2",
    by default all. Raises ValueError if `gpus` is malformed, or names an unknown GPU or machine,
    RuntimeError if virtual GPUs cannot replace CUDA's on this machine or this torch.
    """
    known = re.fullmatch(r"([^:]+):([1-9][0-9]*)", gpus)
    if not known:
        raise ValueError(f"VGPU_CUDA must be vgpu:N or GPU:N: got {gpus!r}")
    kind, number = known[1], int(known[2])
    count = len(_visible(visible, number))
    if count:
        model = None if kind == "vgpu" else kind
        cuda_device.stand_for_cuda(count, model=model, values=values)
        _replace_names()
        if dist.is_available():
            patch_dtensor_class(cuda_device.report_as_cuda)
            patch_process_groups(translate)
        only_cuda.refuse_extensions()


def translate(backend):
    """Return the backend that replaces the requested one.

    Translated are "nccl", the default "undefined", which means it, "gloo" (which accepts GPU
    tensors, too), and pairs such as "cpu:gloo,cuda:nccl". Others are returned unchanged.
    """
    if backend == dist.Backend.GLOO:
        return f"cpu:gloo,vgpu:{BACKEND}"
    if backend in (dist.Backend.UNDEFINED, dist.Backend.NCCL):
        return BACKEND
    names = dict(pair.split(":") for pair in backend.split(",") if ":" in pair)
    if names.get("cuda") not in (dist.Backend.NCCL, dist.Backend.GLOO):
        return backend
    del names["cuda"]
    names["vgpu"] = BACKEND
    return ",".join(map(":".join, names.items()))


def _visible(visible, number):
    """Return the indices in a string as CUDA does: up to an invalid one, none if one repeats."""
    if visible is None:
        return range(number)
    indices = []
    for text in visible.split(","):
        if not text.strip().isdecimal() or int(text) >= number:
            break
        indices.append(int(text))
    return indices if len({*indices}) == len(indices) else []


def _replace_names():
    replacements = {
        name: value
        for name, value in vars(torch_vgpu).items()
        if getattr(value, "__module__", "") == torch_vgpu.__name__ and not name.startswith("_")
    }
    replacements |= _REPLACEMENTS
    replacements["default_generators"] = torch_vgpu.default_generators
    replace_in_cuda(replacements)
    replace_in_cuda({name: refusing(f"torch.cuda.{name}") for name in _REAL_GPU_ONLY})

    def sleep(cycles):
        torch_vgpu._sleep(cycles * NANOSECOND)

    replace_private_names(torch_vgpu, history, sleep, _set_stream, refusing, _CUDART)
    replace(torch.cuda, **{name: _tensor_type(getattr(torch, name)) for name in _TENSOR_TYPES})
    replace(torch, set_default_tensor_type=_set_default_tensor_type)
    torch_vgpu.Stream.cuda_stream = property(lambda stream: stream.stream_id)
    torch_vgpu.Stream.priority_range = staticmethod(lambda: (0, -3))
    replace_nvtx()
    tunable = torch.cuda.tunable
    for module, names in ((torch.cuda.nccl, _NCCL_NAMES), (tunable, tunable.__all__)):
        replace(module, **{name: refusing(f"{module.__name__}.{name}") for name in names})
    replace(torch.cuda.nccl, version=lambda: NCCL_VERSION)
    replace(tunable, is_enabled=lambda: False)
    if hasattr(torch.accelerator, "get_memory_info"):
        replace(torch.accelerator, get_memory_info=torch_vgpu.mem_get_info)
    patch_profiler(profiling.ProfiledWork)
    replace(torch.backends.cuda, is_built=lambda: True)
    replace(
        torch.backends.cudnn,
        is_acceptable=lambda tensor: False,
        is_available=lambda: False,
        version=lambda: None,
    )
    skip_initialization()
    remove_privateuse1_tests()


def _stats_as_nested_dict(device=None):
    nested = {}
    for name, value in torch_vgpu.memory_stats(device).items():
        *path, last = name.split(".")
        inner = nested
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return nested


def _device_memory_used(device=None):
    free, total = torch_vgpu.mem_get_info(device)
    return total - free


class _DeviceOf(torch_vgpu.device):
    """Make the device of a tensor current; a CPU tensor changes nothing."""

    def __init__(self, obj):
        super().__init__(obj.get_device() if obj.is_cuda else None)


def _set_stream(stream_id, device_index, device_type):
    """Make a stream, given by numbers, and its device current, as torch._C does."""
    streams = registry.find(device_index).streams
    (stream,) = [stream for stream in streams if stream.index == stream_id]
    torch_vgpu.set_stream(torch_vgpu.Stream(_stream=stream))


_CUDART = SimpleNamespace(
    cudaError=SimpleNamespace(success=0),
    cudaGetErrorString=lambda error: "no error",
    cudaMemGetInfo=torch_vgpu.mem_get_info,
    cudaProfilerStart=lambda: 0,
    cudaProfilerStop=lambda: 0,
    **{
        name: refusing(f"torch.cuda.cudart().{name}")
        for name in "cudaHostRegister cudaHostUnregister cudaStreamCreate cudaStreamDestroy".split()
    },
)

# Names of `torch.cuda` that `torch.vgpu` lacks, or has with another meaning.
_REPLACEMENTS = {
    "is_current_stream_capturing": lambda: False,  # there are no CUDA graphs
    "ipc_collect": lambda: None,  # no other process holds memory of virtual GPUs
    "get_arch_list": lambda: [],  # no kernels are compiled for an architecture
    "get_allocator_backend": lambda: "native",
    "reset_accumulated_memory_stats": lambda device=None: None,  # sums count from the start
    "memory_stats_as_nested_dict": _stats_as_nested_dict,
    "device_memory_used": _device_memory_used,
    "device_of": _DeviceOf,
}

_REAL_GPU_ONLY = """
    CUDAGraph graph graph_pool_handle make_graphed_callables ExternalStream get_stream_from_external
    MemPool use_mem_pool CUDAPluggableAllocator change_current_allocator GreenContext
    caching_allocator_alloc caching_allocator_delete current_blas_handle current_solver_handle
    list_gpu_processes memory_usage utilization temperature power_draw clock_rate
    host_memory_stats host_memory_stats_as_nested_dict reset_peak_host_memory_stats
    reset_accumulated_host_memory_stats caching_allocator_enable
""".split()

_NCCL_NAMES = "all_reduce reduce broadcast all_gather reduce_scatter init_rank unique_id".split()

_TENSOR_TYPES = """
    FloatTensor DoubleTensor HalfTensor BFloat16Tensor ByteTensor CharTensor ShortTensor IntTensor
    LongTensor BoolTensor
""".split()


def _set_default_tensor_type(t):
    name = t if isinstance(t, str) else f"{t.__module__}.{t.__name__}"
    on_gpu = name.startswith("torch.cuda.")
    torch.set_default_device("cuda" if on_gpu else "cpu")
    torch.set_default_dtype(getattr(torch, name.rpartition(".")[2]).dtype)


class _TensorType(type):
    def __instancecheck__(cls, value):
        return isinstance(value, torch.Tensor) and value.is_cuda and value.dtype == cls.dtype


def _tensor_type(on_cpu):
    """Return a type like `torch.cuda.FloatTensor`, given `torch.FloatTensor`."""
    namespace = {
        "__new__": lambda cls, *args: on_cpu(*args).cuda(),
        "dtype": on_cpu.dtype,
        "__module__": "torch.cuda",
        "is_cuda": True,
    }
    return _TensorType(on_cpu.__name__, (), namespace)
