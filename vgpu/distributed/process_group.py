"""VirtualProcessGroup: the process group of torch.distributed for virtual GPUs.

Messages have an engine for each peer and direction, so that none blocks another. A group that is
created with "cpu:gloo" as well passes CPU tensors to gloo directly.
"""

import atexit
import contextlib
import functools
import os
import sys
import threading
import warnings
import weakref
from collections import Counter

import torch
import torch.distributed as dist

from vgpu.distributed import BACKEND, exchange
from vgpu.distributed.agreement import NO_LINK, Agreement, GlooConnections, bandwidth_and_latency
from vgpu.distributed.collective import Collective, bytes_of, described
from vgpu.distributed.equal_ranks import EqualRanks, EqualRanksGloo
from vgpu.distributed.exchange import Reduction
from vgpu.distributed.meetings import ConnectedRanks
from vgpu.distributed.routes import Route
from vgpu.distributed.work import VirtualWork
from vgpu.modelled.simulation import ModelledEngine, mark_without_values
from vgpu.private.dispatch import tree_flatten
from vgpu.private.process_groups import (
    add_gloo,
    default_store,
    fake_store_of,
    num_collectives,
    start_counting,
)
from vgpu.runtime import registry, scheduler, threads
from vgpu.runtime.engines import Engine, sleep_until
from vgpu.runtime.scheduler import wait
from vgpu.tensors.cells import Missing, Unavailable, fetch, revive, set_missing
from vgpu.tensors.tensor import VirtualTensor


class CollectiveEngine(Engine):
    """An engine whose thread waits for other ranks; the process may fork meanwhile."""

    do = Engine.do_beside_forks


class Lane:
    """A stream and an engine for the collectives of a group, or for messages with one peer."""

    def __init__(self, name, device):
        self.stream = device.new_stream()
        if device.model is None:
            self.engine = device.add_engine(CollectiveEngine(name, device))
        else:
            self.engine = ModelledEngine(name, device, device.compute.clock)


observers = []  # functions(name, arguments) called for each collective on virtual GPUs


def _by_device(method):
    """Decorate a method: CPU tensors go to gloo; calls with others are passed to `observers`."""

    @functools.wraps(method)
    def choose(self, *args, **kwargs):
        if {leaf.device.type for leaf in _tensors(args)} == {"cpu"}:
            return getattr(self.for_cpu(), method.__name__)(*args, **kwargs)
        for note in observers:
            note(method.__name__, args)
        return method(self, *args, **kwargs)

    return choose


def _tensors(value):
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]


class VirtualProcessGroup(dist.ProcessGroup):
    """The ranks of a job, each with its own virtual GPU."""

    supports_coalescing = True
    supports_splitting = supports_time_estimate = False

    def __init__(self, options):
        """Create the group of torch's `DistributedBackendOptions`."""
        rank, size = self._rank, self._size = options.group_rank, options.group_size
        super().__init__(rank, size)
        self._name, self._description = options.group_id, "undefined"
        self._timeout = timeout = options.timeout
        self._fake_store = fake_store_of(options.store)  # keep a reference: torch does not
        self._store = _store_of_attempt(options.store)
        self._ranks = list(options.global_ranks_in_group) or list(range(size))
        self._job_size = dist.get_world_size() if dist.is_initialized() else size
        self._is_whole_job = self._ranks == list(range(self._job_size))
        self._connections = self._for_cpu = None  # stays so in a block of equal_ranks
        self._peers = EqualRanksGloo(rank, size)
        if self._fake_store is None:
            store = dist.PrefixStore("vgpu", self._store)
            self._connections = GlooConnections(store, rank, size, self._ranks, timeout)
            self._peers = self._connections.gloo
            store = dist.PrefixStore("cpu", self._store)
            self._for_cpu = dist.ProcessGroup(store, rank, size)  # has more methods than gloo's
            add_gloo(self._for_cpu, dist.ProcessGroupGloo(store, rank, size, timeout))
        self._lanes = {}  # (index of a device, its model, name of the engine) -> Lane
        self._coalesced = threading.local()
        self._join()
        self._number = 0
        self._last_stream = None  # the stream of the last collective
        self._counts = Counter()  # calls: () for collectives, both ranks for messages
        self._error = None
        self.bound_device = None  # `device_id` of init_process_group

    def _join(self):
        """Connect this rank's clock, if modelled, to the clocks of the other ranks."""
        clock = scheduler.clock
        if clock.meetings is not None:
            return
        if self._connections is None:
            clock.meetings = EqualRanks(clock, self._job_size)
            return
        job = self._store, self._rank, self._size
        if dist.is_initialized():
            job = _store_of_attempt(default_store()), dist.get_rank(), dist.get_world_size()
        clock.meetings = ConnectedRanks(clock, *job, self._timeout)

    # -- the interface that torch expects

    def getBackendName(self):
        return BACKEND

    @property
    def _device_types(self):
        return [torch.device("vgpu")]

    def _get_backend(self, device):
        return self

    def setGroupName(self, name):
        self._name = name

    def setGroupDesc(self, description):
        self._description = description

    def getGroupName(self):
        return self._name

    def getGroupDesc(self):
        return self._description

    def _set_sequence_number_for_group(self):
        if self._for_cpu is not None:
            start_counting(self._for_cpu)

    def _get_sequence_number_for_group(self):
        """Return the number of collectives issued by this rank, including those of gloo."""
        return self._number + (num_collectives(self._for_cpu) if self._for_cpu else 0)

    def set_timeout(self, timeout):
        self._timeout = timeout
        if self._connections is not None:
            self._connections.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def shutdown(self):
        """Wait for all issued collectives, until their time-outs at most, and end the threads."""
        lanes, self._lanes = self._lanes, {}
        for lane in lanes.values():
            for op in lane.stream.tail():
                wait(op, lane.stream.device.torch_device)
            if not lane.engine.clock.is_modelled:
                lane.stream.device.remove_engine(lane.engine)
        if self._is_whole_job:
            scheduler.clock.end_meetings()

    abort = shutdown

    def for_cpu(self):
        """Return the gloo group of this one; RuntimeError, with torch's text, if it has none."""
        if self._for_cpu is None or "cpu:" not in dist.get_backend_config(self):
            raise RuntimeError("No backend type associated with device type cpu")
        return self._for_cpu

    # -- collectives

    @_by_device
    def allreduce(self, tensors, opts=None):
        return self._all_reduce("all_reduce", tensors, opts)

    @_by_device
    def allreduce_coalesced(self, tensors, opts=None):
        return self._all_reduce("all_reduce_coalesced", tensors, opts)

    def _all_reduce(self, name, tensors, opts):
        reduction = self._reduction(opts, tensors)
        call = Collective(name, tensors, tensors, reduction.name, "all_reduce", reduction=reduction)
        return self._issue(call)

    @_by_device
    def reduce(self, tensors, opts=None):
        opts = opts or dist.ReduceOptions()
        reduction, root = self._reduction(opts, tensors), opts.rootRank
        detail = f"{reduction.name}, {self._root(root)}"
        call = Collective("reduce", tensors, tensors, detail, reduction=reduction, root=root)
        return self._issue(call)

    @_by_device
    def broadcast(self, tensors, opts=None):
        root = (opts or dist.BroadcastOptions()).rootRank
        call = Collective("broadcast", tensors, tensors, self._root(root), root=root)
        call.is_read = self._rank == root
        return self._issue(call)

    @_by_device
    def allgather(self, output_lists, inputs, opts=None):
        return self._all_gather("all_gather", output_lists, inputs, output_lists)

    @_by_device
    def allgather_coalesced(self, output_lists, inputs, opts=None):
        raise NotImplementedError("ProcessGroupNCCL does not support allgather_coalesced")

    @_by_device
    def _allgather_base(self, output, value, opts=None):
        """Copy the tensor of each rank to all ranks, into one tensor."""
        return self._all_gather("all_gather_into_tensor", [output], [value])

    all_gather_single = _allgather_base

    @_by_device
    def allgather_into_tensor_coalesced(self, outputs, inputs, opts=None):
        return self._all_gather("all_gather_into_tensor_coalesced", outputs, inputs)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def _all_gather(self, name, wholes, inputs, result=None):
        outputs = self._parts_of(name, wholes, inputs)
        call = Collective(name, inputs, outputs, kind="all_gather")
        return self._issue(call, result or wholes)

    @_by_device
    def reduce_scatter(self, outputs, input_lists, opts=None):
        """Sum over the ranks; rank i gets the sum of the inputs i."""
        return self._reduce_scatter("reduce_scatter", outputs, input_lists, opts)

    @_by_device
    def _reduce_scatter_base(self, output, value, opts=None):
        """Sum over the ranks; rank i gets part i of the sum."""
        return self._reduce_scatter("reduce_scatter_tensor", [output], [value], opts)

    reduce_scatter_single = _reduce_scatter_base

    @_by_device
    def reduce_scatter_tensor_coalesced(self, outputs, inputs, opts=None):
        return self._reduce_scatter("reduce_scatter_tensor_coalesced", outputs, inputs, opts)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _reduce_scatter(self, name, outputs, wholes, opts):
        inputs = self._parts_of(name, wholes, outputs)
        reduction = self._reduction(opts, inputs)
        kind = "reduce_scatter"
        call = Collective(name, inputs, outputs, reduction.name, kind, reduction=reduction)
        return self._issue(call)

    @_by_device
    def alltoall(self, outputs, inputs, opts=None):
        """Send input j to rank j; output i comes from rank i."""
        return self._all_to_all("all_to_all", outputs, inputs, outputs)

    @_by_device
    def alltoall_base(self, output, value, output_sizes=(), input_sizes=(), opts=None):
        """Send part j of a tensor to rank j; sizes are in rows, by default equal."""
        name = "all_to_all_single"
        for whole in output, value:
            _check_dense(name, whole)
        outputs = _split(output, output_sizes) or self._parts(name, output)
        inputs = _split(value, input_sizes) or self._parts(name, value)
        return self._all_to_all(name, outputs, inputs, [output])

    all_to_all_single = alltoall_base

    def _all_to_all(self, name, outputs, inputs, result):
        dtypes = str({tensor.dtype for tensor in (*inputs, *outputs)})
        call = Collective(name, inputs, outputs, dtypes, "all_to_all", shapes_of=[])
        return self._issue(call, result)

    @_by_device
    def gather(self, output_lists, inputs, opts=None):
        root = (opts or dist.GatherOptions()).rootRank
        outputs = self._parts_of("gather", output_lists, inputs)
        call = self._gather_or_scatter("gather", inputs, outputs, root, inputs)
        return self._issue(call, outputs)

    @_by_device
    def scatter(self, outputs, input_lists, opts=None):
        """Copy tensor i of the root to rank i."""
        root = (opts or dist.ScatterOptions()).rootRank
        inputs = self._parts_of("scatter", input_lists, outputs)
        return self._issue(self._gather_or_scatter("scatter", inputs, outputs, root, outputs))

    def _gather_or_scatter(self, name, inputs, outputs, root, own):
        """Return the `Collective` of a gather or scatter; `own` is each rank's part."""
        sizes = {"shapes_of": own, "cost_bytes": bytes_of(own)}
        return Collective(name, inputs, outputs, self._root(root), root=root, **sizes)

    def barrier(self, opts=None):
        """Make the host wait until all ranks have joined."""
        call = Collective("barrier", [], [], cost_bytes=4)
        where = opts.device_ids[0] if opts and opts.device_ids else self.bound_device
        if where is None and not registry.device_was_set:  # like NCCL: used before, or a guess
            guess = self._ranks[self._rank] % max(registry.count, 1)
            where = min((index for index, _, _ in self._lanes), default=guess)
        return self._issue(call, device=registry.find(where), blocks=True)

    def monitored_barrier(self, timeout=None, wait_all_ranks=False):
        return self.for_cpu().monitored_barrier(timeout or self._timeout, wait_all_ranks)

    @_by_device
    def send(self, tensors, other, tag):
        return self._message(tensors, other, sends=True)

    @_by_device
    def recv(self, tensors, other, tag):
        return self._message(tensors, other, sends=False)

    @_by_device
    def recv_anysource(self, tensors, tag):
        raise NotImplementedError("ProcessGroupNCCL does not support recvAnysource")

    def _message(self, tensors, other, sends):
        (tensor,) = tensors
        if other == self._rank:
            raise ValueError(f"a rank cannot exchange messages with itself: got rank {other}")
        inputs, outputs = (tensors, []) if sends else ([], tensors)
        dtype = str(tensor.dtype).removeprefix("torch.")
        detail = f"{tensor.numel()} of {dtype}"  # shapes and tags may differ, as for NCCL
        kind, ends = "send" if sends else "recv", {"peer": other, "sends": sends, "other": other}
        call = Collective("message", inputs, outputs, detail, kind, shapes_of=[], **ends)
        return self._issue(call)

    # -- coalescing

    def _start_coalescing(self, device):
        """Collect the calls until `_end_coalescing`; each is issued at once."""
        self._coalesced.ops = []

    start_coalescing = _start_coalescing

    def _end_coalescing(self, device):
        """Return one `Work` for the calls since `_start_coalescing`."""
        ops, self._coalesced.ops = self._coalesced.ops, None
        return VirtualWork(ops, [])

    end_coalescing = _end_coalescing

    # -- issuing

    def _reduction(self, opts, tensors):
        reduction = Reduction((opts or dist.AllreduceOptions()).reduceOp, self._size)
        for tensor in tensors:
            reduction.check(tensor.dtype)
        return reduction

    def _root(self, rank):
        return f"root {self._ranks[rank]}"

    def _parts(self, name, whole, part=None):
        """Split a tensor into equal parts, one for each rank, of the size of `part` if given."""
        k = self._size
        if whole.numel() % k or part is not None and whole.numel() != k * part.numel():
            size = "equal parts" if part is None else f"parts of {part.numel()}"
            raise ValueError(f"{name}: cannot split {whole.numel()} elements into {k} {size}")
        _check_dense(name, whole)
        return list(whole.view(-1).split(whole.numel() // k)) if whole.numel() else [whole] * k

    def _parts_of(self, name, wholes, parts):
        """Return the parts of all wholes in one list.

        `wholes` are tensors, or lists of one tensor for each rank; empty on ranks but the root.
        `parts` are this rank's tensors, each with the size of one part.
        """
        found = []
        for whole, part in zip(wholes, parts, strict=bool(wholes)):
            each = self._parts(name, whole, part) if isinstance(whole, torch.Tensor) else whole
            if len(each) != self._size:
                raise ValueError(
                    f"{name}: a list must have {self._size} tensors, one a rank: got {len(each)}"
                )
            for one in each:
                if (one.numel(), one.dtype) != (part.numel(), part.dtype):
                    raise ValueError(f"{name}: {described(one)} does not match {described(part)}")
            found += each
        return found

    def _issue(self, op, result=None, device=None, blocks=False):
        """Issue a `Collective` to the stream of its lane; return its `Work`."""
        tensors = [*op.inputs, *op.outputs]
        if device is None:
            device = _device_of(op.name, tensors)
        if self._error is not None:
            raise dist.DistBackendError(f"this process group failed before: {self._error}")
        if self.bound_device is not None and registry.find(self.bound_device) is not device:
            raise dist.DistBackendError(
                "Attempt to perform collective on tensor not on device passed to init_process_group"
            )
        for tensor in tensors:
            _check_dense(op.name, tensor)
            exchange.check_type(op.name, tensor.dtype)
        lane = self._lane(device, op)
        self._number_call(op)
        self._join()
        op.engine, op.work = lane.engine, self._run
        op.args = outputs, _ = [[t._cell for t in each] for each in (op.outputs, op.inputs)]
        op.source = op.target = device.torch_device
        if threads.thread.current is None:  # backward waits for streams recorded there
            threads.thread.current = threads.CurrentStreams()
        current = threads.thread.current
        self._number += 1
        before = (*device.current_stream().tail(), *current.after(lane.stream, op))
        if op.peer is None:  # the same order on all ranks, for any devices
            last, self._last_stream = self._last_stream, lane.stream
            if last is not None and last is not lane.stream:
                before += tuple(last.tail())
        work = VirtualWork([op], op.outputs if result is None else result, blocks)
        lane.stream.issue(op, before)
        for cell in outputs:
            cell.root().writer = op
        coalesced = getattr(self._coalesced, "ops", None)
        if coalesced is not None:
            coalesced.append(op)
        return work

    def _number_call(self, op):
        if op.peer is None:
            op.members, kind = tuple(self._ranks), ()
        else:
            ends = self._ranks[self._rank], self._ranks[op.peer]
            op.members = kind = ends if op.sends else ends[::-1]
        self._counts[kind] += 1
        op.key = (self._name, *kind, self._counts[kind])

    def _lane(self, device, op):
        name = "collectives"
        if op.peer is not None:
            name = f"{'send' if op.sends else 'recv'} {self._ranks[op.peer]}"
        key = device.index, device.model, name
        if key not in self._lanes:
            others = [index for index, _, lane in self._lanes if lane == name]
            if others and others != [device.index]:
                warnings.warn(
                    f"{op.name} on {device.torch_device}, but before on GPU {others[-1]}: NCCL "
                    "hangs unless every rank changes its GPU at the same call",
                    stacklevel=2,
                )
            self._claim(device)
            self._lanes[key] = Lane(name, device)
        return self._lanes[key]

    def _claim(self, device):
        """Raise DistBackendError, with NCCL's text, if another rank has claimed the same GPU."""
        if (
            self._connections is None
            or registry.device_type == "vgpu"
            or dist.get_backend(self) == "gloo"
        ):
            return  # elsewhere each process has GPUs of its own
        visible = dict(enumerate(os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")))
        gpu = visible.get(device.index) or device.index
        key = f"{self._connections.machine}/{os.environ.get('GROUP_RANK')}/{gpu}"
        owner = int(self._store.compare_set(key, "", str(self._rank)))
        if owner != self._rank:
            raise dist.DistBackendError(
                f"Duplicate GPU detected : rank {self._rank} and rank {owner} both on CUDA device "
                f"{gpu}: each must call torch.cuda.set_device with its own"
            )

    # -- in the thread of the engine

    def _run(self, op):
        """Run a collective; an error is stored in its outputs, too."""
        modelled = op.engine.clock.is_modelled
        try:
            if op.failure is not None:
                raise op.failure
            if not op.has_values:
                mark_without_values(op)
                return
            if self._error is not None:
                raise dist.DistBackendError(f"this process group failed: {self._error}")
            values, failure = None, None
            try:
                values = [[_flat(cell) for cell in cells] for cells in op.args[::-1]]
            except Unavailable as unavailable:
                failure = unavailable
            run = self._run_at_its_time if modelled else self._run_in_real_time
            run(op, values, failure)
        except BaseException as error:
            set_missing(op.args[0], Missing(error))
            if isinstance(error, dist.DistBackendError) and self._error is None:
                self._error = error
            raise
        finally:
            op.move = None  # it may hold a tensor, a factor
            op.drop_tensors()
            if modelled:
                op.engine.clock.meetings.done(op)

    def _run_at_its_time(self, op, values, failure):
        op.engine.clock.meetings.waits_for_values(op)
        self._agree(op, 0.0, None, failure)
        op.move(self._peers, *values)

    def _run_in_real_time(self, op, values, failure):
        """Move the values of a collective and occupy the links for its duration."""
        device = op.engine.device
        uses = op.directions(device.sending, device.receiving)
        ready = max(op.ready, *(each.free_at for each in uses))
        agreed = self._agree(op, ready, device.peer_link, failure)
        bandwidth, latency = agreed.bandwidth, agreed.latency
        op.meet(Route(bandwidth, latency))
        end = agreed.start
        if bandwidth < NO_LINK or latency:
            with _links_lock:  # other groups may have agreed on the same time
                end = max(end, *(each.free_at for each in uses)) + op.seconds
                for each in uses:
                    each.free_at = end
        op.move(self._peers, *values)
        sleep_until(end)

    def _agree(self, op, ready, link, failure):
        if self._connections is None:
            if failure is not None:
                raise failure
            return Agreement(ready, *bandwidth_and_latency(link))
        if op.peer is None:
            return self._connections.agree(op.text, ready, link, failure)
        return self._connections.agree_with(op.peer, op.sends, op.text, ready, link, failure)


def _store_of_attempt(store):
    """Return a store without the keys of earlier attempts.

    torchrun keeps its store when it restarts workers, with the addresses of dead ones.
    """
    return dist.PrefixStore(f"start{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


_links_lock = threading.Lock()  # guards the directions of links


def _split(tensor, sizes):
    """Split a dense tensor into parts of these numbers of rows; None if `sizes` is empty."""
    parts = tensor.split(list(sizes)) if len(sizes) else ()
    return [part.as_strided((part.numel(),), (1,)) for part in parts] or None


def _check_dense(name, tensor):
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    memory_format = formats.get(tensor.dim(), torch.contiguous_format)
    is_dense = tensor.is_contiguous() or tensor.is_contiguous(memory_format=memory_format)
    if not is_dense and tensor.numel():
        raise ValueError(
            f"{name}: tensors must be contiguous: got shape {tuple(tensor.shape)} and strides "
            f"{tensor.stride()}"
        )


def _device_of(name, tensors):
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1 or not all(type(tensor) is VirtualTensor for tensor in tensors):
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"{name}: all tensors must be on one virtual GPU: got {names}")
    return registry.find(devices.pop())


def _flat(cell):
    """Return the values of a dense tensor as a flat CPU tensor that shares its memory."""
    revive(cell)
    data = fetch(cell)
    flat = torch.as_strided(data, (data.numel(),), (1,), data.storage_offset())
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat  # as for NCCL


_groups = weakref.WeakSet()
_EXIT_TIMEOUT = 30.0  # seconds that an ending process waits for its issued collectives
_ending = threading.Event()


def _wait_at_exit():
    """Wait at exit for the collectives that this process has issued: other ranks need them.

    After an error, return at once: the other ranks may never join.
    """
    if hasattr(sys, "last_value") or scheduler.in_fork():
        return
    _ending.set()
    _waiters[-1].join(_EXIT_TIMEOUT)


def _shut_down():
    _ending.wait()
    with contextlib.suppress(Exception):  # the process is ending
        for group in sorted(_groups, key=VirtualProcessGroup.size):  # the whole job last
            group.shutdown()


# At most one thread. It is started with the first group, because Python 3.12 and later start none
# at exit; created there, too, because in a fork Python 3.13.0 regards unstarted threads as ended.
_waiters = []


def create(options, backend_options=None):
    """Return a new `VirtualProcessGroup`; torch calls this for the backend "vccl"."""
    group = VirtualProcessGroup(options)
    if not _waiters:
        _waiters.append(threading.Thread(target=_shut_down, daemon=True))
        _waiters[-1].start()
    if not _groups:
        atexit.unregister(_wait_at_exit)
        atexit.register(_wait_at_exit)
    _groups.add(group)
    return group
