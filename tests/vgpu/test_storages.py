"""Storages on virtual GPUs: their bounds, sizes and bytes, and what shares them.

What is expected is what CPU tensors do.
"""

import copy
import ctypes
import gc
import io
import math
import pickle
import random

import numpy
import pytest
import torch
from gates import Gate, only_here, run_what_can

import d2lpar
from vgpu import virtual_gpus
from vgpu.runtime import registry

MIB = 2**20

pytestmark = pytest.mark.usefixtures("no_garbage", "here_and_elsewhere")


@pytest.fixture
def device():
    return d2lpar.virtual_gpus(1)[0]


def allocated():
    return torch.vgpu.memory_allocated()


def test_resize_gives_the_bytes_back_and_takes_them_again(device):
    base, blocks = allocated(), torch.vgpu.memory_stats()["allocation.all.current"]
    tensor = torch.ones(1024, device=device)
    view = tensor.view(32, 32).t()
    assert view.sum().item() == 1024  # the view has seen its values
    storage = view.untyped_storage()
    for value in 2, 3:
        storage.resize_(0)
        assert (storage.size(), storage.data_ptr(), tensor.data_ptr()) == (0, 0, 0)
        assert tensor.untyped_storage().size() == 0 and allocated() == base
        assert storage.resize_(4096) is storage
        assert tensor.untyped_storage().size() == 4096 and allocated() == base + 4096
        assert tensor.data_ptr() == view.data_ptr() > 0
        tensor.fill_(value)
        address = storage.data_ptr()
        assert storage.resize_(4096).data_ptr() == address
        assert view.sum().item() == value * 1024
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
        with pytest.raises(torch.AcceleratorError, match="without values: its memory was freed"):
            read().cpu()


@pytest.mark.parametrize("free", [lambda x: x.untyped_storage().resize_(0), None])
def test_the_system_has_the_pages_back(device, free):
    def resident():
        ctypes.CDLL(None).malloc_trim(0)  # what earlier tests freed may hold `x`, and stay
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * 4096

    x = torch.ones(64 * MIB // 4, device=device)
    y = x.neg()
    torch.neg(x, out=x)
    torch.vgpu.synchronize()
    before = resident()
    x, y = map(free, (x, y)) if free else (None, None)
    torch.vgpu.synchronize()
    assert before - resident() > 112 * MIB


def test_streams_that_use_the_memory_hold_it(device):
    base = allocated()
    tensor, side = torch.ones(1024, device=device), torch.vgpu.Stream()
    with Gate(device, side):
        with side:
            result = tensor * 2
        tensor.record_stream(side)
        reserved = torch.vgpu.memory_stats()["active_bytes.all.current"]
        tensor.untyped_storage().resize_(0)
        assert allocated() == base + result.nbytes
        assert torch.vgpu.memory_stats()["active_bytes.all.current"] == reserved
    side.synchronize()
    assert torch.vgpu.memory_stats()["active_bytes.all.current"] == reserved - tensor.nbytes
    assert result.sum().item() == 2048
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
    with pytest.raises(torch.OutOfMemoryError):
        tensor.resize_(MIB)
    assert tensor.untyped_storage().size() == MIB // 2 and len(tensor) == MIB // 8


# -- bounds


def as_strided_(x, *layout):
    y = x.detach()
    try:
        return y.as_strided_(*layout)
    except RuntimeError as error:
        # torch 2.11 has a text of its own for offsets below 0
        said = "" if torch.__version__ < "2.12" else error
        raise RuntimeError(f"{said}; then {y.shape} {y.stride()} {y.storage_offset()}") from None


def scatter(x, size, stride, offset):
    zeros, stride = torch.zeros(size, device=x.device), [step or 1 for step in stride]
    return torch.as_strided_scatter(x, zeros, size, stride, offset)


def set_(x, size, stride, offset):
    y, stride = torch.empty(0, device=x.device), [abs(step) for step in stride]
    return y.set_(x.untyped_storage(), offset or 0, size, stride)


def outcome(make, x, layout):
    """Return all that there is to see of a view, or the text of its error.

    A storage that is too small for `set_` grows: what is in its new part is not specified.
    """
    before = len(x.untyped_storage())
    try:
        y = make(x, *layout)
    except RuntimeError as error:
        return str(error)
    after = len(y.untyped_storage()) if make is set_ else before
    values = y.tolist() if after == before else None
    return y.shape, y.stride(), y.storage_offset(), after, values, x.tolist()


@pytest.mark.parametrize(
    "make", [torch.as_strided, as_strided_, torch.as_strided_copy, scatter, set_]
)
@only_here
def test_no_view_reaches_past_its_storage(device, make, times=2000):
    """Shapes, strides and offsets are drawn by chance, and many are wrong: as on the CPU."""
    draw, refused = random.Random(0), 0
    for _ in range(times):
        base, cut = torch.arange(float(draw.randrange(30))), draw.randrange(5)
        size = draw.choices([0, 1, 2, 3, 5], k=draw.randrange(4))
        stride = draw.choices([0, 1, 2, 3, 7, -1], [4, 4, 4, 4, 4, 1], k=len(size))
        layout = size, stride, draw.choice([None, 0, 1, 2, 3, 8, 20, -1])
        expected = outcome(make, base[cut:], layout)
        assert outcome(make, base.to(device)[cut:], layout) == expected, (len(base), cut, layout)
        refused += type(expected) is str
    assert 0.1 * times < refused < 0.7 * times


def test_views_of_a_storage_follow_when_it_grows(devices):
    def results(where):
        x = torch.arange(3.0, device=where)
        view, before = x[1:], x * 2
        x[:2].resize_(4)  # and the whole with it
        x.resize_(5)[3:] = 7
        x += 1
        storage = x.untyped_storage()
        storage.resize_(48)
        wide = view.as_strided((12,), (1,), 0)
        wide[5:] = 9
        return [t.tolist() for t in (view, before, x, wide)], len(view.untyped_storage())

    assert results("vgpu:1") == results("cpu")
    virtual_gpus(2, model="v100")
    assert results("vgpu:1") == results("cpu")


def test_a_tensor_without_values_grows_and_gives_its_memory_back():
    (device,) = virtual_gpus(1, model="v100", values=False)
    base, x = allocated(), torch.arange(3.0, device=device)
    assert x.resize_(5)[:3].tolist() == [0, 1, 2]
    assert math.isnan(x.resize_(2**28).normal_().sum().item())
    assert allocated() == base + 2**30
    with pytest.raises(NotImplementedError, match="without values cannot grow"):
        x.untyped_storage().resize_(2**31)
    for num_bytes in 0, 4096:
        x.untyped_storage().resize_(num_bytes)
        assert allocated() == base + num_bytes


def test_a_storage_that_grows_waits_for_those_who_read_it(devices):
    x, side = torch.arange(3.0, device=devices[1]), torch.vgpu.Stream(devices[1])
    torch.vgpu.synchronize(devices[1])
    with Gate(devices[0]):
        side.wait_stream(torch.vgpu.current_stream(devices[0]))
        with side:
            y = x * 2
        x.resize_(2**20)
        z = x[:3] * 3
        ended = torch.vgpu.current_stream(1).record_event()
        run_what_can()
        assert not ended.query()
    side.synchronize()
    assert y.tolist() == [0, 2, 4] and z.tolist() == [0, 3, 6]


# -- bytes


METHODS = [
    lambda s: s.tolist(),
    lambda s: s.clone().tolist(),
    lambda s: s.cpu().tolist(),
    lambda s: (s.fill_(3) is s, s.tolist()),
    lambda s: (s[0], s.__setitem__(5, 7), s[5], s[-1]),
    lambda s: s.copy_(torch.arange(3.0).untyped_storage()).tolist(),
    lambda s: torch.zeros(3).untyped_storage().copy_(s).tolist(),
    lambda s: s.to(device=s.device) is s,
    lambda s: torch.UntypedStorage(12, device=s.device).copy_(s).tolist(),
    lambda s: copy.deepcopy([s, s])[1].tolist(),
    lambda s: (saved(s, zipped=True).tolist(), str(type(s))),
    lambda s: s.float().tolist(),
    lambda s: repr(s).replace(str(s.device), ""),
]


@pytest.mark.parametrize("method", METHODS)
def test_methods_of_storages_do_what_they_do_on_the_cpu(devices, method):
    expected = method(torch.ones(3).untyped_storage())
    assert method(torch.ones(3, device="vgpu:1").untyped_storage()) == expected


def test_a_storage_is_copied_to_another_device_and_not_sliced(devices):
    storage = torch.arange(3.0, device=devices[0]).untyped_storage()
    other = storage.to(device=devices[1])
    assert other.device == devices[1] and other.tolist() == storage.tolist()
    with pytest.raises(NotImplementedError, match="slice a tensor"):
        storage[1:2]
    with Gate(devices[0]):  # the host does not wait
        torch.zeros(3).pin_memory().untyped_storage().copy_(storage, non_blocking=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8])
def test_a_tensor_is_set_to_a_storage(device, dtype):
    def results(where):
        x = torch.arange(5.0, device=where)
        part = torch.empty(0, device=where).set_(x, 1, (2, 2), (2, 1))
        part.set_(source=x, storage_offset=1, size=(2, 2), stride=(2, 1))
        y = torch.empty(0, dtype=dtype, device=where).set_(x.untyped_storage())
        y[:1] += 1
        x[1:].mul_(2)
        return x.tolist(), y.tolist(), part.tolist(), y.set_().dtype

    assert results(device) == results("cpu")


# -- copies


def saved(values, zipped, **options):
    file = io.BytesIO()
    torch.save(values, file, _use_new_zipfile_serialization=zipped)
    file.seek(0)
    return torch.load(file, **options)


COPIES = {
    "deepcopy": lambda values, device: copy.deepcopy(values),
    "pickle": lambda values, device: pickle.loads(pickle.dumps(values)),
    "saved": lambda values, device: saved(values, zipped=True),
    "legacy": lambda values, device: saved(values, zipped=False),
    "moved": lambda values, device: saved(values, zipped=True, map_location=device),
    "legacy, moved": lambda values, device: saved(values, zipped=False, map_location=device),
}


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("where", ["vgpu:1", "cpu"])
def test_copies_share_storages_as_the_originals_do(devices, name, where):
    def results(where, device):
        x = torch.arange(6.0, device=where)
        made = COPIES[name]([x, x[1:], x[2:4], x.view(2, 3).t(), x[:2].expand(3, 2)], device)
        assert {str(y.device) for y in made} == {device if "moved" in name else where}
        made[0].add_(1)
        layouts = [(y.stride(), y.storage_offset(), len(y.untyped_storage())) for y in made]
        return [y.tolist() for y in made], layouts

    assert results(where, "vgpu:0") == results("cpu", "cpu")


@pytest.mark.parametrize("where", ["vgpu:0", "cpu"])
def test_copies_are_conjugated_and_negated(device, where):
    x = torch.tensor([1 + 2j, 3 - 4j], device=where)
    for y in (x.conj(), x.conj().imag, x.imag):
        for copied in (copy.deepcopy(y), saved(y, zipped=True, map_location=device)):
            assert copied.tolist() == y.tolist()


def test_copies_of_parameters_have_memory_of_their_own_and_no_gradient(device):
    def results(where):
        flat = torch.arange(4.0, device=where)
        parameter = torch.nn.Parameter(flat[:2])
        parameter.grad, parameter.mark = torch.ones(2, device=where), [1]
        plain = flat[2:]
        plain.mark = [1]
        copies = copy.deepcopy([flat, parameter, plain])
        copies[0].zero_()
        copies[2].mark.append(2)
        kind = type(copies[1]) is type(parameter), isinstance(copies[1], torch.nn.Parameter)
        return copies[1].tolist(), copies[1].grad, hasattr(copies[1], "mark"), plain.mark, kind

    assert results(device) == results("cpu")


# -- DLPack


def test_dlpack_shares_memory_and_the_device(devices):
    x = torch.arange(4.0, device=devices[0])
    for y in (
        torch.from_dlpack(x[1:]),
        torch.from_dlpack(x[1:], device=x.device),
        torch.from_dlpack(torch.utils.dlpack.to_dlpack(x[1:])),
    ):
        y.add_(1)
        assert y.device == x.device and (x[1:] + y).tolist() == (2 * y).tolist()
    assert x.tolist() == [0, 4, 5, 6]
    copied = torch.from_dlpack(x, copy=True)
    there = torch.from_dlpack(x, device=devices[1])
    x.zero_()
    assert copied.tolist() == there.tolist() == [0, 4, 5, 6] and there.device == devices[1]
    assert numpy.from_dlpack(copied, device="cpu").tolist() == [0, 4, 5, 6]
    assert torch.from_dlpack(numpy.ones(2)).tolist() == [1, 1]
    with pytest.raises(BufferError, match="require gradient"):
        torch.from_dlpack(x.requires_grad_())
