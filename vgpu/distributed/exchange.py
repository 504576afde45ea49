"""How the values of a collective move: as CPU tensors, through gloo, in an engine's thread.

Each function takes a gloo process group and this rank's inputs and outputs, lists of flat CPU
tensors, and returns when the outputs are written. Where one rank stands for many equal ones,
`equal_ranks.Equals` replaces gloo.
"""

import torch
import torch.distributed as dist

from vgpu.tensors.cells import fetch
from vgpu.tensors.tensor import VirtualTensor

Op = dist.ReduceOp.RedOpType
SUMS = {Op.SUM, Op.AVG, Op.PREMUL_SUM}
NOT_REDUCED = {torch.int16, torch.uint16, torch.uint32, torch.uint64}  # neither NCCL nor gloo does
REDUCTIONS = {*SUMS, Op.PRODUCT, Op.MIN, Op.MAX}  # NCCL has these


class Reduction:
    """A `dist.ReduceOp` in three parts: before the exchange, in it, and after it.

    As in NCCL an average of floating-point numbers is divided before the sum, one of integers after
    it, towards zero (`FuncSumPostDiv::divide` in NCCL's src/device/reduce_kernel.h).
    """

    def __init__(self, op, k):
        self.kind, self.k = op.op, k
        if self.kind not in REDUCTIONS:
            raise ValueError(f"ReduceOp.{self.kind.name} is not one of NCCL's, nor of vccl's")
        self.factor = op.factor if self.kind == Op.PREMUL_SUM else None
        self.name = self.kind.name.lower()

    def check(self, dtype):
        """Raise TypeError, in torch's words, if NCCL does not reduce this dtype this way."""
        if dtype in NOT_REDUCED:
            raise TypeError(f"{dtype} is not one of NCCL's types, nor reduced by vccl")
        if dtype == torch.bool and self.kind == Op.AVG:
            raise TypeError("Cannot use ReduceOp.AVG with boolean inputs")
        if self.kind == Op.PREMUL_SUM and not dtype.is_floating_point:
            raise TypeError("PreMulSum Data type must be half, float, bfloat16 or double")

    def prepared(self, value):
        """Return what a rank contributes for an input: a new tensor, or `value`."""
        if value.dtype == torch.bool:  # sums are "or", products are "and"; see `gloo_op`
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
        """Write a result of the exchange to an output."""
        if self.kind == Op.AVG and not value.is_floating_point():
            value = value.div(self.k, rounding_mode="trunc")
        if value.data_ptr() != out.data_ptr():
            out.copy_(value)

    def gloo_op(self, dtype):
        """Return gloo's operation on tensors of a dtype."""
        if dtype == torch.bool:
            kind = Op.MIN if self.kind in (Op.MIN, Op.PRODUCT) else Op.MAX
        else:
            kind = Op.SUM if self.kind in SUMS else self.kind
        return dist.ReduceOp(kind)

    def combine(self, parts, dtype):
        """Return the reduction of the parts of all ranks."""
        kind = self.gloo_op(dtype).op
        total = parts[0].clone()
        for part in parts[1:]:
            if kind == Op.SUM:
                total += part
            elif kind == Op.PRODUCT:
                total *= part
            else:
                (torch.minimum if kind == Op.MIN else torch.maximum)(total, part, out=total)
        return total


def all_reduce(gloo, inputs, outputs, reduction):
    """Leave the sum over the ranks in every output; inputs and outputs share their memory."""
    for value, out in zip(inputs, outputs, strict=True):
        total = reduction.prepared(value)
        options = dist.AllreduceOptions()
        options.reduceOp = reduction.gloo_op(value.dtype)
        gloo.allreduce([total], options).wait()
        reduction.finish(total, out)


def reduce(gloo, inputs, outputs, reduction, root):
    """Leave the sum over the ranks in the output of the root."""
    for value, out in zip(inputs, outputs, strict=True):
        total = reduction.prepared(value)
        if total is value:
            total = value.clone()
        options = dist.ReduceOptions()
        options.reduceOp, options.rootRank = reduction.gloo_op(value.dtype), root
        gloo.reduce([total], options).wait()
        if gloo.rank() == root:
            reduction.finish(total, out)


def broadcast(gloo, inputs, outputs, root):
    """Leave the root's tensors in every output; inputs and outputs share their memory."""
    options = dist.BroadcastOptions()
    options.rootRank = root
    for out in outputs:
        gloo.broadcast([_bytes(out)], options).wait()


def all_gather(gloo, inputs, outputs):
    """Leave the input of rank i in output i; each input has as many outputs as there are ranks."""
    k = gloo.size()
    for place, value in enumerate(inputs):
        outs = outputs[place * k : (place + 1) * k]
        gloo.allgather([[_bytes(out) for out in outs]], [_bytes(value)]).wait()


def reduce_scatter(gloo, inputs, outputs, reduction):
    """Leave the sum of inputs i in the output of rank i; each output has k inputs."""
    k, rank = gloo.size(), gloo.rank()
    for place, out in enumerate(outputs):
        parts = [reduction.prepared(part) for part in inputs[place * k : (place + 1) * k]]
        received = [torch.empty_like(parts[rank]) for _ in range(k)]
        _swap(gloo, parts, received)
        reduction.finish(reduction.combine(received, out.dtype), out)


def all_to_all(gloo, inputs, outputs):
    """Leave input j of rank i in output i of rank j.

    If one rank sends what another does not expect, all ranks raise dist.DistBackendError: gloo
    would end the process.
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
    gloo.alltoall_base(out, torch.cat(sent), out_sizes, in_sizes, dist.AllToAllOptions()).wait()
    for tensor, part in zip(received, out.split(out_sizes), strict=True):
        tensor.copy_(part)


def gather(gloo, inputs, outputs, root):
    """Leave the input of rank i in output i of the root."""
    options = dist.GatherOptions()
    options.rootRank = root
    out = [[_bytes(each) for each in outputs]] if gloo.rank() == root else []
    gloo.gather(out, [_bytes(inputs[0])], options).wait()


def scatter(gloo, inputs, outputs, root):
    """Leave input i of the root in the output of rank i."""
    options = dist.ScatterOptions()
    options.rootRank = root
    sent = [[_bytes(each) for each in inputs]] if gloo.rank() == root else []
    gloo.scatter([_bytes(outputs[0])], sent, options).wait()


def nothing(gloo, inputs, outputs):
    """Move no values: the ranks have met already."""


def send(gloo, inputs, outputs, other, tag):
    """Send the input to another rank."""
    gloo.send([_bytes(inputs[0])], other, 4 * tag + 3).wait()


def recv(gloo, inputs, outputs, other, tag):
    """Receive the output from another rank."""
    gloo.recv([_bytes(outputs[0])], other, 4 * tag + 3).wait()


def _bytes(flat):
    """Return a flat tensor as bytes, which gloo moves whatever their dtype is."""
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)
