"""The device type `vgpu`, and torch's classes and functions for devices."""

import functools
import numbers

import torch

from vgpu.private.patching import replace
from vgpu.private.tensors import CPUGenerator
from vgpu.private.virtual_tables import DeviceGuard, Hooks, answer_without_python

BaseStream, BaseEvent = torch.Stream, torch.Event  # `patch_classes` replaces them
_libraries = []  # kept alive: a deleted torch.library.Library unregisters its kernels


def register_device_type(module, factory, copy_, is_pinned, pin, restore, kernels, refusals):
    """Register the device type `vgpu`, whose module is `torch.vgpu`; return a warning, or None.

    `factory(func, *args, **kwargs)` is for operators without a virtual tensor, `restore(storage,
    location)` for torch.load; `kernels` are functions(library) that register further aten kernels;
    `refusals` has the function(func, *args, **kwargs) that refuses operators of a kind of tensors,
    such as "NestedTensor". Raises RuntimeError if another package has registered a device type.
    """
    name = torch._C._get_privateuse1_backend_name()
    if name != "privateuseone":
        raise RuntimeError(f"torch's only slot for another device type is taken by {name!r}")
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(
        "vgpu", backend_module=module, hook=Hooks(), device_guard=DeviceGuard()
    )
    warning = answer_without_python()
    library = torch.library.Library("_", "IMPL")
    library.fallback(factory, "PrivateUse1")
    _libraries.append(library)
    # torch.tensor(..., device=) creates and copies with __torch_dispatch__ disabled. Within a
    # TorchDispatchMode torch then finds no fallback, only kernels of these operators.
    library = torch.library.Library("aten", "IMPL")
    library.impl("copy_", copy_, "PrivateUse1")
    empty_strided = torch.ops.aten.empty_strided.default
    library.impl(empty_strided, functools.partial(factory, empty_strided), "PrivateUse1")
    library.impl("is_pinned", lambda tensor, device=None: is_pinned(tensor), "CPU")
    library.impl("_pin_memory", lambda tensor, device=None: pin(tensor.clone()), "CPU")
    for add in kernels:
        add(library)
    _libraries.append(library)
    library = torch.library.Library("_", "IMPL")
    library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for kind, refuse in refusals.items():
        library.fallback(refuse, f"{kind}PrivateUse1")
    _libraries.append(library)
    # a low number, to precede torch's own, which would allocate on the device
    torch.serialization.register_package(15, lambda storage: None, restore)
    return warning


def patch_settings(wait):
    """Call `wait` before the default dtype or the deterministic mode changes.

    Queued kernels read them when they run, and they are global to all threads. Setting the current
    dtype again does not wait: torch.compile does so while it holds a lock for which a queued kernel
    may wait.
    """

    def waiting(function):
        @functools.wraps(function)
        def call(*args, **options):
            if args != (torch.get_default_dtype(),):
                wait()
            return function(*args, **options)

        return call

    names = "_set_default_dtype _set_default_tensor_type _set_deterministic_algorithms".split()
    replace(torch._C, **{name: waiting(getattr(torch._C, name)) for name in names})


def patch_classes(stream, event, generator, is_virtual):
    """Make `torch.Stream`, `torch.Event` and `torch.Generator` accept virtual GPUs.

    `stream`, `event` and `generator` are functions(device, ...) that create one.
    """
    torch.Stream = _replacement(BaseStream, stream, is_virtual, "vgpu")
    torch.Event = _replacement(BaseEvent, event, is_virtual, "vgpu")
    torch.Generator = _replacement(CPUGenerator, generator, is_virtual)


class _LikeBase(type):
    """The metaclass of a class that replaces `_base`, in `isinstance` as well."""

    def __instancecheck__(cls, instance):
        return isinstance(instance, cls._base)

    def __subclasscheck__(cls, subclass):
        return subclass is cls or issubclass(subclass, cls._base)


def _replacement(base, make, is_virtual, default=None):
    """Return a class that replaces `base` and calls `make` for a virtual GPU, or as `default`."""

    class Meta(_LikeBase, type(base)):
        def __call__(cls, *args, **kwargs):
            if cls is not stand_in:  # a user's subclass
                return super().__call__(*args, **kwargs)
            device = kwargs.get("device", args[0] if args else None)
            if device is None and "stream_id" not in kwargs:
                device = default
            known = isinstance(device, (str, torch.device)) or _is_number(device)
            if known and is_virtual(torch.device(device)):
                kwargs.pop("device", None)
                return make(torch.device(device), *args[1:], **kwargs)
            return base(*args, **kwargs)

    Meta._base = base
    names = {"__doc__": base.__doc__, "__module__": base.__module__}
    stand_in = Meta(base.__name__, (base,), names)
    return stand_in


def _is_number(device):
    """Return whether a device is an index, Python's or numpy's; torch refuses bool."""
    return isinstance(device, numbers.Integral) and not isinstance(device, bool)


def name_numbered_devices(device_type):
    """Make `torch.device(1)` a device of this type.

    A class replaces `torch.device`, and equals it, for tables of types.
    """
    base = torch.device

    class Meta(_LikeBase):
        def __call__(cls, *args, **kwargs):
            if len(args) == 1 and _is_number(args[0]) and not kwargs:
                args = device_type, *args
            return base(*args, **kwargs)

        def __getattr__(cls, name):
            return getattr(base, name)

        def __eq__(cls, other):
            return other is cls or other is base

        def __hash__(cls):
            return hash(base)

    Meta._base = base
    torch.device = Meta("device", (), {"__doc__": base.__doc__, "__module__": "torch"})
    torch.jit._builtins._register_builtin(torch.device, "aten::device")


_ACCELERATOR_NAMES = """
    current_stream set_stream synchronize memory_allocated max_memory_allocated memory_reserved
    max_memory_reserved memory_stats reset_peak_memory_stats empty_cache
""".split()


def patch_accelerator(module, device_type):
    """Replace functions of torch.accelerator by those of `module`, `torch.vgpu`."""
    replace(
        torch.accelerator,
        **{name: getattr(module, name) for name in _ACCELERATOR_NAMES},
        current_accelerator=lambda check_available=False: torch.device(device_type),
        current_device_index=module.current_device,
        current_device_idx=module.current_device,
        set_device_index=module.set_device,
        set_device_idx=module.set_device,
        device_index=module.device,
    )
    torch._C._get_accelerator = lambda check=None: torch.device(device_type)
