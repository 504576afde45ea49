import pytest
import torch
import torch.distributed as dist
from held import held
from torch.nn import functional as F

import d2lpar
from d2lpar import collectives
from d2lpar.chapters.tensor_parallelism import copied, split_cross_entropy, summed
from d2lpar.collectives import CollectiveCounter


@pytest.fixture
def devices():
    yield d2lpar.virtual_gpus(4)
    d2lpar.synchronize()


def assert_same(tensors, expected):
    for a, b in zip(tensors, expected, strict=True):
        torch.testing.assert_close(a.detach().cpu(), b.detach().cpu())


def test_allgather_gives_all_tensors_to_all_and_keeps_its_own(devices):
    data = [torch.full((i + 1,), float(i), device=device) for i, device in enumerate(devices)]
    with d2lpar.Timeline() as timeline:
        copies = collectives.allgather(data)
    for i, tensors in enumerate(copies):
        assert tensors[i] is data[i]
        assert [t.device for t in tensors] == [devices[i]] * 4
        assert_same(tensors, data)
    links = {(a, b): 4 * (i + 1) for i, a in enumerate(devices) for b in devices if a != b}
    assert timeline.bytes_by_link() == links


def test_allgather_sends_from_all_devices_at_once():
    from vgpu import Link

    two = d2lpar.virtual_gpus(2, peer_link=Link(1e9, latency=0.05))
    data = [torch.ones(8, device=device) for device in two]
    with d2lpar.Timeline() as timeline, held(2):
        collectives.allgather(data)
    d2lpar.virtual_gpus(2)
    assert timeline.overlap(*(timeline.select(device, "copy") for device in two)) > 0


def values(parts):
    return [part.tolist() for part in parts]


def test_copied_and_summed_are_each_what_the_other_does_backwards(devices):
    two = devices[:2]
    for function, forward, backward in (
        (copied, [[1.0, 2.0], [10.0, 20.0]], [[11.0, 11.0]] * 2),
        (summed, [[11.0, 22.0]] * 2, [[1.0, 1.0], [10.0, 10.0]]),
    ):
        parts = [torch.tensor([a, 2 * a], device=d) for a, d in zip((1.0, 10.0), two, strict=True)]
        [part.requires_grad_() for part in parts]
        outputs = function(parts)
        assert values(outputs) == forward
        torch.autograd.backward([outputs[0].sum(), 10 * outputs[1].sum()])
        assert values(part.grad for part in parts) == backward
        assert values(parts) == [[1.0, 2.0], [10.0, 20.0]]


def test_a_counter_counts_its_block_and_no_single_device(devices):
    ones = [torch.ones(4, device=device).requires_grad_() for device in devices]
    with CollectiveCounter() as outer:
        with CollectiveCounter() as inner:
            outputs = copied(ones)
            collectives.allgather(ones)
        torch.autograd.backward([output.sum() for output in outputs])
        summed(ones[:1])
    summed(ones)
    assert (inner.barriers, outer.barriers) == (1, 2)


def _losses_of_parts(outputs, labels):
    rank, k = dist.get_rank(), dist.get_world_size()
    part = outputs.chunk(k, -1)[rank].clone().requires_grad_()
    loss = split_cross_entropy(part, labels, dist.group.WORLD)
    (3 * loss).backward()
    return loss.item(), part.grad


@pytest.mark.parametrize(
    ("dtype", "largest", "tolerance"), [(torch.float32, 1000, 1e-5), (torch.float64, 1, 1e-12)]
)
def test_a_cross_entropy_of_parts_is_that_of_the_whole(dtype, largest, tolerance):
    """Outputs of 1,000 would be infinite without the largest; the gradient counts the factor. A
    step in float32 would be off by 1e-8 or more."""
    torch.manual_seed(0)
    outputs = largest * torch.randn(3, 5, 8, dtype=dtype)
    labels = torch.tensor([[0, 3, 4, 7, 1]] * 3)  # at both ends of both parts
    whole = outputs.detach().double().requires_grad_()
    expected = F.cross_entropy(whole.flatten(0, 1), labels.flatten())
    (3 * expected).backward()
    ranks = d2lpar.launch(_losses_of_parts, outputs, labels)
    gradient = torch.cat([part for _, part in ranks], -1).double()
    for loss, _ in ranks:
        assert loss == pytest.approx(expected.item(), rel=tolerance)
    torch.testing.assert_close(gradient, whole.grad, rtol=0, atol=tolerance)
