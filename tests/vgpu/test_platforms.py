"""Windows and macOS, as far as Linux can play them: names that they lack, `spawn`, their branches.

What a system lacks is hidden after the import of torch, which looks for the system that it was
built for. tests/lint/test_missing_names.py looks for names that are missing there.
"""

import os
import subprocess
import sys

import fresh
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import d2lpar
import d2lpar.vision
from d2lpar.chapters import image_augmentation as workers
from vgpu import __main__ as command
from vgpu import process_limits

HIDE = """
import ctypes, mmap, os, signal, sys, warnings
from types import SimpleNamespace

def fill(status):
    assert status._obj.length == ctypes.sizeof(status._obj) == 64
    status._obj.total = 3 * 2**30

LINUX_ONLY = "sched_getaffinity sched_setaffinity process_cpu_count memfd_create pidfd_open"
POSIX_ONLY = LINUX_ONLY + " fork forkpty register_at_fork wait waitpid killpg getpgid setsid getuid"
POSIX_ONLY += " geteuid setuid sysconf chown mkfifo pipe2 openpty tcgetpgrp tcsetpgrp getpgrp nice"
POSIX_ONLY += " getloadavg pread pwrite posix_spawn uname statvfs"
names = {"darwin": LINUX_ONLY, "win32": POSIX_ONLY}[PLATFORM]
for name in names.split():
    vars(os).pop(name, None)
if PLATFORM == "win32":
    ctypes.windll = SimpleNamespace(kernel32=SimpleNamespace(GlobalMemoryStatusEx=fill))
    kept = "SIGABRT SIGFPE SIGILL SIGINT SIGSEGV SIGTERM Signals".split()
    for name in [name for name in vars(signal) if name[:3].upper() == "SIG" and name not in kept]:
        if name not in ("signal", "siginterrupt"):
            delattr(signal, name)
    for name in [name for name in vars(mmap) if name[:3] in ("MAP", "PRO", "MAD")]:
        delattr(mmap, name)
    for name in ("fcntl", "resource", "termios", "pwd", "grp", "pty", "tty", "syslog"):
        sys.modules[name] = None  # to import it raises ModuleNotFoundError
sys.platform = PLATFORM
"""

STEP = """
import torch
from torch import nn
import d2lpar, vgpu
from vgpu.process_limits import memory_of_this_process

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    devices = d2lpar.virtual_gpus(2, memory=2**28)
assert [f"this is {PLATFORM}" in str(w.message) for w in caught] == [True], caught
assert PLATFORM != "win32" or memory_of_this_process() == 3 * 2**30

def losses(net, device):
    torch.manual_seed(1)
    X, y = torch.rand(8, 10).double(), torch.randint(3, (8,))
    optimizer, seen = torch.optim.SGD(net.parameters(), lr=0.1), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(X.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 6), nn.ReLU(), nn.Linear(6, 3)).double()

on_cpu = losses(build(), "cpu")
with d2lpar.Timeline() as timeline:
    on_two = losses(nn.DataParallel(build().to(devices[0]), devices), devices[0])
torch.testing.assert_close(on_two, on_cpu)
assert {str(span.device) for span in timeline.spans} >= {"vgpu:0", "vgpu:1"}

stream = torch.vgpu.Stream(devices[1])
with torch.vgpu.stream(stream):
    x = torch.ones(1000).pin_memory().to(devices[1], non_blocking=True) + 1
stream.synchronize()
assert x.sum().item() == 2000
try:
    torch.empty(2**27, device=devices[0])
except torch.OutOfMemoryError:
    print("full")
(device,) = d2lpar.virtual_gpus(1, model="v100")
torch.rand(100, 100, device=device).mm(torch.rand(100, 100, device=device))
torch.vgpu.synchronize()
assert 0 < d2lpar.clock() < 1
print("done")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can play other systems")
@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_virtual_gpus_without_what_only_linux_has(platform):
    done = fresh.run(f"PLATFORM = {platform!r}\n{HIDE}{STEP}", fresh.SET_UP)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("full\ndone")


def test_the_other_systems_are_refused_what_needs_linux(monkeypatch, capsys):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SystemExit):
        command.main(["run", "--gpus", "2", "python", "train.py"])
    assert "requires Linux, and this is win32" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("platform.python_implementation = lambda: 'PyPy'", "this is PyPy"),
        (
            "sys.version_info = (3, 10, 0); platform.python_version = lambda: '3.10.0'",
            "CPython 3.10",
        ),
        (
            "sys.version_info = (3, 99, 0); platform.python_version = lambda: '3.99.0'",
            "CPython 3.99",
        ),
        ("sysconfig.get_config_var = {'Py_GIL_DISABLED': 1}.get", "free-threaded CPython"),
    ],
)
def test_another_python_is_refused_before_anything_is_patched(change, named):
    code = f"""
import platform, sys, sysconfig
import torch
import vgpu.devices.backend
before = dict(vars(torch))
{change}
try:
    vgpu.virtual_gpus(1)
except RuntimeError as error:
    print(error)
assert torch._C._get_privateuse1_backend_name() == "privateuseone"
assert [name for name in before if getattr(torch, name) is not before[name]] == []
"""
    done = fresh.run(code, fresh.SET_UP)
    assert done.returncode == 0, done.stderr
    assert named in done.stdout and "create an environment with CPython 3.13" in done.stdout


# -- cores and memory


@pytest.fixture
def groups(monkeypatch, tmp_path):
    """A function that makes control groups: the file of memberships and {path: content}."""
    machine = process_limits.memory_of_this_machine()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    monkeypatch.setattr(process_limits, "MEMBERSHIP", tmp_path / "self")
    monkeypatch.setattr(process_limits, "CGROUPS", tmp_path / "groups")

    def make(membership, files):
        (tmp_path / "self").write_text(membership)
        for name, content in files.items():
            path = tmp_path / "groups" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{content}\n")
        memory = process_limits.memory_of_this_process()
        return process_limits.cores_of_this_process(), None if memory == machine else memory

    return make


TWO = "0::/user.slice/mine\n"
ONE = "5:memory:/docker/4711\n4:cpu,cpuacct:/docker/4711\n3:cpuset:/other\n0::/\n"


@pytest.mark.parametrize(
    ("membership", "files", "found"),
    [
        (TWO, {}, (6, None)),
        (TWO, {"cpu.max": "max 100000", "memory.max": "max"}, (6, None)),
        (TWO, {"user.slice/mine/cpu.max": "200000 100000"}, (2, None)),
        (TWO, {"user.slice/mine/cpu.max": "350000 100000"}, (3, None)),
        (TWO, {"user.slice/mine/cpu.max": "50000 100000"}, (1, None)),
        (TWO, {"user.slice/cpu.max": "40000 10000", "cpu.max": "5000000 1000000"}, (4, None)),
        (TWO, {"user.slice/mine/cpu.max": "900000 100000"}, (6, None)),
        (TWO, {"user.slice/mine/memory.max": 10**9, "memory.max": 10**8}, (6, 10**8)),
        (TWO, {"user.slice/memory.max": 10**8, "memory.max": 10**9}, (6, 10**8)),
        (TWO, {"user.slice/other/memory.max": 10**8, "other/cpu.max": "1 1"}, (6, None)),
        ("0::/\n", {"memory.max": 10**9, "cpu.max": "100000 100000"}, (1, 10**9)),
        ("0::/../..\n", {"memory.max": 10**9}, (6, 10**9)),
        ("0::/a:b\n", {"a:b/memory.max": 10**9}, (6, 10**9)),
        (ONE, {"memory/docker/4711/memory.limit_in_bytes": 2**63 - 4096}, (6, None)),
        (ONE, {"memory/docker/4711/memory.limit_in_bytes": 10**9}, (6, 10**9)),
        (ONE, {"memory/memory.limit_in_bytes": 10**9}, (6, 10**9)),  # as a container sees it
        (ONE, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, (6, None)),
        (ONE, {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, (3, None)),
        (ONE, {"cpu/other/cpu.cfs_quota_us": "1", "cpu/other/cpu.cfs_period_us": "1"}, (6, None)),
    ],
)  # fmt: skip
def test_limits_of_control_groups(groups, membership, files, found):
    assert groups(membership, files) == found


def test_limits_where_there_are_no_control_groups(groups, monkeypatch, tmp_path):
    monkeypatch.setattr(process_limits, "MEMBERSHIP", tmp_path / "none")
    assert process_limits.cores_of_this_process() == 6
    monkeypatch.delattr(os, "sched_getaffinity")
    assert process_limits.cores_of_this_process() == os.cpu_count()
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert process_limits.cores_of_this_process() == 1


# -- processes that are not forked


@pytest.fixture
def only_spawn(monkeypatch):
    """As on Windows: every process begins with an import of torch."""
    monkeypatch.setattr("vgpu.processes.agent.START_METHOD", "spawn")
    monkeypatch.setenv("VGPU_DEVICES", "vgpu")


@pytest.mark.slow
def test_ranks_that_were_spawned_and_one_that_fails(only_spawn, capfd):
    def fail():
        rank = torch.distributed.get_rank()
        x = torch.full((2,), rank + 1.0, device="vgpu")
        torch.distributed.all_reduce(x)
        print("rank", rank, "spawn_main" in " ".join(sys.orig_argv))
        subprocess.run([sys.executable, "-c", "print('a child prints')"], check=True)
        torch.distributed.barrier()  # both have printed
        if rank == 1:
            raise KeyError(x.cpu().tolist())
        torch.distributed.barrier()

    with pytest.raises(KeyError) as caught:
        d2lpar.launch(fail)
    assert caught.value.args == ([3.0, 3.0],)
    assert "raised in rank 1" in caught.value.__notes__[0]
    lines = capfd.readouterr().out.splitlines()
    for rank in (0, 1):
        assert f"[{rank}] rank {rank} True" in lines and f"[{rank}] a child prints" in lines


@pytest.mark.parametrize(
    "can_fork", [True] * workers.CAN_FORK + [pytest.param(False, marks=pytest.mark.slow)]
)
def test_workers_know_the_classes_of_a_notebook(can_fork, monkeypatch):
    """Both by a fork and in new processes, here with a class that no module has.

    It applies a transform of torchvision.
    """
    from torchvision.transforms import v2

    monkeypatch.setattr(workers, "CAN_FORK", can_fork)
    images = torch.arange(6.0).view(6, 1, 1, 1) + torch.tensor([0.0, 0.5])

    class Mirrored(Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, index):
            return v2.RandomHorizontalFlip(p=1.0)(images[index]), index**2, os.getpid()

    def collate(items):
        mirrored, values, pids = zip(*items, strict=True)
        return torch.stack(mirrored), [*values], {*pids}

    context = workers.worker_context(1)
    assert (context == "fork") == can_fork
    loader = DataLoader(
        Mirrored(), 2, num_workers=1, multiprocessing_context=context, collate_fn=collate
    )
    assert isinstance(loader.dataset, Mirrored)
    mirrored, values, pids = zip(*loader, strict=True)
    assert torch.equal(torch.cat(mirrored), images.flip(-1))
    assert values == ([0, 1], [4, 9], [16, 25])
    assert os.getpid() not in set.union(*pids)


def test_without_workers_there_is_no_context():
    assert workers.worker_context(0) is None
    assert len(list(DataLoader(range(4), multiprocessing_context=workers.worker_context(0)))) == 4


NO_THREADS = """
import atexit, threading
import torch, torch.distributed as dist
import d2lpar

(device,) = d2lpar.virtual_gpus(1)
dist.init_process_group("vccl", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(3, device=device)
dist.all_reduce(x)
print(x.tolist())

def refuse(*args, **kwargs):
    raise RuntimeError("can't create new thread at interpreter shutdown")

def at_exit():
    threading._start_new_thread = threading._start_joinable_thread = refuse

atexit.register(at_exit)  # the last one, so it runs first
"""


def test_a_rank_ends_where_no_thread_begins_at_exit():
    # Python 3.12 refuses it: "Exception ignored in atexit callback", and nobody waited.
    done = fresh.run(NO_THREADS, fresh.SET_UP)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[1.0, 1.0, 1.0]\n", "")
