"""What ranks record of a step of DDP, and the bytes that they count."""

import pytest
import torch
import torch.distributed as dist
from gates import held_collectives, named, recorded
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from waiting import wait_until

import d2lpar
from d2lpar import Timeline
from d2lpar.chapters import distributed_data_parallel as ddp
from vgpu import Link
from vgpu.distributed.collective_bytes import CollectiveBytes

CAP = 0.001  # MiB: a bucket for each layer of the classifier
LAST, FIRST = 8 * (100 * 10 + 10), 8 * (200 * 100 + 100)  # bytes of its layers in float64
LINK = Link((LAST + FIRST) / 0.2, latency=0.01)  # 0.2 s for all gradients of two ranks


@pytest.fixture(scope="module", autouse=True)
def on_cpus():
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("VGPU_DEVICES", "vgpu")
        yield


@pytest.fixture(scope="module")
def ranks():
    """What two ranks on a slow link returned that called all these functions one by one."""
    d2lpar.virtual_gpus(2, peer_link=LINK)
    try:
        return d2lpar.launch(everything)
    finally:
        d2lpar.virtual_gpus(2)


def everything():
    """Call, in a rank, what the tests below look at."""
    X, y = (tensor[:4] for tensor in BATCH)
    return {
        "collectives": collectives("cpu"),
        "collectives on GPUs": collectives("vgpu"),
        "compressed": [compressed(device) for device in ("cpu", "vgpu")],
        "device": str(ddp.device_of_rank()),
        "parts": [tensor.tolist() for tensor in ddp.batch_of_rank(*BATCH)],
        "step": recorded_step(X, y),
    }


def recorded_step(X, y):
    """Return a `Timeline` of the second step, which has DDP's final buckets, and its gradients."""
    net = classifier().double().to(ddp.device_of_rank())
    net = DistributedDataParallel(net, bucket_cap_mb=CAP)
    X, y = ddp.batch_of_rank(X.double(), y)
    for _ in range(2):
        net.zero_grad()
        dist.barrier()
        with Timeline() as timeline:
            with timeline.mark("forward"):
                loss = torch.nn.functional.cross_entropy(net(X), y)
            with timeline.mark("backward"), recorded() as spans, held_collectives():
                loss.backward()
                # The backward pass goes on beside its buckets, or this waits in vain.
                wait_until(lambda: named(spans, "aten.threshold_backward"))  # noqa: B023
    return timeline, [p.grad.cpu() for p in net.parameters()]


def sent(timeline, device=None):
    return timeline.select(device, "collective", engine="collectives", name="all_reduce")


def test_a_step_is_recorded_with_its_phases_and_every_bucket_on_the_link(ranks):
    for rank, results in enumerate(ranks):
        timeline, _ = results["step"]
        assert results["device"] == f"vgpu:{rank}"
        assert [mark.name for mark in timeline.marks] == ["forward", "backward"]
        assert [span.num_bytes for span in sent(timeline)] == [LAST, FIRST]
        assert sent(timeline) == [
            span for span in timeline.select(mark="backward") if span.name == "all_reduce"
        ]
        assert {span.device for span in timeline.spans} == {*timeline.devices} == {f"vgpu:{rank}"}
        # The link carries one bucket after the other, in no less than their bytes take.
        last, first = (LINK.seconds(num_bytes) for num_bytes in (LAST, FIRST))
        one, two = sent(timeline)
        before = [s for s in timeline.select(kind="kernel") if s.issued < one.issued]
        assert one.end - max(span.end for span in before) >= last and two.end - one.end >= first


def test_a_bucket_is_sent_while_the_backward_pass_goes_on(ranks):
    """The gradients of the last layer are ready first; their sum ends with the backward pass."""
    for results in ranks:
        timeline, _ = results["step"]
        last, first = sent(timeline)
        between = [
            span
            for span in timeline.select(kind="kernel", mark="backward")
            if last.issued < span.issued < first.issued
        ]
        assert "aten.threshold_backward" in [span.name for span in between]
        assert min(span.start for span in between) < last.end  # they do not wait for it


def collectives(device):
    x = torch.ones(100, device=device)
    before = dist.all_reduce
    with CollectiveBytes() as outer:
        try:
            with CollectiveBytes() as counted:
                dist.all_reduce(x)
                dist.all_gather([torch.empty_like(x), torch.empty_like(x)], x)
                dist.broadcast(x[:10], 0)
                dist.reduce_scatter(x[:50] + 1, [*x.split(50)])
                raise KeyError("in the block")
        except KeyError:
            dist.all_reduce(x)
    return counted.calls, counted.total, outer.total, dist.all_reduce is before


@pytest.mark.parametrize("which", ["collectives", "collectives on GPUs"])
def test_bytes_of_collectives_are_counted_in_the_block_only(ranks, which):
    sizes = {"allreduce": [400], "allgather": [800], "broadcast": [40], "reduce_scatter": [400]}
    assert [results[which] for results in ranks] == [(sizes, 1640, 2040, True)] * 2


def compressed(device):
    net = DistributedDataParallel(torch.nn.Linear(64, 32, bias=False).to(device))
    state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2)
    net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(3):
        with CollectiveBytes() as counted:
            net(torch.randn(4, 64, device=device)).sum().backward()
    return sum(counted.calls["allreduce"])


def test_what_a_hook_sends_from_other_threads_is_counted(ranks):
    assert [results["compressed"] for results in ranks] == [[4 * (64 + 32)] * 2] * 2


def classifier():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(200, 100), torch.nn.ReLU(), torch.nn.Linear(100, 10))


BATCH = torch.arange(1000.0).reshape(5, 200) / 1000, torch.arange(5)


def test_parts_of_ranks_are_the_batch(ranks):
    (X0, y0), (X1, y1) = (results["parts"] for results in ranks)
    assert X0 + X1 == BATCH[0].tolist() and (y0, y1) == ([0, 1, 2], [3, 4])


def test_a_batch_whose_labels_do_not_fit_has_no_parts():
    with pytest.raises(ValueError, match="must have the same length: got 5 and 4"):
        ddp.batch_of_rank(BATCH[0], BATCH[1][:4])


def test_recorded_step_has_the_gradients_of_one_process(ranks):
    X, y = (tensor[:4] for tensor in BATCH)
    net = classifier().double()
    torch.nn.functional.cross_entropy(net(X.double()), y).backward()
    for _, gradients in (results["step"] for results in ranks):
        torch.testing.assert_close(gradients, [p.grad for p in net.parameters()])


def test_saved_bytes_are_the_activations_without_parameters():
    net = classifier()
    X = torch.randn(5, 200, requires_grad=True)
    with d2lpar.SavedBytes(net) as saved:
        net(X).sum() + X[:1].square().sum()  # saves a part of the input again
    assert saved.total == X.nbytes + 4 * 5 * 100  # the input, and the result of the ReLU
    net(X)
    assert saved.total == X.nbytes + 4 * 5 * 100


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,vgpu:vccl"])
def test_what_gloo_is_given_is_counted_once(backend):
    d2lpar.virtual_gpus(1)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        with CollectiveBytes() as counted:
            dist.all_reduce(torch.ones(3))
    finally:
        dist.destroy_process_group()
    assert counted.calls == {"allreduce": [12]}
