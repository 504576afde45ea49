"""Features that only CUDA has: using one raises an error that names it and says what to do."""

import warnings

import torch

from vgpu.private.patching import replace, when_imported

_SUMMARY = "the summary of vgpu run tells how busy each GPU of each process was, and its memory"
_INSTEAD = {  # part of a name -> what to do
    "nccl": "torch.cuda.comm has some of them, and torch.distributed all",
    "raph": "run the code without capturing it (torchtitan: --training.disable_cuda_graphs)",
    "utilization": _SUMMARY,
    "list_gpu": _SUMMARY,
    "memory_usage": _SUMMARY,  # the share of time in which memory was read or written
    "memory": "torch.cuda.memory_stats and memory_summary show what virtual GPUs hold",
}
_KERNELS = "give it a version in PyTorch's own operators, or run it on a machine with a GPU"


def refusing(name):
    """Return a class that raises NotImplementedError when called, for a name in full."""
    hints = (hint for part, hint in _INSTEAD.items() if part in name)
    instead = next(hints, "leave it out, or run it on a machine with a GPU")

    def __new__(cls, *args, **kwargs):
        raise _needs_a_gpu(name, instead)

    refused = type(
        name.rpartition(".")[2], (), {"__new__": __new__, "__doc__": f"{name}: refused."}
    )
    refused.__wrapped__ = refused  # torch._dynamo of 2.15 lists what `use_mem_pool` wraps
    return refused


def _needs_a_gpu(name, instead):
    return NotImplementedError(f"{name} needs a real GPU, and these are virtual: {instead}")


def refuse_extensions():
    """Make CUDA extensions and Triton kernels raise, and torch.compile warn, by name."""
    replace(torch, compile=_compile)
    when_imported("torch.utils.cpp_extension", _change_extensions)
    when_imported("triton.runtime.jit", _change_triton)
    when_imported("deepspeed.ops.adam.fused_adam", _change_deepspeed)


def _compile(model=None, **options):
    """Return `model` as it is: kernels compiled for CUDA need a GPU."""
    warnings.warn(
        "torch.compile does nothing on virtual GPUs: its kernels for CUDA need Triton and a real "
        "GPU, so the program runs operator by operator",
        stacklevel=2,
    )
    return (lambda model: model) if model is None else model


def _change_extensions(module):
    """Make torch.utils.cpp_extension refuse sources in CUDA; C++ alone is compiled as usual."""
    load, load_inline = module.load, module.load_inline

    def _load(name, sources, *args, with_cuda=None, **kwargs):
        files = [sources] if isinstance(sources, str) else sources
        if with_cuda or any(str(file).endswith((".cu", ".cuh")) for file in files):
            raise _needs_a_gpu(f"the CUDA extension {name!r}", _KERNELS)
        return load(name, sources, *args, with_cuda=False, **kwargs)

    def _load_inline(name, cpp_sources, cuda_sources=None, *args, with_cuda=None, **kwargs):
        if with_cuda or cuda_sources:
            raise _needs_a_gpu(f"the CUDA extension {name!r}", _KERNELS)
        return load_inline(name, cpp_sources, cuda_sources, *args, with_cuda=False, **kwargs)

    def _cuda_extension(name, sources, *args, **kwargs):
        raise _needs_a_gpu(f"the CUDA extension {name!r}", _KERNELS)

    replace(module, load=_load, load_inline=_load_inline, CUDAExtension=_cuda_extension)


def _change_triton(module):
    """Make Triton kernels raise when they are launched."""

    def run(self, *args, **kwargs):
        name = getattr(getattr(self, "fn", None), "__name__", type(self).__name__)
        raise _needs_a_gpu(f"the Triton kernel {name!r}", _KERNELS)

    replace(module.JITFunction, run=run)


def _change_deepspeed(module):
    """Make DeepSpeed's Adam, an extension that it compiles, name the option that avoids it."""

    def __init__(self, *args, **kwargs):
        raise _needs_a_gpu(
            "DeepSpeed's FusedAdam",
            'let "params" of the "optimizer" in its configuration have "torch_adam": true',
        )

    replace(module.FusedAdam, __init__=__init__)
