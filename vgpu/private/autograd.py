"""The backward pass: sequence numbers, threads, and cleaning up after a failure."""

import contextlib
import functools

import torch

from vgpu.private.patching import naming_device, replace, when_imported
from vgpu.private.tensors import device_in_cpp

sequence_number = torch.autograd._get_sequence_nr  # the number of autograd's next operator


def in_backward():
    return torch._C._current_graph_task_id() != -1


backward_number = torch._C._current_graph_task_id  # the number of the pass; -1 outside of one
autograd_node = torch._C._current_autograd_node  # the node whose backward runs in this thread


def forward_number(node):
    """Return the sequence number of an autograd node's forward operator.

    None for a node without one, such as the accumulation of a gradient.
    """
    number = node._sequence_nr()
    return number if number < _NUMBERS_WITHOUT_FORWARD else None


_NUMBERS_WITHOUT_FORWARD = 2**62


def _on_device(grad, device, said, named):
    """Return a gradient that is on `device`, or a number, moved there; else raise RuntimeError."""
    if not isinstance(grad, torch.Tensor) or device_in_cpp(grad) == device:
        return grad
    if grad.dim() == 0:
        return grad.to(named(device))
    raise RuntimeError(f"{said} - expected device {named(device)} but got {grad.device}")


def _check_functions(named):
    """Check the devices of the gradients that a `torch.autograd.Function` returns."""

    def checking(apply):
        @functools.wraps(apply)
        def _apply(node, *args):
            grads = apply(node, *args)
            found = [*grads] if isinstance(grads, tuple) else [grads]
            needing = enumerate(node.needs_input_grad[: len(found)])
            positions = [position for position, needs in needing if needs]
            edges = [edge for edge in enumerate(node.next_functions) if edge[1][0] is not None]
            for position, (index, (target, number)) in zip(positions, edges, strict=False):
                said = f"Function {node.name()} returned an invalid gradient at index {index}"
                device = target._input_metadata[number].device
                found[position] = _on_device(found[position], device, said, named)
            return tuple(found) if isinstance(grads, tuple) else found[0]

        return _apply

    function = torch.autograd.function.BackwardCFunction
    for name in {"apply", "apply_boxed"} & vars(function).keys():
        setattr(function, name, checking(vars(function)[name]))


def patch_backward(streams_of_forward, device_type, named):
    """Run backward of virtual GPUs in the calling thread, where it only issues ops.

    torch has a single backward queue for all virtual GPUs anyway. `streams_of_forward` returns a
    context manager in which each operator is issued to the stream of its forward, and `named` a
    device of torch's C++ code under its name in programs, whose type is `device_type`.
    """
    graph = torch.autograd.graph
    run_backward = naming_device(device_type, graph._engine_run_backward)
    _check_functions(named)

    @functools.wraps(run_backward)
    def _run_backward(tensors, grads, *args, **kwargs):
        roots = [(i, each) for i, each in enumerate(tensors) if isinstance(each, torch.Tensor)]
        if any(device_in_cpp(tensor).type not in ("vgpu", "cpu") for _, tensor in roots):
            with on_real_gpus():
                return run_backward(tensors, grads, *args, **kwargs)  # in torch's threads for GPUs
        grads = [*grads]
        for i, tensor in roots:
            said = f"invalid gradient at index {i}"
            grads[i] = _on_device(grads[i], device_in_cpp(tensor), said, named)
        try:
            with streams_of_forward():
                return _in_this_thread(run_backward, tensors, tuple(grads), *args, **kwargs)
        except BaseException:
            if not in_backward():  # not nested in another backward
                drop_tasks()
            raise

    def drop_tasks():
        """Free the tasks of a failed backward, and their tensors, from the thread's queue.

        The next backward would free them, so this runs one.
        """
        with contextlib.suppress(Exception), torch.inference_mode(False):  # which enables gradients
            leaf = torch.zeros((), requires_grad=True, device="cpu")
            ones = torch.ones((), device="cpu")
            run_backward((leaf * 1,), (ones,), False, False, (), accumulate_grad=True)

    graph._engine_run_backward = _run_backward
    torch.autograd._engine_run_backward = _run_backward


@contextlib.contextmanager
def on_real_gpus():
    """Explain the assertion that fails in torch once another device type is registered."""
    try:
        yield
    except RuntimeError as error:
        if "opt_ready_stream" not in str(error):
            raise
        raise RuntimeError(
            "torch computes no gradients on real GPUs in a process that has used virtual ones "
            "(https://github.com/pytorch/pytorch/issues/161129): restart the process, or move the "
            "network to the virtual GPUs that ensure_gpus returns now"
        ) from error


def patch_distributed_backward():
    """Run `torch.distributed.autograd.backward`, too, in the calling thread.

    torch has a single queue for all virtual GPUs, and nodes of all but the first would fail an
    internal assertion. This does not reach other workers, which run in torch's threads.
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
    """Run a backward pass without torch's threads for GPUs."""
    multithreading = torch._C._is_multithreading_enabled()
    try:
        torch._C._set_multithreading_enabled(False)
        return run(*args, **kwargs)
    finally:
        torch._C._set_multithreading_enabled(multithreading)
