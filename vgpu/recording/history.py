"""The history of a device's memory, in the format of https://pytorch.org/memory_viz.

`record_memory_history` and `snapshot` replace the functions of `torch._C` that `torch.cuda.memory`
calls. The format is described there, and written by `torch/csrc/cuda/memory_snapshot.cpp`.

On a modelled GPU, blocks are in the segments of CUDA's allocator, see `caching.py`. On others each
block is a segment, because freed memory is not cached. A free is recorded by the next allocation of
the device at the latest, without a stack.
"""

import functools
import os
import sys
import time
from collections import deque
from typing import NamedTuple

from vgpu.runtime import registry, scheduler
from vgpu.tensors.caching import SMALL_SEGMENT

_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep  # omitted in stacks
_SHIFT = 44  # bits of an address within a device
ACTIONS = "alloc free_requested free_completed segment_alloc segment_free oom snapshot".split()


class Known(NamedTuple):
    """A block in use, or held by a stream; `frames` are dicts, innermost first."""

    address: int
    size: int
    stream: int
    frames: list


class History:
    """The history of one device's `Memory`, which calls `allocated`, `freed` and `failed`."""

    def __init__(self, memory):
        self._memory = memory
        self._segments = {}  # number of a segment of CUDA's allocator -> (address, bytes)
        # Below 2**53, from which on JavaScript's numbers are not exact.
        self._begin = self._end = (memory.device.index + 1) << _SHIFT
        self._blocks = {}  # key, the block's address in `Memory` -> `Known`
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
        frames = self._stack()
        stream = registry.devices[self._memory.device.index].current_stream().index
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
        self._note("oom", free, num_bytes, 0, self._stack())

    def _add(self, key, num_bytes, stream, frames):
        if num_bytes:
            self._follow_segments()
            segment, offset, _ = self._memory.place_of(key) or (None, key % (1 << _SHIFT), None)
            begin = self._begin if segment is None else self._segments[segment][0]
            address = begin + offset
            self._blocks[key] = Known(address, num_bytes, stream, frames)

    def _follow_segments(self):
        sizes = self._memory.segments()
        for number in self._segments.keys() - sizes.keys():
            self._note("segment_free", *self._segments.pop(number), 0)
        for number in sorted(sizes.keys() - self._segments.keys()):
            self._segments[number] = self._end, sizes[number]
            self._end += sizes[number]
            self._note("segment_alloc", *self._segments[number], 0)

    def _note(self, action, address, size, stream, frames=()):
        if action not in self._skipped and self._entries.maxlen:
            now = scheduler.clock.now() if scheduler.clock.is_modelled else time.time()
            where = "device_free" if action == "oom" else "addr"
            entry = {"action": action, where: address, "size": size, "stream": stream}
            frames = list(frames) if self._context in ("alloc", "all") else []
            self._entries.append({**entry, "time_us": int(now * 1e6), "frames": frames})

    def _stack(self):
        """Return the calling frames outside this package, innermost first, if wanted."""
        frame, frames = sys._getframe(1), []
        while frame is not None and self._context is not None:
            if not frame.f_code.co_filename.startswith(_OWN):
                frames.append(self._place(frame.f_code, frame.f_lineno))
            frame = frame.f_back
        return frames

    def snapshot(self):
        """Return the segments and the trace of the device, two lists of dicts."""
        self._memory.collect()
        self._follow_segments()
        entries, segments = list(self._entries), self._snapshot_of_segments()
        self._note("snapshot", 0, sum(each["active_size"] for each in segments), 0)
        return segments, entries

    def _snapshot_of_segments(self):
        held = self._memory.held_keys()
        inside = {number: [] for number in self._segments}
        for key, known in tuple(self._blocks.items()):
            segment, _, size = self._memory.place_of(key) or (key, 0, known.size)
            block = {
                "address": known.address,
                "size": size,
                "requested_size": known.size,
                "state": "active_pending_free" if key in held else "active_allocated",
                "frames": known.frames,
            }
            inside.setdefault(segment, []).append((block, known.stream))
        segments = []
        for number, pairs in inside.items():
            blocks = sorted((block for block, _ in pairs), key=lambda block: block["address"])
            address, total = self._segments.get(number) or (blocks[0]["address"], blocks[0]["size"])
            active = sum(block["size"] for block in blocks)
            in_use = [block for block in blocks if block["state"] == "active_allocated"]
            segments.append(
                {
                    "device": self._memory.device.index,
                    "address": address,
                    "total_size": total,
                    "allocated_size": sum(block["size"] for block in in_use),
                    "active_size": active,
                    "requested_size": sum(block["requested_size"] for block in blocks),
                    "stream": 0 if number in self._segments else pairs[0][1],
                    "segment_type": "small" if total <= SMALL_SEGMENT else "large",
                    "segment_pool_id": (0, 0),
                    "is_expandable": False,
                    "frames": [],
                    "blocks": list(_with_gaps(blocks, address, total)),
                }
            )
        return segments


def _with_gaps(blocks, address, total):
    """Yield the blocks of a segment, in order, and the free blocks between them."""
    end = address + total
    for block in (*blocks, None):
        begin = end if block is None else block["address"]
        if begin > address:
            free = {"address": address, "size": begin - address, "requested_size": 0}
            yield {**free, "state": "inactive", "frames": []}
        if block is not None:
            yield block
            address = block["address"] + block["size"]


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
):
    """Start recording the memory of all virtual GPUs, or for None stop and drop the history.

    The arguments are those of `torch.cuda.memory._record_memory_history`. Both kinds of `stacks`
    have frames of Python only; `compile_context` and `global_record_annotations` are ignored.

    Raises:
        RuntimeError: an argument has another value.
    """
    if enabled not in ("state", "all", None):
        raise RuntimeError(f"expected state to be 'state', 'all', or None: got {enabled!r}")
    if context not in ("state", "alloc", "all", None):
        raise RuntimeError(
            f"expected context to be 'state', 'alloc', 'all', or None: got {context!r}"
        )
    if stacks not in ("python", "all"):
        raise RuntimeError(f"expected stacks to be 'python', or 'all': got {stacks!r}")
    unknown = [action for action in skip_actions if action not in ACTIONS]
    if unknown:
        raise RuntimeError(f"skip_actions must be among {ACTIONS}: got {unknown}")
    for each in registry.devices:
        history = None
        if enabled is not None:
            history = each.memory.history or History(each.memory)
            entries = max_entries if enabled == "all" else 0
            history.configure(context, entries, skip_actions, clear_history)
        each.memory.history = history


def record_memory_history_legacy(
    enabled, record_context, trace_alloc_max_entries, trace_alloc_record_context, *ignored
):
    """Start or stop recording, with the options of torch's older signature."""
    context = "alloc" if trace_alloc_record_context else "state" if record_context else None
    record_memory_history("all" if enabled else None, context, "all", trace_alloc_max_entries)


def snapshot(pool=None):
    """Return the state of the memory of all virtual GPUs, and its history if recorded.

    Returns:
        A dict with "segments", "device_traces" and "allocator_settings"; see
        `torch.cuda.memory._snapshot`.
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
