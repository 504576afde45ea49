"""`torch.vgpu`: the part of `torch.cuda` that multi-device code uses, for virtual GPUs."""

from collections import namedtuple
from time import perf_counter

import torch

from . import device as registry
from . import engine
from .engine import Op, wait

_DeviceProperties = namedtuple(
    "_VirtualGPUProperties", "name total_memory multi_processor_count major minor"
)
PRIVATE_USE_1 = 20  # DeviceType.PrivateUse1
_initialized = True  # torch.utils.checkpoint asks before it keeps the state of random numbers


class Stream(torch.Stream):
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
        self._before = []
        return self

    def __init__(self, device=None, priority=0, *, _stream=None):
        pass

    @property
    def device(self):
        return self._stream.device.torch_device

    def query(self):
        """Return whether all work issued so far has finished."""
        return self._stream.last is None or self._stream.last.done

    def synchronize(self):
        """Wait for all work issued so far; raise the error of an op that failed."""
        self._stream.synchronize()
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
        self._stream.wait_for(stream._stream.last)

    def __enter__(self):
        device = self._stream.device
        self._before.append((registry.current().index, device.current_stream()))
        registry.set_current(device.index)
        device.set_stream(self._stream)
        return self

    def __exit__(self, *exception):
        index, stream = self._before.pop()
        self._stream.device.set_stream(stream)
        registry.set_current(index)

    def __eq__(self, other):
        return isinstance(other, Stream) and self._stream is other._stream

    def __hash__(self):
        return hash(self._stream)

    def __repr__(self):
        return f"<torch.vgpu.Stream device={self.device} stream={self._stream.index}>"


class Event(torch.Event):
    """A point in a stream that hosts and other streams can wait for."""

    def __new__(cls, enable_timing=False, blocking=False, interprocess=False):
        self = super().__new__(cls, torch.device("vgpu"), enable_timing=enable_timing)
        self._timing = enable_timing
        self._op = None
        self._recorded = None
        self._device = None
        return self

    def __init__(self, enable_timing=False, blocking=False, interprocess=False):
        pass

    def record(self, stream=None):
        """Record this event behind the work of `stream` (the current one by default)."""
        stream = current_stream() if stream is None else stream
        self._device = stream._stream.device
        self._op = stream._stream.last
        self._recorded = perf_counter()

    def wait(self, stream=None):
        """Let later work of `stream` (the current one by default) wait for this event."""
        stream = current_stream() if stream is None else stream
        stream._stream.wait_for(self._op)

    def query(self):
        """Return whether the work before this event has finished."""
        return self._op is None or self._op.done

    def synchronize(self):
        """Wait on the host for the work before this event."""
        if self._op is not None:
            wait(self._op, self._device.torch_device)
            self._device.raise_error()

    def elapsed_time(self, end):
        """Return the milliseconds from this event to `end`.

        Raises ValueError for an event made without `enable_timing` or not recorded, RuntimeError
        for one that has not happened yet.
        """
        return (end._time() - self._time()) * 1e3

    def _time(self):
        if not self._timing:
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._recorded is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if not self.query():
            raise RuntimeError("an event has not happened yet: synchronize before elapsed_time")
        return self._recorded if self._op is None else max(self._recorded, self._op.end)

    def __repr__(self):
        return f"<torch.vgpu.Event recorded={self._recorded is not None}>"


class device:  # noqa: N801
    """Context manager: make a device the current one; None or -1 changes nothing."""

    def __init__(self, device):
        self._index = None
        if device is not None and device != -1:
            self._index = registry.find(device).index

    def __enter__(self):
        self._before = registry.current().index
        if self._index is not None:
            registry.set_current(self._index)
        return self

    def __exit__(self, *exception):
        registry.set_current(self._before)


class stream:  # noqa: N801
    """Context manager: issue the calling thread's work to `stream`; None changes nothing."""

    def __init__(self, stream):
        self._stream = stream

    def __enter__(self):
        return self._stream and self._stream.__enter__()

    def __exit__(self, *exception):
        if self._stream is not None:
            self._stream.__exit__(*exception)


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
    registry.set_current(stream._stream.device.index)
    stream._stream.device.set_stream(stream._stream)


def memory_allocated(device=None):
    """Return the bytes of all tensors' storages on `device`."""
    return registry.find(device).allocated


def max_memory_allocated(device=None):
    """Return the highest `memory_allocated` since the start or `reset_peak_memory_stats`."""
    return registry.find(device).peak


def reset_peak_memory_stats(device=None):
    registry.find(device).reset_peak()


memory_reserved, max_memory_reserved = memory_allocated, max_memory_allocated


def mem_get_info(device=None):
    """Return (free bytes, all bytes) of `device`."""
    found = registry.find(device)
    return found.memory - found.allocated, found.memory


def set_per_process_memory_fraction(fraction, device=None):
    """Let at most `fraction`, 0 to 1, of the memory of `device` be in use; raises ValueError."""
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0 to 1")
    registry.find(device).fraction = fraction


def get_per_process_memory_fraction(device=None):
    """Return what `set_per_process_memory_fraction` set, 1 by default."""
    return registry.find(device).fraction


def empty_cache():
    """Do nothing: freed memory is free at once."""


def get_device_name(device=None):
    """Return a name that says what the device is made of."""
    found = registry.find(device)
    return f"Virtual GPU ({found.threads} CPU thread{'s' if found.threads > 1 else ''})"


def get_device_properties(device=None):
    """Return name, total_memory (bytes), multi_processor_count (its threads), major, minor."""
    found = registry.find(device)
    return _DeviceProperties(get_device_name(device), found.memory, found.threads, 0, 0)


def get_device_capability(device=None):
    return 0, 0


def manual_seed(seed):
    """Seed the random numbers of the current device."""
    registry.current().seed(seed)


def manual_seed_all(seed):
    """Seed the random numbers of every device; `torch.manual_seed` calls this."""
    for each in registry.devices:
        each.seed(seed)


def get_rng_state(device=None):
    """Return the state of the random number generator of `device` (a ByteTensor)."""
    found = registry.find(device)
    wait(found.last_random, found.torch_device)
    return found.generator.get_state()


def set_rng_state(state, device=None):
    """Set the state of the random number generator of `device`."""
    generator = torch.Generator()
    generator.set_state(state)
    registry.find(device).generator = generator


def get_rng_state_all():
    return [get_rng_state(index) for index in range(registry.count)]


def set_rng_state_all(states):
    for index, state in enumerate(states):
        set_rng_state(state, index)


def initial_seed():
    return registry.current().generator.initial_seed()


def _is_in_bad_fork():
    return engine.in_fork


def get_amp_supported_dtype():
    """Return the dtypes that `torch.autocast("vgpu", ...)` takes."""
    return [torch.bfloat16, torch.float16]


def _sleep(seconds):
    """Keep the current stream's compute engine busy, asleep (for tests; CUDA's counts cycles)."""
    found = registry.current()
    stream = found.current_stream()
    op = Op("sleep", "kernel", stream, found.compute, lambda op: None)
    op.hold = seconds
    stream.issue(op)
