"""Features that need a real GPU: using one raises an error with its name and an alternative."""

import warnings

import torch

from vgpu.private.patching import replace, when_imported

_SUMMARY = "the summary of vgpu run shows the utilization and memory of each GPU of each process"
_ALTERNATIVES = {  # part of a name -> alternative
    "nccl": "use torch.distributed, or torch.cuda.comm, which has some of these functions",
    "raph": "run the code without capturing it (torchtitan: --training.disable_cuda_graphs)",
    "utilization": _SUMMARY,
    "list_gpu": _SUMMARY,
    "memory_usage": _SUMMARY,  # the share of time in which memory was read or written
    "cudaHost": "use Tensor.pin_memory",
    "host_memory": "remove the call: pinned memory is not counted",
    "memory_history": "give 'all' or None in place of True or False",
    "memory": "use torch.cuda.memory_stats or memory_summary",
}
_KERNELS = "write it with PyTorch's own operators, or run it on a machine with a GPU"


def refusing(name):
    """Return a class that raises NotImplementedError when called; `name` is the full name."""
    hints = (hint for part, hint in _ALTERNATIVES.items() if part in name)
    alternative = next(hints, "remove the call, or run it on a machine with a GPU")

    def __new__(cls, *args, **kwargs):
        raise _needs_a_gpu(name, alternative)

    refused = type(
        name.rpartition(".")[2], (), {"__new__": __new__, "__doc__": f"{name}: refused."}
    )
    refused.__wrapped__ = refused  # torch._dynamo 2.15 reads `use_mem_pool.__wrapped__`
    return refused


def _needs_a_gpu(name, alternative):
    return NotImplementedError(f"{name} needs a real GPU, and these are virtual: {alternative}")


def refuse_extensions():
    """Make CUDA extensions and Triton kernels raise, and torch.compile warn."""
    replace(torch, compile=_compile)
    when_imported("torch.utils.cpp_extension", _change_extensions)
    when_imported("triton.runtime.jit", _change_triton)
    when_imported("deepspeed.ops.adam.fused_adam", _change_deepspeed)


def _compile(model=None, **options):
    """Return `model` unchanged: kernels compiled for CUDA need a GPU."""
    warnings.warn(
        "torch.compile does nothing on virtual GPUs: its CUDA kernels need Triton and a real "
        "GPU, so the program runs in eager mode",
        stacklevel=2,
    )
    return (lambda model: model) if model is None else model


def _change_extensions(module):
    """Make torch.utils.cpp_extension refuse CUDA sources; C++ is compiled as usual."""
    load, load_inline = module.load, module.load_inline

    def _cuda_extension(name, *args, **kwargs):
        raise _needs_a_gpu(f"the CUDA extension {name!r}", _KERNELS)

    def _load(name, sources, *args, with_cuda=None, **kwargs):
        files = [sources] if isinstance(sources, str) else sources
        if with_cuda or any(str(file).endswith((".cu", ".cuh")) for file in files):
            _cuda_extension(name)
        return load(name, sources, *args, with_cuda=False, **kwargs)

    def _load_inline(name, cpp_sources, cuda_sources=None, *args, with_cuda=None, **kwargs):
        if with_cuda or cuda_sources:
            _cuda_extension(name)
        return load_inline(name, cpp_sources, cuda_sources, *args, with_cuda=False, **kwargs)

    replace(module, load=_load, load_inline=_load_inline, CUDAExtension=_cuda_extension)


def _change_triton(module):
    def run(self, *args, **kwargs):
        name = getattr(getattr(self, "fn", None), "__name__", type(self).__name__)
        raise _needs_a_gpu(f"the Triton kernel {name!r}", _KERNELS)

    replace(module.JITFunction, run=run)


def _change_deepspeed(module):
    def __init__(self, *args, **kwargs):
        raise _needs_a_gpu(
            "DeepSpeed's FusedAdam",
            'add "torch_adam": true to the "params" of the "optimizer" in its configuration',
        )

    replace(module.FusedAdam, __init__=__init__)
