"""Programs that say `torch.cuda`: what they do and what they see on virtual GPUs.

Each program runs in a process of its own, a fork of one that has imported torch, because the names
stay changed; where it has the usual GPUs, in a fork of one that has changed the names already. A
program that fails shows its traceback.
"""

import re
import textwrap

import fresh
import pytest

from vgpu.cuda.torch_cuda import switch_on, translate

SWITCH_ON = """
from vgpu.cuda.torch_cuda import switch_on
switch_on({gpus!r}, {visible!r})
"""
BEGIN = """
import os, sys, warnings
import torch
from torch import nn

def error(function, kind=RuntimeError):
    try:
        function()
    except kind as error:
        return str(error)
    raise AssertionError("nothing was raised")
"""


def stand_in(folder, module, code):
    """Write a module, in its packages, for a program to import in place of the real one."""
    *packages, name = module.split(".")
    for package in packages:
        folder = folder / package
        folder.mkdir()
        (folder / "__init__.py").touch()
    (folder / f"{name}.py").write_text(code)


def run(program, gpus="vgpu:2", visible=None):
    """Run a program in a process that has these GPUs; return what it prints, in words."""
    code = BEGIN + textwrap.dedent(program)
    switch_on = SWITCH_ON.format(gpus=gpus, visible=visible)
    if gpus == "vgpu:2" and visible is None:
        done = fresh.run(code, fresh.SET_UP + switch_on)
    else:
        done = fresh.run(switch_on + code, fresh.SET_UP)
    assert done.returncode == 0, done.stderr
    assert not re.search("Failed to record CUDA|Time stats are", done.stderr), done.stderr
    return done.stdout.split()


PROGRAMS = {
    "a_training_loop_gives_what_the_cpu_gives": """
    def train(device):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).double().to(device)
        trainer = torch.optim.Adam(net.parameters(), lr=1e-2)
        x, y = torch.randn(32, 8).double(), torch.randn(32, 1).double()
        for _ in range(5):
            trainer.zero_grad()
            loss = nn.functional.mse_loss(net(x.to(device)), y.to(device))
            loss.backward()
            trainer.step()
        return net, loss

    device = "cuda" if torch.cuda.is_available() else "cpu"
    (net, loss), (_, wanted) = train(device), train("cpu")
    torch.testing.assert_close(loss.cpu(), wanted)
    assert str(loss.device) == "cuda:0" and loss.is_cuda and not wanted.is_cuda
    assert {p.device for p in net.parameters()} == {torch.device("cuda:0")}
    assert net[0].weight.grad.device == torch.device("cuda", 0)
    assert "device='cuda:0'" in repr(loss)
    """,
    "devices_and_their_number": """
    assert torch.cuda.device_count() == 2 == torch.accelerator.device_count()
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    assert torch.get_device_module("cuda") is torch.cuda
    torch.cuda.set_device("cuda:1"), torch.cuda.set_stream(None)
    torch.cuda.manual_seed(4)  # of this GPU
    assert torch.cuda.is_initialized() and torch.cuda.default_generators[1].initial_seed() == 4
    x = torch.ones(2)
    for y in (
        x.cuda(), x.to("cuda"), x.to(1), x.to(device="cuda", dtype=torch.float64),
        torch.zeros(2, device="cuda"), torch.tensor([1.0], device="cuda"),
        torch.as_tensor([1], device="cuda"), x.new_ones(1, device="cuda"),
        nn.Linear(1, 1).cuda().weight, nn.Linear(1, 1, device="cuda").weight,
        torch.tril_indices(2, 2, device="cuda"), x.type(torch.cuda.HalfTensor),
        torch.cuda.FloatTensor([1, 2]), x.type("torch.cuda.FloatTensor"), torch.cuda.ShortTensor(2),
    ):
        assert y.device == torch.device("cuda:1") and y.get_device() == 1, y
    assert x.cuda(0).device.index == 0 == torch.empty(1, device="cuda:0").device.index
    y = torch.ones(2, 2, 2, 2).cuda(memory_format=torch.channels_last)
    assert y.is_contiguous(memory_format=torch.channels_last)
    y = x.cuda()
    assert y.to("cuda") is y.cuda() is y.to(device=y.device) is y and y.to("cuda:0") is not y
    assert y.type() == "torch.cuda.FloatTensor" and isinstance(y, torch.cuda.FloatTensor)
    assert not any(isinstance(z, torch.cuda.FloatTensor) for z in (y.half(), y.cpu(), 3.0))
    assert y.untyped_storage().device == y.device
    with torch.cuda.device(0):
        assert torch.ones(1, device="cuda").device.index == torch.cuda.current_device() == 0
        assert y.type(torch.cuda.HalfTensor).device == y.device
    with torch.device("cuda"):
        assert nn.Linear(1, 1).weight.is_cuda and torch.tensor([1]).is_cuda
    torch.set_default_device("cuda:0")
    assert torch.ones(1).device.index == 0
    torch.set_default_tensor_type("torch.cuda.HalfTensor")
    assert torch.ones(1).is_cuda and torch.ones(1).dtype == torch.float16
    torch.set_default_tensor_type(torch.DoubleTensor)
    assert not torch.ones(1).is_cuda and torch.ones(1).dtype == torch.float64
    """,
    "errors_are_those_of_cuda": """
    x = torch.ones(2).cuda()
    assert "CUDA error: invalid device ordinal" in error(lambda: x.cuda(7))
    assert error(lambda: x + torch.ones(2)).endswith("at least two devices, cuda:0 and cpu!")
    assert error(lambda: x + x.cuda(1)).endswith("at least two devices, cuda:0 and cuda:1!")
    assert "must be cuda device" in error(lambda: x.cuda("cpu"))
    assert "only dense CPU" in error(x.pin_memory) and error(lambda: f"{x:.2f}", TypeError)
    assert error(lambda: torch.ones(2)[x.long()]).startswith("indices should be either on cpu or")
    assert error(lambda: x & 1, NotImplementedError).startswith('"bitwise_and_cuda" not impl')
    y = torch.ones(2, 2).long().cuda()
    assert error(lambda: y.addmm_(y, y), NotImplementedError).startswith('"addmm_cuda" not impl')
    w = x.clone().requires_grad_()
    y = w.exp()
    y.add_(1)
    assert "operation: [torch.cuda.FloatTensor [2]], which" in error(lambda: y.sum().backward())
    hooked = w * 1
    hooked.register_hook(lambda grad: grad.double())
    text = error(lambda: hooked.sum().backward())
    assert text.endswith("(was torch.cuda.FloatTensor got torch.cuda.DoubleTensor)"), text
    text = error(lambda: setattr(w, "grad", torch.ones(2)))
    assert "type 'cpu' to a tensor with device type 'cuda'" in text
    w.grad = x
    assert w.grad is x
    del w.grad
    assert w.grad is None
    for layer in nn.LSTM(1, 1), nn.GRU(1, 1), nn.RNN(1, 1), nn.RNN(1, 1, nonlinearity="relu"):
        text = error(lambda: layer.cuda()(torch.ones(1, 1, 1)))
        assert text.endswith("found input tensor at cpu and parameter tensor at cuda:0")
    text = error(lambda: torch.distributions.Normal(x, -x), ValueError)
    assert text.startswith("Expected parameter scale (Tensor of shape (2,))")
    torch.cuda.set_per_process_memory_fraction(1e-6)
    text = error(lambda: torch.empty(2**20, device="cuda"))
    assert "CUDA out of memory. " in text and "cuda:0" in text  # programs look for it
    """,
    "mixed_precision": """
    net = nn.Linear(4, 4).cuda()
    trainer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.ones(2, 4, device="cuda")
    for scaler, casts in (
        (torch.amp.GradScaler("cuda", init_scale=64.0), torch.autocast("cuda")),
        (torch.cuda.amp.GradScaler(init_scale=64.0), torch.cuda.amp.autocast()),
    ):
        assert scaler.is_enabled()
        with casts:
            assert torch.is_autocast_enabled("cuda") and torch.is_autocast_enabled()
            assert torch.get_autocast_dtype("cuda") == torch.float16 == net(x).dtype
            loss = net(x).float().sum()
        scaler.scale(loss).backward()
        assert net.bias.grad[0] == 2 * scaler.get_scale()
        scaler.unscale_(trainer)
        assert net.bias.grad[0] == 2
        scaler.step(trainer)
        scaler.update()
        trainer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert net(x).dtype == torch.bfloat16 and net.cpu()(x.cpu()).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True), torch.set_autocast_dtype("cuda", torch.bfloat16)
    assert net.cuda()(x).dtype == torch.bfloat16 == torch.get_autocast_gpu_dtype()
    """,
    "pinned_memory": """
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.arange(8.0), torch.arange(8))
    for x, y in DataLoader(data, 4, pin_memory=True):
        assert x.is_pinned() and y.is_pinned()
        x = x.to("cuda", non_blocking=True)
        assert x.is_cuda and x.cpu().tolist() == y.tolist()
    assert torch.empty(2, pin_memory=True).is_pinned() and not torch.empty(2).is_pinned()
    assert torch.full((2,), 3.0, pin_memory=True).tolist() == [3, 3]
    """,
    "data_parallel": """
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    wanted = net(x)
    parallel = nn.DataParallel(net.cuda())
    assert parallel.device_ids == [0, 1]
    got = parallel(x.cuda())
    torch.testing.assert_close(got.cpu(), wanted)
    got.sum().backward()
    assert net.weight.grad.device == got.device == torch.device("cuda:0")
    """,
    "checkpoints": """
    import copy, io, pickle

    net = nn.Linear(2, 2).cuda(1)
    trainer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 2, device="cuda:1")).sum().backward()
    trainer.step()
    file = io.BytesIO()
    torch.save({"net": net.state_dict(), "trainer": trainer.state_dict()}, file)
    assert b"cuda:1" in file.getvalue() and b"vgpu" not in file.getvalue()
    for where, wanted in (
        (None, "cuda:1"), ("cpu", "cpu"), ("cuda:0", "cuda:0"), ("cuda", "cuda:0"),
        ({"cuda:1": "cuda:0"}, "cuda:0"), (torch.device("cuda", 0), "cuda:0"),
        (lambda storage, location: storage, "cpu"),
        (lambda storage, location: storage.cuda(0), "cuda:0"),
    ):
        file.seek(0)
        kept = torch.load(file, map_location=where)
        assert {str(v.device) for v in kept["net"].values()} == {wanted}, (where, kept)
    other = nn.Linear(2, 2).cuda()
    other.load_state_dict(kept["net"])
    torch.testing.assert_close(other.weight.cpu(), net.weight.cpu())
    torch.optim.Adam(other.parameters()).load_state_dict(kept["trainer"])
    assert pickle.loads(pickle.dumps(net)).weight.device.index == 1
    assert copy.deepcopy(net).weight.is_cuda
    """,
    "random_numbers": """
    assert torch.cuda.initial_seed() == torch.initial_seed()  # before any work
    torch.manual_seed(3)
    a = torch.rand(2, device="cuda")
    torch.cuda.manual_seed_all(3)
    assert torch.equal(torch.rand(2, device="cuda"), a)
    state = torch.cuda.get_rng_state()
    b = torch.rand(2, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(2, device="cuda"), b) and not torch.equal(a, b)
    states, c = torch.cuda.get_rng_state_all(), torch.rand(2, device="cuda:1")
    torch.cuda.seed()
    assert torch.cuda.initial_seed() != 3 == torch.cuda.default_generators[1].initial_seed()
    torch.cuda.set_rng_state_all(states)
    assert torch.equal(torch.rand(2, device="cuda:1"), c)
    torch.cuda.seed_all()
    seeds = [each.initial_seed() for each in torch.cuda.default_generators]
    assert len(seeds) == 2 and seeds[0] == seeds[1] != 3
    with torch.random.fork_rng():
        torch.rand(5, device="cuda")
    torch.cuda.set_rng_state(state)
    generator = torch.Generator(device="cuda").manual_seed(3)
    assert generator.device.type == "cuda"
    assert torch.equal(torch.rand(2, device="cuda", generator=generator), a)
    """,
    "streams_events_and_memory": """
    side, start, end = torch.cuda.Stream(), *(torch.cuda.Event(enable_timing=True) for _ in "12")
    torch.cuda.synchronize()
    before = torch.cuda.memory.memory_allocated()
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == side != torch.cuda.default_stream()
        start.record()
        x = torch.ones(1024, device="cuda")
        end.record()
    assert isinstance(side, torch.Stream) and side.device == torch.device("cuda:0")
    assert torch.cuda.default_stream().cuda_stream == 0 != side.cuda_stream
    assert torch.cuda.Stream.priority_range() == (0, -3)  # as torch allows on a V100 and later
    with torch.cuda.stream(torch.cuda.streams.Stream(priority=-1)) as urgent:
        assert urgent.priority == torch.cuda.current_stream().priority == -1
    assert [torch.cuda.Stream(priority=p).priority for p in (-9, 0, 9)] == [-3, 0, 0]
    torch.cuda.current_stream().wait_stream(side)
    x.record_stream(torch.cuda.current_stream())
    end.synchronize()
    assert start.elapsed_time(end) > 0 and torch.cuda.memory_allocated() - before == 4096
    del x
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() >= 4096 and torch.cuda.memory_allocated() == before
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.empty_cache()
    nested = torch.cuda.memory_stats_as_nested_dict()
    assert nested["allocated_bytes"]["all"]["current"] == before
    elsewhere = torch.ones(256, device="cuda:1")
    nested = torch.cuda.memory_stats_as_nested_dict(1)
    assert nested["allocated_bytes"]["all"]["current"] == 1024 == torch.cuda.device_memory_used(1)
    assert "cuda:0" in torch.cuda.memory_summary()
    assert f"allocated_bytes.all.current {1024:>24,}" in torch.cuda.memory_summary(1)
    free, total = getattr(torch.accelerator, "get_memory_info", torch.cuda.mem_get_info)()
    assert total == torch.cuda.get_device_properties(0).total_memory >= free
    """,
    "flags_and_tools_are_accepted": """
    warnings.simplefilter("error")
    x = torch.ones(3, device="cuda")
    assert torch.allclose(x, x) and not torch.allclose(x, x + 1)  # reads its result, as on CUDA
    torch.backends.cudnn.benchmark = torch.backends.cudnn.deterministic = True
    torch.backends.cuda.matmul.allow_tf32 = True
    assert torch.backends.cuda.is_built() and torch.cuda.is_bf16_supported()
    assert torch.backends.cudnn.enabled and torch.backends.cudnn.version() is None
    with torch.cuda.nvtx.range("step"), torch.cuda.profiler.profile():
        torch.cuda.nvtx.range_push("forward")
        torch.cuda.nvtx.range_pop()
    torch.cuda.init(), torch.cuda.ipc_collect(), torch.cuda.reset_accumulated_memory_stats(0)
    assert torch.cuda.get_arch_list() == [] and torch.cuda.get_allocator_backend() == "native"
    assert torch.cuda.nccl.version() >= (2, 10) and not torch.cuda.is_current_stream_capturing()
    with torch.cuda.device_of(torch.ones(1).cuda(1)), torch.cuda.device_of(torch.ones(1)):
        assert torch.cuda.current_device() == 1
    lstm = nn.LSTM(2, 3).cuda()  # asks whether cuDNN would take it
    assert lstm(torch.ones(1, 1, 2, device="cuda"))[0].is_cuda
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    # acc_events: torch 2.11 warns without it
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        torch.ones(2, device="cuda") + 1
    assert "aten::add" in {event.key for event in profile.key_averages()}
    """,
    "values_determinism_and_waits_are_checked_at_the_call": """
    x = torch.zeros(2, 2, device="cuda")
    assert "is singular" in error(lambda: torch.linalg.inv(x), torch.linalg.LinAlgError)
    torch._assert_async(x[0, 0])
    assert "CUDA error: aten._assert_async" in error(torch.cuda.synchronize, torch.AcceleratorError)
    torch.cuda.set_sync_debug_mode("error")
    assert torch.cuda.get_sync_debug_mode() == 2
    for wait in x.cpu, torch.cuda.current_stream().synchronize:
        assert error(wait) == "called a synchronizing CUDA operation"
    pinned = torch.ones(2, 2).pin_memory()
    pinned.cuda(non_blocking=True), pinned.type(torch.cuda.HalfTensor, non_blocking=True)
    torch.cuda.set_sync_debug_mode("default")
    torch.use_deterministic_algorithms(True)
    assert error(lambda: x.median(0)).startswith("median CUDA with indices output does not have")
    x = torch.rand(1, 2, 4, 4, device="cuda", requires_grad=True)
    nn.ReplicationPad2d(1)(x).sum().backward()  # torch decomposes it for deterministic CUDA
    torch.cuda.synchronize()
    """,
    "sparse_tensors_are_refused_by_name_and_with_a_cure": """
    x, dense = torch.eye(3), torch.eye(3).cuda()

    def gradients():
        nn.Embedding(5, 3, sparse=True).cuda()(torch.tensor([1]).cuda()).sum().backward()

    for make in (
        lambda: x.to_sparse().cuda(), lambda: x.to_sparse_csr().cuda(), gradients,
        lambda: dense.to_sparse(), lambda: dense.to_sparse_csr(),
        lambda: torch.sparse_coo_tensor([[0], [1]], [1.0], (2, 2), device="cuda"),
        lambda: torch.sparse_coo_tensor(torch.ones(1, 1).long().cuda(), dense[0, :1], (2,)),
    ):
        text = error(make, NotImplementedError)
        assert "torch.sparse_c" in text and "to_dense()" in text, text
    assert torch.equal(x.to_sparse().to_dense().cuda(), dense)
    """,
    "nested_tensors_of_the_strided_layout_are_refused_by_name_and_with_a_cure": """
    rows = [torch.ones(2, 3), torch.ones(4, 3)]
    nested = torch.nested.nested_tensor(rows)
    for make in (
        lambda: nested.cuda(), lambda: nested.to("cuda"), lambda: nested.to("cuda:1", torch.half),
        lambda: torch.nested.nested_tensor(rows, device="cuda") * 2,
    ):
        assert "strided layout" in error(make) and "torch.jagged" in error(make)
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged).cuda()
    assert jagged.is_cuda and jagged.values().shape == (6, 3)
    """,
    "what_only_cuda_has_says_so_by_name": """
    from pathlib import Path
    import torch.utils.cpp_extension as extension

    def refused(function):
        return error(function, NotImplementedError)

    assert "torch.cuda.CUDAGraph needs a real GPU" in refused(torch.cuda.CUDAGraph)
    assert "--training.disable_cuda_graphs" in refused(torch.cuda.CUDAGraph)
    used = torch.cuda.device_memory_used()
    x = torch.ones(256, device="cuda")
    assert torch.cuda.device_memory_used() == used + 1024  # as nvidia-smi shows it
    assert "torch.cuda.graph needs" in refused(lambda: torch.cuda.graphs.graph(None))
    for name in "temperature", "power_draw", "clock_rate", "MemPool", "ExternalStream":
        assert f"torch.cuda.{name} needs a real GPU" in refused(getattr(torch.cuda, name))
    assert "make_graphed_callables" in refused(lambda: torch.cuda.make_graphed_callables(1, 2))
    for function in torch.cuda.utilization, torch.cuda.memory_usage, torch.cuda.list_gpu_processes:
        assert "the summary of vgpu run" in refused(function)
    for name in "all_reduce reduce broadcast all_gather reduce_scatter unique_id".split():
        assert f"torch.cuda.nccl.{name} needs" in refused(getattr(torch.cuda.nccl, name))
    cudart = torch.cuda.cudart()
    assert cudart.cudaMemGetInfo(0) == torch.cuda.mem_get_info(0)
    torch.cuda.check_error(cudart.cudaProfilerStart())
    assert cudart.cudaGetErrorString(cudart.cudaError.success) == "no error"
    text = refused(lambda: cudart.cudaHostRegister(0, 1, 0))
    assert "torch.cuda.cudart().cudaHostRegister needs" in text and "pin_memory" in text
    assert "pinned memory is not counted" in refused(torch.cuda.host_memory_stats)
    assert "host_memory_stats needs" in refused(torch.cuda.reset_peak_host_memory_stats)
    assert not torch.cuda.tunable.is_enabled()
    assert "torch.cuda.tunable.enable needs" in refused(torch.cuda.tunable.enable)
    kernel = torch.cuda.jiterator._create_jit_fn("template <typename T> T f(T x) { return x; }")
    assert "torch.cuda.jiterator needs" in refused(lambda: kernel(x))
    for make in (
        lambda: extension.load("fast", [Path("a.cpp"), Path("b.cuh")]),
        lambda: extension.load("fast", "b.cu"),
        lambda: extension.load("fast", "a.cpp", with_cuda=True),
        lambda: extension.load_inline("fast", "", cuda_sources="x"),
        lambda: extension.load_inline("fast", "", with_cuda=True),
        lambda: extension.CUDAExtension("fast", ["a.cpp"]),
    ):
        assert "the CUDA extension 'fast' needs a real GPU" in refused(make)
    x = torch.ones(2, device="cuda")
    torch.library.define("ours::mine", "(Tensor x) -> Tensor")
    compiled = torch._C._dispatch_library("IMPL", "ours", "")
    compiled.impl("mine", "CUDA", lambda x: x)
    assert "ours::mine has a kernel for CUDA only" in refused(lambda: torch.ops.ours.mine(x))
    torch.library.impl("ours::mine", "CPU", lambda x: x + 1)
    assert torch.ops.ours.mine(x).tolist() == [2, 2]
    torch.library.define("ours::both", "(Tensor x) -> Tensor")
    torch.library.impl("ours::both", "CPU", lambda x: x + 1)
    torch.library.impl("ours::both", "CUDA", lambda x: x + 2 * x.is_cuda)
    assert torch.ops.ours.both(x).tolist() == [3, 3]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert torch.compile(lambda x: x + 1)(x).tolist() == [2, 2]
        assert torch.compile(mode="max-autotune")(len) is len
    assert len(caught) == 2 and "torch.compile does nothing" in str(caught[0].message)
    assert {each.filename for each in caught} == {"<string>"}, "the line that calls it"
    """,
    "a_child_by_fork_has_gpus_unless_its_parent_has_used_them": """
    import multiprocessing

    def work(queue):
        try:
            queue.put(torch.ones(2, device="cuda").sum().item())
        except RuntimeError as error:
            queue.put(str(error))

    def answer():
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        child = context.Process(target=work, args=(queue,))
        child.start()
        said = queue.get(timeout=60)
        child.join()
        return said

    assert torch.cuda.is_available() and torch.cuda.device_count() == 2
    assert answer() == 2
    torch.ones(1).cuda()
    assert "Cannot re-initialize CUDA in forked subprocess" in answer()
    """,
    # With a backend that stands for that of virtual GPUs: here each rank is alone.
    "process_groups_of_nccl": """
    import tempfile
    import torch.distributed as dist
    import torch.distributed.optim  # TorchScript compiles it, with the functions that we replace

    made = []

    def create(store, rank, size, timeout):
        made.append((rank, size))
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    if "VCCL" not in vars(dist.Backend):
        dist.Backend.register_backend("vccl", create, devices=["vgpu"])
    dist.Backend._plugins["VCCL"] = dist.Backend._BackendPlugin(create, False)
    assert dist.is_nccl_available() and dist.is_backend_available("nccl")
    assert dist.get_default_backend_for_device("cuda") == "nccl"
    for options in (
        {"backend": "nccl"}, {"backend": "nccl", "device_id": torch.device("cuda:1")}, {},
        {"backend": "cpu:gloo,cuda:nccl"},
    ):
        made.clear()
        name = tempfile.mktemp()
        dist.init_process_group(init_method=f"file://{name}", rank=0, world_size=1, **options)
        assert made == [(0, 1)], options
        assert dist.get_backend() == options.get("backend", "undefined")
        if options == {"backend": "nccl"}:
            assert dist.get_backend(dist.new_group([0])) == "nccl" and len(made) == 2
        dist.destroy_process_group()
    """,
    "a_group_that_is_bound_to_a_gpu_refuses_the_others": """
    import torch.distributed as dist

    options = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl", device_id=torch.device("cuda:1"), **options)
    x, elsewhere = torch.ones(2, device="cuda:1"), torch.ones(2, device="cuda:0")
    text = "collective on tensor not on device passed to init_process_group"
    assert text in error(lambda: dist.all_reduce(elsewhere), dist.DistBackendError)
    dist.all_reduce(x)
    dist.barrier()
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(2, 1).cuda(1))
    for _ in range(4):
        ddp(x).backward()  # without a warning that there are no times to log
    dist.destroy_process_group()
    """,
    "attention_of_dtensors_keeps_the_shards_that_are_even": """
    import torch.distributed as dist
    from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("nccl", store=FakeStore(), rank=0, world_size=6)
    mesh = DeviceMesh("cuda", [[0, 1, 2], [3, 4, 5]])
    attention = nn.functional.scaled_dot_product_attention
    x, mask = torch.rand(1, 1, 4, 8), torch.rand(1, 1, 4, 4)
    for dims in (0, 1), (1, 1), (1, 0):
        placements = [Shard(dim) for dim in dims]
        parts = [DTensor.from_local(y.cuda(), mesh, placements) for y in (x, mask)]
        got = attention(parts[0], parts[0], parts[0], parts[1])
        assert got.placements == (*placements,) and got.shape == parts[0].shape, got
        torch.testing.assert_close(got.to_local().cpu(), attention(x, x, x, mask))
        got = attention(*[parts[0]] * 3, None, 0.0, True).to_local().cpu()
        torch.testing.assert_close(got, attention(x, x, x, is_causal=True))
    whole = DTensor.from_local(torch.rand(1, 4, 4, 8).cuda(), mesh, [Replicate()] * 2)
    cut = whole.redistribute(mesh, [Shard(1)] * 2)  # four heads for six ranks
    assert attention(cut, cut, cut).shape == whole.shape and cut.device.type == "cuda"
    """,
    "a_barrier_of_some_ranks_is_on_the_gpu_of_each": """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vgpu import start_recording

    dist.init_process_group("nccl", store=FakeStore(), rank=1, world_size=2)
    _, group, spans = dist.new_group([0]), dist.new_group([1]), start_recording()
    with torch.profiler.profile(acc_events=True) as p:
        dist.barrier(group)
    assert 1 in {e.device_index for e in p.events() if e.device_type.name == "CUDA"}
    dist.all_reduce(torch.ones(1, device="cuda:0"))
    dist.barrier()  # on the GPU that the group has used
    dist.barrier(device_ids=[1]), dist.barrier()
    found = [str(span.device) for span in spans if span.kind == "collective"]
    assert found == ["cuda:1", "cuda:0", "cuda:0", "cuda:1", "cuda:0"]
    x, y, z = torch.tensor([5.0, 6.0]).cuda(), torch.zeros(1).cuda(), torch.zeros(2).cuda()
    dist.scatter(y, [*x.split(1)], src=1), dist.all_to_all_single(z, x)
    assert (y.tolist(), z.tolist()) == ([6], [6, 6])  # rank 1 stands for both
    """,
    "a_backward_pass_over_fake_tensors": """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        net = nn.Linear(3, 2, device="cuda:1")
        net(torch.ones(5, 3, device="cuda:1")).sum().backward()
    grad = net.weight.grad
    assert str(grad.device) == "cuda:1" and grad.is_cuda and grad.shape == (2, 3)
    """,
    "tensors_that_wrap_others_are_on_cuda": """
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    weight = torch.ones(2, 2, device="cuda", requires_grad=True)
    for _ in range(2000):
        x = AsyncCollectiveTensor(torch.ones(2, 2, device="cuda"))
    assert str(x.device) == "cuda:0" and x.is_cuda
    (weight * x).sum().backward()
    assert weight.grad.device == x.device
    """,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_does_as_on_cuda(name):
    run(PROGRAMS[name])


def test_memory_that_a_stream_holds_is_cached():
    run("""
    side, x = torch.cuda.Stream(), torch.ones(1024, device="cuda")
    before = torch.cuda.memory_allocated()
    with torch.cuda.stream(side):
        torch.cuda._sleep(10**9)
    x.record_stream(side)
    del x
    assert torch.cuda.memory_allocated() == before - 4096
    assert torch.cuda.memory_cached() == torch.cuda.memory_reserved() == 2**21  # a segment
    assert torch.cuda.max_memory_cached() == torch.cuda.max_memory_reserved() == 2**21
    """, "v100:1")  # fmt: skip


def test_kernels_that_others_compile_say_their_name_or_what_avoids_them(tmp_path):
    """Of DeepSpeed, when its Adam is made, and of Triton: stand-ins for both."""
    stand_in(tmp_path, "deepspeed.ops.adam.fused_adam", "class FusedAdam: pass")
    stand_in(tmp_path, "triton.runtime.jit", "class JITFunction:\n    def run(self): pass\n")
    run(f"""
    sys.path.insert(0, {str(tmp_path)!r})
    from deepspeed.ops.adam.fused_adam import FusedAdam
    from triton.runtime.jit import JITFunction
    text = error(lambda: FusedAdam([torch.ones(1)]), NotImplementedError)
    assert '"torch_adam": true' in text
    kernel = object.__new__(JITFunction)
    kernel.fn = len
    text = error(lambda: kernel.run(3, grid=(1,)), NotImplementedError)
    assert "the Triton kernel 'len' needs a real GPU" in text
    """)


@pytest.mark.parametrize(
    ("gpus", "visible", "count"),
    [("vgpu:4", None, 4), ("vgpu:4", "0, 3", 2), ("vgpu:2", "1,2,0", 1), ("v100:8", "2", 1)],
)
def test_visible_devices(gpus, visible, count):
    program = "print(torch.cuda.device_count(), torch.cuda.get_device_name(0))"
    number, *name = run(program, gpus, visible)
    assert int(number) == count and (name[0] == "Tesla") == gpus.startswith("v100")


@pytest.mark.parametrize("gpus", ["4", "vgpu", "vgpu:0", "vgpu:-1", ":2", "a:b:2"])
def test_what_names_no_gpus(gpus):
    with pytest.raises(ValueError, match="VGPU_CUDA must be vgpu:N or GPU:N"):
        switch_on(gpus, None)


@pytest.mark.parametrize("visible", ["", "1,0,1"])
def test_no_visible_device_leaves_torch_alone(visible):
    program = "print(torch.zeros(1).is_cuda, hasattr(torch, 'vgpu'))"
    assert run(program, visible=visible) == ["False", "False"]


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ("nccl", "vccl"),
        ("gloo", "cpu:gloo,vgpu:vccl"),
        ("cpu:gloo,cuda:nccl", "cpu:gloo,vgpu:vccl"),
        ("undefined", "vccl"),
        ("cuda:gloo", "vgpu:vccl"),
        ("cuda:mpi", "cuda:mpi"),
        ("mpi", "mpi"),
        ("cpu:gloo", "cpu:gloo"),
    ],
)
def test_names_of_backends(given, ours):
    assert translate(given) == ours
