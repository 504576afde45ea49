"""What nn.DataParallel needs of virtual GPUs: broadcast and reduction in buffers."""

import gc

import pytest
import torch
from gates import Gate, recorded, run_what_can
from torch.nn.parallel import scatter

import d2lpar
from vgpu.operators import comm

SHAPES = [(3, 4), (), (5,), (2, 1, 3)]
COPIES = {1: 8, 40: 6, 10**6: 2}  # to or from two devices, by the bytes of a buffer

pytestmark = pytest.mark.usefixtures("here_and_elsewhere")


@pytest.fixture
def devices():
    return d2lpar.virtual_gpus(3)


def some(device, value):
    return [torch.full(shape, value + i, device=device) for i, shape in enumerate(SHAPES)]


@pytest.mark.parametrize("buffer_size", COPIES)
def test_broadcast_gives_each_device_its_own_copies(devices, buffer_size):
    tensors = some(devices[0], 1.0)
    with recorded() as spans:
        outputs = comm.broadcast_coalesced(tensors, [0, 1, 2], buffer_size)
    assert sum(span.kind == "copy" for span in spans) == COPIES[buffer_size]
    for device, copies in zip(devices, outputs, strict=True):
        for tensor, copy in zip(tensors, copies, strict=True):
            assert copy.device == device
            assert torch.equal(copy.cpu(), tensor.cpu())
    outputs[1][0].zero_()
    assert outputs[2][0].min() == 1 and tensors[0].min() == 1


def test_inputs_on_the_cpu_are_scattered_beside_what_the_devices_compute(devices):
    """torch's `Scatter` copies them on a background stream of each device."""
    x = torch.ones(4, 2).pin_memory()
    with recorded() as spans, Gate(devices[0]):
        for _ in range(2):
            scatter(x, devices[:2])
        run_what_can()
        copies = [(span.target, span.stream) for span in spans if span.kind == "copy"]
        assert len(copies) == 4 and len({*copies}) == len({where for where, _ in copies}) == 2


@pytest.mark.parametrize("buffer_size", COPIES)
@pytest.mark.parametrize("destination", [0, 2])
def test_reduction_sums_over_devices(devices, buffer_size, destination):
    inputs = [some(device, 10.0**k) for k, device in enumerate(devices)]
    inputs[destination][0] = torch.full((4, 3), 10.0**destination, device=devices[destination]).t()
    with recorded() as spans:
        sums = comm.reduce_add_coalesced(inputs, destination, buffer_size)
    assert sum(span.kind == "copy" for span in spans) == COPIES[buffer_size]
    for i, (shape, total) in enumerate(zip(SHAPES, sums, strict=True)):
        assert total.device == devices[destination]
        assert torch.equal(total.cpu(), torch.full(shape, 111.0 + 3 * i))
        for k, tensors in enumerate(inputs):  # are as they were
            assert tensors[i].min().item() == tensors[i].max().item() == 10.0**k + i


def test_reduction_holds_no_memory_but_the_sums(devices):
    gc.collect()
    before = [torch.vgpu.memory_allocated(device) for device in devices]
    inputs = [[torch.ones(1024, device=device)] for device in devices]
    with d2lpar.Timeline() as timeline:
        sums = comm.reduce_add_coalesced(inputs, 0)
        del inputs
    held = [torch.vgpu.memory_allocated(device) for device in devices]
    assert [after - b for after, b in zip(held, before, strict=True)] == [4096, 0, 0]
    assert len(timeline.select(kind="copy")) == 2 and sums[0][0] == 3


def test_reduction_of_what_failed_is_reported(devices):
    index = torch.tensor([7], device=devices[1])
    bad = torch.nn.functional.embedding(index, torch.rand(3, 4, device=devices[1]))
    good = torch.ones(1, 4, device=devices[0])
    comm.reduce_add_coalesced([[good], [bad]], 0)
    with pytest.raises(torch.AcceleratorError, match="embedding"):
        d2lpar.synchronize(devices[1])
    d2lpar.virtual_gpus(2)
    assert good.sum() == 4


@pytest.mark.parametrize("destination", [0, 2])
def test_dtypes_are_not_mixed_in_a_buffer(devices, destination):
    dtypes = torch.float32, torch.float64, torch.int64, torch.float32

    def tensors(device, value):
        return [torch.full((2,), value + i, dtype=d, device=device) for i, d in enumerate(dtypes)]

    for copies in comm.broadcast_coalesced(tensors(devices[0], 1), [0, 1, 2]):
        assert [each.dtype for each in copies] == list(dtypes)
        assert [each.tolist() for each in copies] == [[1 + i] * 2 for i in range(4)]
    inputs = [tensors(device, 10**k) for k, device in enumerate(devices)]
    sums = comm.reduce_add_coalesced(inputs, destination)
    assert [each.dtype for each in sums] == list(dtypes)
    assert [each.tolist() for each in sums] == [[111 + 3 * i] * 2 for i in range(4)]


def test_scatter_copies_on_the_streams_that_it_is_given(devices):
    sides = [torch.vgpu.Stream(device) for device in devices[:2]]
    x = torch.arange(6.0).pin_memory()
    with recorded() as spans:
        pieces = comm.scatter(x, [0, 1], streams=sides)
    copies = [op for op in spans if op.kind == "copy"]
    assert {(op.device, op.stream) for op in copies} == {
        (side.device, side.stream_id) for side in sides
    }
    assert [piece.tolist() for piece in pieces] == [[0, 1, 2], [3, 4, 5]]
    with Gate(devices[0], sides[0]):
        pieces = comm.scatter(x, [0, 1], streams=sides)
        run_what_can()
        assert not sides[0].query() and sides[1].query()


def test_scatter_cuts_pieces_of_given_sizes_along_a_dimension(devices):
    x = torch.arange(6.0).view(2, 3)
    pieces = comm.scatter(x, [0, 1], chunk_sizes=[1, 2], dim=1)
    assert [piece.device for piece in pieces] == devices[:2]
    assert [piece.tolist() for piece in pieces] == [[[0], [3]], [[1, 2], [4, 5]]]
    pieces = comm.scatter(x, [0, 1], dim=1)
    assert [piece.tolist() for piece in pieces] == [[[0, 1], [3, 4]], [[2], [5]]]
    assert torch.equal(comm.gather(pieces, 1, "cpu"), x)
    images = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert comm.scatter(images, [0, 1])[1].stride() == (60, 1, 15, 3)


def test_gather_goes_to_the_current_device_by_default(devices):
    tensors = [torch.full((2,), float(k), device=device) for k, device in enumerate(devices)]
    with torch.vgpu.device(1):
        gathered = comm.gather(tensors)
    assert gathered.device == devices[1] and gathered.tolist() == [0, 0, 1, 1, 2, 2]
    assert comm.gather(tensors, 0, -1).device.type == "cpu"
    for where in (2, "vgpu:2", devices[2], "cpu", torch.device("cpu")):
        expected = torch.device(where if where != 2 else "vgpu:2")
        assert comm.gather(tensors, 0, where).device == expected


def test_gather_to_the_cpu_waits_for_what_it_copies(devices):
    with Gate(devices[1]) as gate:
        pieces = [torch.full((2,), float(k), device=devices[k]) + 1 for k in range(2)]
        with gate.opened_later():
            values = comm.gather(pieces, 0, -1).tolist()
    assert values == [1, 1, 2, 2]


def test_broadcast_takes_either_devices_or_tensors_to_write(devices):
    x, out = torch.ones(3, device=devices[0]), [torch.zeros(3, device=devices[1])]
    for arguments in ({}, {"devices": [1], "out": out}):
        with pytest.raises(RuntimeError, match="Exactly one of 'devices' and 'out'"):
            comm.broadcast(x, **arguments)
    comm.broadcast(x, out=out)
    assert out[0].tolist() == [1] * 3
