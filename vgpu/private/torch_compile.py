"""torch.compile and flex_attention."""

import torch
from torch.utils.checkpoint import checkpoint

from vgpu.private.dispatch import below_autocast
from vgpu.private.patching import when_imported


def compile_in_this_process():
    """Prevent torch's compiler from starting a process pool."""
    from torch._inductor import config

    config.compile_threads = 1


def generated_code(compiled, *args):
    """Call a compiled function; return the generated sources, a list."""
    from torch._inductor.utils import run_and_get_code

    return run_and_get_code(compiled, *args)[1]


def import_dynamo():
    """Import the modules that torch.compile and virtual GPUs import on first use."""
    import torch._dynamo  # noqa: F401


def patch_flex_attention(tensor_class, autocast):
    """Make flex_attention use its dense form for tensors of a class, forward and backward.

    `autocast` casts a tuple of tensors to the precision of autocast.
    """

    def change(module):
        attention, keys = module.flex_attention, torch._C.DispatchKey
        attention.py_impl(tensor_class)(module.sdpa_dense)

        @attention.py_impl(keys.AutogradPrivateUse1)
        def differentiable(*args):
            """Recompute the scores in backward, like CUDA's kernel."""
            recomputing = {"use_reentrant": False, "preserve_rng_state": False}
            output, logsumexp, max_scores = checkpoint(module.sdpa_dense, *args, **recomputing)
            return output, logsumexp, max_scores.detach()

        @attention.py_impl(keys.AutocastPrivateUse1)
        def cast(query, key, value, *others):
            """Cast the arguments that CUDA casts (torch's `_flex_attention_autocast_impl`)."""
            with below_autocast():
                return attention(*autocast((query, key, value)), *others)

    when_imported("torch._higher_order_ops.flex_attention", change)
