"""`torch.vgpu`: the part of `torch.cuda` that multi-device code uses, for virtual GPUs."""

from collections import OrderedDict, namedtuple
from collections.abc import Sequence
from time import perf_counter

import torch

from . import device as registry
from . import scheduler
from .memory import MIB
from .private import PRIVATE_USE_1, BaseEvent, BaseStream
from .scheduler import Op, wait_all

_DeviceProperties = namedtuple(
    "_VirtualGPUProperties", "name total_memory multi_processor_count major minor"
)
_initialized = True  # torch.utils.checkpoint asks before it keeps the state of random numbers


class Stream(BaseStream):
    """A queue of work on one virtual GPU; work of different streams may overlap.

    `Stream(device=None)` makes a new one on `device` (the current one by default). As a context
    manager it is where the calling thread's work goes.
    """

    def __new__(cls, device=None, priority=0, *, _stream=None):
        stream = _stream or registry.find(device).new_stream()
        self = super().__new__(
            cls,
            stream_id=stream.index,
            device_index=stream.device.index,
            device_type=PRIVATE_USE_1,
        )
        self._stream = stream
        return self

    def __init__(self, device=None, priority=0, *, _stream=None):
        pass

    @property
    def device(self):
        return self._stream.device.torch_device

    def query(self):
        """Return whether all work issued so far has finished."""
        return not self._stream.tail()

    def synchronize(self):
        """Wait for all work issued so far; raise the error of an op that failed."""
        wait_all(self._stream.tail(), self.device)
        self._stream.device.raise_error()

    def record_event(self, event=None):
        """Record `event` (a new one by default) behind the work issued so far; return it."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event):
        """Let all later work of this stream wait for `event`."""
        event.wait(self)

    def wait_stream(self, stream):
        """Let all later work of this stream wait for what `stream` was given so far."""
        self._stream.wait_for(stream._stream.tail())

    def __enter__(self):
        stream = self._stream
        before = registry.current().index, stream.device.current_stream()
        try:
            registry.set_stream(stream)
            registry.thread.device = stream.device.index
            registry.thread.entered = (*registry.thread.entered, before)
            return self
        except BaseException:
            _make_current(*before)
            raise

    def __exit__(self, *exception):
        registry.leave()

    def __eq__(self, other):
        return isinstance(other, Stream) and self._stream is other._stream

    def __hash__(self):
        return hash(self._stream)

    def __repr__(self):
        return f"<torch.vgpu.Stream device={self.device} stream={self._stream.index}>"


def _make_current(index, stream):
    registry.set_stream(stream)
    registry.thread.device = index


class Event(BaseEvent):
    """A point in a stream that hosts and other streams can wait for."""

    def __new__(cls, enable_timing=False, blocking=False, interprocess=False):
        self = super().__new__(cls, torch.device("vgpu"), enable_timing=enable_timing)
        self._timing = enable_timing
        self._point = None  # where it was recorded: the device, the ops before it, the time
        return self

    def __init__(self, enable_timing=False, blocking=False, interprocess=False):
        pass

    def record(self, stream=None):
        """Record this event behind the work of `stream` (the current one by default)."""
        stream = (current_stream() if stream is None else stream)._stream
        self._point = stream.device, stream.tail(), perf_counter()

    def wait(self, stream=None):
        """Let later work of `stream` (the current one by default) wait for this event."""
        stream = current_stream() if stream is None else stream
        if self._point is not None:
            stream._stream.wait_for(self._point[1])

    def query(self):
        """Return whether the work before this event has finished."""
        return self._point is None or all(op.done for op in self._point[1])

    def synchronize(self):
        """Wait on the host for the work before this event."""
        if self._point is not None:
            device, ops, _ = self._point
            wait_all(ops, device.torch_device)
            device.raise_error()

    def elapsed_time(self, end):
        """Return the milliseconds from this event to `end`.

        Raises ValueError for an event made without `enable_timing` or not recorded, RuntimeError
        for one that has not happened yet.
        """
        return (end._time() - self._time()) * 1e3

    def _time(self):
        if not self._timing:
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._point is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if not self.query():
            raise RuntimeError("an event has not happened yet: synchronize before elapsed_time")
        _, ops, recorded = self._point
        return max([recorded, *(op.end for op in ops)])

    def __repr__(self):
        return f"<torch.vgpu.Event recorded={self._point is not None}>"


class device:  # noqa: N801
    """Context manager: make a device the current one; None or -1 changes nothing."""

    def __init__(self, device):
        self._index = None
        if device is not None and device != -1:
            self._index = registry.find(device).index

    def __enter__(self):
        before = registry.current().index
        entered = (*registry.thread.entered, (before, None))
        # One step, see scheduler.py.
        registry.thread.device = before if self._index is None else self._index
        registry.thread.entered = entered
        return self

    def __exit__(self, *exception):
        registry.leave()


class StreamContext:
    """Context manager: issue the calling thread's work to `stream`; None changes nothing."""

    def __init__(self, stream):
        self._stream = stream

    def __enter__(self):
        return self._stream and self._stream.__enter__()

    def __exit__(self, *exception):
        if self._stream is not None:
            self._stream.__exit__(*exception)


def stream(stream):
    """Return a context manager that issues the calling thread's work to `stream`."""
    return StreamContext(stream)


def is_available():
    """Return whether there are virtual GPUs."""
    return registry.count > 0


def is_initialized():
    return is_available()


def is_bf16_supported():
    return True


def device_count():
    """Return the number of virtual GPUs."""
    return registry.count


def current_device():
    """Return the index of the calling thread's current device."""
    return registry.current().index


def set_device(device):
    """Make `device` the calling thread's current device."""
    registry.set_current(registry.find(device).index)


def synchronize(device=None):
    """Wait for all streams of `device` (the current one by default).

    Raises torch.AcceleratorError when an op that was issued before has failed.
    """
    registry.find(device).synchronize()


def current_stream(device=None):
    """Return the stream that the calling thread's work on `device` goes to."""
    return Stream(_stream=registry.find(device).current_stream())


def default_stream(device=None):
    """Return the stream that is current unless another was chosen."""
    return Stream(_stream=registry.find(device).default_stream)


def set_stream(stream):
    """Issue the calling thread's work to `stream` and make its device the current one."""
    _make_current(stream._stream.device.index, stream._stream)


def memory_allocated(device=None):
    """Return the bytes of all tensors' storages on `device`."""
    return _memory(device).allocated


def max_memory_allocated(device=None):
    """Return the highest `memory_allocated` since the start or `reset_peak_memory_stats`."""
    return _memory(device).peak


def memory_reserved(device=None):
    """Return `memory_allocated` and what is freed but still used by a stream (`record_stream`)."""
    memory = _memory(device)
    return memory.allocated + memory.held


def max_memory_reserved(device=None):
    """Return the highest `memory_reserved` since the start or `reset_peak_memory_stats`."""
    return _memory(device).reserved_peak


def reset_peak_memory_stats(device=None):
    registry.find(device).memory.reset_peak()


def memory_stats(device=None):
    """Return figures of the memory of `device`, by the names of `torch.cuda.memory_stats`.

    Bytes, and numbers of blocks; there are no pools, so only those of "all" are given.
    """
    memory = _memory(device)
    in_use = memory.allocated + memory.held
    stats = OrderedDict()
    for name, current, peak in (
        ("active_bytes", in_use, memory.reserved_peak),
        ("allocated_bytes", memory.allocated, memory.peak),
        ("reserved_bytes", in_use, memory.reserved_peak),
    ):
        stats[f"{name}.all.current"] = current
        stats[f"{name}.all.peak"] = peak
        stats[f"{name}.all.allocated"] = memory.total_allocated
        stats[f"{name}.all.freed"] = memory.total_allocated - current
    stats["allocation.all.current"] = memory.num_blocks
    stats["allocation.all.allocated"] = memory.num_allocations
    stats["allocation.all.freed"] = memory.num_allocations - memory.num_blocks
    stats["num_alloc_retries"] = memory.num_retries
    stats["num_ooms"] = memory.num_ooms
    return stats


def memory_summary(device=None, abbreviated=False):
    """Return a table of the memory of `device`, for reading."""
    memory = _memory(device)
    reserved = memory.allocated + memory.held
    lines = [
        f"{registry.find(device).torch_device}: {memory.limit / MIB:.2f} MiB, "
        f"{memory.num_ooms} out-of-memory errors, {memory.num_retries} retries",
        f"{'MiB':<24}{'current':>12}{'peak':>12}",
    ]
    for name, *figures in (
        ("allocated", memory.allocated, memory.peak),
        ("and held by streams", reserved, memory.reserved_peak),
    ):
        lines.append(f"{name:<24}" + "".join(f"{figure / MIB:>12.2f}" for figure in figures))
    return "\n".join(lines)


def _memory(device):
    """Return the Memory of a device, its figures up to date."""
    memory = registry.find(device).memory
    memory.collect()
    return memory


def mem_get_info(device=None):
    """Return (free bytes, all bytes) of `device`."""
    memory = _memory(device)
    return memory.limit - memory.allocated - memory.held, memory.limit


def set_per_process_memory_fraction(fraction, device=None):
    """Let at most `fraction`, 0 to 1, of the memory of `device` be in use; raises ValueError."""
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0 to 1")
    memory = registry.find(device).memory
    memory.set_limit(memory.limit, fraction)


def get_per_process_memory_fraction(device=None):
    """Return what `set_per_process_memory_fraction` set, 1 by default."""
    return registry.find(device).memory.fraction


def empty_cache():
    """Do nothing: freed memory is free at once."""


def get_device_name(device=None):
    """Return a name that says what the device is made of."""
    found = registry.find(device)
    return f"Virtual GPU ({found.threads} CPU thread{'s' if found.threads > 1 else ''})"


def get_device_properties(device=None):
    """Return name, total_memory (bytes), multi_processor_count (its threads), major, minor."""
    found = registry.find(device)
    limit = found.memory.limit
    return _DeviceProperties(get_device_name(device), limit, found.threads, 0, 0)


def get_device_capability(device=None):
    return 0, 0


def can_device_access_peer(device, peer_device):
    """Return whether one device reads another's memory without the CPU: virtual GPUs all do.

    Raises RuntimeError for a device that does not exist.
    """
    return registry.find(device) is not registry.find(peer_device)


def manual_seed(seed):
    """Seed the random numbers of the current device."""
    registry.current().generator.manual_seed(seed)


def manual_seed_all(seed):
    """Seed the random numbers of every device; `torch.manual_seed` calls this."""
    for each in registry.devices:
        each.generator.manual_seed(seed)


def seed():
    """Seed the random numbers of the current device with a number that nobody knows."""
    registry.current().generator.seed()


def seed_all():
    """Seed the random numbers of every device with one number that nobody knows."""
    manual_seed_all(registry.current().generator.seed())


def initial_seed():
    """Return the seed of the current device's random numbers."""
    return registry.current().generator.initial_seed()


def get_rng_state(device=None):
    """Return the state of the random number generator of `device` (a ByteTensor)."""
    return registry.find(device).generator.get_state()


def set_rng_state(state, device=None):
    """Set the state of the random number generator of `device`."""
    registry.find(device).generator.set_state(state)


def get_rng_state_all():
    return [get_rng_state(index) for index in range(registry.count)]


def set_rng_state_all(states):
    for index, state in enumerate(states):
        set_rng_state(state, index)


class _DefaultGenerators(Sequence):
    """The generators of the devices in use.

    No `__getattr__` of the module: torch looks for names there and drops what that raises, so an
    interrupt would be lost.
    """

    def __len__(self):
        return registry.count

    def __getitem__(self, index):
        return tuple(each.generator for each in registry.devices[: registry.count])[index]


default_generators = _DefaultGenerators()


def _is_in_bad_fork():
    return scheduler.in_fork()


def get_amp_supported_dtype():
    """Return the dtypes that `torch.autocast("vgpu", ...)` takes."""
    return [torch.bfloat16, torch.float16]


def _sleep(seconds):
    """Keep the current stream's compute engine busy, asleep (for tests; CUDA's counts cycles)."""
    found = registry.current()
    op = Op("sleep", "kernel", found.compute, lambda op: None)
    op.seconds = seconds
    found.current_stream().issue(op)
