"""`torch.vgpu`: the part of `torch.cuda` that multi-device code uses, for virtual GPUs.

Devices are given as `torch.device`, name or index; None is the calling thread's current device. An
unknown device raises RuntimeError.
"""

import contextlib
from collections import OrderedDict

import torch

from vgpu.modelled.simulation import simulator
from vgpu.private.registration import BaseEvent, BaseStream
from vgpu.private.virtual_tables import PRIVATE_USE_1
from vgpu.runtime import registry, scheduler, threads
from vgpu.runtime.identity import identity_of, properties_of
from vgpu.runtime.scheduler import Op, wait_for_ops
from vgpu.tensors.caching import MIB

_initialized = True  # torch.utils.checkpoint reads it before it saves random number states


class Stream(BaseStream):
    """A queue of work on one virtual GPU; work of different streams may overlap.

    `with stream:` makes the stream and its device current for the calling thread.

    Args:
        device: the device of the stream; the current device by default.
        priority: recorded only; kernels of all streams compete equally.

    Attributes:
        device: the `torch.device` of the stream.
        stream_id: its number on the device; 0 for the default stream.
        priority: the given one, but at most 0 and at least -3, as in CUDA's builds of torch.
    """

    def __new__(cls, device=None, priority=0, *, _stream=None):
        stream = _stream or registry.find(device).new_stream(max(-3, min(priority, 0)))
        self = super().__new__(
            cls, stream_id=stream.index, device_index=stream.device.index, device_type=PRIVATE_USE_1
        )
        self._stream = stream
        return self

    @property
    def device(self):
        return self._stream.device.torch_device

    @property
    def priority(self):
        return self._stream.priority

    def query(self):
        """Return whether all work issued so far has finished."""
        scheduler.clock.poll()
        return not self._stream.tail()

    def synchronize(self):
        """Wait for all work issued so far; AcceleratorError if an op of the device has failed."""
        scheduler.note_sync()
        wait_for_ops(self._stream.tail(), self.device)
        self._stream.device.raise_error()

    def record_event(self, event=None):
        """Record `event`, a new one by default, behind the work issued so far; return it."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event):
        """Make all later work of this stream wait for `event`."""
        event.wait(self)

    def wait_stream(self, stream):
        """Make all later work of this stream wait for the work issued to `stream` so far."""
        self._stream.wait_for(stream._stream.tail())

    def __enter__(self):
        stream = self._stream
        before = registry.current().index, stream.device.current_stream()
        try:
            threads.set_stream(stream)
            threads.thread.device = stream.device.index
            threads.thread.entered = (*threads.thread.entered, before)
            return self
        except BaseException:
            _make_current(*before)
            raise

    def __exit__(self, *exception):
        threads.leave()

    def __eq__(self, other):
        return isinstance(other, Stream) and self._stream is other._stream

    def __hash__(self):
        return hash(self._stream)

    def __repr__(self):
        return f"<torch.{self.device.type}.Stream device={self.device} stream={self._stream.index}>"


def _make_current(index, stream):
    threads.set_stream(stream)
    threads.thread.device = index


class Event(BaseEvent):
    """A point in a stream that the host and other streams can wait for.

    An event without a record counts as reached.

    Args:
        enable_timing: whether `elapsed_time` is supported.
        blocking, interprocess: ignored.
    """

    def __new__(cls, enable_timing=False, blocking=False, interprocess=False):
        self = super().__new__(cls, torch.device("vgpu"), enable_timing=enable_timing)
        self._timing = enable_timing
        self._clock = None  # the clock in force at the record
        self._point = None  # the record: device, ops before it, time
        return self

    def record(self, stream=None):
        """Record this event behind the work of `stream`, the current one by default."""
        stream = (current_stream() if stream is None else stream)._stream
        self._clock = scheduler.clock
        self._point = stream.device, stream.tail(), scheduler.clock.now()

    def wait(self, stream=None):
        """Make later work of `stream`, the current one by default, wait for this event."""
        stream = current_stream() if stream is None else stream
        if self._point is not None:
            stream._stream.wait_for(self._point[1])

    def query(self):
        """Return whether the work before this event has finished."""
        scheduler.clock.poll()
        return self._is_reached()

    def _is_reached(self):
        return self._point is None or not any(map(scheduler.under_way, self._point[1]))

    def synchronize(self):
        """Wait for the work before this event; AcceleratorError if an op there has failed."""
        if self._point is not None:
            device, ops, _ = self._point
            wait_for_ops(ops, device.torch_device)
            device.raise_error()

    def elapsed_time(self, end):
        """Return the milliseconds from this event to `end`, another event.

        Raises:
            ValueError: an event was created without `enable_timing`, or not recorded.
            RuntimeError: an event has not been reached yet, or `virtual_gpus` has changed the clock
                between them.
        """
        seconds = end._time() - self._time()
        if self._clock is not end._clock:
            raise RuntimeError("virtual_gpus has changed the clock between these two events")
        return seconds * 1e3

    def _time(self):
        if not self._timing:
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._point is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        scheduler.clock.catch_up()
        if not self._is_reached():
            raise RuntimeError("an event has not been reached yet: synchronize before elapsed_time")
        _, ops, recorded = self._point
        return max([recorded, *(op.end for op in ops)])

    def __repr__(self):
        return f"<torch.{registry.device_type}.Event recorded={self._point is not None}>"


class device:  # noqa: N801
    """Make a device the calling thread's current one within a block; None and -1 do nothing."""

    def __init__(self, device):
        self._index = None
        if device is not None and device != -1:
            self._index = registry.find(device).index

    def __enter__(self):
        before = registry.current().index
        entered = (*threads.thread.entered, (before, None))
        threads.set_entered(before if self._index is None else self._index, entered)
        return self

    def __exit__(self, *exception):
        threads.leave()


def stream(stream):
    """Return a context manager that makes a stream the current one; for None it does nothing."""
    return contextlib.nullcontext() if stream is None else stream


def is_available():
    """Return whether there are virtual GPUs."""
    return registry.count > 0


def is_initialized():
    """Return whether this process has chosen a virtual GPU, or issued work.

    If not, `init_device_mesh` chooses the GPU of the local rank, as on CUDA.
    """
    return registry.device_was_set or has_worked()


def has_worked():
    """Return whether this process has issued work to a virtual GPU."""
    workers = [engine for device in registry.devices for engine in device.own_engines]
    return any(worker.started for worker in (*workers, simulator))


def is_bf16_supported(including_emulation=True):
    """Return True; without emulation, whether the compute capability is at least 8."""
    return including_emulation or get_device_capability()[0] >= 8


def device_count():
    """Return the number of virtual GPUs."""
    return registry.count


def current_device():
    """Return the index of the calling thread's current device."""
    return registry.current().index


def set_device(device):
    """Make `device` the calling thread's current device; a negative index does nothing."""
    if not isinstance(device, int) or device >= 0:
        threads.thread.device = registry.find(device).index
        registry.device_was_set = True


def synchronize(device=None):
    """Wait for all work issued so far to the streams of `device`, the current one by default.

    Raises torch.AcceleratorError if an op that was issued before has failed.
    """
    registry.find(device).synchronize()


def set_sync_debug_mode(debug_mode):
    """Let operators that make the host wait warn (1, "warn"), raise (2, "error") or do neither."""
    modes = {"default": 0, "warn": 1, "error": 2}
    if debug_mode not in (*modes, *modes.values()):
        raise RuntimeError(
            "invalid value of debug_mode, expected one of `default`, `warn`, `error`"
        )
    scheduler.sync_debug_mode = modes.get(debug_mode, debug_mode)


def get_sync_debug_mode():
    return scheduler.sync_debug_mode


def current_stream(device=None):
    """Return the calling thread's current stream of `device`."""
    return Stream(_stream=registry.find(device).current_stream())


def default_stream(device=None):
    """Return the stream of `device` that is current initially."""
    return Stream(_stream=registry.find(device).default_stream)


def set_stream(stream):
    """Make `stream` and its device current for the calling thread; None does nothing."""
    if stream is not None:
        _make_current(stream._stream.device.index, stream._stream)


def memory_allocated(device=None):
    """Return the bytes that storages on `device` take: each is rounded up to 512, as on CUDA."""
    return _memory(device).allocated


def max_memory_allocated(device=None):
    """Return the peak of `memory_allocated`, bytes since the start or `reset_peak_memory_stats`."""
    return _memory(device).peak


def memory_reserved(device=None):
    """Return the most bytes in use at a time since `empty_cache`, in segments of 2 MiB.

    On a modelled GPU these are the segments that CUDA's caching allocator would reserve, see
    `caching.py`.
    """
    return _memory(device).reserved


def max_memory_reserved(device=None):
    """Return the peak of `memory_reserved`, bytes since the start or `reset_peak_memory_stats`."""
    return _memory(device).reserved_peak


def reset_peak_memory_stats(device=None):
    """Reset the peak memory of `device` to the memory in use now."""
    registry.find(device).memory.reset_peak()


def memory_stats(device=None):
    """Return memory statistics of `device` under the names of `torch.cuda.memory_stats`.

    Returns:
        {name: integer}: bytes ("allocated_bytes.all.peak"), numbers of blocks
        ("allocation.all.current"), allocations that waited for freed memory ("num_alloc_retries")
        and those that failed ("num_ooms"). The only pool is "all".
    """
    memory = _memory(device)
    in_use = memory.allocated + memory.held
    stats = OrderedDict()
    for name, current, peak in (
        ("active_bytes", in_use, memory.held_peak),
        ("allocated_bytes", memory.allocated, memory.peak),
        ("reserved_bytes", memory.reserved, memory.reserved_peak),
    ):
        stats[f"{name}.all.current"] = current
        stats[f"{name}.all.peak"] = peak
        if name != "reserved_bytes":  # segments that were freed are not counted
            stats[f"{name}.all.allocated"] = memory.total_allocated
            stats[f"{name}.all.freed"] = memory.total_allocated - current
    stats["requested_bytes.all.current"] = memory.requested
    stats["allocation.all.current"] = memory.num_blocks
    stats["allocation.all.allocated"] = memory.num_allocations
    stats["allocation.all.freed"] = memory.num_allocations - memory.num_blocks
    stats["num_alloc_retries"] = memory.num_retries
    stats["num_ooms"] = memory.num_ooms
    return stats


def memory_summary(device=None, abbreviated=False):
    """Return a table of the memory of `device`: its size, and `memory_stats`."""
    size = f"{registry.find(device).torch_device}: {_memory(device).limit / MIB:.2f} MiB"
    return "\n".join([size, *(f"{name:<34}{n:>18,}" for name, n in memory_stats(device).items())])


def _memory(device):
    memory = registry.find(device).memory
    memory.collect()
    return memory


def mem_get_info(device=None):
    """Return free and total bytes of the memory of `device`, a tuple."""
    memory = _memory(device)
    return memory.limit - memory.allocated - memory.held, memory.limit


def set_per_process_memory_fraction(fraction, device=None):
    """Limit the usable memory of a device to a fraction, 0 to 1; ValueError for another number.

    An allocation beyond the limit raises torch.OutOfMemoryError.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0 to 1")
    memory = registry.find(device).memory
    memory.set_limit(memory.limit, fraction)


def get_per_process_memory_fraction(device=None):
    """Return the fraction of `set_per_process_memory_fraction`, 1 by default."""
    return registry.find(device).memory.fraction


def empty_cache():
    """Lower `memory_reserved` to what is in use: freed memory is released at once anyway."""
    for device in registry.devices[: registry.count]:
        device.memory.empty_cache()


def get_device_name(device=None):
    """Return the name of a device: that of the modelled GPU, or "Virtual GPU (1 CPU thread)"."""
    return identity_of(registry.find(device)).name


def get_device_properties(device=None):
    """Return the `DeviceProperties` of a device.

    `multi_processor_count` is that of the modelled GPU, otherwise the number of CPU threads.
    """
    return properties_of(registry.find(device))


def get_device_capability(device=None):
    """Return the compute capability of the modelled GPU, otherwise (7, 0)."""
    return identity_of(registry.find(device)).capability


def can_device_access_peer(device, peer_device):
    """Return whether a device can access another one's memory: True for any two virtual GPUs."""
    return registry.find(device) is not registry.find(peer_device)


def manual_seed(seed):
    """Seed the random numbers of the current device."""
    registry.current().generator.manual_seed(seed)


def manual_seed_all(seed):
    """Seed the random numbers of every device; `torch.manual_seed` calls this."""
    for each in registry.devices:
        each.generator.manual_seed(seed)


def get_rng_state(device=None):
    """Return the state after all draws issued so far, without waiting: a CPU ByteTensor."""
    return registry.find(device).generator.get_state()


def set_rng_state(state, device=None):
    """Set the random number state of a device for later draws."""
    registry.find(device).generator.set_state(state)


default_generators = []  # of the devices in use
_is_in_bad_fork = scheduler.in_fork


def get_amp_supported_dtype():
    """Return the dtypes that `torch.autocast("vgpu", ...)` supports, a list."""
    return [torch.bfloat16, torch.float16]


def _sleep(seconds):
    """Keep the current device's compute engine busy for `seconds`, as `torch.cuda._sleep` does."""
    found = registry.current()
    op = Op("sleep", "kernel", found.compute, lambda op: None)
    op.seconds = seconds
    found.current_stream().issue(op)
