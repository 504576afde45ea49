"""How much memory CUDA's caching allocator would reserve for the blocks that a program uses.

The rules are those of c10/cuda/CUDACachingAllocator.cpp with default settings. Sizes are rounded to
512 bytes; blocks of up to 1 MiB are cut from segments of 2 MiB, those below 10 MiB from segments of
20 MiB, and a larger one gets its own segment, rounded to 2 MiB. The smallest free block that is
large enough is taken, and its rest stays free if it is worth it. Segments are kept until
`empty_cache`, or until the device is full.
"""

from bisect import bisect_left, insort
from itertools import count

KIB, MIB = 2**10, 2**20
ROUNDED = 512
SMALL, SMALL_SEGMENT = MIB, 2 * MIB  # the largest block of the small pool, and its segments
LARGE, LARGE_SEGMENT = 10 * MIB, 20 * MIB


class CachingAllocator:
    """Follows the blocks of a program; see above.

    Attributes:
        reserved: bytes of all segments, which may be more than the device has: CUDA would have
            run out of memory.
        peak: the highest `reserved` since `reset_peak`.
        sizes: a dict from the number of each segment to its bytes.
    """

    def __init__(self, limit):
        self._limit = limit
        self.reserved = self.peak = 0
        self._free = {True: [], False: []}  # by whether it is small: (bytes, segment, offset)
        self._used = {}  # key of a block -> (is it small, segment, offset, bytes)
        self.sizes = {}
        self._ends = {}  # (segment, offset just behind a free block) -> its bytes
        self._starts = {}  # (segment, offset of a free block) -> its bytes
        self._numbers = count()

    def allocate(self, key, num_bytes):
        """Take a block of `num_bytes` for `key`, which has none; nothing for 0 bytes."""
        if not num_bytes:
            return
        size = -(-num_bytes // ROUNDED) * ROUNDED
        small = size <= SMALL
        free = self._free[small]
        place = bisect_left(free, (size,))
        if place < len(free):
            found, segment, offset = free[place]
            self._forget(small, found, segment, offset)
        else:
            found = self._segment_for(size)
            if self.reserved + found > self._limit:
                self.empty_cache()
            segment, offset = next(self._numbers), 0
            self.sizes[segment] = found
            self.reserved += found
            self.peak = max(self.peak, self.reserved)
        rest = found - size
        if rest >= ROUNDED if small else rest > SMALL:
            self._add(small, rest, segment, offset + size)
        else:
            size = found
        self._used[key] = small, segment, offset, size

    def free(self, key):
        """Give back the block of `key`, if there is one, joined with free ones next to it."""
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
        """Return the segment, the offset and the bytes of the block of `key`; None for none."""
        return self._used[key][1:] if key in self._used else None

    def empty_cache(self):
        """Give back the segments of which nothing is used."""
        for small, free in self._free.items():
            for size, segment, offset in tuple(free):
                if size == self.sizes[segment]:
                    self._forget(small, size, segment, offset)
                    self.reserved -= self.sizes.pop(segment)

    def reset_peak(self):
        """Restart the peak from what is reserved now."""
        self.peak = self.reserved

    @staticmethod
    def _segment_for(size):
        if size <= SMALL:
            return SMALL_SEGMENT
        if size < LARGE:
            return LARGE_SEGMENT
        return -(-size // SMALL_SEGMENT) * SMALL_SEGMENT

    def _add(self, small, size, segment, offset):
        insort(self._free[small], (size, segment, offset))
        self._starts[segment, offset] = self._ends[segment, offset + size] = size

    def _forget(self, small, size, segment, offset):
        free = self._free[small]
        del free[bisect_left(free, (size, segment, offset))]
        del self._starts[segment, offset], self._ends[segment, offset + size]
