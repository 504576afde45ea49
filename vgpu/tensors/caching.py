"""Model of CUDA's caching allocator: the memory that it would reserve for a program.

The rules are those of c10/cuda/CUDACachingAllocator.cpp with default settings. Sizes are rounded up
to 512 bytes; blocks of up to 1 MiB are cut from segments of 2 MiB, those below 10 MiB from segments
of 20 MiB, and larger ones get their own segment, rounded up to 2 MiB. The best fit among the free
blocks is used, and split if the rest is large enough. Segments are kept until `empty_cache`, or
until the device is full.
"""

from bisect import bisect_left, insort
from itertools import count

MIB = 2**20
GRANULARITY = 512  # bytes: blocks and their addresses are multiples of it
SMALL, SMALL_SEGMENT = MIB, 2 * MIB  # the largest block of the small pool, and its segments
LARGE, LARGE_SEGMENT = 10 * MIB, 20 * MIB


class CachingAllocator:
    """The segments and blocks of a device; see above.

    Attributes:
        reserved: bytes of all segments. It may exceed the device's memory, where CUDA would have
            run out of memory.
        peak: the highest `reserved` since `reset_peak`.
        sizes: {number of a segment: bytes}.
    """

    def __init__(self, limit):
        self._limit = limit
        self.reserved = self.peak = 0
        self._free = {True: [], False: []}  # is small -> sorted list of (bytes, segment, offset)
        self._used = {}  # key of a block -> (is small, segment, offset, bytes)
        self.sizes = {}
        self._ends = {}  # (segment, end offset of a free block) -> its bytes
        self._starts = {}  # (segment, offset of a free block) -> its bytes
        self._numbers = count()

    def allocate(self, key, num_bytes):
        """Allocate a block of `num_bytes` for the new `key`; no block for 0 bytes."""
        if not num_bytes:
            return
        size = -(-num_bytes // GRANULARITY) * GRANULARITY
        small = size <= SMALL
        free = self._free[small]
        index = bisect_left(free, (size,))
        if index < len(free):
            found, segment, offset = free[index]
            self._forget(small, found, segment, offset)
        else:
            found = -(-size // SMALL_SEGMENT) * SMALL_SEGMENT
            if size < LARGE:
                found = SMALL_SEGMENT if small else LARGE_SEGMENT
            if self.reserved + found > self._limit:
                self.empty_cache()
            segment, offset = next(self._numbers), 0
            self.sizes[segment] = found
            self.reserved += found
            self.peak = max(self.peak, self.reserved)
        rest = found - size
        if rest >= GRANULARITY if small else rest > SMALL:
            self._add(small, rest, segment, offset + size)
        else:
            size = found
        self._used[key] = small, segment, offset, size

    def free(self, key):
        """Free the block of `key`, if there is one, and merge it with free neighbours."""
        if key not in self._used:
            return
        small, segment, offset, size = self._used.pop(key)
        before = self._ends.get((segment, offset))
        if before is not None:
            offset -= before
            self._forget(small, before, segment, offset)
            size += before
        behind = self._starts.get((segment, offset + size))
        if behind is not None:
            self._forget(small, behind, segment, offset + size)
            size += behind
        self._add(small, size, segment, offset)

    def place_of(self, key):
        """Return segment, offset and bytes of the block of `key`; None without a block."""
        return self._used[key][1:] if key in self._used else None

    def empty_cache(self):
        """Free the segments without blocks in use."""
        for small, free in self._free.items():
            for size, segment, offset in tuple(free):
                if size == self.sizes[segment]:
                    self._forget(small, size, segment, offset)
                    self.reserved -= self.sizes.pop(segment)

    def reset_peak(self):
        self.peak = self.reserved

    def _add(self, small, size, segment, offset):
        insort(self._free[small], (size, segment, offset))
        self._starts[segment, offset] = self._ends[segment, offset + size] = size

    def _forget(self, small, size, segment, offset):
        free = self._free[small]
        del free[bisect_left(free, (size, segment, offset))]
        del self._starts[segment, offset], self._ends[segment, offset + size]
