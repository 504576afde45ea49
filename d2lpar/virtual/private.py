"""Everything here that is private to torch: registration, backward's errors, and patches.

Known to work on torch 2.11 to 2.15.
"""

import ctypes
import functools
import os
import signal
import threading

import torch

from d2lpar.interrupts import held_back

from . import autocast, comm, engine, module, saving
from . import device as registry
from .operators import copy, is_pinned, issue_factory, pin
from .tensor import VirtualTensor

FIRST, LAST = (2, 11), (2, 15)
_libraries = []  # kept alive: a torch.library.Library takes back what it registered


def check_version(version):
    """Raise RuntimeError for a version of torch on which virtual GPUs are not known to work."""
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if not FIRST <= numbers <= LAST:
        raise RuntimeError(
            f"virtual GPUs work on torch {FIRST[0]}.{FIRST[1]} to {LAST[0]}.{LAST[1]}; "
            f"this is torch {version}"
        )


def register():
    """Make the device type `vgpu` known to torch; raises RuntimeError where that cannot be."""
    check_version(torch.__version__)
    name = torch._C._get_privateuse1_backend_name()
    if name != "privateuseone":
        raise RuntimeError(f"torch's slot for a further device type is taken by {name!r}")
    with held_back():  # what the first shape inference imports stays broken if it is interrupted
        torch.ones(1, device="meta") + 1
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(
        "vgpu", backend_module=module, device_guard=_DeviceGuard()
    )
    library = torch.library.Library("_", "IMPL")
    library.fallback(_factory, "PrivateUse1")
    _libraries.append(library)
    # torch.tensor(..., device=) makes its tensor and copies with __torch_dispatch__ switched off;
    # within a TorchDispatchMode torch finds no fallback there, only kernels of their own
    library = torch.library.Library("aten", "IMPL")
    library.impl("copy_", _copy_, "PrivateUse1")
    empty_strided = torch.ops.aten.empty_strided.default
    library.impl(empty_strided, functools.partial(_factory, empty_strided), "PrivateUse1")
    _libraries.append(library)
    torch.__future__.set_swap_module_params_on_conversion(True)
    # before torch's own, which would ask for memory on the device
    torch.serialization.register_package(15, lambda storage: None, saving.restore)
    _register_pinning()
    _register_autocast()
    _patch_backward()
    _patch_accelerator()
    _patch_data_parallel()
    os.register_at_fork(
        before=engine.before_fork,
        after_in_parent=engine.after_fork,
        after_in_child=engine.after_fork_in_child,
    )


def _factory(func, *args, **kwargs):
    return issue_factory(func, args, kwargs)


def _copy_(target, source, non_blocking=False):
    copy(target, source, non_blocking)
    return target


# -- errors in backward: see design, "The trap"

_fetch = ctypes.pythonapi.PyErr_Fetch
_fetch.restype = None
_error = [ctypes.c_void_p() for _ in range(3)]
_references = [ctypes.byref(part) for part in _error]
_kept = []


class _DeviceGuard(torch._C._acc.DeviceGuard):
    """torch asks this for its type from a destructor, where a pending exception must be put aside
    before anything else or the process ends."""

    def type_(
        self,
        fetch=_fetch,
        references=_references,
        error=_error,
        answer=torch._C._autograd.DeviceType.PrivateUse1,
    ):
        fetch(*references)
        if error[0].value is not None:
            _keep_error()
        return answer


def _keep_error():
    """Keep the exception that PyErr_Fetch took, for `_run_backward` to raise."""
    api = ctypes.pythonapi
    api.PyErr_NormalizeException.argtypes = [ctypes.c_void_p] * 3
    api.PyErr_NormalizeException.restype = None
    api.PyErr_NormalizeException(*(ctypes.addressof(part) for part in _error))
    kind, value, traceback = (
        None if part.value is None else ctypes.cast(part, ctypes.py_object).value for part in _error
    )
    if traceback is not None:
        value = value.with_traceback(traceback)
    _kept.append(value)
    for part in _error:
        if part.value is not None:
            ctypes.pythonapi.Py_DecRef(part)
        part.value = None


class _Interrupts:
    """Put off an interrupt that comes while torch's own code runs, where it must not raise, until
    backward has issued its work; in a hook or in an operator of ours it is raised at once."""

    def __init__(self, *unsafe):
        self._unsafe = {function.__code__ for function in (*unsafe, _DeviceGuard.type_)}

    def __enter__(self):
        self._came = self._handler = None
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, self._interrupt)

    def _interrupt(self, number, frame):
        if frame is not None and frame.f_code in self._unsafe:
            self._came = number
        else:
            self._handler(number, frame)

    def __exit__(self, *exception):
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if self._came is not None:
                self._handler(self._came, None)


def _patch_backward():
    """Run backward in the calling thread (it only issues), and raise the errors put aside."""
    graph = torch.autograd.graph
    run_backward = graph._engine_run_backward

    @functools.wraps(run_backward)
    def _run_backward(*args, **kwargs):
        depth = len(_kept)
        try:
            with torch.autograd.set_multithreading_enabled(False), _Interrupts(run_backward):
                return run_backward(*args, **kwargs)
        except SystemError:
            if len(_kept) > depth:
                error = _kept[depth]
                del _kept[depth:]
                try:
                    raise error from None
                finally:
                    del error  # its traceback holds this frame, and all tensors on the way
            raise

    graph._engine_run_backward = _run_backward
    torch.autograd._engine_run_backward = _run_backward


# -- pinned memory


def _register_pinning():
    library = torch.library.Library("aten", "IMPL")
    library.impl("is_pinned", lambda tensor, device=None: is_pinned(tensor), "CPU")
    library.impl("_pin_memory", lambda tensor, device=None: pin(tensor.clone()), "CPU")
    _libraries.append(library)


# -- autocast


def _register_autocast():
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    library = torch.library.Library("aten", "IMPL")
    autocast.register(library)
    _libraries.extend((fallback, library))


# -- torch.accelerator and nn.DataParallel


def _patch_accelerator():
    """Let torch.accelerator's functions mean our streams and devices."""
    accelerator = torch.accelerator
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
        "reset_peak_memory_stats": module.reset_peak_memory_stats,
        "empty_cache": module.empty_cache,
    }.items():
        setattr(accelerator, name, function)


def _patch_data_parallel():
    """Give nn.DataParallel the four functions that it has for CUDA only."""
    from torch.nn.parallel import _functions, data_parallel
    from torch.nn.parallel import comm as torch_comm

    def ours(argument):
        if isinstance(argument, torch.Tensor):
            return type(argument) is VirtualTensor
        return any(ours(item) for item in argument)

    for name in ("scatter", "gather", "broadcast", "broadcast_coalesced", "reduce_add_coalesced"):
        setattr(torch_comm, name, _choose(getattr(torch_comm, name), getattr(comm, name), ours))
    torch_comm.scatter = comm.scatter
    data_parallel._get_available_device_type = lambda: "vgpu"
    torch._utils._get_available_device_type = lambda: "vgpu"
    streams = {}

    def get_stream(device):
        device = registry.find(device)
        if device.index not in streams:
            streams[device.index] = module.Stream(device.index)
        return streams[device.index]

    _functions._get_stream = get_stream


def _choose(theirs, ours, test):
    @functools.wraps(theirs)
    def function(tensors, *args, **kwargs):
        return (ours if test(tensors) else theirs)(tensors, *args, **kwargs)

    return function
