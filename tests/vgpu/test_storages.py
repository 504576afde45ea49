"""Storages on virtual GPUs that give their memory back, and take it again."""

import gc

import pytest
import torch
from gates import Gate

import d2lpar
from vgpu.runtime import registry

MIB = 2**20


@pytest.fixture
def device():
    return d2lpar.virtual_gpus(1)[0]


def allocated():
    return torch.vgpu.memory_allocated()


def test_resize_gives_the_bytes_back_and_takes_them_again(device):
    base, blocks = allocated(), torch.vgpu.memory_stats()["allocation.all.current"]
    tensor = torch.ones(1000, device=device)
    view = tensor.view(10, 100).t()
    assert view.sum().item() == 1000  # the view has seen its values
    storage = view.untyped_storage()
    for value in 2, 3:
        storage.resize_(0)
        assert (storage.size(), storage.data_ptr(), tensor.data_ptr()) == (0, 0, 0)
        assert tensor.untyped_storage().size() == 0 and allocated() == base
        assert storage.resize_(4000) is storage
        assert tensor.untyped_storage().size() == 4000 and allocated() == base + 4000
        assert tensor.data_ptr() == view.data_ptr() > 0
        tensor.fill_(value)
        assert view.sum().item() == value * 1000
    storage.resize_(0)
    del tensor, view, storage
    gc.collect()
    assert allocated() == base
    assert torch.vgpu.memory_stats()["allocation.all.current"] == blocks


def test_kernels_issued_before_have_the_values_and_later_ones_fail(device):
    tensor = torch.ones(1000, device=device)
    view = tensor[:500]
    assert view.sum().item() == 500
    torch.vgpu._sleep(0.05)
    before = tensor * 2
    tensor.untyped_storage().resize_(0)
    assert before.sum().item() == 2000
    for read in tensor.sum, view.cpu:
        with pytest.raises(torch.AcceleratorError, match="its memory was freed"):
            read().cpu()


def test_the_system_has_the_pages_back(device):
    def resident():
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * 4096

    tensor = torch.ones(64 * MIB // 4, device=device)
    torch.vgpu.synchronize()
    before = resident()
    tensor.untyped_storage().resize_(0)
    torch.vgpu.synchronize()
    assert before - resident() > 48 * MIB


def test_streams_that_use_the_memory_hold_it(device):
    base = allocated()
    tensor, side = torch.ones(1000, device=device), torch.vgpu.Stream()
    with Gate(device, side):
        with side:
            result = tensor * 2
        tensor.record_stream(side)
        reserved = torch.vgpu.memory_reserved()
        tensor.untyped_storage().resize_(0)
        assert allocated() == base + result.nbytes
        assert torch.vgpu.memory_reserved() == reserved
    side.synchronize()
    assert torch.vgpu.memory_reserved() == reserved - tensor.nbytes
    assert result.sum().item() == 2000
    tensor.record_stream(side)  # nothing is left to hold
    del tensor
    gc.collect()
    assert registry.find(device).memory.recorded == 0


def test_another_stream_takes_the_memory_after_it_was_given_back(device):
    tensor, side = torch.ones(1000, device=device), torch.vgpu.Stream()
    torch.vgpu._sleep(0.1)
    tensor.untyped_storage().resize_(0)
    with side:
        tensor.untyped_storage().resize_(4000)
        tensor.fill_(5)
        assert tensor.sum().item() == 5000


def test_no_memory_is_left_for_it_again():
    gc.collect()  # of tensors of other tests
    (device,) = d2lpar.virtual_gpus(1, memory=MIB + 2**16)
    tensor = torch.ones(MIB // 8, device=device)
    tensor.untyped_storage().resize_(0)
    other = torch.ones(MIB // 4, device=device)
    with pytest.raises(torch.OutOfMemoryError):
        tensor.untyped_storage().resize_(MIB // 2)
    assert tensor.untyped_storage().size() == 0
    del other
    assert tensor.untyped_storage().resize_(MIB // 2).size() == MIB // 2


def test_other_sizes_are_refused(device):
    storage = torch.ones(10, device=device).untyped_storage()
    with pytest.raises(NotImplementedError, match="must be 0, or the 40 bytes .* got 20"):
        storage.resize_(20)


def test_modelled_gpus_account_for_it():
    (device,) = d2lpar.virtual_gpus(1, model="v100", values=False)
    base, tensor = allocated(), torch.ones(1000, device=device)
    tensor.untyped_storage().resize_(0)
    assert allocated() == base
    tensor.untyped_storage().resize_(4000)
    assert allocated() == base + 4000
