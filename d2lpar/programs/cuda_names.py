"""The names under which programs know GPUs: `torch.cuda`, "nccl", and what torch asks of CUDA.

`switch_on` lets all of them mean virtual GPUs. A name of `torch.cuda` is one of these:

- `torch.vgpu` has it: it is that one;
- it is in the tables below: it does what can be done here, which may be nothing;
- it needs what only a GPU has: it says so.
"""

import contextlib
import functools
import re
from types import SimpleNamespace

import torch

from d2lpar.virtual import as_cuda, copies, private, vgpu

from . import only_cuda, process_groups
from .only_cuda import refusing

NANOSECOND = 1e-9  # a cycle of the clock of virtual GPUs, as `torch.cuda._sleep` counts
NCCL_VERSION = (2, 27, 0)  # programs ask whether it can do bfloat16, and it can


def switch_on(gpus, visible=None):
    """Let `torch.cuda` and the device "cuda" mean virtual GPUs, for all of this process.

    Args:
        gpus: how many and of what kind, "vgpu:4" or "v100:4".
        visible: indices of those that the program sees, "0,2", as in CUDA_VISIBLE_DEVICES; all of
            them by default.

    Raises:
        ValueError: `gpus` is something else, or no GPU and no machine has the name.
        RuntimeError: virtual GPUs cannot stand for CUDA's on this machine or this torch.
    """
    kind, number = parse(gpus)
    count = len(_visible(visible, number))
    if count:
        options = {} if kind == "vgpu" else {"model": kind}
        as_cuda.stand_for_cuda(count, **options)
        _replace_names()
        process_groups.let_nccl_mean_ours()
        only_cuda.refuse()


def parse(gpus):
    """Return the kind and the number of GPUs that a text such as "vgpu:4" or "v100:8" names.

    Raises:
        ValueError: it is something else.
    """
    known = re.fullmatch(r"([^:]+):([1-9][0-9]*)", gpus)
    if not known:
        raise ValueError(f"D2LPAR_CUDA is vgpu:N or GPU:N, not {gpus!r}")
    return known[1], int(known[2])


def _visible(visible, number):
    """Return the indices below `number` that a text lists, up to the first one that is none."""
    if visible is None:
        return range(number)
    indices = []
    for text in visible.split(","):
        if not text.strip().isdecimal() or int(text) >= number:
            break
        indices.append(int(text))
    return indices


def _replace_names():
    """Put ours in the place of all names of `torch.cuda` and of its modules that have to change."""
    ours = {
        name: value
        for name, value in vars(vgpu).items()
        if getattr(value, "__module__", "") == vgpu.__name__ and not name.startswith("_")
    }
    ours |= {name: getattr(Names, name) for name in vars(Names) if not name.startswith("__")}
    ours["default_generators"] = vgpu.default_generators
    homes = [torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.streams]
    for name, value in ours.items():
        for home in homes:
            if hasattr(home, name):
                setattr(home, name, value)
    for name in _ONLY_ON_A_GPU:
        for home in (*homes, torch.cuda.graphs):
            if hasattr(home, name):
                setattr(home, name, refusing(f"torch.cuda.{name}"))
    for name, dtype in _TENSOR_TYPES.items():
        setattr(torch.cuda, name, _tensor_type(name, dtype))
    torch.set_default_tensor_type = _set_default_tensor_type
    private.note_factories()
    for name in _WITH_PINNED_MEMORY:
        setattr(torch, name, private.stand_for(getattr(torch, name), _pinning))
    vgpu.Stream.cuda_stream = property(lambda stream: stream.stream_id)
    vgpu.Stream.priority_range = staticmethod(lambda: (0, 0))
    for name, function in _NVTX.items():
        setattr(torch.cuda.nvtx, name, function)
    torch.cuda.profiler.start = torch.cuda.profiler.stop = lambda: None
    torch.cuda.profiler.profile = contextlib.nullcontext
    torch.cuda.nccl.version = lambda: NCCL_VERSION
    for name in _OF_NCCL:
        setattr(torch.cuda.nccl, name, refusing(f"torch.cuda.nccl.{name}"))
    if hasattr(torch.accelerator, "get_memory_info"):
        torch.accelerator.get_memory_info = vgpu.mem_get_info
    torch.autograd.profiler.profile.__init__ = _without_cuda(
        torch.autograd.profiler.profile.__init__
    )
    torch.backends.cuda.is_built = lambda: True
    torch.backends.cudnn.is_acceptable = lambda tensor: False
    torch.backends.cudnn.is_available = lambda: False
    torch.backends.cudnn.version = lambda: None
    private.let_cuda_be_initialized()


class Names:
    """Names of `torch.cuda` that `torch.vgpu` lacks, or has with another meaning."""

    @staticmethod
    def is_bf16_supported(including_emulation=True):
        """Return True: virtual GPUs compute in bfloat16."""
        return True

    @staticmethod
    def is_tf32_supported():
        """Return False: float32 is computed in full."""
        return False

    @staticmethod
    def is_current_stream_capturing():
        """Return False: no CUDA graph is captured."""
        return False

    @staticmethod
    def init():
        """Do nothing: virtual GPUs are ready."""

    @staticmethod
    def ipc_collect():
        """Do nothing: no other process holds memory of virtual GPUs."""

    @staticmethod
    def get_arch_list():
        """Return []: no kernels are compiled for an architecture."""
        return []

    @staticmethod
    def get_gencode_flags():
        """Return "": no kernels are compiled for an architecture."""
        return ""

    @staticmethod
    def get_allocator_backend():
        """Return "native", the only allocator there is."""
        return "native"

    @staticmethod
    def set_sync_debug_mode(debug_mode):
        """Do nothing; waits of the host are seen in a trace."""

    @staticmethod
    def get_sync_debug_mode():
        """Return 0: waits of the host are not reported."""
        return 0

    @staticmethod
    def memory_cached(device=None):
        """Return what `memory_reserved` does."""
        return vgpu.memory_reserved(device)

    @staticmethod
    def max_memory_cached(device=None):
        """Return what `max_memory_reserved` does."""
        return vgpu.max_memory_reserved(device)

    @staticmethod
    def reset_max_memory_allocated(device=None):
        """Do what `reset_peak_memory_stats` does."""
        vgpu.reset_peak_memory_stats(device)

    @staticmethod
    def reset_max_memory_cached(device=None):
        """Do what `reset_peak_memory_stats` does."""
        vgpu.reset_peak_memory_stats(device)

    @staticmethod
    def reset_accumulated_memory_stats(device=None):
        """Do nothing: what `memory_stats` sums up is summed up since the start."""

    @staticmethod
    def memory_stats_as_nested_dict(device=None):
        """Return `memory_stats` as dicts within dicts."""
        nested = {}
        for name, value in vgpu.memory_stats(device).items():
            *path, last = name.split(".")
            inner = nested
            for part in path:
                inner = inner.setdefault(part, {})
            inner[last] = value
        return nested

    @staticmethod
    def cudart():
        """Return what switches a profiler of CUDA on and off; here it does nothing."""
        return SimpleNamespace(cudaProfilerStart=lambda: 0, cudaProfilerStop=lambda: 0)

    @staticmethod
    def check_error(result):
        """Do nothing: what `cudart` returns here tells of no errors."""

    @staticmethod
    def _sleep(cycles):
        """Keep the current device busy for some cycles of a clock of 1 GHz."""
        vgpu._sleep(cycles * NANOSECOND)

    @staticmethod
    def _lazy_call(function, **kwargs):
        function()

    @staticmethod
    def _is_in_bad_fork():
        return vgpu._is_in_bad_fork()

    class device_of(vgpu.device):  # noqa: N801
        """Make the device of a tensor the current one; one on the CPU changes nothing."""

        def __init__(self, obj):
            super().__init__(obj.get_device() if obj.is_cuda else None)


_ONLY_ON_A_GPU = """
    CUDAGraph graph graph_pool_handle make_graphed_callables ExternalStream get_stream_from_external
    MemPool use_mem_pool CUDAPluggableAllocator change_current_allocator GreenContext
    caching_allocator_alloc caching_allocator_delete current_blas_handle current_solver_handle
    memory_snapshot _record_memory_history _snapshot _dump_snapshot list_gpu_processes
    device_memory_used memory_usage utilization temperature power_draw clock_rate _compile_kernel
""".split()

_OF_NCCL = "all_reduce reduce broadcast all_gather reduce_scatter init_rank unique_id".split()

_TENSOR_TYPES = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "CharTensor": torch.int8,
    "ShortTensor": torch.int16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "BoolTensor": torch.bool,
}

_NVTX = {
    "range_push": lambda msg: 0,
    "range_pop": lambda: 0,
    "range_start": lambda msg: 0,
    "range_end": lambda range_id: None,
    "mark": lambda msg: None,
    "range": lambda msg, *args, **kwargs: contextlib.nullcontext(),
}


_WITH_PINNED_MEMORY = "empty zeros ones full rand randn empty_like zeros_like empty_strided".split()


def _pinning(function):
    """Let a function make a tensor in pinned memory, for which torch asks a real GPU."""

    @functools.wraps(function)
    def call(*args, pin_memory=False, **kwargs):
        tensor = function(*args, **kwargs)
        return copies.pin(tensor) if pin_memory else tensor

    return call


def _without_cuda(init):
    """Let torch's profiler see the host alone: `d2lpar run --trace` shows what the GPUs do."""

    @functools.wraps(init)
    def __init__(self, *args, use_cuda=False, use_device=None, **kwargs):
        init(self, *args, use_device=None if use_device == "cuda" else use_device, **kwargs)

    return __init__


def _set_default_tensor_type(t):
    """Let new tensors be of a type, "torch.cuda.FloatTensor" for example."""
    name = t if isinstance(t, str) else f"{t.__module__}.{t.__name__}"
    on_gpu = name.startswith("torch.cuda.")
    torch.set_default_device("cuda" if on_gpu else "cpu")
    torch.set_default_dtype(_TENSOR_TYPES[name.rpartition(".")[2]])


class _TensorType(type):
    """The class of `torch.cuda.FloatTensor` and its kin."""

    def __instancecheck__(cls, value):
        return isinstance(value, torch.Tensor) and value.is_cuda and value.dtype == cls.dtype


def _tensor_type(name, dtype):
    """Return what stands for `torch.cuda.FloatTensor`, for example."""

    def __new__(cls, *args):
        values = getattr(torch, name)(*args)
        return values.cuda()

    namespace = {"__new__": __new__, "dtype": dtype, "__module__": "torch.cuda", "is_cuda": True}
    return _TensorType(name, (), namespace)
