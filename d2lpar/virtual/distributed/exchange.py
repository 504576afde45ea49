"""How the values of a collective move: on CPU tensors, through gloo, in an engine's thread.

Each function takes a gloo process group and lists of flat CPU tensors, the inputs and the outputs
of this rank, and returns when the outputs are written. Where one rank stands for many equal ones,
`Equals` takes the place of gloo.
"""

import torch
import torch.distributed as dist

from .. import private
from ..memory import fetch
from ..tensor import VirtualTensor

Op = dist.ReduceOp.RedOpType
SUMS = {Op.SUM, Op.AVG, Op.PREMUL_SUM}
NOT_REDUCED = {torch.int16, torch.uint16, torch.uint32, torch.uint64}  # neither NCCL nor gloo does
REDUCTIONS = {*SUMS, Op.PRODUCT, Op.MIN, Op.MAX}  # those that NCCL has


class Reduction:
    """A `dist.ReduceOp` in two parts: what each rank does before, and the sum or the like.

    As in NCCL the average of numbers with a fraction multiplies by 1 / k before it sums.

    Args:
        op: a `dist.ReduceOp`.
        k: number of ranks.

    Raises:
        ValueError: NCCL has no such operation.
    """

    def __init__(self, op, k):
        self.kind, self.k = private.kind_of_reduction(op), k
        if self.kind not in REDUCTIONS:
            raise ValueError(f"ReduceOp.{self.kind.name} is not one of NCCL's, nor of vccl's")
        self.factor = private.factor_of_reduction(op) if self.kind == Op.PREMUL_SUM else None
        self.name = self.kind.name.lower()

    def prepared(self, value):
        """Return what a rank adds for its input: a new tensor, or `value`."""
        if value.dtype == torch.bool:
            return value.to(torch.uint8)
        if self.kind == Op.PREMUL_SUM:
            factor = self.factor
            if type(factor) is VirtualTensor:
                factor = fetch(factor._cell)
            return value * (factor.to(value.dtype) if isinstance(factor, torch.Tensor) else factor)
        if self.kind == Op.AVG and value.is_floating_point():
            return value / self.k
        return value

    def finish(self, value, out):
        """Write a sum, or the like, to an output."""
        if self.kind == Op.AVG and not (value.is_floating_point() or out.dtype == torch.bool):
            value = value.div(self.k, rounding_mode="floor")
        if value is not out:
            out.copy_(value)

    def gloo_op(self, dtype):
        """Return the operation for gloo on tensors of a dtype."""
        if dtype == torch.bool:
            kind = Op.MIN if self.kind in (Op.MIN, Op.PRODUCT) else Op.MAX
        else:
            kind = Op.SUM if self.kind in SUMS else self.kind
        return dist.ReduceOp(kind)

    def combine(self, parts, dtype):
        """Return the parts of all ranks, in one dtype, as one."""
        kind = private.kind_of_reduction(self.gloo_op(dtype))
        total = parts[0].clone()
        for part in parts[1:]:
            if kind == Op.SUM:
                total += part
            elif kind == Op.PRODUCT:
                total *= part
            else:
                (torch.minimum if kind == Op.MIN else torch.maximum)(total, part, out=total)
        return total


class Equals:
    """In the place of a gloo group where this rank stands for all: others have the same values.

    Messages, and what a root elsewhere would give, leave the outputs as they are.

    Args:
        rank, size: of this process in the group.
    """

    def __init__(self, rank, size):
        self._rank, self._size = rank, size

    def rank(self):
        return self._rank

    def size(self):
        return self._size

    def allreduce(self, tensors, options):
        """Reduce `size` equal tensors to one: MIN and MAX of them are the tensor itself."""
        kind = private.kind_of_reduction(options.reduceOp)
        for tensor in tensors:
            if kind == Op.SUM:
                tensor *= self._size
            elif kind == Op.PRODUCT:
                tensor **= self._size
        return _Done()

    reduce = allreduce

    def allgather(self, output_lists, inputs):
        """Copy each input to all of its outputs."""
        for outs, value in zip(output_lists, inputs, strict=True):
            for out in outs:
                out.copy_(value)
        return _Done()

    def gather(self, output_lists, inputs, options):
        """Copy each input to all of its outputs, if this rank is the root that has them."""
        return self.allgather(output_lists, inputs) if output_lists else _Done()

    def alltoall_base(self, output, value, output_sizes, input_sizes, options):
        """Receive from every rank what it sends to this one."""
        own = value.split(input_sizes)[self._rank]
        for part in output.split(output_sizes):
            part.copy_(own)
        return _Done()

    def scatter(self, outputs, input_lists, options):
        """Receive this rank's input, if it is the root that has them."""
        for out, values in zip(outputs, input_lists, strict=False):
            out.copy_(values[self._rank])
        return _Done()

    def broadcast(self, tensors, options):
        """Leave the tensors as they are: the root has the same."""
        return _Done()

    def send(self, tensors, other, tag):
        """Do nothing: there is nobody else."""
        return _Done()

    recv = send


class _Done:
    """The work of `Equals`, which has ended when it is returned."""

    def wait(self):
        """Do nothing."""


def all_reduce(gloo, inputs, outputs, reduction):
    """Leave the sum over the ranks in every output."""
    for value, out in zip(inputs, outputs, strict=True):
        total = reduction.prepared(value)
        if total is value and value is not out:
            total = value.clone()
        options = private.AllreduceOptions()
        options.reduceOp = reduction.gloo_op(value.dtype)
        gloo.allreduce([total], options).wait()
        reduction.finish(total, out)


def reduce(gloo, inputs, outputs, reduction, root):
    """Leave the sum over the ranks in the output of the root."""
    for value, out in zip(inputs, outputs, strict=True):
        total = reduction.prepared(value)
        if total is value:
            total = value.clone()
        options = private.ReduceOptions()
        options.reduceOp, options.rootRank = reduction.gloo_op(value.dtype), root
        gloo.reduce([total], options).wait()
        if gloo.rank() == root:
            reduction.finish(total, out)


def broadcast(gloo, inputs, outputs, root):
    """Leave the root's inputs in every output."""
    options = private.BroadcastOptions()
    options.rootRank = root
    for value, out in zip(inputs, outputs, strict=True):
        if gloo.rank() == root and value is not out:
            out.copy_(value)
        gloo.broadcast([_bytes(out)], options).wait()


def all_gather(gloo, inputs, outputs):
    """Leave the input of rank i in output i; there are as many outputs an input as ranks."""
    k = gloo.size()
    for place, value in enumerate(inputs):
        outs = outputs[place * k : (place + 1) * k]
        gloo.allgather([[_bytes(out) for out in outs]], [_bytes(value)]).wait()


def reduce_scatter(gloo, inputs, outputs, reduction):
    """Leave the sum of inputs i in the output of rank i; there are k inputs an output."""
    k, rank = gloo.size(), gloo.rank()
    for place, out in enumerate(outputs):
        parts = [reduction.prepared(part) for part in inputs[place * k : (place + 1) * k]]
        received = [torch.empty_like(parts[rank]) for _ in range(k)]
        _swap(gloo, parts, received)
        reduction.finish(reduction.combine(received, out.dtype), out)


def all_to_all(gloo, inputs, outputs):
    """Leave input j of rank i in output i of rank j.

    Raises:
        dist.DistBackendError: what one rank sends is not what another expects. All ranks raise it,
            because gloo would end the process.
    """
    k = gloo.size()
    sizes = torch.tensor([[tensor.nbytes for tensor in each] for each in (inputs, outputs)])
    table = [torch.empty_like(sizes) for _ in range(k)]
    gloo.allgather([table], [sizes]).wait()
    sent, expected = torch.stack(table, 1)
    wrong = (sent != expected.T).nonzero().tolist()
    if wrong:
        lines = [
            f"  group rank {i} sends {sent[i, j]} bytes to {j}, which expects {expected[j, i]}"
            for i, j in wrong
        ]
        raise dist.DistBackendError("\n".join(["the ranks disagree: all_to_all", *lines]))
    _swap(gloo, inputs, outputs)


def _swap(gloo, sent, received):
    """Send tensor i to rank i and receive from it; sizes may differ."""
    sent, received = [[*map(_bytes, tensors)] for tensors in (sent, received)]
    out_sizes, in_sizes = [[t.numel() for t in tensors] for tensors in (received, sent)]
    out = torch.empty(sum(out_sizes), dtype=torch.uint8)
    gloo.alltoall_base(out, torch.cat(sent), out_sizes, in_sizes, private.AllToAllOptions()).wait()
    for tensor, part in zip(received, out.split(out_sizes), strict=True):
        tensor.copy_(part)


def gather(gloo, inputs, outputs, root):
    """Leave the input of rank i in output i of the root."""
    options = private.GatherOptions()
    options.rootRank = root
    out = [[_bytes(each) for each in outputs]] if gloo.rank() == root else []
    gloo.gather(out, [_bytes(inputs[0])], options).wait()


def scatter(gloo, inputs, outputs, root):
    """Leave input i of the root in the output of rank i."""
    options = private.ScatterOptions()
    options.rootRank = root
    sent = [[_bytes(each) for each in inputs]] if gloo.rank() == root else []
    gloo.scatter([_bytes(outputs[0])], sent, options).wait()


def nothing(gloo, inputs, outputs):
    """Move nothing: the ranks have met."""


def send(gloo, inputs, outputs, other, tag):
    """Send the input to another rank."""
    gloo.send([_bytes(inputs[0])], other, 4 * tag + 3).wait()


def recv(gloo, inputs, outputs, other, tag):
    """Receive the output from another rank."""
    gloo.recv([_bytes(outputs[0])], other, 4 * tag + 3).wait()


def _bytes(flat):
    """Return a flat tensor as bytes, which gloo moves whatever their dtype is."""
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)
