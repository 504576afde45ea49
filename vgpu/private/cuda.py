"""Virtual GPUs in place of CUDA's, in `torch.cuda` and in torch's C++ code."""

import functools
import warnings

import torch

from vgpu.private.patching import naming_device, replace, when_imported
from vgpu.private.virtual_tables import install_cuda_guard

_libraries = []  # kept alive: a deleted torch.library.Library unregisters its kernels
# The factories with their own kernel in a CUDA build of torch; all others call these.
_FACTORIES = ("empty.memory_format", "empty_strided", "tril_indices", "triu_indices")


def register_cuda(factory, refusals):
    """Make "cuda" devices virtual GPUs in torch's C++ code, also in a CUDA build.

    `factory` and `refusals` are those of `register_device_type`. RuntimeError if virtual GPUs
    cannot replace CUDA's on this machine or this torch.
    """
    install_cuda_guard()
    library = torch.library.Library("_", "IMPL")
    library.fallback(factory, "CUDA")
    for kind, refuse in refusals.items():
        library.fallback(refuse, f"{kind}CUDA")
    _libraries.append(library)
    library_of = functools.cache(lambda namespace: torch.library.Library(namespace, "IMPL"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a CUDA build warns about replaced kernels
        for name in _FACTORIES:
            packet, _, overload = name.partition(".")
            func = getattr(getattr(torch.ops.aten, packet), overload or "default")
            library_of("aten").impl(name, functools.partial(factory, func), "CUDA")
        for kind, refuse in refusals.items():
            key = f"{kind}CUDA"
            for name in torch._C._dispatch_get_registrations_for_dispatch_key(key):
                namespace, _, plain = name.partition("::")
                refusal = functools.partial(refuse, f"{namespace}.{plain}")
                library_of(namespace).impl(plain, refusal, key)
    _libraries.append(library_of)


def replace_in_cuda(values):
    """Replace names of `torch.cuda` and its modules that exist in this torch."""
    cuda = torch.cuda
    for name, value in values.items():
        for home in (cuda, cuda.memory, cuda.random, cuda.streams, cuda.graphs):
            if hasattr(home, name):
                setattr(home, name, value)


def replace_private_names(module, history, sleep, set_stream, refusing, cudart):
    """Replace private names of `torch.cuda` and `torch._C` that programs use.

    Those of `torch._C` are called by `torch.cuda`, torch's test classes and `torch._dynamo.reset`.
    `module` and `history` are `torch.vgpu` and `vgpu.recording.history`; `refusing(name)` returns a
    callable that raises an error; `cudart` has functions of CUDA's library.
    """
    replace_in_cuda(
        {
            "_cudart": cudart,
            "_sleep": sleep,
            "_lazy_call": lambda function, **kwargs: function(),
            "_is_in_bad_fork": module._is_in_bad_fork,
            "_compile_kernel": refusing("torch.cuda._compile_kernel"),
        }
    )
    replace(
        torch._C,
        _cuda_record_memory_history=history.record_memory_history,
        _cuda_record_memory_history_legacy=refusing(
            "torch.cuda.memory._record_memory_history(bool)"
        ),
        _cuda_memorySnapshot=history.snapshot,
        # A separate function: torch._dynamo has different rules for torch.cuda.set_device.
        _cuda_setDevice=lambda device: module.set_device(device),
        _cuda_setStream=set_stream,
        _cuda_cudaCachingAllocator_is_enabled=lambda: True,
        _cuda_jiterator_compile_and_launch_kernel=refusing("torch.cuda.jiterator"),
        _cuda_clearCublasWorkspaces=lambda: None,  # there are no workspaces
        _cuda_resetCublasWorkspaceSize=lambda: None,
        _cuda_resetCublasLtWorkspaceSize=lambda: None,
    )
    if not hasattr(torch._C, "_cuda_CUDAAllocator_AllocatorState"):  # a CPU build of torch
        replace(
            torch._C,
            _cuda_CUDAAllocator_AllocatorState=refusing("torch.cuda.CUDAGraph"),
            _set_cached_tensors_enabled=lambda enabled: None,  # there are no CUDA graphs
        )


def remove_privateuse1_tests():
    """Remove our device type from torch's test classes: it is tested as "cuda" already."""
    when_imported(
        "torch.testing._internal.common_device_type",
        lambda module: module.device_type_test_bases.remove(module.PrivateUse1TestBase),
    )


def skip_initialization():
    """Prevent torch from initialising CUDA, which fails without a real GPU."""
    replace_in_cuda({"_lazy_init": lambda: None})
    torch.cuda._initialized = True


def patch_messages(tensor_class):
    """Name "cuda" in errors of C++ code: for gradients of tensors of a class, recurrent layers."""
    grad, names = torch.Tensor.grad, ("lstm", "gru", "rnn_tanh", "rnn_relu")
    tensor_class.grad = property(grad.__get__, naming_device("cuda", grad.__set__), grad.__delete__)
    replace(torch._VF, **{name: naming_device("cuda", getattr(torch._VF, name)) for name in names})


def patch_autocast():
    """Make autocast("cuda") an autocast of "vgpu", the device type in torch's C++ code."""

    def translated(function):
        @functools.wraps(function)
        def call(device_type="cuda", *args, **kwargs):
            return function("vgpu" if device_type == "cuda" else device_type, *args, **kwargs)

        return call

    names = "is_autocast_enabled set_autocast_enabled get_autocast_dtype set_autocast_dtype"
    for name in names.split():
        setattr(torch, name, translated(getattr(torch, name)))
    torch.get_autocast_gpu_dtype = lambda: torch.get_autocast_dtype("cuda")
    init = torch.amp.autocast.__init__

    @functools.wraps(init)
    def __init__(self, device_type, *args, **kwargs):
        init(self, "vgpu" if device_type == "cuda" else device_type, *args, **kwargs)

    torch.amp.autocast.__init__ = __init__
