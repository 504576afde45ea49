"""Reserved memory of modelled GPUs, by the rules of c10/cuda/CUDACachingAllocator.cpp by hand.

There: kMinBlockSize 512, kSmallSize 1 MiB, kSmallBuffer 2 MiB, kMinLargeAlloc 10 MiB, kLargeBuffer
20 MiB, kRoundLarge 2 MiB.
"""

import gc
import random

import pytest
import torch
from modelling import Fixed, fixed_gpus, room
from test_interrupts import interrupted_everywhere

from vgpu import host_takes, virtual_gpus
from vgpu.runtime import registry
from vgpu.tensors.caching import CachingAllocator
from vgpu.tensors.device_memory import MAX_PENDING

MIB = 2**20
EVERY = 5  # of how many places for an interrupt one is tried, to save time
NUMBER = 16  # of devices, of which one holds no tensors of tests before


@pytest.fixture
def device():
    """Make the current device one that holds nothing."""
    gc.collect()
    fixed_gpus(NUMBER, 1.0)
    device = next(each for each in range(NUMBER) if torch.vgpu.memory_allocated(each) == 0)
    torch.vgpu.set_device(device)
    torch.vgpu.empty_cache()
    torch.vgpu.reset_peak_memory_stats()
    yield torch.device("vgpu", device)
    torch.vgpu.set_device(0)
    virtual_gpus(2)


def caching(*sizes, limit=2**40):
    """Return an allocator with blocks 0, 1, ... of so many bytes."""
    made = CachingAllocator(limit)
    for key, size in enumerate(sizes):
        made.allocate(key, size)
    return made


@pytest.mark.parametrize(
    ("num_bytes", "reserved"),
    [
        (0, 0),
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB),  # rounded to 512 first, so it is 10 MiB
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (12 * MIB, 12 * MIB),
        (100 * MIB + 512, 102 * MIB),
    ],
)
def test_a_segment_is_as_large_as_its_first_block_asks_for(num_bytes, reserved):
    assert caching(num_bytes).reserved == reserved


@pytest.mark.parametrize(
    ("size", "fit"),
    [(1, 4096), (512, 4096), (513, 2048), (MIB // 2, 4), (MIB // 2 + 1, 3), (MIB, 2)],
)
def test_small_blocks_are_multiples_of_512_in_a_segment_of_2_mib(size, fit):
    """513 bytes take 1024, and three of MIB / 2 + 512 leave MIB / 2 - 1536, too little for more."""
    assert caching(*[size] * fit).reserved == 2 * MIB
    assert caching(*[size] * (fit + 1)).reserved == 4 * MIB


def play(script, limit=2**40):
    """Play a script of an allocator; return it, and what is reserved at each "=", in MiB.

    A number is a block of so many MiB, "-2" frees block 2, counted from 0, "!" empties the cache.
    """
    made, key, found = CachingAllocator(limit), 0, []
    for word in script.split():
        if word == "!":
            made.empty_cache()
        elif word == "=":
            found.append(made.reserved / MIB)
        elif word[0] == "-":
            made.free(int(word[1:]))
        else:
            made.allocate(key, int(float(word) * MIB))
            key += 1
    return made, found


HALF_K = 512 / MIB
SCRIPTS = {
    "large blocks share a segment of 20 MiB": ("5 5 5 5 = 5 =", [20, 40]),
    "small ones have segments of their own": ("5 1 =", [22]),
    # of 20 MiB 7, 7 and 5 leave 1, which is kept with the third: 5 + 1
    "a rest of 1 MiB stays with its block": ("7 7 5 -2 6 =", [20]),
    "a rest above 1 MiB stays free": ("7 7 4 2 =", [20]),
    "and so does one of 512 bytes more": (f"7 7 {5 - HALF_K} {1 + HALF_K} =", [20]),
    "but not one of 1 MiB": (f"7 7 5 {1 + HALF_K} =", [40]),
    # 5, 6 and 9 MiB, of which 5 are in use again out of the 6: 9 are free, not 10
    "a rest of 1 MiB does not join what is free behind it": ("5 6 9 -1 5 -2 10 =", [30]),
    # free are 16, 12 and 14 MiB: 12 fits into the second, so 14 and 16 are still there
    "the smallest free block is taken": ("16 12 14 -0 -1 -2 12 = 14 = 16 = 12 =", [42, 42, 42, 54]),
    **{
        f"free neighbours are joined, {order}": (f"6 6 8 {order} 20 =", [20])
        for order in ("-0 -1 -2", "-2 -1 -0", "-0 -2 -1", "-1 -0 -2")
    },
    "and no others, each smaller": ("6 6 8 -0 -2 9 =", [40]),
    "a block in use keeps its segment": ("1 12 5 5 = ! = -0 -1 -2 = ! =", [34, 34, 34, 20]),
    "5 and 10 MiB are free, not joined": ("5 5 -0 ! 15 = -1 -2 ! =", [36, 0]),
    "what is free twice, or unknown": ("1 -7 -0 -0 ! =", [0]),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_is_reserved_after_a_script(name):
    script, reserved = SCRIPTS[name]
    assert play(script)[1] == reserved


def test_a_full_device_gives_back_what_is_free_before_it_takes_more():
    made, _ = play("10 10 10 -0 -1 12", limit=32 * MIB)
    assert (made.reserved, made.peak) == (22 * MIB, 30 * MIB)
    made.reset_peak()
    made.free(3)
    assert made.peak == 22 * MIB
    made.empty_cache()
    made.reset_peak()
    assert made.peak == 10 * MIB
    assert play("12 -0 14 =", limit=26 * MIB)[1] == [26]  # both just fit


def test_no_byte_is_lost_whatever_the_order():
    """What is used lies apart, in what is reserved; what is free joins, or it could not go back."""
    chance, made, used = random.Random(30), caching(), set()
    for key in range(4000):
        if used and chance.random() < 0.5:
            old = chance.choice(sorted(used))
            used.remove(old)
            made.free(old)
        else:
            made.allocate(key, int(2 ** chance.uniform(0, 25)))
            used.add(key)
        if key % 500 == 0:
            made.empty_cache()
        ends = {}
        for segment, offset, size in sorted(map(made.place_of, used)):
            assert ends.get(segment, 0) <= offset, "two blocks in one place"
            ends[segment] = offset + size
        assert all(end <= made.sizes[segment] for segment, end in ends.items())
        assert sum(made.sizes.values()) == made.reserved
        if key % 500 == 0:
            assert ends.keys() == made.sizes.keys(), "a segment of which nothing is used"
    for key in used:
        made.free(key)
    made.empty_cache()
    assert made.reserved == 0 and not made.sizes, "a hole: its segment is not free as a whole"


# -- of a device


def reserved():
    """Return the bytes reserved now, and at the peak."""
    return torch.vgpu.memory_reserved(), torch.vgpu.max_memory_reserved()


def test_a_modelled_gpu_reserves_segments_and_a_virtual_one_what_was_in_use(device):
    x, small = room(5 * MIB, device), room(1000, device)
    assert reserved() == (22 * MIB, 22 * MIB)
    assert torch.vgpu.memory_allocated() == 5 * MIB + 1024
    stats = torch.vgpu.memory_stats()
    assert stats["reserved_bytes.all.current"] == stats["reserved_bytes.all.peak"] == 22 * MIB
    del x
    assert reserved() == (22 * MIB, 22 * MIB)
    torch.vgpu.empty_cache()
    assert reserved() == (2 * MIB, 22 * MIB)
    torch.vgpu.reset_peak_memory_stats()
    assert reserved() == (2 * MIB, 2 * MIB)
    virtual_gpus(NUMBER)
    assert torch.vgpu.memory_reserved() == 2 * MIB
    fixed_gpus(NUMBER)
    assert reserved()[0] == 2 * MIB, "what there was before is in segments, too"
    del small


def test_a_block_that_a_stream_holds_is_not_used_again(device):
    side = torch.vgpu.Stream(device)
    x = room(12 * MIB, device)
    with torch.vgpu.stream(side):
        torch.vgpu._sleep(1.0)
    x.record_stream(side)
    del x
    y = room(12 * MIB, device)
    assert reserved() == (24 * MIB, 24 * MIB)
    host_takes(2.0)
    z = room(12 * MIB, device)
    assert reserved() == (24 * MIB, 24 * MIB), "the first segment is free by now"
    del y, z


def test_a_storage_that_is_resized_gives_its_block_back_and_takes_one(device):
    x = room(12 * MIB, device)
    storage = x.untyped_storage()
    storage.resize_(0)
    y = room(12 * MIB, device)
    assert reserved() == (12 * MIB, 12 * MIB)
    storage.resize_(12 * MIB)
    assert reserved() == (24 * MIB, 24 * MIB)
    del y
    z = room(12 * MIB, device)
    assert reserved() == (24 * MIB, 24 * MIB)
    del x, storage, z
    torch.vgpu.empty_cache()
    assert reserved() == (0, 24 * MIB)


def test_no_more_is_reserved_than_the_device_has(device):
    """Three of 7 MiB need 40 MiB by these rules; CUDA would not have them, the model lets them."""
    virtual_gpus(NUMBER, model=Fixed(), memory=30 * MIB)
    torch.vgpu.reset_peak_memory_stats()
    tensors = [room(7 * MIB, device) for _ in range(3)]
    assert reserved() == (30 * MIB, 30 * MIB)
    torch.vgpu.reset_peak_memory_stats()
    assert reserved() == (30 * MIB, 30 * MIB)
    del tensors
    torch.vgpu.empty_cache()
    assert reserved() == (0, 30 * MIB)


@pytest.mark.parametrize("memory", [2**40, 64 * MIB])
def test_at_least_as_much_is_reserved_as_allocated(device, memory):
    """On a large device, and on one that is almost full."""
    virtual_gpus(NUMBER)
    torch.vgpu.reset_peak_memory_stats()
    early = room(40 * MIB, device)
    del early  # a peak of the wall clock
    virtual_gpus(NUMBER, model=Fixed(), memory=memory, values=False)
    chance, kept = random.Random(30), []
    side = torch.vgpu.Stream()
    for step in range(300):
        what = chance.random()
        if what < 0.6:
            try:
                kept.append(room(int(2 ** chance.uniform(0, 24)), device))
            except torch.OutOfMemoryError:
                kept.clear()
        elif what < 0.9 and kept:
            old = kept.pop(chance.randrange(len(kept)))
            if what < 0.65:
                old.record_stream(side)
            del old
        elif what < 0.92:
            torch.vgpu.reset_peak_memory_stats()
        elif what < 0.94:
            torch.vgpu.empty_cache()
        assert torch.vgpu.memory_allocated() <= torch.vgpu.memory_reserved() <= memory, step
        assert torch.vgpu.max_memory_allocated() <= torch.vgpu.max_memory_reserved(), step
        assert torch.vgpu.max_memory_reserved() <= memory, step


def test_an_interrupt_leaves_what_is_reserved_right(device):
    """It comes at each place, while news wait to be seen; what it interrupts is done again."""
    kept = []

    def prepare():
        large = room(12 * MIB, device)
        kept.append(room(1000, device))
        del large

    def call():
        torch.vgpu.memory_reserved()
        torch.vgpu.empty_cache()
        torch.vgpu.reset_peak_memory_stats()

    gc.collect()
    gc.freeze()  # so that the collections below take a moment only
    for where in interrupted_everywhere(call, EVERY, at_least=20, prepare=prepare):
        assert reserved()[0] in (2 * MIB, 14 * MIB), where
        kept.clear()
        gc.collect()
        torch.vgpu.empty_cache()
        assert reserved()[0] == 0, where


def test_what_the_allocator_has_not_seen_does_not_grow_without_end():
    (device,) = virtual_gpus(1, model="v100", values=False)
    memory = registry.find(device).memory
    x = torch.empty(100, device=device)
    for _ in range(2 * MAX_PENDING):
        x[:0] + 1
    assert 0 < len(memory._events) + len(memory._freed) < 1.1 * MAX_PENDING
    assert torch.vgpu.max_memory_reserved(device) >= torch.vgpu.max_memory_allocated(device)
