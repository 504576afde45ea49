"""Memory: what holds it, what gives it back, addresses and storages, and the figures of it."""

import contextlib
import copy
import gc
import threading
import weakref
from functools import partial

import numpy
import pytest
import torch
from gates import Gate, error_of, in_threads, only_here
from modelling import room

from d2lpar import SavedBytes
from vgpu import virtual_gpus
from vgpu.operators.issuing import issue_function
from vgpu.runtime import registry, scheduler
from vgpu.runtime.scheduler import Op
from vgpu.runtime.streams import StreamQueue

MIB = 2**20

pytestmark = pytest.mark.usefixtures("no_garbage", "here_and_elsewhere")


def used(device):
    gc.collect()
    return torch.vgpu.memory_allocated(device)


def active(which="current", device=0):
    """Return the bytes in use, and those that a stream holds, now or at most."""
    return torch.vgpu.memory_stats(device)[f"active_bytes.all.{which}"]


# -- what holds memory


def test_an_allocation_waits_for_memory_that_another_stream_holds(devices):
    virtual_gpus(2, memory=used(devices[0]) + 3 * MIB)
    side = torch.vgpu.Stream(devices[0])
    retries = torch.vgpu.memory_stats()["num_alloc_retries"]
    with Gate(devices[0], side) as gate:
        x = room(2 * MIB, devices[0])
        x.record_stream(side)
        del x
        with gate.opened_later():
            y = room(2 * MIB, devices[0])
    assert torch.vgpu.memory_stats()["num_alloc_retries"] > retries
    with pytest.raises(torch.OutOfMemoryError):
        room(2 * MIB, devices[0])
    assert torch.vgpu.memory_allocated() == active()
    del y


def test_memory_is_held_by_what_its_stream_was_given_before_the_free(devices):
    virtual_gpus(2, memory=[9640 * MIB, used(devices[1]) + 3 * MIB])  # not of the current device
    side = torch.vgpu.Stream(devices[1])
    host = torch.ones(4).pin_memory()
    x = room(2 * MIB, devices[1])
    with torch.vgpu.stream(side):
        host.to(devices[1], non_blocking=True)
    x.record_stream(side)
    side.synchronize()
    del x
    with Gate(devices[1], side):  # given to the stream after the free
        y = room(2 * MIB, devices[1])
        assert active(device=1) == torch.vgpu.memory_allocated(1)
    del y


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_memory_is_held_until_the_last_of_its_streams_is_done(devices, order):
    before = used(devices[0])
    sides = [torch.vgpu.Stream(devices[0]) for _ in range(2)]
    x = torch.ones(1024, device=devices[0])
    torch.vgpu.synchronize()
    with Gate(devices[1]):
        sides[1].wait_stream(torch.vgpu.current_stream(1))
        with Gate(devices[0], sides[0]):
            for i in order:
                x.record_stream(sides[i])
            del x
            assert active() - before == 4096
        sides[0].synchronize()
        assert active() - before == 4096
    sides[1].synchronize()
    assert active() == before


def test_data_that_is_replaced_gives_its_memory_back(devices):
    before = used(devices[0])
    x = torch.zeros(1000, device=devices[0])
    x.data = torch.zeros(128, device=devices[0])
    assert torch.vgpu.memory_allocated() - before == 512
    x.data = torch.zeros(256, device=devices[0])
    assert torch.vgpu.memory_allocated() - before == 1024


def test_data_that_torch_refuses_leaves_a_tensor_conjugated(devices):
    x = torch.tensor([1 + 2j], device=devices[0], requires_grad=True)
    x.data = x.data.conj()
    with pytest.raises(RuntimeError, match="must be floating point"):
        x.data = torch.tensor([3], device=devices[0])
    assert x.is_conj() and x.tolist() == [1 - 2j]
    x.data = torch.tensor([3 + 4j], device=devices[0])
    assert not x.is_conj() and x.tolist() == [3 + 4j]


def test_an_error_that_was_raised_holds_no_memory(devices):
    for fails in (
        lambda x: x @ x,
        lambda x: x & 1,
        lambda x: x.__setitem__(0, torch.ones(7, 5, device=x.device)),
        lambda x: x.copy_(torch.ones(3, 5)),
        lambda x: torch.ones(3, 5, device=x.device).cpu().copy_(x),
    ):
        for _ in range(2):  # torch's first shape inference keeps frames
            before = used(devices[0])
            gc.disable()
            with contextlib.suppress(RuntimeError):
                fails(torch.ones(4, 5, device=devices[0]))
                pytest.fail("nothing was raised")
            after = torch.vgpu.memory_allocated(devices[0])
            gc.enable()
        assert after == before


def test_what_an_op_was_given_is_free_when_it_has_run(devices):
    host, array = torch.ones(1000).pin_memory(), numpy.ones(1000)
    x = torch.empty(1000, device=devices[0])
    x.copy_(host, non_blocking=True)
    y = torch.from_numpy(array).to(devices[0])
    torch.vgpu.synchronize()
    host, array = weakref.ref(host), weakref.ref(array)
    gc.collect()
    assert host() is None and array() is None

    def work(values):
        return [values[0] * 2]

    z = issue_function("work", work, [x], [x._cell.layout])[0]
    torch.vgpu.synchronize()
    work = weakref.ref(work)
    assert work() is None and z.sum().item() == 2000 and y.sum().item() == 1000


def test_an_output_that_grows_to_what_only_the_values_tell_is_accounted(devices):
    x = torch.ones(128, device=devices[0])
    before = used(devices[0])
    found = torch.zeros(0, dtype=torch.int64, device=devices[0])
    torch.nonzero(x, out=found)
    assert found.shape == (128, 1) and found.sum().item() == 128 * 127 // 2
    assert used(devices[0]) - before == 1024


# -- addresses and storages


def test_addresses_tell_storages_apart_and_views_lie_in_theirs(devices):
    x, y = (torch.zeros(4, 6, device=devices[0]) for _ in range(2))
    other = torch.zeros(4, 6, device=devices[1])
    assert len({tensor.data_ptr() for tensor in (x, y, other)}) == 3
    assert all(tensor.data_ptr() for tensor in (x, y, other))
    assert x[1].data_ptr() == x[1:].data_ptr() == x.data_ptr() + 24
    assert x[1, 2].data_ptr() == x.data_ptr() + 32
    assert x.t().data_ptr() == x.detach().data_ptr() == x.data_ptr()
    assert not x.data_ptr() <= y.data_ptr() < x.data_ptr() + x.nbytes
    storages = [tensor.untyped_storage() for tensor in (x, x[1], x.t(), y)]
    assert storages[0] == storages[1] == storages[2] != storages[3]
    assert len({storage.data_ptr() for storage in storages}) == 2
    assert len({storage._cdata for storage in storages}) == len(set(storages)) == 2
    assert [storage.nbytes() for storage in storages] == [96] * 4
    assert storages[1].data_ptr() == x.data_ptr()


def test_an_address_is_used_once_and_lies_among_those_of_its_device(devices):
    """A device's are 2**40 in a row: no block of one lies among those of another."""
    seen = [{room(10**6, device).data_ptr() for _ in range(5)} for device in devices]
    assert [len(addresses) for addresses in seen] == [5, 5]
    assert not {each >> 40 for each in seen[0]} & {each >> 40 for each in seen[1]}
    assert not any(each % 512 for each in seen[0] | seen[1]), "kernels load whole vectors"


@pytest.mark.parametrize("size", [(0,), (3, 0), (0, 3), (2, 0, 4)])
def test_an_empty_tensor_takes_no_memory_and_has_no_address(devices, size):
    before = used(devices[0])
    x = torch.empty(size, device=devices[0])
    assert torch.vgpu.memory_allocated() == before
    assert x.data_ptr() == x[..., :0].data_ptr() == 0


def test_saved_bytes_count_storages_of_virtual_gpus(devices):
    net = torch.nn.Linear(10, 10).to(devices[0])
    x = torch.ones(5, 10, device=devices[0])
    with SavedBytes(net) as saved:
        y = net(x).exp()
    assert saved.total == 5 * 10 * 4 * 2
    y.sum().backward()
    assert torch.equal(net.bias.grad, y.sum(0))  # the derivative of exp
    del net, x, y
    assert torch.vgpu.memory_allocated(devices[0]) == 0


def test_a_shallow_copy_shares_its_memory(devices):
    before = used(devices[0])
    x = torch.zeros(3, device=devices[0], requires_grad=True)
    parameter = torch.nn.Parameter(torch.zeros(3, device=devices[0]))
    x.note = "kept"
    twins = copy.copy(x), copy.copy(parameter)
    assert torch.vgpu.memory_allocated() - before == 2 * 512
    with torch.no_grad():
        x.add_(1)
        parameter.add_(2)
    assert twins[0].tolist() == [1] * 3 and twins[1].tolist() == [2] * 3
    assert twins[0].data_ptr() == x.data_ptr() and isinstance(twins[1], torch.nn.Parameter)
    assert twins[0].requires_grad and twins[0].note == "kept"


# -- figures


def test_each_storage_takes_a_multiple_of_512_bytes(devices):
    before, requested = used(devices[0]), "requested_bytes.all.current"
    asked = torch.vgpu.memory_stats()[requested]
    kept = []
    for size, taken in (0, 0), (1, 512), (512, 1024), (513, 2048):
        kept.append(room(size, devices[0]))
        assert used(devices[0]) - before == taken
    assert torch.vgpu.memory_stats()[requested] - asked == 1 + 512 + 513


def test_statistics_have_the_names_of_cuda(devices):
    before = torch.vgpu.memory_stats()
    x = room(1024, devices[0])
    with pytest.raises(torch.OutOfMemoryError):
        room(2**60, devices[0])
    torch.vgpu.reset_peak_memory_stats()
    y = room(3000, devices[0])
    del y
    stats = torch.accelerator.memory_stats(devices[0])
    change = {name: stats[name] - before[name] for name in stats}
    current = torch.vgpu.memory_allocated()
    assert stats["allocated_bytes.all.current"] == current
    assert stats["allocated_bytes.all.peak"] == torch.vgpu.max_memory_allocated() == current + 3072
    assert change["allocated_bytes.all.current"] == 1024
    assert change["allocated_bytes.all.allocated"] == 4096
    assert change["allocated_bytes.all.freed"] == 3072
    assert change["allocation.all.current"] == 1
    assert change["allocation.all.allocated"] == 2
    assert change["allocation.all.freed"] == 1
    assert (change["num_ooms"], change["num_alloc_retries"]) == (1, 0)
    side = torch.vgpu.Stream(devices[0])
    torch.vgpu.synchronize()
    with Gate(devices[0], side):
        x.record_stream(side)
        del x
        held = torch.vgpu.memory_stats()
        freed = {name: stats[name] - held[name] for name in held}
        assert freed["allocation.all.current"] == 1 and not freed["requested_bytes.all.current"]
        assert held["active_bytes.all.current"] - held["allocated_bytes.all.current"] == 1024
        assert held["allocated_bytes.all.freed"] - held["active_bytes.all.freed"] == 1024


def test_the_peak_does_not_count_what_was_given_back(devices):
    before = used(devices[0])
    torch.accelerator.reset_peak_memory_stats()
    for _ in range(10):
        room(1024, devices[0])
    assert torch.accelerator.memory_allocated() == before
    assert torch.accelerator.max_memory_allocated() == before + 1024
    assert active("peak") == before + 1024
    x = room(5120, devices[0])
    del x
    torch.vgpu.reset_peak_memory_stats()
    assert torch.vgpu.max_memory_allocated() == before


def test_what_a_stream_holds_is_reserved(devices):
    before, side = used(devices[0]), torch.vgpu.Stream(devices[0])
    torch.vgpu.reset_peak_memory_stats()
    limit = torch.vgpu.mem_get_info()[1]
    x = room(1024, devices[0])
    with Gate(devices[0], side):
        x.record_stream(side)
        del x
        y = room(1024, devices[0])
        for _ in range(2):
            assert torch.vgpu.max_memory_allocated() == before + 1024
            assert active("peak") == before + 2048
            assert torch.vgpu.mem_get_info() == (limit - before - 2048, limit)
            torch.vgpu.reset_peak_memory_stats()
        with pytest.raises(ValueError, match=f"must be at least the {before + 2048} bytes"):
            virtual_gpus(2, memory=before + 1536)
    side.synchronize()
    assert active() == before + 1024
    assert active("peak") == before + 2048
    del y
    z = room(1024, devices[0])  # the peak does not count what was given back before
    assert torch.vgpu.max_memory_allocated() == before + 1024
    del z


def test_freed_memory_stays_reserved_until_the_cache_is_emptied(devices):
    """In segments of 2 MiB, as c10/cuda/CUDACachingAllocator.cpp has small blocks."""

    def reserved():
        cached = torch.accelerator.memory_reserved(1), torch.accelerator.max_memory_reserved(1)
        stats = torch.vgpu.memory_stats(1)
        assert cached == (stats["reserved_bytes.all.current"], stats["reserved_bytes.all.peak"])
        return tuple(size // MIB for size in cached)

    virtual_gpus(2, memory=[9640 * MIB, 63 * MIB])
    assert used(devices[1]) == 0
    torch.vgpu.empty_cache()
    torch.vgpu.reset_peak_memory_stats(1)
    assert reserved() == (0, 0)
    x = room(100, devices[1])
    assert reserved() == (2, 2)
    y = room(40 * MIB, devices[1])
    del y
    assert reserved() == (42, 42)
    torch.vgpu.reset_peak_memory_stats(1)
    assert reserved() == (42, 42)
    for _ in range(2):
        torch.accelerator.empty_cache()
        assert reserved() == (2, 42)
    torch.vgpu.reset_peak_memory_stats(1)
    assert reserved() == (2, 2)
    y, side = room(40 * MIB, devices[1]), torch.vgpu.Stream(devices[1])
    with Gate(devices[1], side):
        y.record_stream(side)
        del y
        torch.vgpu.empty_cache()
        assert reserved() == (42, 42)
        room(10 * MIB, devices[1])
        assert reserved() == (52, 52)
    y = room(62 * MIB, devices[1])
    assert reserved() == (63, 63)  # no more than there is
    del x, y


def test_a_summary_names_the_device_and_its_figures(devices):
    virtual_gpus(2, memory=64 * MIB)
    x = room(3 * MIB, devices[1])
    first, *lines = torch.vgpu.memory_summary(1).splitlines()
    assert first == "vgpu:1: 64.00 MiB"
    figures = {name: int(number.replace(",", "")) for name, number in map(str.split, lines)}
    assert figures == torch.vgpu.memory_stats(1)
    assert figures["allocated_bytes.all.current"] >= x.nbytes and min(figures.values()) >= 0


def test_memory_is_accounted_whichever_thread_frees(devices):
    before = used(devices[0])
    tensors = [room(100, devices[0]) for _ in range(200)]

    def free():
        with contextlib.suppress(IndexError):
            while True:
                tensors.pop()

    in_threads([free] * 4)
    assert torch.vgpu.memory_allocated() == before
    assert registry.find(0).memory.num_blocks == torch.vgpu.memory_stats()["allocation.all.current"]


# -- destructors that the garbage collector runs in the middle of things


def test_a_destructor_within_the_accounting_is_accounted_once(devices, monkeypatch):
    """`collect` asks a stream what it has to do; a destructor that runs there collects as well."""
    found, side = registry.find(devices[0]), torch.vgpu.Stream(devices[0])
    before = used(devices[0])
    tail = StreamQueue.tail

    def tail_with_a_destructor(stream):
        monkeypatch.setattr(StreamQueue, "tail", tail)
        found.memory.collect()
        return tail(stream)

    x = room(1024, devices[0])
    with Gate(devices[0], side):
        x.record_stream(side)
        monkeypatch.setattr(StreamQueue, "tail", tail_with_a_destructor)
        del x
        found.memory.collect()
        assert (found.memory.allocated, found.memory.held) == (before, 1024)
    torch.vgpu.synchronize(devices[0])
    assert active() == before


@only_here
def test_a_destructor_that_waits_in_the_thread_of_an_engine_is_refused(devices, monkeypatch):
    """For what another device has under way, or for room behind that."""
    found, ended, errors = registry.find(devices[0]), threading.Event(), []
    x = torch.ones(3, device=devices[1])
    torch.vgpu.synchronize(devices[1])

    def destructor(op):
        for wait in partial(torch.vgpu.synchronize, devices[1]), partial(x.add_, 1):
            errors.append(str(error_of(wait)))
        ended.set()

    with Gate(devices[1]):
        x.add_(1)
        with monkeypatch.context() as patched:
            patched.setattr(scheduler, "QUEUE_LIMIT", 2)
            op = Op("collects", "kernel", found.compute, destructor)
            found.default_stream.issue(op)
            assert ended.wait(10), "the engine waits"
    assert all("a destructor that waits for a virtual GPU" in error for error in errors)
    assert x.tolist() == [2] * 3
