"""Collectives of tensors in one process, and those that autograd goes through."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from held import held, run_what_is_ready
from torch.nn import functional as F

import d2lpar
from d2lpar.chapters.tensor_parallelism import copied, split_cross_entropy, summed
from d2lpar.collectives import CollectiveCounter, allgather, allreduce
from d2lpar.timelines.timeline import Timeline
from vgpu import Link

ALGORITHMS = ("star", "tree", "ring")


def replicas(k, shape, dtype=torch.float32):
    """Return `k` tensors of whole numbers, whose sums are exact in any order."""
    torch.manual_seed(k)
    return [torch.randint(-100, 100, shape).to(dtype) for _ in range(k)]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("k", range(1, 6))
@pytest.mark.parametrize("shape", [(64,), (7, 3), (2,), (), (0,)])
def test_sum_lands_in_every_tensor_with_the_same_bits(algorithm, k, shape):
    data = replicas(k, shape)
    expected = sum(data)
    places = [tensor.data_ptr() for tensor in data]
    assert allreduce(data, algorithm) is None
    assert [tensor.data_ptr() for tensor in data] == places
    for tensor in data:
        assert torch.equal(tensor, expected)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_other_layouts_types_and_parameters(algorithm):
    params = [tensor.requires_grad_() for tensor in replicas(3, (4,))]
    some_transposed = [*replicas(1, (5, 4)), *(tensor.T for tensor in replicas(2, (4, 5)))]
    for data in (replicas(3, (5,), torch.int64), some_transposed, params):
        expected = sum(tensor.detach() for tensor in data)
        allreduce(data, algorithm)
        assert all(torch.equal(tensor, expected) and tensor.is_leaf for tensor in data)


ONES = torch.ones(2)


@pytest.mark.parametrize(("data", "text"), [
    ([], "the list is empty"),
    ([ONES, torch.ones(3)], r"tensor 1 is torch.float32 of shape \(3,\), tensor 0"),
    ([ONES, ONES.double()], "torch.float64"),
    ([None, None], r"tensor 0 of 2 is None, .*backward\("),
    ([ONES, ONES + 1, None], r"tensor 2 of 3 is None, .*backward\("),
    ([ONES, ONES + 1, ONES], "must be distinct: 0 and 2 are the same tensor"),
])  # fmt: skip
def test_errors_give_values(data, text):
    with pytest.raises(ValueError, match=text):
        allreduce(data)
    if None in data[-1:]:
        with pytest.raises(ValueError, match=text):
            allgather(data)
    with pytest.raises(ValueError, match="'mesh': choose one of star, tree, ring"):
        allreduce([ONES], "mesh")


def elements_sent(algorithm, k, numel):
    """Return the elements that go over each link, a dict from (source, target)."""
    if algorithm == "ring":  # each sends all chunks twice, but one to add and one to keep
        chunks = [len(chunk) for chunk in torch.zeros(numel).tensor_split(k)]
        unsent = [chunks[(i + 1) % k] + chunks[(i + 2) % k] for i in range(k)]
        return {(i, (i + 1) % k): 2 * numel - unsent[i] for i in range(k)}
    parents = {"star": [0] * k, "tree": [i & (i - 1) for i in range(k)]}[algorithm]
    pairs = [(i, parents[i]) for i in range(1, k)]
    return dict.fromkeys([*pairs, *((b, a) for a, b in pairs)], numel)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("k, numel", [(2, 8), (3, 1000), (4, 1001), (4, 2), (5, 3), (5, 0)])
def test_virtual_gpus_sum_and_send_no_more_than_the_algorithm_needs(algorithm, k, numel):
    devices = d2lpar.virtual_gpus(k)
    data = replicas(k, (numel,))
    expected = [tensor.clone() for tensor in data]
    allreduce(expected, algorithm)
    data = [tensor.to(device) for tensor, device in zip(data, devices, strict=True)]
    with Timeline() as timeline:
        allreduce(data) if algorithm == "star" else allreduce(data, algorithm)  # the default
    for tensor, device in zip(data, devices, strict=True):
        assert tensor.device == device
        assert torch.equal(tensor.cpu(), expected[0])
    sent = {(a.index, b.index): n for (a, b), n in timeline.bytes_by_link().items()}
    wanted = elements_sent(algorithm, k, numel).items()
    assert sent == {link: 4 * elements for link, elements in wanted if elements}


@pytest.fixture
def slow_devices():
    """Two virtual GPUs that move 4000 bytes in 0.1 s."""
    yield d2lpar.virtual_gpus(2, peer_link=40_000)
    d2lpar.virtual_gpus(2)


def test_a_ring_sends_both_ways_at_once_and_does_not_keep_the_host(slow_devices):
    data = [torch.ones(1000, device=device) for device in slow_devices]
    d2lpar.synchronize()
    with Timeline() as timeline, held(2):
        allreduce(data, "ring")
        with timeline.mark("issued"):
            pass
    first, second = (timeline.select(device, "copy") for device in slow_devices)
    assert timeline.overlap(first, second) > 0
    [(_, issued, _)] = timeline.marks
    assert issued < min(span.end for span in first)


def test_later_work_waits_for_the_allreduce(slow_devices):
    data = [torch.ones(1000, device=device) for device in slow_devices]
    allreduce(data, "ring")
    for tensor in data:
        tensor.zero_()
    assert all(tensor.sum().item() == 0 for tensor in data)
    allreduce([tensor.add_(1) for tensor in data], "ring")
    assert all(tensor.sum().item() == 2000 for tensor in data)


@pytest.mark.parametrize("collective", [partial(allreduce, algorithm="ring"), allgather])
def test_later_work_waits_until_the_data_is_sent(collective):
    """Device 0 receives its last chunk before it has sent its own, which takes until the end."""
    devices = d2lpar.virtual_gpus(2, peer_link=[20_000, None])
    data = [torch.ones(1000, device=device) for device in devices]
    with Timeline() as timeline, held():
        collective(data)
        with timeline.mark("later"):
            data[0].zero_()
        run_what_is_ready(devices[0])
    d2lpar.virtual_gpus(2)
    [later] = timeline.select(devices[0], "kernel", mark="later")
    assert max(span.end for span in timeline.select(devices[0], "copy")) <= later.start


@pytest.fixture
def devices():
    yield d2lpar.virtual_gpus(4)
    d2lpar.synchronize()


def test_allgather_gives_all_tensors_to_all_and_keeps_its_own(devices):
    data = [torch.full((i + 1,), float(i), device=device) for i, device in enumerate(devices)]
    with Timeline() as timeline:
        copies = allgather(data)
    for i, tensors in enumerate(copies):
        assert tensors[i] is data[i]
        assert [t.device for t in tensors] == [devices[i]] * 4
        assert all(torch.equal(t.cpu(), x.cpu()) for t, x in zip(tensors, data, strict=True))
    links = {(a, b): 4 * (i + 1) for i, a in enumerate(devices) for b in devices if a != b}
    assert timeline.bytes_by_link() == links


def test_allgather_sends_from_all_devices_at_once():
    two = d2lpar.virtual_gpus(2, peer_link=Link(1e9, latency=0.05))
    data = [torch.ones(8, device=device) for device in two]
    with Timeline() as timeline, held(2):
        allgather(data)
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
            assert not any(copy.requires_grad for copy in allgather(ones)[0][1:])
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
