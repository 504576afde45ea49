"""Moves the values of collectives as CPU tensors, through gloo, in an engine's thread.

Each function takes a gloo process group and this rank's inputs and outputs, lists of flat CPU
tensors, and returns when the outputs are written. In `equal_ranks`, `EqualRanksGloo` replaces gloo.
"""

import torch
import torch.distributed as dist

from vgpu.private.dispatch import type_name
from vgpu.private.process_groups import options
from vgpu.tensors.cells import fetch
from vgpu.tensors.tensor import VirtualTensor

ReduceOp = dist.ReduceOp
SUMS = {ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM}
REDUCTIONS = {*SUMS, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX}  # supported by NCCL
TYPES = {  # that NCCL knows; see `ncclDataType` in torch's NCCLUtils.cpp
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool, torch.bfloat16),
    *(torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
}


def check_type(name, dtype):
    """Raise an error, with torch's message, if NCCL does not support a dtype in a collective."""
    as_real = dtype.is_complex and name in ("all_reduce", "reduce", "broadcast")
    if dtype not in TYPES and not as_real:
        kind = type_name(dtype)
        if name in ("message", "gather", "scatter", "all_to_all", "all_to_all_single"):
            raise RuntimeError(f"Unconvertible NCCL type {kind}")
        raise TypeError(f"Input tensor data type is not supported for NCCL process group: {kind}")


class Reduction:
    """A `dist.ReduceOp` in three parts: before the exchange, in it, and after it.

    As in NCCL, averages of floating-point numbers divide before the sum; those of integers divide
    after it, towards zero (`FuncSumPostDiv::divide` in NCCL's src/device/reduce_kernel.h).
    """

    def __init__(self, op, k):
        self.kind, self.k = op.op, k
        if self.kind not in REDUCTIONS:
            raise ValueError(f"Cannot use ReduceOp.{self.kind.name} with NCCL")
        _, self.factor = op.__getstate__()  # None but for PREMUL_SUM
        self.name = self.kind.name.lower()

    def check(self, dtype):
        """Raise an error, with torch's message, if NCCL does not support this reduction."""
        if dtype.is_floating_point and dtype.itemsize == 1:
            raise RuntimeError("Unsupported Float8 type for NCCL reduction")
        if dtype == torch.bool and self.kind == ReduceOp.AVG:
            raise TypeError("Cannot use ReduceOp.AVG with boolean inputs")
        if dtype.is_complex and self.kind not in SUMS:
            raise RuntimeError(f"ReduceOp.{self.kind.name} does not support complex tensors")
        if self.kind == ReduceOp.PREMUL_SUM and not (dtype.is_floating_point or dtype.is_complex):
            raise TypeError("PreMulSum Data type must be half, float, bfloat16 or double")

    def prepared(self, value):
        """Return this rank's contribution for an input: a new tensor, or `value` itself."""
        if value.dtype == torch.bool:  # a sum is "or", a product is "and"; see `gloo_op`
            return value.to(torch.uint8)
        if self.kind == ReduceOp.PREMUL_SUM:
            factor = fetch(self.factor._cell) if type(self.factor) is VirtualTensor else self.factor
            return value * (factor.to(value.dtype) if isinstance(factor, torch.Tensor) else factor)
        if self.kind == ReduceOp.AVG and value.is_floating_point():
            return value / self.k
        return value

    def finish(self, value, out):
        """Write a result of the exchange to an output."""
        if self.kind == ReduceOp.AVG and not value.is_floating_point():
            value = value.div(self.k, rounding_mode="trunc")
        if value.data_ptr() != out.data_ptr():
            out.copy_(value)

    def gloo_op(self, dtype):
        if dtype == torch.bool:
            kind = ReduceOp.MIN if self.kind in (ReduceOp.MIN, ReduceOp.PRODUCT) else ReduceOp.MAX
        else:
            kind = ReduceOp.SUM if self.kind in SUMS else self.kind
        return ReduceOp(kind)

    def combine(self, parts, dtype):
        kind = self.gloo_op(dtype).op
        of_two = {ReduceOp.SUM: torch.add, ReduceOp.PRODUCT: torch.mul, ReduceOp.MIN: torch.minimum}
        total = parts[0].clone()
        for part in parts[1:]:
            of_two.get(kind, torch.maximum)(total, part, out=total)
        return total


def all_reduce(gloo, inputs, outputs, reduction):
    """Write the sum over the ranks to every output; inputs and outputs share memory."""
    for value, out in zip(inputs, outputs, strict=True):
        total = reduction.prepared(value)
        kind = reduction.gloo_op(value.dtype)
        gloo.allreduce([total], options(dist.AllreduceOptions, reduceOp=kind)).wait()
        reduction.finish(total, out)


def reduce(gloo, inputs, outputs, reduction, root):
    """Write the sum over the ranks to the output of the root."""
    for value, out in zip(inputs, outputs, strict=True):
        total = reduction.prepared(value)
        if total is value:
            total = value.clone()
        kind = reduction.gloo_op(value.dtype)
        gloo.reduce([total], options(dist.ReduceOptions, reduceOp=kind, rootRank=root)).wait()
        if gloo.rank() == root:
            reduction.finish(total, out)


def broadcast(gloo, inputs, outputs, root):
    """Write the root's tensors to every output; inputs and outputs share memory."""
    for out in outputs:
        gloo.broadcast([_bytes(out)], options(dist.BroadcastOptions, rootRank=root)).wait()


def all_gather(gloo, inputs, outputs):
    """Write the input of rank i to output i; each input has one output for each rank."""
    k = gloo.size()
    for i, value in enumerate(inputs):
        outs = outputs[i * k : (i + 1) * k]
        gloo.allgather([[_bytes(out) for out in outs]], [_bytes(value)]).wait()


def reduce_scatter(gloo, inputs, outputs, reduction):
    """Write the sum of inputs i to the output of rank i; an output has an input for each rank."""
    k, rank = gloo.size(), gloo.rank()
    for i, out in enumerate(outputs):
        parts = [reduction.prepared(part) for part in inputs[i * k : (i + 1) * k]]
        received = [torch.empty_like(parts[rank]) for _ in range(k)]
        _swap(gloo, parts, received)
        reduction.finish(reduction.combine(received, out.dtype), out)


def all_to_all(gloo, inputs, outputs):
    """Write input j of rank i to output i of rank j.

    Raises dist.DistBackendError on all ranks if sizes differ; gloo would kill the process.
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
    """Exchange tensor i with rank i; sizes may differ."""
    sent, received = [[*map(_bytes, tensors)] for tensors in (sent, received)]
    out_sizes, in_sizes = [[t.numel() for t in tensors] for tensors in (received, sent)]
    out = torch.empty(sum(out_sizes), dtype=torch.uint8)
    gloo.alltoall_base(out, torch.cat(sent), out_sizes, in_sizes, dist.AllToAllOptions()).wait()
    for tensor, part in zip(received, out.split(out_sizes), strict=True):
        tensor.copy_(part)


def gather(gloo, inputs, outputs, root):
    """Write the input of rank i to output i of the root."""
    out = [[_bytes(each) for each in outputs]] if gloo.rank() == root else []
    gloo.gather(out, [_bytes(inputs[0])], options(dist.GatherOptions, rootRank=root)).wait()


def scatter(gloo, inputs, outputs, root):
    """Write input i of the root to the output of rank i."""
    sent = [[_bytes(each) for each in inputs]] if gloo.rank() == root else []
    gloo.scatter([_bytes(outputs[0])], sent, options(dist.ScatterOptions, rootRank=root)).wait()


def barrier(gloo, inputs, outputs):
    """Move no values, for a barrier: the ranks have agreed already."""


def send(gloo, inputs, outputs, other):
    gloo.send([_bytes(inputs[0])], other, 3).wait()


def recv(gloo, inputs, outputs, other):
    gloo.recv([_bytes(outputs[0])], other, 3).wait()


def _bytes(flat):
    """Return a view of a flat tensor as bytes: gloo does not know every dtype."""
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)
