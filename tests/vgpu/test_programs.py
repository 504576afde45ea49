"""Programs as people write them for GPUs, on virtual ones: each computes what it does on the CPU.

The benchmark `bench_programs.py` runs those of others.
"""

import contextlib
import io
import json
import sys
import textwrap

import pytest
import torch
from programs import ranks, vgpu, written
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

pytestmark = pytest.mark.slow


def on_gpus(folder, gpus, source, *command):
    """Run a program with virtual GPUs; return the results that it prints, each JSON in a line."""
    program = written(folder, source)
    return results(vgpu(folder, "run", "--gpus", str(gpus), *command, program))


def results(done):
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def on_cpu(source):
    """Run a program in this process, which has no GPU; return the results that it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(textwrap.dedent(source), {})
    return [json.loads(line) for line in printed.getvalue().splitlines()]


def about(wanted, rel):
    return {name: pytest.approx(value, rel=rel) for name, value in wanted.items()}


TRAINER = """
    import json, os
    import torch
    import torch.nn.functional as F
    from torch import distributed as dist, nn
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.data.distributed import DistributedSampler

    class Trainer:
        def __init__(self, model, loader, optimizer, device, path):
            self.model, self.loader, self.optimizer = model.to(device), loader, optimizer
            self.device, self.path, self.epochs_run = device, path, 0
            if os.path.exists(path):
                snapshot = torch.load(path, map_location=device)
                self.model.load_state_dict(snapshot["model"])
                self.optimizer.load_state_dict(snapshot["optimizer"])
                self.epochs_run = snapshot["epochs_run"]
            self.model, self.group = DDP(self.model, device_ids=[device.index]), dist.new_group()

        def run_epoch(self, epoch):
            self.loader.sampler.set_epoch(epoch)
            for source, targets in self.loader:
                source = source.to(self.device, non_blocking=True)
                targets = targets.to(self.device, non_blocking=True)
                self.optimizer.zero_grad()
                loss = F.cross_entropy(self.model(source), targets)
                loss.backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
            total = loss.detach().clone()
            dist.all_reduce(total, op=dist.ReduceOp.SUM, group=self.group)
            return total.item() / dist.get_world_size()

        def train(self, max_epochs):
            for epoch in range(self.epochs_run, max_epochs):
                loss = self.run_epoch(epoch)
                if dist.get_rank() == 0:
                    state = {"model": self.model.module.state_dict(), "epochs_run": epoch + 1}
                    state["optimizer"] = self.optimizer.state_dict()
                    torch.save(state, self.path)
                dist.barrier()
                assert dist.get_rank() == 0 or self.epochs_run, "fails after its first epoch"
            return loss

    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(128, 20).double(), torch.randint(5, (128,)))
    loader = DataLoader(data, 16, pin_memory=True, sampler=DistributedSampler(data))
    model = nn.Sequential(
        nn.Linear(20, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 5)
    ).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = Trainer(model, loader, optimizer, torch.device("cuda", rank), "snapshot.pt")
    result = {"loss": trainer.train(3), "resumed after": trainer.epochs_run}
    result["norms"] = [parameter.norm().item() for parameter in model.parameters()]
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(result), flush=True)
"""


def test_a_trainer_that_torchrun_starts_again(tmp_path):
    """The second ranks find a snapshot of the first, and in torchrun's store what those left."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1"]
    options = "--model", "v100", *torchrun, "--nproc-per-node=2"
    (found,) = on_gpus(tmp_path, 2, TRAINER, *options)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(128, 20).double(), torch.randint(5, (128,)))
    samplers = [DistributedSampler(data, 2, rank) for rank in range(2)]
    model = nn.Sequential(
        nn.Linear(20, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 5)
    ).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(3):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        loaders = [DataLoader(data, 16, sampler=sampler) for sampler in samplers]
        for batches in zip(*loaders, strict=True):
            optimizer.zero_grad()
            loss = sum(F.cross_entropy(model(x), y) for x, y in batches) / 2
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    norms = [parameter.norm().item() for parameter in model.parameters()]
    assert found == about({"loss": loss.item(), "resumed after": 1, "norms": norms}, rel=1e-9)


SHARDED = """
    import json, os
    import torch
    from torch import distributed as dist, nn
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import (
        CPUOffload, FullStateDictConfig, FullyShardedDataParallel, StateDictType, fully_shard
    )
    from torch.distributed.tensor import Replicate, Shard, rand
    from torch.nn.parallel import DistributedDataParallel

    def net_on_the_cpu():
        torch.manual_seed(0)
        layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)
        return nn.Sequential(*layers).double()

    def losses_of(net):
        optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.1), []
        for _ in range(3):
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    torch.manual_seed(1)
    x, result = torch.randn(4, 6).double(), {}
    if "RANK" not in os.environ:
        net = net_on_the_cpu()
        wanted = losses_of(net)
        names = "fully_shard", "True", "False", "offload", "hook"
        result = {name: wanted for name in names}
        result["norms"] = [value.double().norm().item() for value in net.state_dict().values()]
    else:
        rank = int(os.environ["LOCAL_RANK"])
        mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
        assert torch.cuda.current_device() == rank
        drawn = rand(8, device_mesh=mesh, placements=[Shard(0), Replicate()]).full_tensor()
        drawn = torch.cat([drawn, torch.rand(2, device="cuda")])
        others = [torch.empty_like(drawn) for _ in range(4)]
        dist.all_gather(others, drawn)
        assert len({*drawn.tolist()}) == 10 and all(other.equal(drawn) for other in others)
        heads = rand(2, 4, 6, 8, device_mesh=mesh, placements=[Shard(0), Shard(1)])
        attention = nn.functional.scaled_dot_product_attention
        assert attention(heads, heads, heads, is_causal=True).placements == heads.placements
        x = x.cuda()
        net = net_on_the_cpu()
        fully_shard(net[0])
        result["fully_shard"] = losses_of(fully_shard(net))
        for original in True, False:
            net = FullyShardedDataParallel(
                net_on_the_cpu(), device_id=rank, use_orig_params=original
            )
            result[str(original)] = losses_of(net)
            net.cpu()  # as Lightning does between fit and validate
            assert {p.device.type for p in net.parameters()} == {"cpu"}
            net.cuda()
            config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
            kind = StateDictType.FULL_STATE_DICT
            with FullyShardedDataParallel.state_dict_type(net, kind, config):
                state = net.state_dict()
            assert all(value.device.type == "cpu" for value in state.values())
            assert len(state) == (9 if rank == 0 else 0), state.keys()
            result["norms"] = [value.double().norm().item() for value in state.values()]
        offload = CPUOffload(offload_params=True)
        net = FullyShardedDataParallel(net_on_the_cpu(), device_id=rank, cpu_offload=offload)
        result["offload"] = losses_of(net)
        assert {p.device.type for p in net.parameters()} == {"cpu"}
        net = DistributedDataParallel(net_on_the_cpu().cuda(), device_ids=[rank])
        net.register_comm_hook(None, bf16_compress_hook)
        result["hook"] = losses_of(net)
        dist.destroy_process_group()
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(result), flush=True)
"""


def test_networks_on_the_cpu_are_moved_and_sharded(tmp_path):
    (found,), (wanted,) = on_gpus(tmp_path, 4, SHARDED, *ranks(tmp_path, 4)), on_cpu(SHARDED)
    hook, of_hook = found.pop("hook"), wanted.pop("hook")
    assert hook == pytest.approx(of_hook, rel=1e-2)  # whose gradients are rounded to bfloat16
    assert found == about(wanted, rel=1e-9)


SPAWNED = """
    import json, os
    import torch
    from torch import distributed as dist, multiprocessing as mp, nn
    from torch.nn.parallel import DistributedDataParallel as DDP

    def main(rank, world_size, path):
        store = f"file://{path}"
        dist.init_process_group("nccl", init_method=store, rank=rank, world_size=world_size)
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
        model = DDP(model.double().to(rank), device_ids=[rank])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        batches = torch.randn(4, 8, 1, 8, 8).double()
        dist.barrier()  # on the current device, whichever the ones of the model are
        if rank == 0:
            torch.save(model.state_dict(), f"{path}.pt")
        dist.barrier()
        location = {"cuda:0": f"cuda:{rank}"}
        model.load_state_dict(torch.load(f"{path}.pt", map_location=location))
        for number, batch in enumerate(batches):
            if number % 2:
                loss = model(batch.to(rank)).square().mean()
            else:
                with model.no_sync():
                    loss = model(batch.to(rank)).square().mean()
            loss.backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        losses = [torch.empty_like(loss) for _ in range(world_size)]
        dist.all_gather(losses, loss.detach())
        received = torch.zeros(2, device=rank)
        if rank == 0:
            dist.send(torch.tensor([1.0, 2.0], device=rank), 1)
            dist.recv(received, world_size - 1)
        else:
            dist.recv(received, rank - 1)
            dist.send(received + rank, (rank + 1) % world_size)
        names = [None] * world_size
        torch.cuda.set_device(rank)  # where objects travel, as torch documents
        dist.all_gather_object(names, f"rank {rank}")
        dist.barrier()
        group = dist.new_group(backend="gloo")  # which takes tensors of GPUs, too
        dist.broadcast(received, world_size - 1, group=group)
        if rank == 0:
            result = {"losses": [each.item() for each in losses], "around": received.tolist()}
            norms = [parameter.norm().item() for parameter in model.parameters()]
            print(json.dumps({**result, "names": names, "norms": norms}), flush=True)
        dist.destroy_process_group()

    if __name__ == "__main__":
        world_size = torch.cuda.device_count()
        mp.spawn(main, (world_size, os.path.abspath("store")), nprocs=world_size)
"""


def test_processes_of_mp_spawn(tmp_path):
    program = written(tmp_path, SPAWNED)
    done = vgpu(tmp_path, "run", "--gpus", "2", sys.executable, program)
    (found,) = results(done)
    for device in "cuda:0", "cuda:1":
        assert f"{device}, collectives" in done.stderr  # their bytes, among those of the copies
        assert [device[-1], device] in [line.split()[:2] for line in done.stderr.splitlines()]
    batches = []
    for rank in 1, 0:  # whose network is that of both
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
        model, batch = model.double(), torch.randn(4, 8, 1, 8, 8).double()
        batches.insert(0, batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(4):
        losses = [model(of_rank[number]).square().mean() for of_rank in batches]
        (sum(losses) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert found.pop("names") == ["rank 0", "rank 1"]
    norms = [parameter.norm().item() for parameter in model.parameters()]
    wanted = {"losses": [loss.item() for loss in losses], "around": [1, 2], "norms": norms}
    assert found == about(wanted, rel=1e-9)


FLEX = """
    import json, torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.manual_seed(0)
    inputs = [torch.randn(1, heads, 128, 16) for heads in (4, 2, 2)] + [torch.rand(4)]
    if gpu := torch.cuda.is_available():
        mask = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 128, 128)

    def attention(q, k, v, slopes):
        if gpu:
            score = lambda score, b, h, i, j: score + slopes[h] * (j - i)
            return torch.compile(flex_attention)(q, k, v, score, mask, enable_gqa=True)
        i, j = torch.arange(128)[:, None], torch.arange(128)
        bias = (slopes[:, None, None] * (j - i)).masked_fill(i < j, -torch.inf)
        q, k, v = q.double(), *(x.double().repeat_interleave(2, 1) for x in (k, v))
        return (q @ k.mT / 4 + bias).softmax(-1) @ v

    def results(bfloat16):
        leaves = [x.to("cuda" if gpu else "cpu").requires_grad_() for x in inputs]
        before = torch.cuda.memory_allocated() if gpu else 0
        with torch.autocast("cuda", torch.bfloat16, enabled=gpu and bfloat16):
            out = attention(*leaves)
        if gpu:
            assert out.dtype == (torch.bfloat16 if bfloat16 else torch.float32), out.dtype
            assert torch.cuda.memory_allocated() - before < 4 * 128 * 128 * 4, "scores are kept"
        out.float().square().sum().backward()
        return [x.double().norm().item() for x in (out, *(x.grad for x in leaves))]

    print(json.dumps([results(False), results(True)]))
"""


ACROSS = """
    import json, os, torch
    from torch.distributed import autograd, rpc

    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{os.getcwd()}/r")
    rpc.init_rpc("worker", rank=0, world_size=1, rpc_backend_options=options)
    x = torch.tensor([2.0, 5.0], requires_grad=True)
    with autograd.context() as context:
        tripled = (3 * x).cuda(1)
        loss = tripled.sum() + x.to("cuda:2").square().sum().to("cuda:1")
        autograd.backward(context, [loss], retain_graph=True)
        autograd.backward(context, [loss])  # adds up
        gradient = autograd.get_gradients(context)[x]
    rpc.shutdown()
    print(json.dumps(gradient.tolist()))
"""


def test_flex_attention_with_a_score_that_is_trained(tmp_path):
    """ALiBi with trained slopes, beside the formula in double precision on the CPU."""
    ((exact, low),) = on_gpus(tmp_path, 1, FLEX, sys.executable)
    ((wanted, _),) = on_cpu(FLEX)
    assert exact == pytest.approx(wanted, rel=1e-4)
    assert low == pytest.approx(wanted, rel=2e-2) and low != pytest.approx(wanted, rel=1e-5)


def test_distributed_autograd_on_gpus_that_are_not_the_first(tmp_path):
    """Twice the derivatives of 3 x and x**2 by hand."""
    assert on_gpus(tmp_path, 3, ACROSS, sys.executable) == [[14.0, 26.0]]


TORCH_TESTS = """
    import torch, torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.testing._internal.common_device_type import (
        deviceCountAtLeast, dtypes, instantiate_device_type_tests, onlyCUDA
    )
    from torch.testing._internal.common_distributed import (
        DistributedTestBase, MultiProcessTestCase, MultiThreadedTestCase, requires_nccl,
        skip_if_lt_x_gpu
    )
    from torch.testing._internal.common_fsdp import MLP, FSDPTest
    from torch.testing._internal.common_utils import TestCase, run_tests
    from torch.testing._internal.distributed._tensor.common_dtensor import (
        DTensorTestBase, with_comms
    )

    def fork_processes(test):
        context = torch.multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.testing._internal.common_fsdp"])
        test._start_processes(context.Process)

    class TestProcesses(MultiProcessTestCase):
        world_size = 2
        _spawn_processes = fork_processes

        def setUp(self):
            super().setUp()
            self._spawn_processes()

        @requires_nccl()
        @skip_if_lt_x_gpu(2)
        def test_all_reduce(self):
            store = dist.FileStore(self.file_name, self.world_size)
            dist.init_process_group("nccl", store=store, rank=self.rank, world_size=2)
            x = torch.full((3,), self.rank + 1.0, device=f"cuda:{self.rank}")
            dist.all_reduce(x)
            self.assertEqual(x.tolist(), [3.0] * 3)
            dist.destroy_process_group()

    class TestGroup(DistributedTestBase):
        world_size = 2
        _spawn_processes = fork_processes

        @requires_nccl()
        @skip_if_lt_x_gpu(2)
        def test_broadcast(self):
            self.create_pg("cuda")
            x = torch.full((2,), float(self.rank), device=f"cuda:{self.rank}")
            dist.broadcast(x, 1)
            self.assertEqual(x.tolist(), [1.0, 1.0])
            dist.destroy_process_group()

        @skip_if_lt_x_gpu(3)
        def test_needs_another(self):
            raise AssertionError

    class TestSharded(FSDPTest):
        world_size = 2
        _spawn_processes = fork_processes

        @skip_if_lt_x_gpu(2)
        def test_forward(self):
            torch.manual_seed(0)
            net, x = MLP(4), torch.ones(2, 4, device="cuda")
            expected = MLP(4).cuda()
            expected.load_state_dict(net.state_dict())
            fully_shard(net)
            self.assertEqual(net(x), expected(x))

    class TestDTensors(DTensorTestBase):
        world_size = 2
        _spawn_processes = fork_processes

        @with_comms
        @skip_if_lt_x_gpu(2)
        def test_product(self):
            x = torch.arange(8.0, device="cuda").reshape(4, 2)
            parts = distribute_tensor(x, self.build_device_mesh(), [Shard(0)])
            product = (parts @ parts.new_ones(2, 3)).full_tensor()
            self.assertEqual(product.tolist(), [[s] * 3 for s in (1.0, 5.0, 9.0, 13.0)])

    class TestThreads(MultiThreadedTestCase):
        world_size = 2

        def setUp(self):
            super().setUp()
            self._spawn_threads()

        @skip_if_lt_x_gpu(2)
        def test_all_reduce(self):
            x = torch.full((2,), self.rank + 1.0, device=f"cuda:{self.rank}")
            dist.all_reduce(x)
            self.assertEqual(x.tolist(), [3.0, 3.0])

    class TestDevices(TestCase):
        @dtypes(torch.float32, torch.bfloat16)
        def test_sum(self, device, dtype):
            x = torch.full((4,), 2, device=device, dtype=dtype)
            self.assertEqual((x + x).tolist(), [4.0] * 4)

        @onlyCUDA
        @deviceCountAtLeast(2)
        def test_copy(self, devices):
            self.assertNotEqual(torch.cuda.current_stream(), torch.cuda.default_stream())
            self.assertEqual(torch.cuda.current_device(), 0)
            x = torch.ones(2, device=devices[0]).to(devices[1])
            self.assertEqual((str(x.device), x.tolist()), ("cuda:1", [1.0, 1.0]))

    instantiate_device_type_tests(TestDevices, globals())

    if __name__ == "__main__":
        run_tests()
"""


def test_torchs_own_classes_for_tests(tmp_path):
    """What is skipped says why: tests that only CUDA can pass, or that need more GPUs.

    A server with torch in it forks the processes.
    """
    written(tmp_path, TORCH_TESTS, "test_own.py")
    pytest_ = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-q", "-rs", "test_own.py"]
    done = vgpu(tmp_path, "run", "--gpus", "2", *pytest_, timeout=600)
    assert done.returncode == 0 and "10 passed, 2 skipped" in done.stdout, done.stdout
    assert "Need at least 3 CUDA devices" in done.stdout and "on cuda" in done.stdout
