"""torch.compile: compiling in this process, the generated code, and torch._dynamo's import.

Also `torch.nn.attention.flex_attention`, whose fused kernels torch.compile would make, in its dense
form.
"""

import torch
from torch.utils.checkpoint import checkpoint

from vgpu.private.dispatch import below_autocast
from vgpu.private.patching import when_imported


def compile_in_this_process():
    """Keep torch's compiler from starting a pool of processes."""
    from torch._inductor import config

    config.compile_threads = 1


def generated_code(compiled, *args):
    """Call a compiled function; return a list of the sources that were generated for it."""
    from torch._inductor.utils import run_and_get_code

    return run_and_get_code(compiled, *args)[1]


def import_dynamo():
    """Import what the first use of torch.compile, or of virtual GPUs, imports."""
    import torch._dynamo  # noqa: F401


def patch_flex_attention(tensor_class, autocast):
    """Make flex_attention compute tensors of a class in its dense form, forward and backward.

    Args:
        tensor_class: the class.
        autocast: function that returns a tuple of tensors in the precision that autocast asks for.
    """

    def change(module):
        attention, keys = module.flex_attention, torch._C.DispatchKey
        attention.py_impl(tensor_class)(module.sdpa_dense)

        @attention.py_impl(keys.AutogradPrivateUse1)
        def differentiable(*args):
            """Compute the scores once more in backward, as CUDA does, rather than keep them."""
            recomputing = {"use_reentrant": False, "preserve_rng_state": False}
            output, logsumexp, max_scores = checkpoint(module.sdpa_dense, *args, **recomputing)
            return output, logsumexp, max_scores.detach()

        @attention.py_impl(keys.AutocastPrivateUse1)
        def cast(query, key, value, *others):
            """Cast what CUDA casts (torch's `_flex_attention_autocast_impl`)."""
            with below_autocast():
                return attention(*autocast((query, key, value)), *others)

    when_imported("torch._higher_order_ops.flex_attention", change)
