"""The history of a device's memory, in the format of https://pytorch.org/memory_viz.

`record_memory_history` and `snapshot` replace the functions of `torch._C` that `torch.cuda.memory`
calls. The format is described there, and written by `torch/csrc/cuda/memory_snapshot.cpp`.

Each block is a segment: CUDA's allocator would reserve larger ones, see `caching.py`. A free is
recorded by the next allocation of the device at the latest, without a stack.
"""

import functools
import sys
import time
from collections import deque
from typing import NamedTuple

from vgpu.runtime import registry, scheduler
from vgpu.tensors.caching import SMALL

_SHIFT = 44  # bits of an address within a device
ACTIONS = "alloc free_requested free_completed segment_alloc segment_free oom snapshot".split()


class RecordedBlock(NamedTuple):
    """A block in use, or held by a stream; `frames` are dicts, innermost first."""

    address: int
    size: int
    stream: int
    frames: list


class History:
    """The history of one device's `Memory`, which calls `allocated`, `freed` and `failed`."""

    def __init__(self, memory):
        self._memory = memory
        # Below 2**53, from which on JavaScript's numbers are not exact.
        self._begin = (memory.device.index + 1) << _SHIFT
        self._blocks = {}  # key, the block's address in `Memory` -> `RecordedBlock`
        self._place = functools.cache(_place)  # equal frames share a dict, for small files
        self.configure(None, 0, ())
        memory.collect()
        for key, num_bytes in memory.blocks():
            self._add(key, num_bytes, 0, [])

    def configure(self, context, max_entries, skipped, clear=True):
        entries = () if clear else self._entries
        self._entries = deque(entries, maxlen=max_entries)
        self._context, self._skipped = context, skipped

    def allocated(self, key, num_bytes):
        stream, frames = self._here()
        self._add(key, num_bytes, stream, frames)
        if num_bytes:
            self._note("alloc", self._blocks[key].address, num_bytes, stream, frames)

    def freed(self, key, requested=True, completed=True):
        """Record that a block was freed, that no stream holds it any more, or both."""
        block = self._blocks.get(key)
        if block is not None and requested:
            self._note("free_requested", block.address, block.size, block.stream)
        if block is not None and completed:
            self._note("free_completed", block.address, block.size, block.stream)
            del self._blocks[key]

    def failed(self, num_bytes, free):
        """Record that an allocation failed, with `free` bytes left."""
        self._note("oom", free, num_bytes, *self._here())

    def _add(self, key, num_bytes, stream, frames):
        if num_bytes:
            address = self._begin + key % (1 << _SHIFT)
            self._blocks[key] = RecordedBlock(address, num_bytes, stream, frames)

    def _note(self, action, address, size, stream, frames=()):
        if action not in self._skipped and self._entries.maxlen:
            now = scheduler.clock.now() if scheduler.clock.is_modelled else time.time()
            where = "device_free" if action == "oom" else "addr"
            entry = {"action": action, where: address, "size": size, "stream": stream}
            frames = list(frames) if self._context in ("alloc", "all") else []
            self._entries.append({**entry, "time_us": int(now * 1e6), "frames": frames})

    def _here(self):
        """Return the current stream, a number, and if wanted the frames outside this package."""
        stream = registry.devices[self._memory.device.index].current_stream().index
        frame, frames = sys._getframe(1), []
        while frame is not None and self._context is not None:
            if not frame.f_code.co_filename.startswith(scheduler.PACKAGE):
                frames.append(self._place(frame.f_code, frame.f_lineno))
            frame = frame.f_back
        return stream, frames

    def snapshot(self):
        """Return the segments and the trace of the device, two lists of dicts."""
        self._memory.collect()
        held, entries = self._memory.held_keys(), list(self._entries)
        segments = [
            _segment(self._memory.device.index, block, key in held)
            for key, block in tuple(self._blocks.items())
        ]
        self._note("snapshot", 0, sum(each["active_size"] for each in segments), 0)
        return segments, entries


def _segment(device, block, is_held):
    """Return a segment that has one block."""
    where = {"address": block.address, "requested_size": block.size}
    state = "active_pending_free" if is_held else "active_allocated"
    return {
        **where,
        "device": device,
        "total_size": block.size,
        "allocated_size": 0 if is_held else block.size,
        "active_size": block.size,
        "stream": block.stream,
        "segment_type": "small" if block.size <= SMALL else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": [{**where, "size": block.size, "state": state, "frames": block.frames}],
    }


def _place(code, line):
    return {"filename": code.co_filename, "line": line, "name": code.co_name}


def record_memory_history(
    enabled="all",
    context="all",
    stacks="all",
    max_entries=sys.maxsize,
    clear_history=False,
    compile_context=False,
    global_record_annotations=False,
    skip_actions=(),
    record_pinned_host_memory=False,
    record_cuda=True,
):
    """Start recording the memory of all virtual GPUs, or for None stop and drop the history.

    The arguments are those of `torch.cuda.memory._record_memory_history`, other values raise
    RuntimeError. Both kinds of `stacks` have frames of Python; what is not used below is ignored.
    """
    for name, value, known in (
        ("enabled", enabled, ("state", "all", None)),
        ("context", context, ("state", "alloc", "all", None)),
        ("stacks", stacks, ("python", "all")),
        *(("skip_actions", action, ACTIONS) for action in skip_actions),
    ):
        if value not in known:
            raise RuntimeError(f"{name} must be among {known}: got {value!r}")
    for each in registry.devices:
        history = None
        if enabled is not None and record_cuda:
            history = each.memory.history or History(each.memory)
            entries = max_entries if enabled == "all" else 0
            history.configure(context, entries, skip_actions, clear_history)
        each.memory.history = history


def snapshot(pool=None):
    """Return the state of the memory of all virtual GPUs, and its history if recorded.

    It is the dict of `torch.cuda.memory._snapshot`.
    """
    both = [
        (each.memory.history or History(each.memory)).snapshot()
        for each in registry.devices[: registry.count]
    ]
    return {
        "segments": [segment for segments, _ in both for segment in segments],
        "device_traces": [entries for _, entries in both],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "expandable_segments": False},
        "external_annotations": [],
    }
