"""VirtualProcessGroup: what torch.distributed calls for tensors on virtual GPUs.

A collective is issued and returns. It is an op on a stream of the group's own, behind all that the
current stream was given so far, and runs in an engine of its own: the thread that waits for other
ranks. Messages from one rank to another have an engine for each direction and peer, so that none
waits for another one. Tensors on the CPU go to gloo directly.
"""

import atexit
import contextlib
import functools
import os
import sys
import threading
import weakref
from collections import Counter

import torch
import torch.distributed as dist

from .. import device as registry
from .. import private, scheduler
from ..engines import Engine, sleep_until
from ..memory import Failure, Unavailable, fail, fetch, revive
from ..scheduler import Op, wait
from ..simulation import ModelledEngine, leave_without_values
from ..tensor import VirtualTensor
from . import BACKEND, costs, exchange
from .agreement import NO_LINK, Agreement, Table, figures_of
from .exchange import Reduction
from .meetings import EqualRanks, Meetings
from .work import VirtualWork


class CollectiveEngine(Engine):
    """An engine whose thread waits for other ranks; meanwhile this process may fork."""

    do = Engine.do_beside_forks


class Lane:
    """Where collectives of one group, or messages with one peer, follow each other.

    Args:
        name: of its engine.
        device: the `Device`.
    """

    def __init__(self, name, device):
        self.stream = device.new_stream()
        if device.model is None:
            self.engine = device.add_engine(CollectiveEngine(name, device))
        else:
            self.engine = ModelledEngine(name, device, device.compute.simulation)


observers = []  # functions of name and arguments of each collective on virtual GPUs


class Call:
    """One collective as a rank was asked for it.

    Args:
        name: as of torch.distributed.
        inputs, outputs: lists of tensors.
        run: function(gloo, inputs, outputs) of flat CPU tensors; see `exchange`.
        cost: function of k, bytes, bandwidth and latency; see `costs`.
        num_bytes: for `cost`.
        detail: what ranks must agree on, besides the shapes.
        shapes_of: the tensors whose shapes must agree; by default the inputs.
        peer, sends, tag: of a message: the other rank, the direction and the tag.

    Attributes:
        key: what names it on all of its ranks; its last part counts.
        members: these ranks, as in the default group.
        failure: an error on a modelled clock because of which it is not run; or None.
        gives: whether another rank reads what its inputs are.
        has_values: whether all ranks have the values that they give; see `values` of a simulation.
    """

    peer = sends = tag = failure = None
    gives = has_values = True

    def __init__(self, name, inputs, outputs, run, cost, num_bytes, detail="", shapes_of=None):
        self.name, self.inputs, self.outputs = name, inputs, outputs
        self.run, self.cost, self.num_bytes = run, cost, num_bytes
        shapes = (inputs or outputs) if shapes_of is None else shapes_of
        described = ", ".join(map(_described, shapes[:8]))
        if len(shapes) > 8:
            described += f", ... ({len(shapes)} tensors, {sum(t.numel() for t in shapes)} elements)"
        self.text = f"{name}({', '.join(filter(None, (described, detail)))})"

    def meet(self, op, bandwidth, latency, has_values=True):
        """Note in its op what it costs on the links of its ranks, and whether there are values."""
        self.has_values = has_values
        cost = self.cost(self.k, self.num_bytes, bandwidth, latency)
        op.num_bytes = cost.num_bytes
        op.seconds = cost.seconds(bandwidth, latency)


def _described(tensor):
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _on_either(method):
    """Let a method of the group be gloo's where the tensors are on the CPU, or tell observers."""

    @functools.wraps(method)
    def choose(self, *args, **kwargs):
        if any(leaf.device.type == "cpu" for leaf in _tensors(args)):
            return getattr(self.for_cpu(), method.__name__)(*args, **kwargs)
        for note in observers:
            note(method.__name__, args)
        return method(self, *args, **kwargs)

    return choose


def _tensors(value):
    return [leaf for leaf in private.tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]


class VirtualProcessGroup(dist.ProcessGroup):
    """The ranks of a job, each with a virtual GPU of its own.

    Args:
        store: where they find each other.
        rank, size: of this process.
        timeout: a timedelta, how long a collective waits for all of them.
        global_ranks: the rank of each in the default group.
    """

    supports_coalescing = True
    supports_splitting = supports_time_estimate = False

    def __init__(self, store, rank, size, timeout, global_ranks=(), name=""):
        super().__init__(rank, size)
        self._name, self._description = name, "undefined"
        self._rank, self._size, self._timeout = rank, size, timeout
        self._store = store = _of_this_start(store)
        self._ranks = list(global_ranks) or list(range(size))
        job_size = dist.get_world_size() if dist.is_initialized() else size
        self._is_whole_job = self._ranks == list(range(job_size))
        self._table, self._peers = None, exchange.Equals(rank, size)  # one rank stands for all
        if not private.is_fake_store(store):
            store = dist.PrefixStore("vgpu", store)
            self._table = Table(store, rank, size, self._ranks, timeout)
            self._peers = self._table.gloo
        self._for_cpu = None
        if self._table is not None:
            store = dist.PrefixStore("cpu", self._store)
            gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
            group = dist.ProcessGroup(store, rank, size)  # which has more functions
            group._register_backend(torch.device("cpu"), group.BackendType.GLOO, gloo)
            group._set_default_backend(group.BackendType.GLOO)
            self._for_cpu = group
        self._lanes = {}  # (index of a device, peer, direction) -> Lane
        self._coalesced = threading.local()
        self._join()
        self._number = 0
        self._last_stream = None  # of the last collective
        self._counts = Counter()  # of calls, by what names them
        self._error = None

    def _join(self):
        """Let the ranks of the job have one clock, if it is a modelled one."""
        simulation = scheduler.simulation
        if simulation is None or simulation.meetings is not None:
            return
        if self._table is None:
            simulation.meetings = EqualRanks(simulation)
            return
        job = self._store, self._rank, self._size
        if dist.is_initialized():
            job = _of_this_start(private.default_store()), dist.get_rank(), dist.get_world_size()
        simulation.meetings = Meetings(simulation, *job, self._timeout)

    # -- what torch asks a group

    def rank(self):
        return self._rank

    def size(self):
        return self._size

    getRank, getSize = rank, size

    def name(self):
        return BACKEND

    def getBackendName(self):
        return BACKEND

    def _get_backend_name(self):
        return BACKEND

    @property
    def _device_types(self):
        return [torch.device("vgpu")]

    def _get_backend(self, device):
        return self

    @property
    def group_name(self):
        return self._name

    @property
    def group_desc(self):
        return self._description

    def _set_group_name(self, name):
        self._name = name

    def _set_group_desc(self, description):
        self._description = description

    def getGroupName(self):
        return self._name

    def getGroupDesc(self):
        return self._description

    setGroupName, setGroupDesc = _set_group_name, _set_group_desc

    @property
    def options(self):
        return self

    def _set_sequence_number_for_group(self):
        if self._for_cpu is not None:
            self._for_cpu._set_sequence_number_for_group()

    def _get_sequence_number_for_group(self):
        """Return how many collectives this rank has issued, those of tensors on the CPU too."""
        on_cpu = self._for_cpu and self._for_cpu._get_sequence_number_for_group()
        return self._number + (on_cpu or 0)

    def set_timeout(self, timeout):
        self._timeout = timeout
        if self._table is not None:
            self._table.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def shutdown(self):
        """Wait until what was issued has ended, and let the threads end."""
        lanes, self._lanes = self._lanes, {}
        for lane in lanes.values():
            for op in lane.stream.tail():
                wait(op, lane.stream.device.torch_device)
            if lane.engine.simulation is None:
                lane.stream.device.remove_engine(lane.engine)
        simulation = scheduler.simulation
        if self._is_whole_job and simulation is not None and simulation.meetings is not None:
            simulation.meetings.end()
            simulation.meetings = None

    def abort(self):
        """Do as `shutdown`: a collective under way ends with its time-out at the latest."""
        self.shutdown()

    def for_cpu(self):
        """Return the gloo group for tensors on the CPU."""
        if self._for_cpu is None:
            raise RuntimeError("one rank that stands for all has no group for tensors on the CPU")
        return self._for_cpu

    # -- collectives

    @_on_either
    def allreduce(self, tensors, opts=None):
        """Sum each tensor over the ranks, in place."""
        return self._all_reduce("all_reduce", tensors, opts)

    @_on_either
    def allreduce_coalesced(self, tensors, opts=None):
        """Sum each tensor over the ranks, in place."""
        return self._all_reduce("all_reduce_coalesced", tensors, opts)

    def _all_reduce(self, name, tensors, opts):
        reduction = self._reduction(opts, tensors)
        run = functools.partial(exchange.all_reduce, reduction=reduction)
        num_bytes = _num_bytes(tensors)
        return self._issue(
            Call(name, tensors, tensors, run, costs.all_reduce, num_bytes, reduction.name)
        )

    @_on_either
    def reduce(self, tensors, opts=None):
        """Sum each tensor over the ranks; the root has the sum."""
        opts = opts or private.ReduceOptions()
        reduction = self._reduction(opts, tensors)
        run = functools.partial(exchange.reduce, reduction=reduction, root=opts.rootRank)
        detail = f"{reduction.name}, {self._root(opts.rootRank)}"
        num_bytes = _num_bytes(tensors)
        return self._issue(Call("reduce", tensors, tensors, run, costs.around, num_bytes, detail))

    @_on_either
    def broadcast(self, tensors, opts=None):
        """Copy each tensor of the root to all ranks."""
        root = (opts or private.BroadcastOptions()).rootRank
        run = functools.partial(exchange.broadcast, root=root)
        num_bytes, detail = _num_bytes(tensors), self._root(root)
        call = Call("broadcast", tensors, tensors, run, costs.around, num_bytes, detail)
        call.gives = self._rank == root
        return self._issue(call)

    @_on_either
    def allgather(self, output_lists, inputs, opts=None):
        """Copy the tensor of each rank to all ranks."""
        outputs = [out for outs in output_lists for out in outs]
        return self._all_gather("all_gather", outputs, inputs, output_lists)

    @_on_either
    def _allgather_base(self, output, value, opts=None):
        """Copy the tensor of each rank to all ranks, into one tensor."""
        outputs = self._parts(output, "all_gather_into_tensor", value)
        return self._all_gather("all_gather_into_tensor", outputs, [value], [output])

    all_gather_single = _allgather_base

    @_on_either
    def allgather_into_tensor_coalesced(self, outputs, inputs, opts=None):
        """Do `_allgather_base` for each pair of tensors."""
        name = "all_gather_into_tensor_coalesced"
        parts = self._parts_of_each(outputs, name, inputs)
        return self._all_gather(name, parts, inputs, outputs)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def _all_gather(self, name, outputs, inputs, result):
        _check_parts(name, outputs, inputs)
        num_bytes = self._size * _num_bytes(inputs)
        call = Call(name, inputs, outputs, exchange.all_gather, costs.in_parts, num_bytes)
        return self._issue(call, result)

    @_on_either
    def allgather_coalesced(self, output_lists, inputs, opts=None):
        """Copy the tensors of each rank to all ranks; list i is of rank i."""
        outputs = [outs[place] for place in range(len(inputs)) for outs in output_lists]
        return self._all_gather("all_gather_coalesced", outputs, inputs, output_lists)

    @_on_either
    def reduce_scatter(self, outputs, input_lists, opts=None):
        """Sum over the ranks; rank i gets the sum of the inputs i."""
        inputs = [value for values in input_lists for value in values]
        return self._reduce_scatter("reduce_scatter", outputs, inputs, opts)

    @_on_either
    def _reduce_scatter_base(self, output, value, opts=None):
        """Sum over the ranks; rank i gets part i of the sum."""
        name = "reduce_scatter_tensor"
        return self._reduce_scatter(name, [output], self._parts(value, name, output), opts)

    reduce_scatter_single = _reduce_scatter_base

    @_on_either
    def reduce_scatter_tensor_coalesced(self, outputs, inputs, opts=None):
        """Do `_reduce_scatter_base` for each pair of tensors."""
        name = "reduce_scatter_tensor_coalesced"
        parts = self._parts_of_each(inputs, name, outputs)
        return self._reduce_scatter(name, outputs, parts, opts)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _reduce_scatter(self, name, outputs, inputs, opts):
        _check_parts(name, inputs, outputs)
        reduction = self._reduction(opts, inputs)
        run = functools.partial(exchange.reduce_scatter, reduction=reduction)
        num_bytes = _num_bytes(inputs)
        return self._issue(
            Call(name, inputs, outputs, run, costs.in_parts, num_bytes, reduction.name)
        )

    @_on_either
    def alltoall(self, outputs, inputs, opts=None):
        """Send input j to rank j; output i is of rank i."""
        return self._all_to_all("all_to_all", outputs, inputs, outputs)

    @_on_either
    def alltoall_base(self, output, value, output_sizes=(), input_sizes=(), opts=None):
        """Send part j of a tensor to rank j; sizes are in rows, by default even."""
        name = "all_to_all_single"
        outputs = _split(output, output_sizes) or self._parts(output, name)
        inputs = _split(value, input_sizes) or self._parts(value, name)
        return self._all_to_all(name, outputs, inputs, [output])

    all_to_all_single = alltoall_base

    def _all_to_all(self, name, outputs, inputs, result):
        num_bytes = max(_num_bytes(inputs), _num_bytes(outputs))
        detail = str({tensor.dtype for tensor in (*inputs, *outputs)})
        call = Call(
            name, inputs, outputs, exchange.all_to_all, costs.in_parts, num_bytes, detail, []
        )
        return self._issue(call, result)

    @_on_either
    def gather(self, output_lists, inputs, opts=None):
        """Copy the tensor of each rank to the root."""
        root = (opts or private.GatherOptions()).rootRank
        outputs = [out for outs in output_lists for out in outs]
        _check_parts("gather", outputs, inputs)
        run = functools.partial(exchange.gather, root=root)
        num_bytes, detail = _num_bytes(inputs), self._root(root)
        call = Call("gather", inputs, outputs, run, costs.at_root, num_bytes, detail)
        return self._issue(call, outputs)

    @_on_either
    def scatter(self, outputs, input_lists, opts=None):
        """Copy tensor i of the root to rank i."""
        root = (opts or private.ScatterOptions()).rootRank
        inputs = [value for values in input_lists for value in values]
        _check_parts("scatter", inputs, outputs)
        run = functools.partial(exchange.scatter, root=root)
        num_bytes, detail = _num_bytes(outputs), self._root(root)
        call = Call("scatter", inputs, outputs, run, costs.at_root, num_bytes, detail, outputs)
        return self._issue(call)

    def barrier(self, opts=None):
        """Let the host wait until all ranks have come."""
        device = registry.current()
        call = Call("barrier", [], [], exchange.nothing, costs.all_reduce, 4)
        return self._issue(call, device=device, blocks=True)

    def monitored_barrier(self, timeout=None, wait_all_ranks=False):
        """Do what gloo does, for the hosts."""
        return self.for_cpu().monitored_barrier(timeout or self._timeout, wait_all_ranks)

    @_on_either
    def send(self, tensors, other, tag):
        """Send a tensor to another rank."""
        return self._message(tensors, other, tag, sends=True)

    @_on_either
    def recv(self, tensors, other, tag):
        """Receive a tensor from another rank."""
        return self._message(tensors, other, tag, sends=False)

    @_on_either
    def recv_anysource(self, tensors, tag):
        """Raise: NCCL has no such thing."""
        raise RuntimeError("vccl, like NCCL, receives from a rank that is named")

    def _message(self, tensors, other, tag, sends):
        (tensor,) = tensors
        if other == self._rank:
            raise ValueError(f"rank {other} sends a message to itself")
        run = functools.partial(exchange.send if sends else exchange.recv, other=other, tag=tag)
        inputs, outputs = (tensors, []) if sends else ([], tensors)
        dtype = str(tensor.dtype).removeprefix("torch.")
        detail = f"{tensor.numel()} of {dtype}, tag {tag}"  # the shapes may differ, as for NCCL
        cost = costs.one_message
        call = Call("message", inputs, outputs, run, cost, tensor.nbytes, detail, shapes_of=[])
        call.peer, call.sends, call.tag = other, sends, tag
        return self._issue(call)

    # -- several calls as one

    def _start_coalescing(self, device):
        """Collect the calls until `_end_coalescing`; they are issued at once, all the same."""
        self._coalesced.ops = []

    start_coalescing = _start_coalescing

    def _end_coalescing(self, device):
        """Return one `Work` for the calls since `_start_coalescing`."""
        ops, self._coalesced.ops = self._coalesced.ops, None
        return VirtualWork(ops, [])

    end_coalescing = _end_coalescing

    # -- issuing

    def _reduction(self, opts, tensors):
        for tensor in tensors:
            if tensor.dtype in exchange.NOT_REDUCED:
                raise TypeError(f"{tensor.dtype} is not one of NCCL's types, nor reduced by vccl")
        return Reduction(private.SUM if opts is None else opts.reduceOp, self._size)

    def _root(self, rank):
        return f"root {self._ranks[rank]}"

    def _parts(self, whole, name, part=None):
        """Return `whole` in as many equal parts as there are ranks."""
        k = self._size
        if whole.numel() % k or part is not None and whole.numel() != k * part.numel():
            size = "" if part is None else f", each of {part.numel()}"
            raise ValueError(f"{name}: {whole.numel()} elements are not {k} parts{size}")
        _check_dense(whole, name)
        return list(whole.view(-1).split(whole.numel() // k)) if whole.numel() else [whole] * k

    def _parts_of_each(self, wholes, name, parts):
        """Return the parts of each of `wholes`, one after the other, each of the size of a part."""
        pairs = zip(wholes, parts, strict=True)
        return [each for whole, part in pairs for each in self._parts(whole, name, part)]

    def _issue(self, call, result=None, device=None, blocks=False):
        """Issue a call to the stream of its lane; return its `Work`."""
        tensors = [*call.inputs, *call.outputs]
        if device is None:
            device = _device_of(tensors, call.name)
        if self._error is not None:
            raise dist.DistBackendError(f"this process group has failed before: {self._error}")
        for tensor in tensors:
            _check_dense(tensor, call.name)
        lane = self._lane(device, call)
        self._name_call(call)
        self._join()
        op = Op(call.name, "collective", lane.engine, self._run)
        inputs, outputs = ([t._cell for t in each] for each in (call.inputs, call.outputs))
        op.args = outputs, inputs
        op.kwargs = {"call": call}  # which keeps the tensors, and so their memory
        op.source = op.target = device.torch_device
        if registry.thread.current is None:  # so that backward minds the streams of collectives
            registry.thread.current = registry.CurrentStreams()
        current = registry.thread.current
        self._number += 1
        before = (*device.current_stream().tail(), *current.after(lane.stream, op))
        if call.peer is None:  # all ranks take part in the same order, whichever devices they use
            last, self._last_stream = self._last_stream, lane.stream
            if last is not None and last is not lane.stream:
                before += tuple(last.tail())
        lane.stream.issue(op, before)
        for cell in outputs:
            cell.root().writer = op
        coalesced = getattr(self._coalesced, "ops", None)
        if coalesced is not None:
            coalesced.append(op)
        return VirtualWork([op], call.outputs if result is None else result, blocks)

    def _name_call(self, call):
        """Give a call its key and its ranks."""
        ranks = self._ranks
        if call.peer is None:
            call.k, call.members, kind = self._size, tuple(ranks), ()
        else:
            ends = ranks[self._rank], ranks[call.peer]
            source, target = ends if call.sends else ends[::-1]
            call.k, call.members, kind = 2, (source, target), (source, target, call.tag)
        self._counts[kind] += 1
        call.key = (self._name, *kind, self._counts[kind])

    def _lane(self, device, call):
        if call.peer is None:
            key, name = (device.index, device.model), "collectives"
        else:
            key = device.index, device.model, call.peer, call.sends
            name = f"{'send' if call.sends else 'recv'} {self._ranks[call.peer]}"
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = Lane(name, device)
        return lane

    # -- in the thread of the engine

    def _run(self, op):
        """Do the work of a collective; its outputs fail where it fails."""
        call, modelled = op.kwargs["call"], op.engine.simulation is not None
        try:
            if call.failure is not None:
                raise call.failure
            if not call.has_values:
                leave_without_values(op)
                return
            if self._error is not None:
                raise dist.DistBackendError(f"this process group has failed: {self._error}")
            values, failure = None, None
            try:
                values = [[_flat(cell) for cell in cells] for cells in op.args[::-1]]
            except Unavailable as unavailable:
                failure = unavailable
            (self._run_at_its_time if modelled else self._run_by_the_wall_clock)(
                op, values, failure
            )
        except BaseException as error:
            fail(op.args[0], Failure(error))
            call.failure = error
            if isinstance(error, dist.DistBackendError) and self._error is None:
                self._error = error
            raise
        finally:
            if modelled:
                op.engine.simulation.meetings.done(op)

    def _run_at_its_time(self, op, values, failure):
        """Move the values of a collective whose time a simulation has told."""
        call = op.kwargs["call"]
        op.engine.simulation.meetings.waits_for_values(op)
        self._agree(call, 0.0, None, failure)
        self._exchange(call, *values)

    def _run_by_the_wall_clock(self, op, values, failure):
        """Move the values of a collective, and keep the links busy for as long as it takes them."""
        call, device = op.kwargs["call"], op.engine.device
        out, into = device.sending, device.receiving
        uses = {None: (out, into), True: (out,), False: (into,)}[call.sends]
        ready = max(op.ready, *(each.free_at for each in uses))
        agreed = self._agree(call, ready, device.peer_link, failure)
        bandwidth, latency = agreed.bandwidth, agreed.latency
        call.meet(op, bandwidth, latency)
        end = agreed.start
        if bandwidth < NO_LINK or latency:
            with _sharing:  # other groups may have agreed on the same time
                end = max(end, *(each.free_at for each in uses)) + op.seconds
                for each in uses:
                    each.free_at = end
        self._exchange(call, *values)
        sleep_until(end)

    def _exchange(self, call, inputs, outputs):
        call.run(self._peers, inputs, outputs)

    def _agree(self, call, ready, link, failure):
        if self._table is None:
            if failure is not None:
                raise failure
            return Agreement(ready, *figures_of(link))
        if call.peer is None:
            return self._table.agree(call.text, ready, link, failure)
        return self._table.agree_with(
            call.peer, call.sends, call.text, ready, link, failure, call.tag
        )


def _of_this_start(store):
    """Return the part of a store that is new: torchrun keeps it when it starts its workers again.

    Otherwise they would look for the workers before them.
    """
    if private.is_fake_store(store):
        return store
    return dist.PrefixStore(f"start{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


_sharing = threading.Lock()  # of the directions of links


def _repeated(values, number):
    """Return a list of `number` values: each of `values` equally often, one after the other."""
    return [value for value in values for _ in range(number // len(values))]


def _num_bytes(tensors):
    return sum(tensor.nbytes for tensor in tensors)


def _split(tensor, sizes):
    """Return the parts of a tensor with so many rows each; None where no sizes are given."""
    return [part.reshape(-1) for part in tensor.split(list(sizes))] if len(sizes) else None


def _check_parts(name, parts, tensors):
    """Raise ValueError unless the parts, equally many a tensor, are of its size and dtype."""
    for tensor, part in zip(_repeated(tensors, len(parts)), parts, strict=bool(parts)):
        if (part.numel(), part.dtype) != (tensor.numel(), tensor.dtype):
            raise ValueError(f"{name}: {_described(part)} does not fit {_described(tensor)}")


def _check_dense(tensor, name):
    if not (tensor.is_contiguous() or tensor.numel() == 0):
        for memory_format in (torch.channels_last, torch.channels_last_3d):
            dims = 4 if memory_format == torch.channels_last else 5
            if tensor.dim() == dims and tensor.is_contiguous(memory_format=memory_format):
                return
        raise ValueError(
            f"{name}: tensors must be contiguous; one has shape {tuple(tensor.shape)} and strides "
            f"{tensor.stride()}"
        )


def _device_of(tensors, name):
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1 or not all(type(tensor) is VirtualTensor for tensor in tensors):
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"{name}: the tensors must be on one virtual GPU; they are on {names}")
    return registry.find(devices.pop())


def _flat(cell):
    """Return the values of a dense tensor as a flat CPU tensor that shares its memory."""
    revive(cell)
    data = fetch(cell)
    return torch.as_strided(data, (data.numel(),), (1,), data.storage_offset())


_groups = weakref.WeakSet()
_LAST = 30.0  # seconds that a process waits in the end for others to take part in what it issued


def _finish():
    """Wait, as the process ends, for the collectives that it has issued: others wait for them.

    A process that ends by an error does not, since others may wait for what it has not issued.
    """
    if hasattr(sys, "last_value") or scheduler.in_fork():
        return

    def shut_down():
        with contextlib.suppress(Exception):  # nobody is left to tell
            for group in sorted(_groups, key=VirtualProcessGroup.size):  # the whole job last
                group.shutdown()

    thread = threading.Thread(target=shut_down, daemon=True)
    thread.start()
    thread.join(_LAST)


def create(options, backend_options=None):
    """Return a group; torch calls this for "vccl"."""
    group = VirtualProcessGroup(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        options.global_ranks_in_group,
        options.group_id,
    )
    if not _groups:
        atexit.unregister(_finish)
        atexit.register(_finish)
    _groups.add(group)
    return group
