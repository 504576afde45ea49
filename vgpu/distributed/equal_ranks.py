"""equal_ranks: one simulated rank in place of many equal ones."""

import contextlib
from types import SimpleNamespace

import torch.distributed as dist

from vgpu.distributed.meetings import has_values
from vgpu.distributed.routes import link_in_machine, route, share_of_network
from vgpu.private.process_groups import fake_store
from vgpu.runtime import scheduler

ReduceOp = dist.ReduceOp


@contextlib.contextmanager
def equal_ranks(k):
    """Run one modelled GPU in place of `k` equal ranks of a job, within a block.

        (device,) = virtual_gpus(1, model="dgxa100", values=False)
        with equal_ranks(1024):
            net = DistributedDataParallel(net.to(device))  # a step takes as long as on 1,024 GPUs

    Ranks that do the same take equally long, so one of them is simulated. In the block, this
    process is rank 0 of the default process group. Collectives take the time of `k` ranks and
    return the values that result if all ranks hold the same ones. Sharded ranks, as in
    `fully_shard`, hold different values: there only time, bytes and memory are those of `k` ranks.
    The group has the backend "vccl" and torch's fake store.

    Raises:
        ValueError: `k` is not a positive integer, or a default process group exists already.
        RuntimeError: no GPUs are modelled.
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ValueError(f"k must be a positive integer: got {k!r}")
    if not scheduler.clock.is_modelled:
        raise RuntimeError("equal_ranks requires a modelled GPU: call virtual_gpus(1, model=...)")
    dist.init_process_group("vccl", store=fake_store(), rank=0, world_size=k)
    try:
        yield
    finally:
        dist.destroy_process_group()


class EqualRanks:
    """Replaces `ConnectedRanks` where one rank represents many equal ones."""

    pending = ()

    def __init__(self, simulation, size):
        self._simulation, self._size = simulation, size

    def may_advance_to(self, seconds):
        """Return True: all ranks are ready when this one is."""
        return True

    def post(self, op):
        op.ready = op.start
        gpus = op.engine.device.model.machine.gpus or self._size
        machines = [rank // gpus for rank in op.members]
        shares = {each: share_of_network(op, self._size, each) for each in set(machines)}
        between = [shares[each] for each in machines]
        op.meet(route(machines, [link_in_machine(op)], between), has_values(op))
        self._simulation.make_ready(op)

    def done(self, op=None):
        """Do nothing: there are no other ranks."""

    waits_for_values = leave = done

    def end(self):
        self._simulation.finish()


class EqualRanksGloo:
    """Replaces a gloo group where this rank represents all ranks, with equal values.

    Messages, and tensors from a root on another rank, leave the outputs unchanged.
    """

    def __init__(self, rank, size):
        self._rank, self._size = rank, size

    def rank(self):
        return self._rank

    def size(self):
        return self._size

    def allreduce(self, tensors, options):
        """Reduce `size` equal tensors to one: MIN and MAX of them are the tensor itself."""
        kind = options.reduceOp.op
        for tensor in tensors:
            if kind == ReduceOp.SUM:
                tensor *= self._size
            elif kind == ReduceOp.PRODUCT:
                tensor **= self._size
        return _DONE

    reduce = allreduce

    def allgather(self, output_lists, inputs, options=None):
        """Copy each input to all of its outputs; ranks but the root of a gather have none."""
        for outs, value in zip(output_lists, inputs, strict=False):
            for out in outs:
                out.copy_(value)
        return _DONE

    gather = allgather

    def alltoall_base(self, output, value, output_sizes, input_sizes, options):
        """Fill the outputs with this rank's own part: all ranks send the same."""
        own = value.split(input_sizes)[self._rank]
        for part in output.split(output_sizes):
            part.copy_(own)
        return _DONE

    def scatter(self, outputs, input_lists, options):
        """Copy this rank's own input on the root; other ranks have no inputs."""
        for out, values in zip(outputs, input_lists, strict=False):
            out.copy_(values[self._rank])
        return _DONE

    def broadcast(self, *arguments):
        """Do nothing: the root has the same values, and there are no other ranks."""
        return _DONE

    send = recv = broadcast


_DONE = SimpleNamespace(wait=lambda: None)  # a completed work
