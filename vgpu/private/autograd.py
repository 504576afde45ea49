"""The backward pass: its numbers, its threads, and what it leaves behind when it fails."""

import contextlib
import functools
import threading

import torch

from vgpu.private.patching import replace, when_imported
from vgpu.private.tensors import own_device

sequence_number = torch.autograd._get_sequence_nr  # the number of autograd's next operator


def in_backward():
    """Return whether the calling thread is in a backward pass."""
    return torch._C._current_graph_task_id() != -1


backward_number = torch._C._current_graph_task_id  # the number of the pass; -1 outside of one
autograd_node = torch._C._current_autograd_node  # the node whose backward runs in this thread


def forward_number(node):
    """Return the number of the operator of the forward that an autograd node belongs to.

    It is None for a node that belongs to none, such as the accumulation of a gradient.
    """
    number = node._sequence_nr()
    return number if number < _NUMBERS_WITHOUT_FORWARD else None


_NUMBERS_WITHOUT_FORWARD = 2**62
_below_autograd = threading.local()


def set_below_autograd():
    """Make the operators of the calling thread bypass autograd as long as the thread lives."""
    _below_autograd.guard = torch._C._AutoDispatchBelowAutograd()


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
        if any(own_device(tensor).type not in ("vgpu", "cpu") for tensor in _roots(tensors)):
            with _on_real_gpus():
                return run_backward(tensors, *args, **kwargs)  # GPUs have threads of their own
        try:
            with streams_of_forward():
                return _in_this_thread(run_backward, tensors, *args, **kwargs)
        except BaseException:
            if not in_backward():  # no other backward is around this one
                drop_tasks()
            raise

    def drop_tasks():
        """Make torch drop the tasks of a failed backward, and the tensors in them.

        Otherwise they stay in the thread's queue until its next backward.
        """
        with contextlib.suppress(Exception), torch.inference_mode(False), torch.enable_grad():
            leaf = torch.zeros((), requires_grad=True, device="cpu")
            ones = torch.ones((), device="cpu")
            run_backward((leaf * 1,), (ones,), False, False, (), accumulate_grad=True)

    graph._engine_run_backward = _run_backward
    torch.autograd._engine_run_backward = _run_backward


@contextlib.contextmanager
def _on_real_gpus():
    """Explain the assertion that torch fails there once it knows another device type."""
    try:
        yield
    except RuntimeError as error:
        if "opt_ready_stream" not in str(error):
            raise
        raise RuntimeError(
            "torch computes no gradients on real GPUs in a process that has used virtual ones "
            "(https://github.com/pytorch/pytorch/issues/161129): restart it, or move the network "
            "to the virtual GPUs that ensure_gpus returns now"
        ) from error


def patch_distributed_backward():
    """Run `torch.distributed.autograd.backward`, too, without torch's queues for each GPU.

    There is one for all virtual GPUs, and a node of another than the first would end in an internal
    assert. What other workers do for it, in threads that torch starts, is not reached by this.
    """

    def change(module):
        backward = module.backward

        @functools.wraps(backward)
        def _backward(context_id, roots, retain_graph=False):
            _in_this_thread(backward, context_id, roots, retain_graph)

        if module.is_available():
            replace(module, backward=_backward)

    when_imported("torch.distributed.autograd", change)


def _in_this_thread(run, *args, **kwargs):
    """Call a function that runs a backward pass, without torch's threads for GPUs."""
    multithreading = torch._C._is_multithreading_enabled()
    try:
        torch._C._set_multithreading_enabled(False)
        return run(*args, **kwargs)
    finally:
        torch._C._set_multithreading_enabled(multithreading)


def _roots(tensors):
    if isinstance(tensors, torch.Tensor):
        return (tensors,)
    return [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
