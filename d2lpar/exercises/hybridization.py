"""Reference solutions for exercise notebook 01."""

import torch

from d2lpar.exercises.marks import reference
from vgpu.torch_internals import TorchDispatchMode


@reference
def calls_until_paid(t_compile, t_eager, t_compiled):
    """Return the smallest number of calls for which compiling pays off, by brute force."""
    return next(q for q in range(1, 10_000) if q * t_eager >= t_compile + q * t_compiled)


class _Traffic(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.num_ops = self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.num_ops += 1
        self.num_bytes += sum(x.nbytes for x in (*args, result) if isinstance(x, torch.Tensor))
        return result


@reference
def eager_traffic(function, *inputs):
    """Return the number of operators, and the bytes of the tensors that they read and write."""
    with _Traffic() as traffic:
        function(*inputs)
    return traffic.num_ops, traffic.num_bytes


@reference
def programs_of(function, calls, dynamic=None):
    """Return the number of programs compiled for calls (batch size, flag)."""
    compiled = []

    def keep(graph, example_inputs):
        compiled.append(graph)
        return graph.forward

    torch.compiler.reset()
    program = torch.compile(function, backend=keep, dynamic=dynamic)
    for size, train in calls:
        program(torch.ones(size, 8), train)
    torch.compiler.reset()
    return len(compiled)


@reference
def bound_of(spans):
    """Return the bound, and two wrong ones: by the number of kernels, and with idle gaps."""
    stays = [span for span in spans if any(name in span.name for name in ("conv", "mm", "matmul"))]
    in_library, in_all = (sum(span.end - span.start for span in part) for part in (stays, spans))
    with_gaps = (spans[-1].end - spans[0].start) / in_library
    return in_all / in_library, len(spans) / len(stays), with_gaps
