"""What is modelled: names, machines, refused figures, and the time of a kernel."""

import dataclasses
import itertools
import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from modelling import Fixed, fixed_gpus, kernels, schedule, seconds_of
from test_interrupts import interrupted_everywhere
from torch import nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.utils.checkpoint import checkpoint

import d2lpar
from vgpu import PRESETS, Link, clock, equal_ranks, hardware_name, host_takes, virtual_gpus
from vgpu.modelled import modelled_gpu
from vgpu.modelled.datasheets import GPUS
from vgpu.modelled.hardware import MACHINES, Machine, as_machine, machines_of
from vgpu.modelled.host import EAGER, Host, as_host
from vgpu.modelled.kernels import Kernel
from vgpu.modelled.modelled_gpu import GPU
from vgpu.modelled.products import Product
from vgpu.runtime import registry

LINK = Link(1e9)


def gpu(**figures):
    known = {"name": "mine", "memory": 1000, "bandwidth": 1e9, "peaks": {"float32": 1e9}}
    return GPU(**{**known, "multiprocessors": 4, "link": LINK, **figures})


def host(**figures):
    return Host(**{"operator": 1.0, "module": 1.0, "autograd": 1.0, **figures})


def kernel(*products, num_bytes=0, dtype=torch.float32, name="aten.mm"):
    return Kernel(name, products, num_bytes, dtype)


# -- arguments


@pytest.mark.parametrize(
    ("model", "error", "words"),
    [
        ("v1000", ValueError, ["v1000", *GPUS, *MACHINES]),
        (["v100", "a1000"], ValueError, ["a1000", *GPUS]),
        (3, TypeError, ["3"]),
        ([None, "v100"], TypeError, ["None"]),
        (["dgx1", "v100"], ValueError, ["the same Machine"]),
        (["dgx1", "dgxa100"], ValueError, ["the same Machine"]),
        (["v100"] * 3, ValueError, ["3", "2"]),
        (Machine("v100", gpus=1), ValueError, ["2", "1", "network must be given"]),
    ],
)
def test_a_model_that_is_none_is_refused_and_nothing_changes(model, error, words):
    devices = virtual_gpus(2, memory=12345678)
    x = torch.ones(3, device=devices[0])
    with pytest.raises(error) as raised:
        virtual_gpus(2, model=model)
    for word in words:
        assert word in str(raised.value)
    assert hardware_name() == ""
    assert torch.vgpu.get_device_properties(0).total_memory == 12345678
    assert (x + 1).tolist() == [2] * 3


@pytest.mark.parametrize("options", [{"values": False}, {"host": 8e-6}, {"host": "eager"}])
def test_without_a_model_there_are_values_and_no_host(options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"{name}={value!r} requires model="):
        virtual_gpus(2, **options)


NAN = float("nan")
COUNTS = itertools.product(["gpus", "gpus_per_switch", "network_cards"], [0, -1, 1.5, "2"])
NOT_POSITIVE = {"memory": (0, -1, "16 GB"), "bandwidth": (0, NAN), "multiprocessors": (0,)}
SECONDS = itertools.product(["operator", "module", "autograd"], [-1.0, float("inf"), NAN])


@pytest.mark.parametrize(
    ("make", "figures", "words"),
    [
        *(
            (gpu, {name: x}, f"^{name} of a GPU must be a positive number: got {x!r}$")
            for name, refused in NOT_POSITIVE.items()
            for x in refused
        ),
        (gpu, {"peaks": {"float32": 1e9, "fp16": 2e9}}, "must be of float64, .*: got 'fp16'"),
        (gpu, {"peaks": {"float32": 0}}, "float32 of a GPU must be a positive number: got 0"),
        (gpu, {"peaks": {"float32": 1e9, "float16": -2.0}}, "float16 of a GPU must .*: got -2.0"),
        (gpu, {"peaks": {"float16": 1e9}}, "float16"),  # and no float32
        *((partial(Machine, "v100"), {name: n}, f"{name} .*{n!r}") for name, n in COUNTS),
        (partial(Machine, "v100"), {"network": "11gbe"}, "no link named '11gbe'"),
        (host_takes, {"seconds": -1e-9}, "-1e-09"),
        (host_takes, {"seconds": NAN}, "nan"),
        *((host, {name: x}, f"^{name} of a Host must .*: got {x}$") for name, x in SECONDS),
    ],
)
def test_figures_that_make_no_sense_are_refused(make, figures, words):
    with pytest.raises(ValueError, match=words):
        make(**figures)


def test_machines_are_found_by_name_by_gpu_and_as_they_are():
    machine = Machine(gpu(), 2)
    assert as_machine(machine) is machine
    assert as_machine("DGX1") is MACHINES["dgx1"]
    assert as_machine("V100").gpu is GPUS["v100"]
    assert as_machine(machine.gpu) == Machine(machine.gpu)
    own = Fixed()
    assert as_machine(own).gpu is own
    assert machines_of(2, ["v100", "t4"])[1].gpu is GPUS["t4"]
    assert len(machines_of(16, ["dgx1"] * 16)) == 16
    assert Machine("v100", network="10gbe").network.bandwidth == 1.25e9


# -- what it is then


def test_devices_have_the_memory_and_the_links_of_what_they_model():
    virtual_gpus(3, model=["a100", "t4", "v100"])
    found = registry.devices[:3]
    models = [GPUS[name] for name in ("a100", "t4", "v100")]
    assert [device.memory.limit for device in found] == [each.memory for each in models]
    assert [device.link for device in found] == [each.link for each in models]
    expected = [each.peer_link or each.link for each in models]
    assert [device.peer_link for device in found] == expected
    assert hardware_name() == ", ".join(each.name for each in models) + f", {EAGER}"
    virtual_gpus(2, model="dgx1", memory=2**30, link=None, peer_link=7, host=8e-6)
    assert found[0].memory.limit == 2**30
    assert found[0].link is None and found[0].peer_link == Link(7.0)
    assert hardware_name() == f"2 x {GPUS['v100'].name} in dgx1, host 8 µs"


def test_over_the_network_its_link_counts():
    virtual_gpus(4, model=Machine("v100", gpus=2, network=Link(1.0, 3)))
    first, *others = registry.devices[:4]
    links = [first.link_to(other) for other in others]
    assert links == [GPUS["v100"].peer_link, Link(1.0, 3), Link(1.0, 3)]
    virtual_gpus(9, model="v100")  # one machine
    assert registry.devices[0].link_to(registry.devices[8]) == GPUS["v100"].peer_link


# -- the time of a kernel


def test_the_longest_of_three_counts():
    mine = gpu(bandwidth=1e6, peaks={"float32": 1e6})
    assert mine.kernel_seconds(kernel()) == modelled_gpu.LEAST_SECONDS
    by_bytes = 1000 / (1e6 * modelled_gpu.MEMORY_EFFICIENCY)
    assert mine.kernel_seconds(kernel(num_bytes=1000)) == pytest.approx(by_bytes, rel=1e-12)
    product = Product(1, 128, 128, 64)
    by_product = mine.product_seconds(product)
    assert by_product > by_bytes
    seconds = mine.kernel_seconds(kernel(product, product, num_bytes=1000))
    assert seconds == pytest.approx(2 * by_product, rel=1e-12)


def on_tensor_cores(**figures):
    return gpu(peaks={"float32": 1e9, "float16": 8e9}, **figures)


def test_no_tile_of_a_product_in_float32_is_narrower_than_64():
    """cuBLAS has no such kernel: 16 columns take as long as 64; cuDNN's convolutions have one."""
    mine = gpu(multiprocessors=4)
    narrow, wide = Product(4, 64, 16, 512), Product(4, 64, 64, 512)
    assert mine.product_seconds(narrow) == mine.product_seconds(wide)
    convolution = {"name": "aten.convolution"}
    assert mine.product_seconds(narrow, **convolution) < mine.product_seconds(wide, **convolution)


def test_sums_of_less_than_64_terms_are_not_split():
    """Four tiles of 64 x 64 for 8 multiprocessors: in two parts from 128 terms on, and 9 more."""
    mine, rate = gpu(multiprocessors=8), 0.92 * 1e9 / 8 * (64 / 96) / (128 / 160)
    for k, terms, adding in (127, 127, 0), (128, 64, 3e-6):
        seconds = 2 * 64 * 64 * (terms + 9) / rate + adding
        assert mine.product_seconds(Product(1, 128, 128, k)) == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize(("waves", "k"), [(1, 4096), (2, 4096), (5, 4096), (8, 128)])
def test_full_waves_of_the_largest_tiles_on_tensor_cores_begin_and_end(waves, k):
    """Four tiles of 256 x 128 at a time, each begins and ends, in 2.5 microseconds."""
    mine, peak = on_tensor_cores(tensor_efficiency=0.5), 8e9
    product = Product(1, 256 * waves, 128 * 4, k)
    alone = 2 * 256 * 128 * k / (0.5 * peak / 4)
    expected = waves * (2.5e-6 + alone)
    assert mine.product_seconds(product, torch.float16) == pytest.approx(expected, rel=1e-12)
    assert mine.product_seconds(product) == gpu().product_seconds(product)
    pairs = Product(8 * waves, 128, 64, k)  # of tiles of 128 x 64, which begin together
    expected = waves * 2.5e-6 + 2 * waves * alone / 4 / ((8 / 11) / (16 / 19))
    assert mine.product_seconds(pairs, torch.float16) == pytest.approx(expected, rel=1e-12)


def test_the_sums_of_a_large_product_on_tensor_cores_are_not_split():
    """Their parts, 16 MiB each in float32, have no room in the 8 MiB that torch gives to cuBLAS.

    Without splitting the best way is 512 tiles of 128 x 64, in 5 waves of 108.
    """
    mine = on_tensor_cores(multiprocessors=108, tensor_efficiency=1.0)
    product, k = Product(1, 4096, 1024, 1024), 1024
    of_a_tile = 2 * 128 * 64 * k / (8e9 / 108)
    loss = (256 / 3) / (256 / 3 + 32) / ((512 / 3) / (512 / 3 + 32))  # of a smaller tile
    seconds = mine.product_seconds(product, torch.float16)
    assert seconds == pytest.approx(5 * of_a_tile / loss, rel=1e-4)
    assert mine.product_seconds(product, torch.float16, "aten.convolution") < seconds
    assert mine.product_seconds(product) < seconds * 8, "float32 is split as before"
    small = Product(1, 512, 512, 8192)  # 1 MiB: up to eight parts
    filled = small.flops / 8e9
    batch = small._replace(batch=8)  # 8 MiB: no two parts
    of_batch = mine.product_seconds(batch, torch.float16)
    assert mine.product_seconds(small, torch.float16) < 1.5 * filled
    mine = on_tensor_cores(multiprocessors=108, tensor_efficiency=1.0, workspace=2**20)
    assert mine.product_seconds(small, torch.float16) > 1.5 * filled
    assert mine.product_seconds(batch, torch.float16) == of_batch


def test_matrices_that_are_not_aligned_are_slow_on_tensor_cores_only():
    """A tile of 256 x 128 on each of 132 multiprocessors, which do 1e12 FLOP/s of such products."""
    h100, shape = GPUS["h100"], (1, 256 * 132, 128, 4096)
    odd, even = Product(*shape, aligned=False), Product(*shape)
    tile = 2 * 256 * 128 * 4096
    seconds = h100.product_seconds(odd, torch.bfloat16)
    assert seconds == pytest.approx(2e-6 + 2.5e-6 + tile / 1e12, rel=1e-9)
    fast = h100.product_seconds(even, torch.bfloat16)
    assert fast == pytest.approx(2e-6 + 2.5e-6 + tile / (0.78 * 989.4e12 / 132), rel=1e-9)
    assert h100.product_seconds(odd) == h100.product_seconds(even)
    slow = gpu(multiprocessors=132, peaks={"float32": 1e12, "float16": 2e12})
    assert slow.product_seconds(odd, torch.float16) == slow.product_seconds(even, torch.float16)


@pytest.mark.parametrize("length", [1, 100, 128])
def test_attention_has_a_tile_for_each_128_queries_of_a_head(length):
    """Tiles of 6 heads run on 4 multiprocessors in two waves, as 8 tiles would."""
    product = Product(6, length, 256, 64, exponentials=1.0)
    seconds = 8 / 6 * 6 * length * 256 * (2 * 64 / (0.5 * 8e9) + 1 / (0.25 * 1e9 / 2))
    mine = on_tensor_cores(tensor_efficiency=0.5)
    assert mine.product_seconds(product, torch.float16) == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize(("dtype", "peak"), [(torch.float32, 1e9), (torch.float16, 8e9)], ids=str)
def test_more_work_never_takes_less_time(dtype, peak):
    mine = on_tensor_cores(multiprocessors=80)
    sizes = [1, 31, 32, 33, 64, 128, 129, 257, 1000, 1024]
    for m, n, k in itertools.product(sizes, repeat=3):
        seconds = mine.product_seconds(Product(1, m, n, k), dtype)
        assert seconds >= 2 * m * n * k / peak
        turned = mine.product_seconds(Product(1, n, m, k), dtype)
        assert turned == seconds or dtype == torch.float16  # its tiles are not square
        for more in ((m + 1, n, k), (m, n + 1, k), (m, n, k + 1)):
            longer = mine.product_seconds(Product(1, *more), dtype)
            assert longer >= seconds * (1 - 1e-12)


def test_networks_reach_the_part_of_their_wire_that_their_source_says():
    found = {name: link for name, link in PRESETS.items() if " of the wire" in link.source}
    assert {"25gbe-collectives", "infiniband-edr-collectives"} <= found.keys()
    for name, link in found.items():
        part, wire = float(link.source.split()[0]), PRESETS[name.removesuffix("-collectives")]
        assert link.bandwidth == pytest.approx(part * wire.bandwidth, rel=1e-12)


@pytest.mark.parametrize(
    ("dtype", "unit"),
    [("float32", "float32"), ("float16", "float16"), ("bfloat16", "float32"), ("int64", "float32")],
)
def test_a_dtype_that_is_missing_runs_as_float32(dtype, unit):
    assert GPUS["v100"].unit(getattr(torch, dtype)) == unit


@pytest.fixture
def flags():
    """What torch allows for products, as it was before after the test."""
    before = torch.get_float32_matmul_precision()
    yield torch.backends.cuda.matmul
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    torch.set_float32_matmul_precision(before)


def test_tf32_is_used_where_torch_allows_it(flags):
    ours, name = GPUS["a100"], "aten.convolution"
    assert ours.unit(torch.float32) == "float32"  # torch's defaults
    assert ours.unit(torch.float32, name) == "tf32"
    assert ours.unit(torch.float32, "aten.convolution_backward") == "tf32"
    assert {GPUS[gpu].unit(torch.float32, name) for gpu in ("v100", "rtx4090")} == {"float32"}
    with torch.backends.cudnn.flags(allow_tf32=False):
        flags.allow_tf32 = True
        assert ours.unit(torch.float32) == "tf32"
        assert ours.unit(torch.float32, name) == "float32"
        assert ours.unit(torch.float64) == "float64"


@pytest.mark.parametrize(
    ("flag", "values"),
    [("allow_tf32", (False, True, False)), ("fp32_precision", ("ieee", "tf32", "ieee"))],
)
def test_what_torch_allows_counts_when_the_operator_is_issued(flags, flag, values):
    (device,) = virtual_gpus(1, model="a100")
    x, seconds, of_convolutions = torch.ones(512, 512, device=device), [], []
    for value in values:
        setattr(flags, flag, value)
        seconds.append(seconds_of(partial(torch.mm, x, x)))
    for allowed in (False, True, False):
        with torch.backends.cudnn.flags(allow_tf32=allowed):
            of_convolutions.append(seconds_of(partial(torch.conv1d, x[None], x[..., None])))
    for before, allowed, after in seconds, of_convolutions:
        assert before == pytest.approx(after, rel=1e-9) and allowed < 0.9 * before


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_and_machine_says_where_its_figures_come_from(name):
    ours = GPUS[name]
    assert ours.source and ours.source != "the caller"
    measured = [link for key, link in PRESETS.items() if key.endswith("-measured")]
    assert ours.link in measured
    assert ours.peer_link is None or ours.peer_link in measured
    assert ours.bandwidth > ours.link.bandwidth
    for machine in MACHINES.values():
        assert machine.gpu in GPUS.values() and machine.network in PRESETS.values()
        assert machine.source


def test_gpus_and_machines_cannot_be_changed_by_mistake():
    for each, figure in (GPUS["v100"], "memory"), (MACHINES["dgx1"], "gpus"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(each, figure, 1)


def kernel_beside_a_collective(machine):
    """Return how much longer a kernel takes while the sum of eight GPUs is under way."""
    (device,) = virtual_gpus(1, model=machine, values=False)
    large, x = torch.empty(2**30, device=device), torch.empty(2**22, device=device)
    d2lpar.synchronize()
    with equal_ranks(8), schedule() as found:
        x.add_(1)
        d2lpar.synchronize()
        work = dist.all_reduce(large, async_op=True)
        x.add_(1)
        work.wait()
    alone, beside = (end - start for _, engine, start, end in found if engine == "compute")
    return beside / alone


def test_a_scaled_gpu_is_otherwise_what_it_was():
    """It catches a scaled GPU whose kernels are as fast beside a collective as alone."""
    ours = MACHINES["dgxa100"]
    machine = dataclasses.replace(ours, gpu=ours.gpu.scaled(2.0))
    assert (machine.gpu.memory, machine.gpu.link) == (ours.gpu.memory, ours.gpu.link)
    assert machine.gpu.collective_link is ours.gpu.collective_link
    assert machine.gpu.multiprocessors == 108, "NVIDIA A100 data sheet"
    assert "kernels x 2" in machine.gpu.name
    moved = kernel(num_bytes=10**9)
    seconds = [each.kernel_seconds(moved) for each in (ours.gpu, machine.gpu.scaled(3.0))]
    assert seconds[1] == pytest.approx(6 * seconds[0])
    with pytest.raises(ValueError, match="must be positive: got 0"):
        ours.gpu.scaled(0)
    beside = kernel_beside_a_collective(ours)
    assert beside > 1.05
    assert kernel_beside_a_collective(machine) == pytest.approx(beside, rel=1e-9)


# -- the host


def test_a_host_is_a_name_seconds_or_a_host():
    assert as_host("eager") is EAGER and min(EAGER.operator, EAGER.module, EAGER.autograd) > 0
    assert as_host(2e-6) == Host(2e-6, 0.0, 2e-6) and as_host(0) == Host(0.0, 0.0, 0.0)
    own = Host(3e-6, 2e-6, 1e-6, "me")
    assert as_host(own) is own and str(own) == "host 3/2/1 µs"
    assert str(own.scaled(2, "me")) == "host 6/4/2 µs"
    assert str(Host(3e-6, 0.0, 1e-6)) == "host 3/0/1 µs"
    assert str(Host(3e-6, 3e-6, 3e-6)) == "host 3/3/3 µs" and str(as_host(3e-6)) == "host 3 µs"
    assert Machine("v100").host is EAGER and Machine("v100", host=own).host is own


@pytest.mark.parametrize(
    ("host", "error"),
    [("fast", ValueError), (-1e-9, ValueError), *((x, TypeError) for x in (True, None, [1e-6]))],
)
def test_a_host_that_is_none_is_refused(host, error):
    devices = virtual_gpus(2, memory=12345678)
    with pytest.raises(error, match=re.escape(repr(host))):
        Machine("v100", host=host)
    if host is not None:  # the machine's own
        with pytest.raises(error, match=re.escape(repr(host))):
            virtual_gpus(2, model="v100", host=host)
    assert hardware_name() == "" and len(devices) == torch.vgpu.device_count()


def took(program):
    """Return the seconds of the clock that the host spends in a program, and its kernels."""
    torch.vgpu.synchronize()
    with kernels() as found:
        begun = clock()
        program()
        return clock() - begun, len(found)


def test_what_autograd_issues_costs_what_the_host_says_of_it():
    """And what a checkpoint computes again is issued by Python, though in a backward pass."""
    fixed_gpus(1, launch=Host(1.0, 0.0, 2.0**-8))
    x = torch.ones(2, 3, device="vgpu", requires_grad=True)
    seconds, forward = took(lambda: x.sin().cos().exp())
    assert seconds == forward == 3
    y, ones = x.sin().cos().exp(), torch.ones_like(x)
    seconds, backward = took(lambda: y.backward(ones))
    assert backward > 3 and seconds == backward * 2.0**-8
    y = checkpoint(lambda x: x.sin().cos().exp(), x, use_reentrant=False)
    seconds, both = took(lambda: y.backward(ones))
    again = both - backward - 1  # x.grad is there by now, and is added to
    assert again in (2, 3)  # it stops once it has what was asked for
    assert seconds == again + (backward + 1) * 2.0**-8
    optimizer = torch.optim.SGD([x], lr=0.1, foreach=False)
    seconds, steps = took(optimizer.step)
    assert seconds == steps > 0


def test_the_host_that_is_given_takes_the_place_of_the_machines():
    machine = Machine(Fixed(), host=1.0)
    for host, expected in ((None, 1.0), (0.25, 0.25), (Host(0.5, 0.0, 0.125), 0.5)):
        virtual_gpus(1, model=machine, host=host)
        x = torch.ones(3, device="vgpu")
        assert took(lambda x=x: x + 1) == (expected, 1)
    assert machine.host == Host(1.0, 0.0, 1.0)


MODULES = Host(1.0, 2.0**-4, 2.0**-8)


def three_leaves():
    """Two operators, by three modules without parts in two with parts."""
    return nn.Sequential(nn.ReLU(), nn.Sequential(nn.Identity(), nn.ReLU()))


def test_a_call_of_a_module_without_parts_costs_what_the_host_says_and_others_nothing():
    fixed_gpus(1, launch=MODULES)
    net, x = three_leaves(), torch.ones(2, device="vgpu")
    assert took(lambda: net(x)) == (2 + 3 * 2.0**-4, 2)
    assert took(lambda: net[1][0](x)) == (2.0**-4, 0)
    assert took(lambda: net.forward(x))[0] == 2 + 3 * 2.0**-4, "its parts are called"
    assert took(lambda: net[0].forward(x)) == (1, 1), "not called as a module"
    assert took(lambda: nn.Sequential()(x)) == (2.0**-4, 0)


def test_what_a_checkpoint_computes_again_calls_its_modules_again():
    fixed_gpus(1, launch=MODULES)
    net, x = three_leaves(), torch.ones(2, device="vgpu", requires_grad=True)
    y = net(x)
    plain, num = took(lambda: y.backward(torch.ones_like(y)))
    y = checkpoint(net, x, use_reentrant=False)
    seconds, both = took(lambda: y.backward(torch.ones_like(y)))
    again = both - num - 1  # x.grad is there by now, and is added to
    assert again == 2 and seconds == plain + 2.0**-8 + again + 3 * 2.0**-4


def test_calls_of_modules_are_counted_by_the_simulation_in_force_and_by_no_other():
    net, x = three_leaves(), torch.ones(2)
    fixed_gpus(1, launch=MODULES)
    for figures in (MODULES, Host(1.0, 0.5, 1.0), MODULES):
        fixed_gpus(1, launch=figures)
        net(x)
        assert clock() == 3 * figures.module and len(_global_forward_pre_hooks) == 1
    fixed_gpus(1, launch=1.0)
    net(x)
    assert clock() == 0 and not _global_forward_pre_hooks
    fixed_gpus(1, launch=MODULES)
    virtual_gpus(1)
    assert net(x).tolist() == [1, 1] and not _global_forward_pre_hooks


def test_a_thread_that_calls_a_module_while_the_clock_changes_goes_on():
    """Its hook may be called once more after another clock came into force."""
    fixed_gpus(1, launch=MODULES)
    (hook,) = _global_forward_pre_hooks.values()
    virtual_gpus(1)
    hook(nn.ReLU(), ())


def test_an_interrupt_leaves_no_hook_of_modules():
    for where in interrupted_everywhere(EAGER.start, at_least=2):
        EAGER.stop()
        assert not _global_forward_pre_hooks and not _global_forward_hooks, where


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")  # there is a hook
def test_a_compiled_module_is_one_graph_by_a_modelled_clock_and_calls_no_modules():
    """On the CPU: dynamo does not trace tensors on virtual GPUs, by either clock."""
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    x, graphs = torch.arange(6.0).reshape(2, 3), []

    def keep(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    fixed_gpus(1, launch=MODULES)
    torch.compiler.reset()
    try:
        compiled = torch.compile(net, backend=keep, fullgraph=True)
        for _ in range(3):
            found = compiled(x)
    finally:
        torch.compiler.reset()
    assert len(graphs) == 1 and clock() == 0
    torch.testing.assert_close(found, net(x))


def test_the_host_is_named_where_times_are_printed(capsys):
    fixed_gpus(2, launch=Host(3e-6, 2e-6, 1e-6))
    with d2lpar.Benchmark("step"):
        pass
    out = capsys.readouterr().out
    assert out == "step: 0.0000 sec (modelled: 2 x fixed, host 3/2/1 µs)\n"
