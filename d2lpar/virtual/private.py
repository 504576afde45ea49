"""Everything here that is private to torch: names, registration, backward's errors, patches.

It imports nothing of ours: what torch shall call is handed in. Known to work on torch 2.11 to 2.15.
"""

import ctypes
import functools
import itertools
import mmap
import os
import platform
import sys
import threading
import warnings

import torch

FIRST, LAST = (2, 11), (2, 15)
PRIVATE_USE_1 = 20  # DeviceType.PrivateUse1
CPUGenerator = torch._C.Generator
BaseStream, BaseEvent = torch.Stream, torch.Event  # `register` puts our own in their place
_libraries = []  # kept alive: a torch.library.Library takes back what it registered

make_wrapper = torch.Tensor._make_wrapper_subclass
no_torch_function = torch._C._disabled_torch_function_impl
sequence_number = torch.autograd._get_sequence_nr  # of the next operator that autograd makes
autograd_node = torch._C._current_autograd_node  # whose backward runs in this thread
set_conj, set_neg = torch._C._set_conj, torch._C._set_neg
_below_autograd = threading.local()


def check_version(version):
    """Raise RuntimeError for a version of torch on which virtual GPUs are not known to work."""
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if not FIRST <= numbers <= LAST:
        raise RuntimeError(
            f"virtual GPUs work on torch {FIRST[0]}.{FIRST[1]} to {LAST[0]}.{LAST[1]}; "
            f"this is torch {version}"
        )


def set_below_autograd():
    """Let the operators of the calling thread go past autograd, for as long as it lives."""
    _below_autograd.guard = torch._C._AutoDispatchBelowAutograd()


def without_python():
    """Return a context manager within which no operator comes back to Python."""
    return torch._C._DisableTorchDispatch()


def is_composite(func):
    """Return whether the operator `func` consists of others: where autograd is off
    (`torch.inference_mode`, an operator that calls another) such ones arrive whole."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def function_of(func):
    """Return the C++ function of an operator: hashing it is faster than hashing the operator."""
    return func._op


def storage_id(tensor):
    """Return what tells the storages of two CPU or meta tensors apart."""
    return tensor.untyped_storage()._cdata


def tensor_string(tensor):
    """Return what stands between "tensor(" and its closing bracket for a CPU tensor."""
    return torch._tensor_str._tensor_str(tensor, len("tensor("))


def is_parameter(tensor):
    """Return whether `tensor` counts as an nn.Parameter."""
    return getattr(tensor, "_is_param", False)


def rebuild_tensor_arguments(tensor, values, storage):
    """Return what pickle needs to make a tensor again as torch does for one on CUDA.

    `values` is a CPU tensor with the values of `tensor`, whose untyped storage stands as `storage`.
    """
    typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=tensor.dtype, _internal=True)
    layout = values.storage_offset(), tuple(values.shape), values.stride()
    arguments = (typed, *layout, tensor.requires_grad, _ordered())
    return torch._utils._rebuild_tensor_v2, arguments


def rebuild_parameter_arguments(tensor):
    """Return what pickle needs to make an nn.Parameter again."""
    return torch._utils._rebuild_parameter, (tensor.detach(), tensor.requires_grad, _ordered())


def _ordered():
    from collections import OrderedDict

    return OrderedDict()


def take_tensors(tensors, buffer_size):
    """Yield `tensors` in groups of one dtype and at most `buffer_size` bytes."""
    return torch._utils._take_tensors(tensors, buffer_size)


def reorder_as(tensors, ordered):
    """Return `tensors`, grouped as by `take_tensors`, in the order of `ordered`."""
    return torch._utils._reorder_tensors_as(tensors, ordered)


def below_autocast():
    """Return a context manager within which autocast of virtual GPUs does nothing."""
    return torch._C._ExcludeDispatchKeyGuard(_AUTOCAST)


_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)


# -- registration


def register(module, factory, copy_, is_pinned, pin, restore, autocast):
    """Make the device type `vgpu` known to torch.

    Args:
        module: `torch.vgpu`.
        factory: function(func, *args, **kwargs) for operators without a tensor of ours.
        copy_: function(target, source, non_blocking), where torch.tensor(..., device=) copies.
        is_pinned, pin: functions of a CPU tensor.
        restore: function(storage, location) for torch.load.
        autocast: function(library) that adds the kernels of autocast.

    Raises RuntimeError where that cannot be.
    """
    name = torch._C._get_privateuse1_backend_name()
    if name != "privateuseone":
        raise RuntimeError(f"torch's slot for a further device type is taken by {name!r}")
    torch.ones(1, device="meta") + 1  # the first shape inference imports a second's worth of torch
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(
        "vgpu", backend_module=module, hook=_Hooks(), device_guard=_DeviceGuard()
    )
    _take_python_out_of_the_guard()
    library = torch.library.Library("_", "IMPL")
    library.fallback(factory, "PrivateUse1")
    _libraries.append(library)
    # torch.tensor(..., device=) makes its tensor and copies with __torch_dispatch__ switched off;
    # within a TorchDispatchMode torch finds no fallback there, only kernels of their own
    library = torch.library.Library("aten", "IMPL")
    library.impl("copy_", copy_, "PrivateUse1")
    empty_strided = torch.ops.aten.empty_strided.default
    library.impl(empty_strided, functools.partial(factory, empty_strided), "PrivateUse1")
    library.impl("is_pinned", lambda tensor, device=None: is_pinned(tensor), "CPU")
    library.impl("_pin_memory", lambda tensor, device=None: pin(tensor.clone()), "CPU")
    autocast(library)
    _libraries.append(library)
    library = torch.library.Library("_", "IMPL")
    library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    _libraries.append(library)
    torch.__future__.set_swap_module_params_on_conversion(True)
    # before torch's own, which would ask for memory on the device
    torch.serialization.register_package(15, lambda storage: None, restore)


# -- what torch's C++ code asks a device type
#
# torch asks a device guard for streams and devices in places where no exception may be raised, or
# the process ends: in forward when it notes an operator for backward, and in backward even while an
# exception unwinds. A guard written in Python cannot be asked there: an interrupt is raised in it,
# and it cannot run at all while an exception is pending. But all its answers are constants: device
# 0 of type PrivateUse1, and its stream 0. So the table of the guard's methods is copied, and a few
# bytes of machine code that return these constants take the place of those that would ask Python.

_CODE = {  # "return 20, and 0 in the second register", which is type, device, and stream alike
    "x86_64": bytes.fromhex("b814000000 31d2 c3"),  # mov eax, 20; xor edx, edx; ret
    "aarch64": bytes.fromhex("80028052 010080d2 c0035fd6"),  # mov w0, #20; mov x1, #0; ret
}
_CONSTANT_METHODS = (0, 1, 2, 5, 8, 9)
"""type, exchangeDevice, getDevice, getStream, getNewStream, exchangeStream: their places in
c10/core/impl/DeviceGuardImplInterface.h, the same in torch 2.11 to 2.15."""
_NUM_METHODS, _BEFORE = 40, 2  # at least as many as there are; a table begins with two words more


def _constant(value):
    return staticmethod(itertools.repeat(value).__next__)  # in C, where no interrupt comes


class _DeviceGuard(torch._C._acc.DeviceGuard):
    type_ = _constant(torch._C._autograd.DeviceType.PrivateUse1)


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    is_available = _constant(True)
    is_built = _constant(True)
    has_primary_context = staticmethod(range(2**16).__contains__)


def _take_python_out_of_the_guard():
    """Let the registered device guard answer without Python; warn where it cannot."""
    code = _CODE.get(platform.machine())
    if sys.platform != "linux" or code is None:
        warnings.warn(
            "an interrupt or an error in backward may end this process: virtual GPUs are proof "
            "against them on Linux, on x86-64 and 64-bit ARM (on Windows, in WSL); this is "
            f"{sys.platform} on {platform.machine()}",
            stacklevel=5,
        )
        return
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    function = ctypes.addressof(ctypes.c_char.from_buffer(page))
    library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))
    guards = (ctypes.c_void_p * (PRIVATE_USE_1 + 1)).in_dll(
        library, "_ZN3c104impl26device_guard_impl_registryE"
    )
    methods = ctypes.c_void_p.from_address(guards[PRIVATE_USE_1]).value
    word = ctypes.sizeof(ctypes.c_void_p)
    table = (ctypes.c_void_p * (_BEFORE + _NUM_METHODS)).from_buffer_copy(
        ctypes.string_at(methods - _BEFORE * word, (_BEFORE + _NUM_METHODS) * word)
    )
    for place in _CONSTANT_METHODS:
        table[_BEFORE + place] = function
    guard = ctypes.c_void_p(ctypes.addressof(table) + _BEFORE * word)
    _kept_alive.extend((page, table, guard))
    guards[PRIVATE_USE_1] = ctypes.addressof(guard)


_kept_alive = []  # torch has their addresses


def patch_backward(streams_of_forward):
    """Run backward of virtual GPUs in the calling thread: it only issues, and torch has one queue
    of backward for all of them.

    `streams_of_forward` returns a context manager within which each operator is issued to the
    stream of its forward.
    """
    graph = torch.autograd.graph
    run_backward = graph._engine_run_backward

    @functools.wraps(run_backward)
    def _run_backward(tensors, *args, **kwargs):
        __tracebackhide__ = True
        if any(tensor.device.type not in ("vgpu", "cpu") for tensor in _roots(tensors)):
            return run_backward(tensors, *args, **kwargs)  # GPUs have threads of their own
        multithreading = torch._C._is_multithreading_enabled()
        try:
            torch._C._set_multithreading_enabled(False)
            with streams_of_forward():
                return run_backward(tensors, *args, **kwargs)
        finally:
            torch._C._set_multithreading_enabled(multithreading)

    graph._engine_run_backward = _run_backward
    torch.autograd._engine_run_backward = _run_backward


def _roots(tensors):
    if isinstance(tensors, torch.Tensor):
        return (tensors,)
    return [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]


def patch_default_dtype(wait):
    """Call `wait` before the default dtype changes: kernels that are queued ask for it, too."""
    set_dtype = torch.set_default_dtype

    @functools.wraps(set_dtype)
    def set_default_dtype(d):
        wait()
        set_dtype(d)

    torch.set_default_dtype = set_default_dtype


# -- torch.Stream, torch.Event, torch.Generator, torch.accelerator and nn.DataParallel


def patch_classes(stream, event, generator):
    """Let `torch.Stream(device=...)`, `torch.Event(...)`, `torch.Generator(...)` know our devices.

    Args: functions of a device (`vgpu` or `vgpu:i`) and further arguments that make ours.
    """
    torch.Stream = _with_our_devices(BaseStream, stream)
    torch.Event = _with_our_devices(BaseEvent, event)
    torch.Generator = _with_our_devices(CPUGenerator, generator)


def _with_our_devices(base, make):
    """Return a class that stands for `base`, and whose call with a device of ours calls `make`."""

    class Meta(type(base)):
        def __call__(cls, *args, **kwargs):
            device = kwargs.get("device", args[0] if args else None)
            if isinstance(device, (str, torch.device)) and torch.device(device).type == "vgpu":
                rest = args[1:] if args else ()
                kwargs.pop("device", None)
                return make(torch.device(device), *rest, **kwargs)
            return base(*args, **kwargs)

        def __instancecheck__(cls, instance):
            return isinstance(instance, base)

        def __subclasscheck__(cls, subclass):
            return issubclass(subclass, base)

    namespace = {"__doc__": base.__doc__, "__module__": base.__module__}
    return Meta(base.__name__, (base,), namespace)


def patch_accelerator(module):
    """Let torch.accelerator's functions mean the streams and devices of `module` (torch.vgpu)."""
    for name, function in {
        "current_accelerator": lambda check_available=False: torch.device("vgpu"),
        "current_device_index": module.current_device,
        "current_device_idx": module.current_device,
        "set_device_index": module.set_device,
        "set_device_idx": module.set_device,
        "current_stream": module.current_stream,
        "set_stream": module.set_stream,
        "synchronize": module.synchronize,
        "device_index": module.device,
        "memory_allocated": module.memory_allocated,
        "max_memory_allocated": module.max_memory_allocated,
        "memory_reserved": module.memory_reserved,
        "max_memory_reserved": module.max_memory_reserved,
        "memory_stats": module.memory_stats,
        "reset_peak_memory_stats": module.reset_peak_memory_stats,
        "empty_cache": module.empty_cache,
    }.items():
        setattr(torch.accelerator, name, function)


def patch_data_parallel(comm, is_ours, get_stream):
    """Give nn.DataParallel what it has for CUDA only.

    Args:
        comm: a module with scatter, gather, broadcast and the two coalesced functions.
        is_ours: function that tells whether tensors are on virtual GPUs.
        get_stream: function of a device that returns a side stream for copies to it.
    """
    from torch.nn.parallel import _functions, data_parallel
    from torch.nn.parallel import comm as torch_comm

    for name in ("gather", "broadcast", "broadcast_coalesced", "reduce_add_coalesced"):
        setattr(torch_comm, name, _choose(getattr(torch_comm, name), getattr(comm, name), is_ours))
    torch_comm.scatter = comm.scatter
    data_parallel._get_available_device_type = lambda: "vgpu"
    torch._utils._get_available_device_type = lambda: "vgpu"
    _functions._get_stream = get_stream


def _choose(theirs, ours, test):
    @functools.wraps(theirs)
    def function(tensors, *args, **kwargs):
        return (ours if test(tensors) else theirs)(tensors, *args, **kwargs)

    return function
