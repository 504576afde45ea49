import pytest
import torch
from held import held, run_what_is_ready

import d2lpar
from d2lpar.collectives import allgather, allreduce
from d2lpar.timelines.timeline import Timeline

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
    transposed = [tensor.T for tensor in replicas(3, (4, 5))]
    for data in (replicas(3, (5,), torch.int64), transposed, params):
        expected = sum(tensor.detach() for tensor in data)
        allreduce(data, algorithm)
        assert all(torch.equal(tensor, expected) and tensor.is_leaf for tensor in data)


def test_star_is_the_default():
    data, star = replicas(4, (5,)), replicas(4, (5,))
    allreduce(data)
    allreduce(star, "star")
    assert torch.equal(data[3], star[3])


ONES = torch.ones(2)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ([], "the list is empty"),
        ([ONES, torch.ones(3)], r"tensor 1 is torch.float32 of shape \(3,\), tensor 0"),
        ([ONES, ONES.double()], "torch.float64"),
        ([None, None], r"tensor 0 of 2 is None, .*backward\("),
        ([ONES, ONES + 1, None], r"tensor 2 of 3 is None, .*backward\("),
        ([ONES, ONES + 1, ONES], "must be distinct: 0 and 2 are the same tensor"),
    ],
)
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
        allreduce(data, algorithm)
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


def allreduce_over_a_ring(data):
    allreduce(data, "ring")


@pytest.mark.parametrize("collective", [allreduce_over_a_ring, allgather])
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
