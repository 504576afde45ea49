"""All that virtual GPUs use of torch's inside: names, registration, backward's errors, patches.

This imports nothing of ours: what torch shall call is handed in. It works on torch 2.11 to 2.15.
"""

import contextlib
import ctypes
import functools
import inspect
import mmap
import os
import platform
import sys
import threading
import warnings
from types import FunctionType, SimpleNamespace

import torch
from torch.optim.optimizer import _foreach_supported_types as of_optimizers
from torch.utils._foreach_utils import _foreach_supported_types as of_utilities
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten  # noqa: F401

FIRST, LAST = (2, 11), (2, 15)
PRIVATE_USE_1 = 20  # DeviceType.PrivateUse1
CPUGenerator = torch._C.Generator
BaseStream, BaseEvent = torch.Stream, torch.Event  # `register` puts our own in their place
_libraries = []  # kept alive: a torch.library.Library takes back what it registered

make_wrapper = torch.Tensor._make_wrapper_subclass
no_torch_function = torch._C._disabled_torch_function_impl
sequence_number = torch.autograd._get_sequence_nr  # of the next operator that autograd makes


def in_backward():
    """Return whether the calling thread is in a backward pass."""
    return torch._C._current_graph_task_id() != -1


backward_number = torch._C._current_graph_task_id  # of the backward pass; -1 outside of one


autograd_node = torch._C._current_autograd_node  # the node whose backward runs in this thread


def forward_number(node):
    """Return the number of the operator of the forward that an autograd node belongs to.

    It is None for a node that belongs to none, as the accumulation of a gradient.
    """
    number = node._sequence_nr()
    return number if number < _NUMBERS_WITHOUT_FORWARD else None


_NUMBERS_WITHOUT_FORWARD = 2**62
# Context managers; within them torch calls nothing of ours in Python.
no_dispatch = torch._C._DisableTorchDispatch
no_torch_function_at_all = torch._C.DisableTorchFunction
set_conj, set_neg = torch._C._set_conj, torch._C._set_neg
_own_device = torch.Tensor.device.__get__  # a tensor's device as torch's C++ code knows it
_below_autograd = threading.local()


def check_version(version):
    """Raise RuntimeError where virtual GPUs are not known to work on this version of torch."""
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if not FIRST <= numbers <= LAST:
        raise RuntimeError(
            f"virtual GPUs work on torch {FIRST[0]}.{FIRST[1]} to {LAST[0]}.{LAST[1]}; "
            f"this is torch {version}"
        )


def set_below_autograd():
    """Let the operators of the calling thread bypass autograd for as long as the thread lives."""
    _below_autograd.guard = torch._C._AutoDispatchBelowAutograd()


def is_composite(func):
    """Return whether the operator `func` is composed of others.

    Where autograd is off (in `torch.inference_mode`, or in an operator that calls another one),
    such an operator arrives in one piece.
    """
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def has_products_of_float16():
    """Return whether this CPU has instructions for products of float16."""
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def check_kernel(func):
    """Raise NotImplementedError where the operator `func` has a kernel for CUDA and none for CPUs.

    Virtual GPUs run the kernels of the CPU.
    """
    name = func.name()
    if not name.startswith("aten::"):
        has_kernel = torch._C._dispatch_has_computed_kernel_for_dispatch_key
        if not has_kernel(name, "CPU") and has_kernel(name, "CUDA"):
            raise NotImplementedError(
                f"the operator {name} has a kernel for CUDA only, and virtual GPUs run those of "
                f'the CPU: give it one, torch.library.impl("{name}", "CPU", function), or run it '
                "on a machine with a real GPU"
            )


def lacks_shape_inference(error):
    """Return whether `error` says that a custom operator has no function for meta tensors."""
    return isinstance(error, NotImplementedError) or "no fake impl" in str(error)


def schema_of(func):
    """Return the schema of an operator."""
    return func._schema


def function_of(func):
    """Return the C++ function of an operator: hashing it is faster than hashing the operator."""
    return func._op


def storage_id(tensor):
    """Return an identity of the storage of a CPU or meta tensor; no two storages share it."""
    return tensor.untyped_storage()._cdata


def tensor_string(tensor):
    """Return the text of a CPU tensor that stands between "tensor(" and the closing bracket."""
    return torch._tensor_str._tensor_str(tensor, len("tensor("))


def is_parameter(tensor):
    """Return whether `tensor` counts as an nn.Parameter."""
    return getattr(tensor, "_is_param", False)


def rebuild_tensor_arguments(tensor, values, storage):
    """Return what pickle needs to make a tensor again as torch does for one on CUDA.

    Args:
        tensor: the tensor.
        values: a CPU tensor with its values.
        storage: the untyped storage of `values`, or one that stands for it.

    Returns:
        A function and a tuple of its arguments.
    """
    typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=tensor.dtype, _internal=True)
    layout = values.storage_offset(), tuple(values.shape), values.stride()
    arguments = (typed, *layout, tensor.requires_grad, _ordered())
    return torch._utils._rebuild_tensor_v2, arguments


def rebuild_parameter_arguments(tensor):
    """Return what pickle needs to make an nn.Parameter again: a function and its arguments."""
    return torch._utils._rebuild_parameter, (tensor.detach(), tensor.requires_grad, _ordered())


def _ordered():
    from collections import OrderedDict

    return OrderedDict()


def take_tensors(tensors, buffer_size):
    """Yield `tensors` in groups of one dtype and at most `buffer_size` bytes, or of one tensor."""
    return torch._utils._take_tensors(tensors, buffer_size)


def reorder_as(tensors, ordered):
    """Return `tensors`, grouped as by `take_tensors`, in the order of `ordered`."""
    return torch._utils._reorder_tensors_as(tensors, ordered)


def below_autocast():
    """Return a context manager within which autocast of virtual GPUs does nothing."""
    return torch._C._ExcludeDispatchKeyGuard(_AUTOCAST)


_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)


# -- registration


@functools.cache
def prepare_shape_inference():
    """Let torch import now what its first shape inference imports, which takes a second or two."""
    torch.ones(1, device="meta") + 1


def register(module, factory, copy_, is_pinned, pin, restore, autocast):
    """Make the device type `vgpu` known to torch.

    Args:
        module: `torch.vgpu`.
        factory: function(func, *args, **kwargs) for operators without a tensor of ours.
        copy_: function(target, source, non_blocking) that torch.tensor(..., device=) copies with.
        is_pinned, pin: functions of a CPU tensor.
        restore: function(storage, location) for torch.load.
        autocast: function(library) that adds the kernels of autocast.

    Raises:
        RuntimeError: another package has added a device type to torch.
    """
    name = torch._C._get_privateuse1_backend_name()
    if name != "privateuseone":
        raise RuntimeError(f"torch's slot for a further device type is taken by {name!r}")
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(
        "vgpu", backend_module=module, hook=_Hooks(), device_guard=_DeviceGuard()
    )
    _answer_without_python()
    library = torch.library.Library("_", "IMPL")
    library.fallback(factory, "PrivateUse1")
    _libraries.append(library)
    # torch.tensor(..., device=) makes its tensor and copies with __torch_dispatch__ switched off.
    # Within a TorchDispatchMode torch then finds no fallback, only kernels of these operators.
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
    _swap_when_modules_move()
    # a low number, to come before torch's own, which would ask for memory on the device
    torch.serialization.register_package(15, lambda storage: None, restore)


def swap_in_spite_of_weak_references(is_ours):
    """Let tensors of ours be swapped where weak references know one, as CUDA's may change `data`.

    They know the object, which stays the same.

    Args:
        is_ours: function that tells whether a tensor is on a virtual GPU.
    """
    swap = torch.utils.swap_tensors
    none = SimpleNamespace(getweakrefs=lambda tensor: ())
    swap_all = FunctionType(swap.__code__, {**swap.__globals__, "weakref": none}, swap.__name__)

    @functools.wraps(swap)
    def swap_tensors(t1, t2):
        return (swap_all if is_ours(t1) or is_ours(t2) else swap)(t1, t2)

    torch.utils.swap_tensors = swap_tensors


def _swap_when_modules_move():
    """Let `module.to` swap parameters, since a tensor cannot become another one's by its `data`.

    `load_state_dict` would swap them, too, which is refused where DDP holds them. Now it copies,
    as on CUDA, unless the program has asked for swapping before.
    """
    if torch.__future__.get_swap_module_params_on_conversion():
        return
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch.nn.Module._load_from_state_dict = _without_swapping(torch.nn.Module._load_from_state_dict)


def _without_swapping(function):
    """Return a function that does the same, while modules do not swap parameters."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(False)
        try:
            return function(*args, **kwargs)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)

    return call


def let_fully_shard_take_assigned_parameters(module):
    """Let `load_state_dict(assign=True)` give `fully_shard` other parameters, as on CUDA.

    Args:
        module: torch.distributed.fsdp._fully_shard._fsdp_param.
    """
    module.FSDPParam.reset_sharded_param = _without_swapping(module.FSDPParam.reset_sharded_param)


# -- what torch's C++ code asks a device type
#
# torch asks a device guard for streams and devices in places where an exception would end the
# process: in forward when it notes an operator for backward, and in backward even while an
# exception unwinds. A guard written in Python cannot answer there: an interrupt may be raised in
# it, and it cannot run at all while an exception is pending. But all answers are constants: device
# 0 of type PrivateUse1, its stream 0, and yes. So a few bytes of machine code that return a
# constant take the place of the methods that would ask Python. Which device is current is answered
# by one without an index: torch hands it on, in `x.to("vgpu")`, and our operators know the index.

_NO_INDEX = 0xFF00  # in the two bytes of a c10::Device the index, -1 for none, follows the type
_YES, _CURRENT = 1, PRIVATE_USE_1 | _NO_INDEX
_CODE_OF_ADDRESS = {"x86_64": "48b8 {} c3", "aarch64": "40000058 c0035fd6 {}"}  # returns that
# The places of virtual methods, which are the same in torch 2.11 to 2.15: type, exchangeDevice,
# getDevice, getStream, getNewStream and exchangeStream in c10/core/impl/DeviceGuardImplInterface.h;
# isBuilt, isAvailable, hasPrimaryContext and, for C++ code that asks for pinned memory,
# getPinnedMemoryAllocator in ATen/detail/AcceleratorHooksInterface.h, after two places of the
# destructor.
_GUARD_METHODS, _GET_DEVICE = (0, 1, 5, 8, 9), (2,)
_HOOKS_METHODS, _GET_ALLOCATOR = (2, 3, 4), (12,)
_NUM_METHODS, _BEFORE = 40, 2  # at least as many as there are; a table begins with two words more
_WORD = ctypes.sizeof(ctypes.c_void_p)
_kept_alive = []  # torch has their addresses


class _DeviceGuard(torch._C._acc.DeviceGuard):
    def type_(self):
        return torch._C._autograd.DeviceType.PrivateUse1


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self):
        return True

    def is_built(self):
        return True

    def has_primary_context(self, device_index):
        return True


def can_answer_without_python():
    """Return whether machine code for this machine is known."""
    return sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")


def _code(constant):
    """Return code that returns a constant below 65536, and 0 in the second register of a result."""
    if platform.machine() == "x86_64":  # mov eax, constant; xor edx, edx; ret
        return b"\xb8" + constant.to_bytes(4, "little") + bytes.fromhex("31d2 c3")
    move = 0x52800000 | constant << 5  # mov w0, constant; mov x1, 0; ret
    return move.to_bytes(4, "little") + bytes.fromhex("010080d2 c0035fd6")


def _answer_without_python():
    """Let the registered guard and hooks answer without Python; warn where they cannot."""
    if not can_answer_without_python():
        warnings.warn(
            "an interrupt or an error in backward may end this process: virtual GPUs are proof "
            "against them on Linux, on x86-64 and 64-bit ARM (on Windows, in WSL); this is "
            f"{sys.platform} on {platform.machine()}",
            stacklevel=5,
        )
        return
    get_hooks = _library("torch_cpu")["_ZN2at6detail19getPrivateUse1HooksEv"]
    get_hooks.restype = ctypes.c_void_p
    _answer(_guards()[PRIVATE_USE_1], _GUARD_METHODS, _code(PRIVATE_USE_1))
    _answer(_guards()[PRIVATE_USE_1], _GET_DEVICE, _code(_CURRENT))
    _answer(get_hooks(), _HOOKS_METHODS, _code(_YES))
    _mark_pinned(get_hooks())


_READ_WRITE_EXECUTE = 7  # as Linux counts; the module mmap has no names for it on Windows


def _guards():
    """Return torch's table of device guards, one address for each type of device."""
    name = "_ZN3c104impl26device_guard_impl_registryE"
    return (ctypes.c_void_p * (PRIVATE_USE_1 + 1)).in_dll(_library("c10"), name)


def _library(name):
    return ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", f"lib{name}.so"))


def _answer(address, places, code):
    """Let the virtual methods at `places` of the C++ object at `address` be `code`.

    The object gets a copy of its table of methods with the other addresses in it.
    """
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=_READ_WRITE_EXECUTE)
    page.write(code)
    methods = ctypes.c_void_p.from_address(address)
    num_bytes = (_BEFORE + _NUM_METHODS) * _WORD
    copied = ctypes.string_at(methods.value - _BEFORE * _WORD, num_bytes)
    table = (ctypes.c_void_p * (_BEFORE + _NUM_METHODS)).from_buffer_copy(copied)
    for place in places:
        table[_BEFORE + place] = ctypes.addressof(ctypes.c_char.from_buffer(page))
    _kept_alive.extend((page, table))
    methods.value = ctypes.addressof(table) + _BEFORE * _WORD


def _mark_pinned(hooks):
    """Let C++ code, `torch.empty(..., pin_memory=True)` too, get pinned memory.

    It is memory of the CPU from a copy of torch's allocator, which has nothing but methods. The
    address of the copy tells it from other memory.
    """
    global _place_of_allocator
    get_allocator = _library("c10")["_ZN3c1015GetCPUAllocatorEv"]
    get_allocator.restype = ctypes.c_void_p
    _allocator[:] = ctypes.string_at(get_allocator(), _WORD)
    address = ctypes.addressof(_allocator)
    code = _CODE_OF_ADDRESS[platform.machine()].format(address.to_bytes(_WORD, "little").hex())
    _answer(hooks, _GET_ALLOCATOR, bytes.fromhex(code))
    storage = torch.empty(1, pin_memory=True, device="cpu").untyped_storage()
    words = (ctypes.c_void_p * _NUM_WORDS).from_address(storage._cdata)
    _place_of_allocator = words[:].index(address)


_allocator = ctypes.create_string_buffer(_WORD)
_place_of_allocator = None
_NUM_WORDS = 12  # of a storage in C++; its allocator is the last


def is_from_pinned_allocator(tensor):
    """Return whether C++ code has allocated the memory of a CPU tensor as pinned memory."""
    if _place_of_allocator is None:
        return False
    address = tensor.untyped_storage()._cdata + _place_of_allocator * _WORD
    return ctypes.c_void_p.from_address(address).value == ctypes.addressof(_allocator)


def patch_backward(streams_of_forward):
    """Run backward of virtual GPUs in the calling thread.

    There it only issues; and torch has one queue of backward for all virtual GPUs anyway.

    Args:
        streams_of_forward: function that returns a context manager, within which each operator is
            issued to the stream of its forward.
    """
    graph = torch.autograd.graph
    run_backward = graph._engine_run_backward

    @functools.wraps(run_backward)
    def _run_backward(tensors, *args, **kwargs):
        if any(_own_device(tensor).type not in ("vgpu", "cpu") for tensor in _roots(tensors)):
            return run_backward(tensors, *args, **kwargs)  # GPUs have threads of their own
        multithreading = torch._C._is_multithreading_enabled()
        try:
            torch._C._set_multithreading_enabled(False)
            with streams_of_forward():
                return run_backward(tensors, *args, **kwargs)
        except BaseException:
            if not in_backward():  # no other backward is around this one
                drop_tasks()
            raise
        finally:
            torch._C._set_multithreading_enabled(multithreading)

    def drop_tasks():
        """Let torch drop the tasks of a backward that failed, and the tensors in them.

        Otherwise they stay in the thread's queue until its next backward.
        """
        with contextlib.suppress(Exception), torch.inference_mode(False), torch.enable_grad():
            leaf = torch.zeros((), requires_grad=True, device="cpu")
            ones = torch.ones((), device="cpu")
            run_backward((leaf * 1,), (ones,), False, False, (), accumulate_grad=True)

    graph._engine_run_backward = _run_backward
    torch.autograd._engine_run_backward = _run_backward


def allow_foreach(tensor_class):
    """Let optimizers and `clip_grad_norm_` choose one kernel for many tensors, as on CUDA."""
    of_optimizers.append(tensor_class)
    of_utilities.append(tensor_class)


def patch_threads(started, joined):
    """Let `started` be called with each thread that is about to start, `joined` after its end."""
    start, join = threading.Thread.start, threading.Thread.join
    if getattr(start, "_is_ours", False):
        return

    @functools.wraps(start)
    def _start(self):
        started(self)
        start(self)

    @functools.wraps(join)
    def _join(self, timeout=None):
        join(self, timeout)
        if not self.is_alive():
            joined(self)

    _start._is_ours = True
    threading.Thread.start, threading.Thread.join = _start, _join


def _roots(tensors):
    if isinstance(tensors, torch.Tensor):
        return (tensors,)
    return [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]


def patch_default_dtype(wait):
    """Call `wait` before the default dtype changes, because queued kernels ask for it, too."""
    set_dtype = torch.set_default_dtype

    @functools.wraps(set_dtype)
    def set_default_dtype(d):
        wait()
        set_dtype(d)

    torch.set_default_dtype = set_default_dtype


# -- "cuda" where torch's C++ code meets it
#
# A tensor stays of type PrivateUse1 there. Only the devices that a program asks for are CUDA's, and
# what torch does with one is to ask its guard which index a bare "cuda" has, and to look for
# CUDA's kernel of the operator that makes a tensor.

_CUDA = 1  # DeviceType.CUDA
# The operators without tensors that have a kernel of their own in a CUDA build of torch; all others
# are composed of these.
_FACTORIES = ("empty.memory_format", "empty_strided", "tril_indices", "triu_indices")


def register_cuda(factory):
    """Let torch's C++ code find virtual GPUs under "cuda", also in a build for CUDA.

    Args:
        factory: function(func, *args, **kwargs) for operators without a tensor of ours.

    Raises:
        RuntimeError: no machine code is known for this machine.
    """
    if not can_answer_without_python():
        raise RuntimeError(
            "virtual GPUs stand for CUDA's on Linux, on x86-64 and 64-bit ARM (on Windows, in "
            f"WSL); this is {sys.platform} on {platform.machine()}"
        )
    guards = _guards()
    guard = (ctypes.c_void_p * 8)(ctypes.c_void_p.from_address(guards[PRIVATE_USE_1]).value)
    _kept_alive.append(guard)
    address = ctypes.addressof(guard)
    _answer(address, _GUARD_METHODS, _code(_CUDA))
    # "cuda" stays as it is, without an index
    _answer(address, (1, *_GET_DEVICE), _code(_CUDA | _NO_INDEX))
    guards[_CUDA] = address
    library = torch.library.Library("_", "IMPL")
    library.fallback(factory, "CUDA")
    _libraries.append(library)
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a CUDA build says that its kernels are replaced
        for name in _FACTORIES:
            packet, _, overload = name.partition(".")
            func = getattr(getattr(torch.ops.aten, packet), overload or "default")
            library.impl(name, functools.partial(factory, func), "CUDA")
    _libraries.append(library)


def patch_make_wrapper(own_device, say_cuda):
    """Let classes that wrap tensors of virtual GPUs have these devices in torch's C++ code, too.

    Args:
        own_device: function of a device that returns it as torch's C++ code knows it.
        say_cuda: function that lets the tensors of a class say "cuda" for such a device.
    """
    say_it = set()

    @functools.wraps(make_wrapper)
    def _make_wrapper_subclass(cls, *args, device=None, **kwargs):
        if device is not None:
            own = own_device(device)
            if own is not device and cls not in say_it:
                say_it.add(cls)
                say_cuda(cls)
            device = own
        return make_wrapper(cls, *args, device=device, **kwargs)

    torch.Tensor._make_wrapper_subclass = staticmethod(_make_wrapper_subclass)


def note_factories():
    """Let torch note the functions that `torch.set_default_device` is for, before they change."""
    from torch.utils import _device

    _device._device_constructors()


def stand_for(function, change):
    """Return what `change` makes of a function of torch; TorchScript takes both for the same."""
    from torch.jit import _builtins

    changed = change(function)
    _builtins._register_builtin(changed, _builtins._find_builtin(function))
    return changed


def let_cuda_be_initialized():
    """Let nothing of torch initialise CUDA: a build without it cannot, one with it finds no GPU."""
    torch.cuda._lazy_init = lambda: None
    torch.cuda._initialized = True


def patch_process_groups(translate):
    """Let programs make process groups of virtual GPUs under the names of CUDA's.

    Args:
        translate: function of the name of a backend that a program gives that returns ours.
    """
    from torch.distributed import constants
    from torch.distributed import distributed_c10d as c10d

    helper = c10d._new_process_group_helper
    signature = inspect.signature(helper)

    @functools.wraps(helper)
    def _new_process_group_helper(*args, **kwargs):
        call = signature.bind(*args, **kwargs)
        given = call.arguments["backend"]
        call.arguments["backend"] = c10d.Backend(translate(str(given)))
        call.arguments["device_id"] = None  # NCCL connects early where it is given
        call.arguments["backend_options"] = None  # these are for NCCL, too
        group, store = helper(*call.args, **call.kwargs)
        if group in c10d._world.pg_map:  # a rank that is not in the group has none
            c10d._world.pg_map[group] = given, c10d._world.pg_map[group][1]
        return group, store

    c10d._new_process_group_helper = _new_process_group_helper
    if c10d.default_pg_nccl_timeout is None:  # in a build without NCCL
        c10d.default_pg_nccl_timeout = constants.default_pg_timeout


# -- torch.Stream, torch.Event, torch.Generator, torch.accelerator and nn.DataParallel


def patch_classes(stream, event, generator, is_virtual):
    """Let `torch.Stream(device=...)`, `torch.Event(...)`, `torch.Generator(...)` know our devices.

    Args:
        stream, event, generator: functions of a device (`vgpu` or `vgpu:i`) and further arguments
            that make ours.
        is_virtual: function that tells whether a `torch.device` is one of ours.
    """
    torch.Stream = _with_our_devices(BaseStream, stream, is_virtual)
    torch.Event = _with_our_devices(BaseEvent, event, is_virtual)
    torch.Generator = _with_our_devices(CPUGenerator, generator, is_virtual)


def _with_our_devices(base, make, is_virtual):
    """Return a class in the place of `base`; called with a device of ours, it calls `make`."""

    class Meta(type(base)):
        def __call__(cls, *args, **kwargs):
            if cls is not stand_in:  # a class that a user derived
                return super().__call__(*args, **kwargs)
            device = kwargs.get("device", args[0] if args else None)
            if isinstance(device, (str, torch.device)) and is_virtual(torch.device(device)):
                rest = args[1:] if args else ()
                kwargs.pop("device", None)
                return make(torch.device(device), *rest, **kwargs)
            return base(*args, **kwargs)

        def __instancecheck__(cls, instance):
            return isinstance(instance, base)

        def __subclasscheck__(cls, subclass):
            return issubclass(subclass, base)

    namespace = {"__doc__": base.__doc__, "__module__": base.__module__}
    stand_in = Meta(base.__name__, (base,), namespace)
    return stand_in


def patch_accelerator(module, device_type):
    """Let the functions of torch.accelerator be those of `module`, which is torch.vgpu.

    Args:
        module: the module.
        device_type: what programs call the devices.
    """
    for name, function in {
        "current_accelerator": lambda check_available=False: torch.device(device_type),
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
    torch._C._get_accelerator = lambda check=None: torch.device(device_type)


def patch_data_parallel(comm, is_ours, get_stream, device_type):
    """Give nn.DataParallel what it has for CUDA only.

    Args:
        comm: a module with scatter, gather, broadcast and the two coalesced functions.
        is_ours: function that tells whether tensors are on virtual GPUs.
        get_stream: function of a device that returns a side stream for copies to it.
        device_type: what programs call the devices.
    """
    from torch.nn.parallel import _functions, data_parallel
    from torch.nn.parallel import comm as torch_comm

    for name in ("gather", "broadcast", "broadcast_coalesced", "reduce_add_coalesced"):
        setattr(torch_comm, name, _choose(getattr(torch_comm, name), getattr(comm, name), is_ours))
    torch_comm.scatter = comm.scatter
    data_parallel._get_available_device_type = lambda: device_type
    torch._utils._get_available_device_type = lambda: device_type
    _functions._get_stream = get_stream


def _choose(theirs, ours, test):
    @functools.wraps(theirs)
    def function(tensors, *args, **kwargs):
        return (ours if test(tensors) else theirs)(tensors, *args, **kwargs)

    return function


# -- torch.distributed

if torch.distributed.is_available():
    from torch._C._distributed_c10d import (  # noqa: F401
        AllreduceCoalescedOptions,
        AllreduceOptions,
        AllToAllOptions,
        BroadcastOptions,
        GatherOptions,
        ReduceOptions,
        ReduceScatterOptions,
        ScatterOptions,
    )

    process_group = torch._C._distributed_c10d._resolve_process_group  # that has a name

    SUM = torch.distributed.ReduceOp(torch.distributed.ReduceOp.SUM)


def register_process_groups(name, create, is_virtual):
    """Let torch.distributed make process groups of the backend `name` by `create`, for vgpu.

    Args:
        name: of the backend.
        create: function of torch's options for any backend, and those for this one.
        is_virtual: function that tells whether a `torch.device` is a virtual GPU.
    """
    if torch.distributed.is_available():
        register = torch.distributed.Backend.register_backend
        register(name, create, extended_api=True, devices=["vgpu"])
        logger = torch.distributed.Logger
        logger.set_runtime_stats_and_log = _without_timers(logger.set_runtime_stats_and_log)

        patch_hooks(is_virtual)
        _leave_out_flight_recorder()


def _without_timers(log):
    """Return a method of DDP's logger that leaves statistics of time out, which it has for CUDA.

    It would warn of that, on stderr.
    """

    @functools.wraps(log)
    def set_runtime_stats_and_log(self):
        if self._get_ddp_logging_data().strs_map["backend_name"] != "vccl":
            log(self)

    return set_runtime_stats_and_log


def _leave_out_flight_recorder():
    """Let torch 2.15 record no calls of groups written in Python, which its recorder cannot do."""
    c10d = torch.distributed.distributed_c10d
    attach = getattr(c10d, "_maybe_attach_flight_recorder", None)
    if attach is not None:

        @functools.wraps(attach)
        def _maybe_attach_flight_recorder(pg, *args, **kwargs):
            if type(pg) is torch.distributed.ProcessGroup:
                attach(pg, *args, **kwargs)

        c10d._maybe_attach_flight_recorder = _maybe_attach_flight_recorder


def patch_fsdp(module, is_virtual):
    """Let FSDP move what lies on the CPU to a virtual GPU, as it does to others.

    Args:
        module: where it is done: torch.distributed.fsdp._fully_shard._fsdp_init for `fully_shard`,
            torch.distributed.fsdp._init_utils for `FullyShardedDataParallel`.
        is_virtual: function that tells whether a `torch.device` is a virtual GPU.
    """
    move = module._move_states_to_device

    @functools.wraps(move)
    def _move_states_to_device(params, buffers, device):
        for tensor in (*params, *buffers) if device is not None and is_virtual(device) else ():
            if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu":
                moved = tensor.detach().to(device)
                if isinstance(tensor, torch.nn.Parameter):
                    moved = torch.nn.Parameter(moved, tensor.requires_grad)
                torch.utils.swap_tensors(tensor, moved)
        move(params, buffers, device)

    module._move_states_to_device = _move_states_to_device


def patch_fsdp_offload(flat_param, state_dicts, is_ours, is_virtual):
    """Let state dicts of `FullyShardedDataParallel` go to the CPU: each parameter, as it is copied.

    Otherwise the flat parameter would go there by its `data`, which a tensor of ours cannot.

    Args:
        flat_param: torch.distributed.fsdp._flat_param.
        state_dicts: torch.distributed.fsdp._state_dict_utils.
        is_ours: function that tells whether a tensor is on a virtual GPU.
        is_virtual: function that tells whether a `torch.device` is one.
    """
    to_cpu, finish = (
        flat_param.FlatParamHandle.to_cpu,
        state_dicts._common_unshard_post_state_dict_hook,
    )

    @functools.wraps(to_cpu)
    def _to_cpu(self):
        return contextlib.nullcontext() if is_virtual(self.device) else to_cpu(self)

    @functools.wraps(finish)
    def _common_unshard_post_state_dict_hook(module, fsdp_state, state_dict, prefix, param_hook):
        def hook(state_dict, prefix, fqn):
            param_hook(state_dict, prefix, fqn)
            if fsdp_state._state_dict_config.offload_to_cpu and is_ours(state_dict[fqn]):
                state_dict[fqn] = state_dict[fqn].cpu()

        return finish(module, fsdp_state, state_dict, prefix, hook)

    flat_param.FlatParamHandle.to_cpu = _to_cpu
    state_dicts._common_unshard_post_state_dict_hook = _common_unshard_post_state_dict_hook


def patch_names_in_fsdp(module, say):
    """Let `FullyShardedDataParallel` call a GPU by the name that programs know.

    It knows GPUs by their numbers, and `torch.device(0)` has torch's own name for them.

    Args:
        module: torch.distributed.fsdp._init_utils.
        say: function that returns a `torch.device` under the name by which programs know it.
    """
    given, computing = module._get_device_from_device_id, module._get_compute_device

    @functools.wraps(given)
    def _get_device_from_device_id(*args):
        device = given(*args)
        return device and say(device)

    @functools.wraps(computing)
    def _get_compute_device(*args):
        *args, handle = args
        current = say(torch.device("vgpu", handle.current_device()))
        return computing(*args, SimpleNamespace(current_device=lambda: current))

    module._get_device_from_device_id = _get_device_from_device_id
    module._get_compute_device = _get_compute_device


def patch_hooks(is_virtual):
    """Let DDP take hooks for bfloat16, and hooks in Python for those in C++.

    The latter need futures that cannot be made in Python.

    Args:
        is_virtual: function that tells whether a `torch.device` is a virtual GPU.
    """
    ddp = torch.nn.parallel.DistributedDataParallel
    register, check = ddp._register_builtin_comm_hook, ddp._check_comm_hook

    @functools.wraps(register)
    def _register_builtin_comm_hook(self, comm_hook_type):
        if not is_virtual(torch.device(self.device_type)):
            return register(self, comm_hook_type)
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        is_fp16 = comm_hook_type == torch.distributed.BuiltinCommHookType.FP16_COMPRESS
        hook = default_hooks.fp16_compress_hook if is_fp16 else default_hooks.allreduce_hook
        return self.register_comm_hook(self.process_group, hook)

    @functools.wraps(check)
    def _check_comm_hook(self, hook):
        ours = is_virtual(torch.device(self.device_type))
        if not (ours and hook.__name__.startswith("bf16_")):
            check(self, hook)

    ddp._register_builtin_comm_hook = _register_builtin_comm_hook
    ddp._check_comm_hook = _check_comm_hook


def waits_when_used(tensor):
    """Return a tensor that waits for the collective that writes `tensor` when it is first used."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return AsyncCollectiveTensor(tensor)


def part_of_dtensor(tracker, spec):
    """Return the number of this rank's part of a DTensor, whose copies have the same number.

    Args:
        tracker: the `OffsetBasedRNGTracker`.
        spec: the `DTensorSpec`.
    """
    from torch.distributed.tensor import _random

    mesh = spec.mesh
    coordinate = [mesh._sym_get_coordinate(dim) for dim in range(mesh.ndim)]
    return tracker._calc_shard_linear_idx(*_random._calc_shard_info(coordinate, spec))


def kind_of_reduction(op):
    """Return the `ReduceOp.RedOpType` of a `ReduceOp`, or of such a type itself."""
    return op.op if hasattr(op, "op") else op


def factor_of_reduction(op):
    """Return the factor of a `ReduceOp.PREMUL_SUM`, a number or a tensor."""
    return op.factor


def default_store():
    """Return the store of the default process group."""
    return torch.distributed.distributed_c10d._get_default_store()


def fake_store():
    """Return a store of torch's fake process group, in which one rank stands for all."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def is_fake_store(store):
    """Return whether a store is that of torch's fake process group: there are no other ranks."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return type(store).__name__ == "FakeStore"
