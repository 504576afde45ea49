"""Devices and their figures: which there are, what `virtual_gpus` takes, links, descriptions."""

import gc
import math
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import fresh
import pytest
import torch

import d2lpar
import vgpu as virtual
from vgpu import PRESETS, Link, memory_of_this_process
from vgpu.devices import device_setup
from vgpu.private import check_version
from vgpu.runtime import engines, registry
from vgpu.runtime.scheduler import Op, wait

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    """Two virtual GPUs, before and after each test, and no wish of the user's."""
    for name in ("VGPU_DEVICES", "VGPU_THREADS"):
        monkeypatch.delenv(name, raising=False)
    yield d2lpar.virtual_gpus(2)
    monkeypatch.undo()
    d2lpar.virtual_gpus(2)


@pytest.fixture
def real(monkeypatch):
    """A function that lets the machine have `n` real GPUs."""

    def only_now(ever=False):
        return [] if ever else virtual.devices_in_use()

    def pretend(n):
        monkeypatch.setattr(d2lpar.devices, "devices_in_use", only_now)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: n)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: f"Card {device}")

    pretend(0)
    return pretend


# -- what there is


def test_real_gpus_count_until_virtual_ones_are_on(real, monkeypatch):
    real(3)
    monkeypatch.setattr(registry, "count", 0)  # as before they are switched on
    assert d2lpar.num_gpus() == 3
    assert d2lpar.try_gpu(2) == torch.device("cuda:2")
    assert d2lpar.try_gpu(3) == CPU
    monkeypatch.setattr(registry, "count", 2)
    assert d2lpar.try_all_gpus() == [torch.device("vgpu:0"), torch.device("vgpu:1")]
    for index in (-1, 1.0, True, "0", None):
        with pytest.raises(ValueError, match=f"must be a non-negative integer: got {index!r}"):
            d2lpar.try_gpu(index)


def test_virtual_gpus_are_gpus(gpus):
    assert gpus == [torch.device("vgpu", 0), torch.device("vgpu", 1)]
    assert d2lpar.num_gpus() == torch.vgpu.device_count() == 2
    assert d2lpar.try_gpu() == gpus[0]
    assert d2lpar.try_gpu(i=1) == gpus[1]
    assert d2lpar.try_gpu(2) == CPU
    assert d2lpar.try_all_gpus() == gpus
    assert torch.vgpu.is_available()
    assert torch.get_device_module(gpus[1]) is torch.vgpu


FRESH = """
import torch, threading
before = threading.active_count()
import d2lpar
assert d2lpar.try_gpu() == torch.device("cpu")
assert d2lpar.try_all_gpus() == [torch.device("cpu")]
assert d2lpar.num_gpus() == 0
d2lpar.synchronize()
assert not hasattr(torch, "vgpu")
assert torch._C._get_privateuse1_backend_name() == "privateuseone"
for wrong in (0, 2.5):
    try:
        d2lpar.virtual_gpus(wrong)
    except ValueError:
        pass
assert not hasattr(torch, "vgpu")
devices = d2lpar.virtual_gpus(3)
assert threading.active_count() == before, "an engine starts with its first op"
assert torch.vgpu.device_count() == d2lpar.num_gpus() == 3
(torch.ones(3, device=devices[2]) + 1).tolist()
torch.rand(3)
print(*devices)
"""


def test_nothing_happens_before_the_first_call_and_the_process_ends(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = fresh.run(FRESH, fresh.SET_UP)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["vgpu:0", "vgpu:1", "vgpu:2"]


# -- ensure_gpus


def test_ensure_gpus_takes_virtual_ones_and_says_so(real, capsys):
    devices = d2lpar.ensure_gpus(2, threads=3)
    assert devices == [torch.device("vgpu:0"), torch.device("vgpu:1")]
    cores = virtual.cores_of_this_process()
    told = f"2 virtual GPUs on 6 threads of {cores} CPU core{'s' * (cores > 1)} "
    assert capsys.readouterr().out == f"{told}(this machine has no real GPU)\n"
    d2lpar.ensure_gpus(1)
    assert capsys.readouterr().out.startswith("1 virtual GPU on 1 thread of ")


def test_ensure_gpus_takes_real_ones_where_there_are_enough(real, capsys):
    real(2)
    assert d2lpar.ensure_gpus(2) == [torch.device("cuda:0"), torch.device("cuda:1")]
    assert capsys.readouterr().out == "2 real GPUs: Card 0, Card 1\n"
    assert d2lpar.ensure_gpus(1) == [torch.device("cuda:0")]
    assert capsys.readouterr().out == "1 real GPU: Card 0\n"
    assert d2lpar.ensure_gpus(3) == [torch.device("vgpu", i) for i in range(3)]
    assert "(this machine has 2 real GPUs)" in capsys.readouterr().out
    real(1)
    d2lpar.ensure_gpus(2)
    assert "(this machine has 1 real GPU)" in capsys.readouterr().out


def test_beside_virtual_gpus_no_real_ones_are_taken(gpus, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert d2lpar.ensure_gpus(2) == gpus
    assert "(torch computes no gradients on real GPUs in a process" in capsys.readouterr().out
    d2lpar.ensure_gpus(3)
    assert "(this machine has 2 real GPUs)" in capsys.readouterr().out
    monkeypatch.setenv("VGPU_DEVICES", "cuda")
    with pytest.raises(RuntimeError, match="VGPU_DEVICES=cuda: torch computes no .*restart it"):
        d2lpar.ensure_gpus(2)


@pytest.mark.parametrize(
    ("value", "present", "expected"),
    [
        ("vgpu", 8, ["vgpu:0", "vgpu:1"]),
        ("vgpu:4", 0, ["vgpu:0", "vgpu:1", "vgpu:2", "vgpu:3"]),
        ("vgpu:1", 8, ["vgpu:0"]),
        ("cuda", 2, ["cuda:0", "cuda:1"]),
        ("", 0, ["vgpu:0", "vgpu:1"]),
    ],
)
def test_the_environment_chooses(value, present, expected, real, monkeypatch, capsys):
    real(present)
    monkeypatch.setenv("VGPU_DEVICES", value)
    assert list(map(str, d2lpar.ensure_gpus(2))) == expected
    line = capsys.readouterr().out
    assert line.count("\n") == 1
    kind = "real" if value == "cuda" else "virtual"
    assert line.startswith(f"{len(expected)} {kind} GPU")
    assert (f"VGPU_DEVICES={value}" in line) == value.startswith("vgpu")


def test_the_environment_gives_the_threads_that_a_call_does_not(monkeypatch):
    monkeypatch.setenv("VGPU_THREADS", "2")
    d2lpar.virtual_gpus(2)
    assert figures("threads") == [2, 2]
    d2lpar.virtual_gpus(2, threads=1)
    assert figures("threads") == [1, 1]
    monkeypatch.setenv("VGPU_THREADS", "")
    d2lpar.virtual_gpus(1)
    assert figures("threads") == [1]
    monkeypatch.setenv("VGPU_DEVICES", "t4:3")
    assert device_setup.requested_settings(2) == {"n": 3, "model": "t4"}
    assert len(d2lpar.ensure_gpus(2)) == 3 and virtual.hardware_name().startswith("3 x T4, host")
    for text in ("0", "-1", "two"):
        monkeypatch.setenv("VGPU_THREADS", text)
        with pytest.raises(ValueError, match=f"VGPU_THREADS must .* got '{text}'"):
            d2lpar.virtual_gpus(2)


@pytest.mark.parametrize(
    "value", ["gpu", "cuda", "cuda:2", "vgpu:x", "vgpu:-1", "VGPU", "vgpu:2:3", "vgpu:0", "vgpu:"]
)
def test_nonsense_in_the_environment_is_refused(value, real, monkeypatch):
    real(1)
    monkeypatch.setenv("VGPU_DEVICES", value)
    missing = RuntimeError, "VGPU_DEVICES=cuda requires 2 real GPUs: found 1"
    error, text = missing if value == "cuda" else (ValueError, repr(value))
    with pytest.raises(error, match=text):
        d2lpar.ensure_gpus(2)


@pytest.mark.parametrize("n", [0, -1, 1.5, "2", True, None])
@pytest.mark.parametrize("present", [0, 4])
def test_a_number_of_gpus_that_makes_no_sense_is_refused(n, present, real):
    real(present)
    with pytest.raises(ValueError, match="positive integer"):
        d2lpar.ensure_gpus(n)


# -- the figures of virtual GPUs


FIGURES = "threads", "memory", "link", "peer_link"


def figures(name):
    in_use = registry.devices[: registry.count]
    if name == "memory":
        return [device.memory.limit for device in in_use]
    return [getattr(device, name) for device in in_use]


def test_one_figure_for_all_or_one_for_each():
    d2lpar.virtual_gpus(3, threads=[1, 2, 1], memory=3e6, link=[None, "pcie3", 1e6])
    assert figures("threads") == [1, 2, 1]
    assert figures("memory") == [3_000_000] * 3
    assert figures("link") == [None, PRESETS["pcie3"], Link(1e6)]
    assert figures("peer_link") == figures("link")
    assert registry.devices[1].link_to(registry.devices[2]) == PRESETS["pcie3"]
    d2lpar.virtual_gpus(3, link=("pcie3", None, 1e9), peer_link=None)
    assert figures("link") == [PRESETS["pcie3"], None, Link(1e9)]
    assert figures("peer_link") == [None] * 3
    assert figures("threads") == [1, 1, 1]
    total, in_use = figures("memory")[1], torch.vgpu.memory_allocated(1)
    assert torch.vgpu.mem_get_info(1) == (total - in_use, total)
    assert sum(figures("memory")) == pytest.approx(0.8 * memory_of_this_process(), abs=3)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"n": 0}, ValueError, "positive integer: got 0"),
        ({"n": -2}, ValueError, "got -2"),
        ({"n": True}, ValueError, "got True"),
        ({"n": 2.0}, ValueError, "got 2.0"),
        ({"n": 129}, ValueError, "at most 128 devices: got 129"),  # as torch counts them in a byte
        ({"threads": 0}, ValueError, "of a virtual GPU must be a positive whole number: got 0"),
        ({"threads": 1.5}, TypeError, "threads of a virtual GPU must be a whole number: got 1.5"),
        ({"threads": [1, 2, 3]}, ValueError, "threads must be one value, or 2 for 2 virtual GPUs"),
        ({"threads": True}, TypeError, "got True"),
        ({"memory": -5}, ValueError, "of a virtual GPU must be a positive whole number: got -5"),
        ({"memory": "1 GB"}, TypeError, "got '1 GB'"),
        ({"memory": [10**9]}, ValueError, "must be one value, or 2 for 2 virtual GPUs: got 1, [1"),
        ({"link": "pcie9"}, ValueError, "no link named 'pcie9'; there are pcie3, "),
        ({"link": 0}, ValueError, "bandwidth of a link must be positive, in bytes/s: got 0"),
        ({"link": {}}, TypeError, "a preset's name, bytes/s or None: got {}"),
        ({"link": True}, TypeError, "got True"),
        ({"peer_link": [None]}, ValueError, "peer_link must be one value, or 2 for 2 virtual GPUs"),
    ],
)
def test_figures_that_make_no_sense_change_nothing(options, error, text):
    before = [*map(figures, FIGURES)]
    options = {"n": 2, "threads": 2, "memory": 10**9, "link": 1e9, **options}
    with pytest.raises(error, match=re.escape(text)):
        d2lpar.virtual_gpus(**options)
    assert [*map(figures, FIGURES)] == before


def kernel_threads(device):
    """Return how many threads the kernels of `device` have, as one of them sees it."""
    seen, found = [], registry.find(device)
    op = Op("threads", "kernel", found.compute, lambda op: seen.append(torch.get_num_threads()))
    wait(found.default_stream.issue(op), device)
    return seen[0]


def test_memory_that_was_just_given_back_is_not_in_use(gpus):
    gc.collect()
    before = torch.vgpu.memory_allocated(gpus[0])
    x = torch.empty(2**20, device=gpus[0])
    del x
    d2lpar.virtual_gpus(len(gpus), memory=before + 2**20)


def test_an_error_of_one_device_changes_nothing_on_the_others(gpus):
    before = [*map(figures, FIGURES)]
    weight, index = torch.ones(3, 4, device=gpus[1]), torch.full((2,), 7, device=gpus[1])
    torch.nn.functional.embedding(index, weight)
    with pytest.raises(torch.AcceleratorError, match="aten.embedding"):
        d2lpar.virtual_gpus(2, memory=2**20, link="pcie4", threads=2)
    assert [*map(figures, FIGURES)] == before
    x = torch.ones(1000, device=gpus[1])
    text = r"memory of vgpu:1 must be at least the \d+ .* in use: got 3999"
    with pytest.raises(ValueError, match=text):
        d2lpar.virtual_gpus(2, memory=[2**20, 3999], link="pcie4", threads=2)
    assert [*map(figures, FIGURES)] == before
    assert x.sum().item() == 1000
    d2lpar.virtual_gpus(2, memory=[2**20, torch.vgpu.memory_allocated(1)])


def test_memory_and_cores_are_those_of_this_process(monkeypatch):
    monkeypatch.setattr(device_setup, "memory_of_this_process", lambda: 10**9)
    d2lpar.virtual_gpus(2)
    assert figures("memory") == [4 * 10**8] * 2
    monkeypatch.setattr(device_setup, "cores_of_this_process", lambda: 1)
    with pytest.warns(UserWarning, match="10 threads of virtual GPUs share 1 CPU cores") as noted:
        for threads, model in (5, "v100"), (4, None), (5, None):
            d2lpar.virtual_gpus(2, threads=threads, model=model)
    assert len(noted) == 1


def test_threads_of_a_device_are_not_those_of_threads_to_come(gpus):
    def default():
        with ThreadPoolExecutor() as pool:
            return pool.submit(torch.get_num_threads).result()

    before, own = default(), torch.get_num_threads()
    for threads in (before + 2, before + 1):
        d2lpar.virtual_gpus(2, threads=threads)
        (torch.ones(3, device=gpus[0]) + 1).sum().item()
        torch.vgpu.synchronize(gpus[0])
        assert (default(), torch.get_num_threads()) == (before, own)


def test_kernels_run_with_the_threads_asked_for_and_nothing_else_does(gpus):
    here = torch.get_num_threads()
    assert [kernel_threads(device) for device in gpus] == [1, 1]
    d2lpar.virtual_gpus(2, threads=[3, 2])
    assert [kernel_threads(device) for device in gpus] == [3, 2]
    assert torch.get_num_threads() == here
    assert torch.vgpu.get_device_name(1) == "Virtual GPU (2 CPU threads)"
    assert torch.vgpu.get_device_properties(gpus[1]).multi_processor_count == 2
    for threads in ([2, 3], [3, 2]):
        d2lpar.virtual_gpus(2, threads=threads, model="v100")  # one thread computes for both
        assert kernel_threads(gpus[0]) == 3
    d2lpar.virtual_gpus(2)
    assert [kernel_threads(device) for device in gpus] == [1, 1]
    assert torch.vgpu.get_device_name() == "Virtual GPU (1 CPU thread)"


@pytest.mark.parametrize("asked", [[3], [1, 3]])
def test_a_device_that_is_new_has_the_threads_that_were_asked_for_last(gpus, asked):
    n = len(registry.devices) + 1
    for threads in asked:
        gpu = d2lpar.virtual_gpus(n, threads=[1] * (n - 1) + [threads])[-1]
    assert kernel_threads(gpu) == 3


def test_engines_that_start_at_once_keep_the_default_of_threads(gpus, monkeypatch):
    """The second begins while the first looks what the default is."""
    steps, came, lock = [], threading.Event(), threading.Lock()
    second = threading.Thread(target=lambda: engines.set_thread_count(3), name="second")
    in_new_thread = engines._in_new_thread

    class Lock:
        def __enter__(self):
            came.set()
            lock.acquire()

        def __exit__(self, *exception):
            lock.release()

    def step(function):
        steps.append(threading.current_thread().name)
        came.set()
        in_new_thread(function)
        if not second.ident:
            came.clear()
            second.start()
            assert came.wait(30)

    monkeypatch.setattr(engines, "_counting", Lock())
    monkeypatch.setattr(engines, "_in_new_thread", step)
    first = threading.Thread(target=lambda: engines.set_thread_count(2), name="first")
    first.start()
    first.join(30)
    second.join(30)
    assert steps == ["first", "first", "second", "second"]


def test_more_and_fewer_devices_keep_their_tensors(gpus):
    x = torch.ones(3, device=gpus[1])
    d2lpar.virtual_gpus(3)
    y = x.to("vgpu:2") + 1
    assert d2lpar.virtual_gpus(1) == gpus[:1]
    assert d2lpar.try_all_gpus() == gpus[:1]
    assert torch.device("vgpu:2") in virtual.devices_in_use(ever=True)
    assert y.tolist() == [2, 2, 2]
    with pytest.raises(RuntimeError, match="invalid device ordinal: vgpu:1 of 1 virtual GPUs"):
        torch.ones(3, device="vgpu:1")
    for use in lambda: torch.ones(3).to("vgpu:7"), lambda: torch.accelerator.set_device_index(1):
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            use()
    for other in ("cpu", "cuda:0", torch.device("cpu")):
        with pytest.raises(ValueError, match=f"Expected a vgpu device, but got: {other}"):
            torch.vgpu.current_stream(other)
    assert d2lpar.virtual_gpus(2) == gpus
    assert (x + 1).tolist() == [2, 2, 2]


def test_fewer_devices_leave_a_current_one(gpus):
    with torch.vgpu.device(1):
        d2lpar.virtual_gpus(1)
        with pytest.raises(RuntimeError, match="vgpu:1"):
            torch.ones(1, device="vgpu")
    assert torch.ones(1, device="vgpu").device == gpus[0]


# -- synchronize


def test_synchronize_takes_names_indices_of_devices_and_the_cpu(gpus):
    torch.vgpu._sleep(0.05)
    d2lpar.synchronize("vgpu:0", CPU, gpus[1])
    assert torch.vgpu.current_stream().query()
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        d2lpar.synchronize("vgpu:5")


def test_peak_bytes_counts_what_was_given_back_too(gpus):
    kept = []

    def work():
        kept.append(torch.empty(1024, device=gpus[0]))
        torch.empty(5120, device=gpus[0])
        torch.empty(384, device=gpus[1])

    torch.empty(100_000, device=gpus[0])
    assert d2lpar.peak_bytes(work, gpus) == [24_576, 1536]
    assert d2lpar.peak_bytes(lambda: kept.append(None), gpus) == [0, 0]


# -- links


def test_a_link_takes_bytes_over_bandwidth_and_latency():
    link = Link(bandwidth=1e9, latency=1e-3, pageable=5e8)
    assert link.seconds(2e9) == 2.001
    assert link.seconds(2e9, pinned=False) == 4.001
    assert Link(1e9).seconds(1e9, pinned=False) == 1
    assert link.seconds(0) == 1e-3


def test_a_scaled_link_is_slower_and_says_so():
    link = PRESETS["pcie3"].scaled(100)
    assert link.bandwidth == pytest.approx(157.5e6)
    assert link.pageable == pytest.approx(PRESETS["pcie3"].pageable / 100)
    assert link.latency == PRESETS["pcie3"].latency
    assert str(link) == "pcie3 slowed 100x (157.5 MB/s, latency 10 µs)"
    assert str(Link(1e8, 2e-3)) == "link (100 MB/s, latency 2 ms)"
    assert link.source == PRESETS["pcie3"].source
    assert Link(1e9, startup=1).scaled(2) == Link(5e8, name="link slowed 2x", startup=1)
    for factor in (0, -1, math.nan):
        with pytest.raises(ValueError, match=f"must be positive: got {factor}"):
            link.scaled(factor)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0,), "bandwidth of a link must be positive, in bytes/s: got 0"),
        ((-1e9,), "got -1000000000.0"),
        ((math.nan,), "got nan"),
        ((1e9, -1e-6), "latency of a link must not be negative, in seconds: got -1e-06"),
        ((1e9, math.nan), "nan"),
        ((1e9, 0, None, "", "", -1), "startup of a link must not be negative, in seconds: got -1"),
        ((1e9, 0, 0), "pageable of a link must be positive, in bytes/s: got 0"),
    ],
)
def test_links_that_make_no_sense_are_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        Link(*arguments)


def test_measured_presets_are_below_the_published_ones_and_have_a_source():
    for name, link in PRESETS.items():
        wire = PRESETS.get(name.removesuffix("-measured").removesuffix("-collectives"))
        assert name.endswith(("-measured", "-collectives")) or link.name == name
        assert (link.startup > 0) == name.endswith("-collectives")
        assert wire is None or link is wire or link.bandwidth < wire.bandwidth
        assert link.source and link.latency > 0
        assert link.pageable is None or link.pageable < link.bandwidth


# -- versions of torch


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.15.1+cu130", "2.14.0a0+git1"])
def test_known_versions_of_torch(version):
    check_version(version)


@pytest.mark.parametrize("version", ["2.10.1", "1.13.0", "2.16.0", "3.0.0+cpu", "2.9.1"])
def test_unknown_versions_of_torch_are_refused(version):
    with pytest.raises(RuntimeError, match=f"2.11 to 2.15; this is torch {re.escape(version)}"):
        check_version(version)


def test_a_backward_on_real_gpus_beside_virtual_ones_says_why_it_fails():
    from vgpu.private.autograd import on_real_gpus

    with pytest.raises(RuntimeError, match="no gradients on real GPUs.*161129"), on_real_gpus():
        raise RuntimeError("opt_ready_stream && opt_parent_stream INTERNAL ASSERT FAILED")
    with pytest.raises(RuntimeError, match="^out of memory$"), on_real_gpus():
        raise RuntimeError("out of memory")
