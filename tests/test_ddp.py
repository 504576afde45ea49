"""What ranks record of a step of DDP, and the bytes that they count."""

import contextlib
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed import fake_pg  # noqa: F401  makes the backend "fake"

import d2lpar
from d2lpar import memory, training
from d2lpar.processes import ddp
from d2lpar.processes.collective_bytes import CollectiveBytes
from d2lpar.processes.ddp import StepRecorder
from d2lpar.virtual import Link

CAP = 0.1  # MiB: two buckets for each layer below would be too many, one for each is right
LAYER = 4 * (200 * 200 + 200)  # bytes


@pytest.fixture(scope="module", autouse=True)
def on_cpus():
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("D2LPAR_DEVICES", "vgpu")
        yield


def step(recorded, link=None):
    """Return what a recorder saw of the second step, the gradients, and the bytes by bucket."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(200, 200) for _ in range(3)))
    ddp = DistributedDataParallel(net, bucket_cap_mb=CAP)
    X = torch.randn(4, 200) * (1 + dist.get_rank())
    recorder = StepRecorder(link)
    if recorded:
        recorder.record_buckets(ddp)
    for _ in range(2):
        net.zero_grad()
        dist.barrier()
        recorder.clear()
        with recorder.mark("forward"):
            loss = ddp(X).square().sum()
        with CollectiveBytes() as counted, recorder.mark("backward"):
            loss.backward()
    return recorder.marks, [p.grad for p in net.parameters()], counted.calls


@pytest.fixture(scope="module")
def ranks():
    """What two ranks returned that called all these functions, one after the other."""
    return d2lpar.launch(everything)


def everything():
    """Call, in a rank, what the tests below look at."""
    X, y = (tensor[:4] for tensor in BATCH)
    start = time.perf_counter()
    arrivals = ddp.gradient_arrivals(classifier(), X, y)
    return {
        "arrivals": (arrivals, time.perf_counter() - start),
        "plain step": step(False),
        "recorded step": step(True),
        "collectives": collectives(),
        "compressed": compressed(),
        "parts": [tensor.tolist() for tensor in ddp.batch_of_rank(*BATCH)],
        "record_step": ddp.record_step(classifier(), X, y, 0.001, Link(1e6)),
        "bucket_bytes": ddp.bucket_bytes(classifier(), X, y, 0.001),
    }


def test_recorder_sees_each_bucket_within_backward_and_changes_nothing(ranks):
    for results in ranks:
        marks, gradients, calls = results["recorded step"]
        nothing, expected, _ = results["plain step"]
        forward, backward, *buckets = marks
        assert [forward.name, backward.name] == ["forward", "backward"]
        assert [mark.name for mark in buckets] == ["bucket 0", "bucket 1", "bucket 2"]
        assert all(backward.start < mark.start < mark.end < backward.end for mark in buckets)
        assert forward.end <= backward.start
        assert calls == {"allreduce": [LAYER] * 3}
        assert [mark.name for mark in nothing] == ["forward", "backward"]
        torch.testing.assert_close(gradients, expected, rtol=0, atol=0)


def test_link_carries_the_bytes_of_a_ring_one_bucket_after_the_other():
    link = Link(LAYER / 0.05, latency=0.01)
    for nproc, factor in ((2, 1.0), (3, 4 / 3)):
        for marks, _, _ in d2lpar.launch(step, True, link, nproc=nproc):
            buckets = marks[2:]
            assert len(buckets) == 3
            for count, mark in enumerate(buckets, 1):
                assert mark.end - buckets[0].start >= count * (0.05 * factor + 0.01)


def test_link_is_for_processes_on_cpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match="slow .* is for processes on CPUs"):
        StepRecorder(Link(1e6, name="slow"))


def collectives():
    x = torch.ones(100)
    before = dist.all_reduce
    try:
        with CollectiveBytes() as counted:
            dist.all_reduce(x)
            dist.all_gather([torch.empty(100), torch.empty(100)], x)
            dist.broadcast(x[:10], 0)
            x + 1
            raise KeyError("in the block")
    except KeyError:
        dist.all_reduce(x)
    return counted.calls, counted.total, dist.all_reduce is before


def test_bytes_of_collectives_are_counted_in_the_block_only(ranks):
    for calls, total, restored in (results["collectives"] for results in ranks):
        assert calls == {"allreduce": [400], "allgather": [800], "broadcast": [40]}
        assert total == 1240 and restored


def compressed():
    net = DistributedDataParallel(torch.nn.Linear(64, 32, bias=False))
    state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2)
    net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(3):
        with CollectiveBytes() as counted:
            net(torch.randn(4, 64)).sum().backward()
    return sum(counted.calls["allreduce"])


def test_what_a_hook_sends_from_other_threads_is_counted(ranks):
    assert [results["compressed"] for results in ranks] == [4 * (64 + 32)] * 2


def classifier():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(200, 100), torch.nn.ReLU(), torch.nn.Linear(100, 10))


BATCH = torch.arange(1000.0).reshape(5, 200) / 1000, torch.arange(5)


def test_parts_of_ranks_are_the_batch(ranks):
    (X0, y0), (X1, y1) = (results["parts"] for results in ranks)
    assert X0 + X1 == BATCH[0].tolist() and (y0, y1) == ([0, 1, 2], [3, 4])


def test_a_batch_whose_labels_do_not_fit_has_no_parts():
    with pytest.raises(ValueError, match="X has 5 items and y has 4"):
        ddp.batch_of_rank(BATCH[0], BATCH[1][:4])


def test_recorded_step_has_the_gradients_of_ddp_and_rows_in_which_ranks_wait(ranks):
    X, y = (tensor[:4] for tensor in BATCH)
    ranks = [results["record_step"] for results in ranks]
    net = classifier()
    torch.nn.functional.cross_entropy(net(X), y).backward()
    for marks, gradients in ranks:
        torch.testing.assert_close(gradients, [p.grad for p in net.parameters()])
        assert [mark.name for mark in marks] == ["forward", "backward", "bucket 0", "bucket 1"]
    rows = ddp.rank_rows(ranks)
    assert list(rows) == ["rank 0", "rank 0's link", "rank 1", "rank 1's link"]
    forward, backward, waits = rows["rank 1"]
    assert backward.end == waits.start == rows["rank 1's link"][-1].start
    assert waits.end == ranks[1][0][1].end and waits.name == "waits"


def test_buckets_and_arrivals_hold_all_gradients_last_layer_first(ranks):
    last, first = 4 * (100 * 10 + 10), 4 * (200 * 100 + 100)
    assert [results["bucket_bytes"] for results in ranks] == [[last, first]] * 2
    for arrivals, seconds in (results["arrivals"] for results in ranks):
        moments, num_bytes = zip(*arrivals, strict=True)
        assert sum(num_bytes[:2]) == last and sum(num_bytes[2:]) == first
        assert 0 < moments[0] and list(moments) == sorted(moments)
        assert moments[-1] < seconds  # they count from the backward pass on


def test_saved_bytes_are_the_activations_without_parameters():
    net = classifier()
    X = torch.randn(5, 200, requires_grad=True)
    with d2lpar.SavedBytes(net) as saved:
        net(X).sum()
    assert saved.total == X.nbytes + 4 * 5 * 100  # the input, and the result of the ReLU
    net(X)
    assert saved.total == X.nbytes + 4 * 5 * 100


def test_held_bytes_count_each_storage_once():
    x = torch.zeros(10)
    assert memory.storage_bytes([x, x[:2], torch.zeros(1)]) == 44


@contextlib.contextmanager
def rank_of(world_size, backend):
    """Be the last rank of a process group, for the length of a block."""
    rank, store = world_size - 1, dist.HashStore()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_held_bytes_of_a_dtensor_are_those_of_its_shard():
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    with rank_of(2, "fake"):
        shard = torch.zeros(10)
        whole = DTensor.from_local(shard, init_device_mesh("cpu", (2,)), [Shard(0)])
        assert whole.nbytes == 80
        assert memory.storage_bytes([whole]) == memory.storage_bytes([whole, shard]) == 40


def test_an_allreduce_is_timed_with_as_many_bytes_as_were_asked_for():
    with rank_of(1, "gloo"), CollectiveBytes() as counted:
        assert ddp.time_allreduce(4000) > 0
    assert counted.calls == {"allreduce": [4000] * 9}  # the best of eight after one to warm up


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_timed_is_a_step_of_sgd_each_time(monkeypatch, dtype):
    X, y = BATCH
    net, same, dtypes = classifier(), classifier(), []
    net.register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    monkeypatch.setattr(training, "best_seconds", lambda step, repeats: step() or step() or 7)
    assert training.step_seconds(net, X, y, dtype) == 7
    optimizer = torch.optim.SGD(same.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = torch.nn.functional.cross_entropy(same(X), y)
        loss.backward()
        optimizer.step()
    assert dtypes == [dtype] * 2
    for ours, theirs in zip(net.parameters(), same.parameters(), strict=True):
        assert torch.equal(ours, theirs) and ours.dtype == torch.float32
