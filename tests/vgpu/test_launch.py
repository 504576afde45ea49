"""launch: functions in several processes, their results, their faults, and what is left behind."""

import functools
import gc
import json
import linecache
import logging
import math
import multiprocessing.forkserver
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import fresh
import hosts
import pytest
import torch
import torch.distributed as dist
from gates import in_threads
from waiting import is_alive, wait_until

import d2lpar
from vgpu.devices.device_setup import settings_of_ranks
from vgpu.processes import agent, roll_call
from vgpu.processes import rank as rank_module

pytestmark = pytest.mark.waits


@pytest.fixture(autouse=True)
def on_cpus(monkeypatch):
    """These tests are about virtual GPUs and output that is buffered, wherever they run."""
    monkeypatch.setenv("VGPU_DEVICES", "vgpu")
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)


@pytest.fixture
def impatient(monkeypatch):
    """Let launch wait 0.3 s, not 1.5 s, for the reasons that further ranks may have to fail."""
    monkeypatch.setattr("vgpu.processes.agent.SECONDS_TO_SETTLE", 0.3)


# There is no main guard: a rank that ran this would show its greeting.
SCRIPT = """
import json, os, signal, sys, threading, traceback
from pathlib import Path
import torch, d2lpar

def rank(): return torch.distributed.get_rank()

print("the script runs", flush=True)
for line in sys.stdin:
    try:
        exec(json.loads(line), globals().copy())
    except Exception:
        traceback.print_exc(file=sys.stdout)
    print("ready", flush=True)
"""


class Program:
    """A script that runs what it is sent.

    Attributes:
        process: of the script, which leads a group of its own.
        temporary: its folder for temporary files.
        said: all that it has printed until its last answer.
    """

    def __init__(self, folder):
        (folder / "script.py").write_text(SCRIPT)
        self.temporary = folder / "t"
        self.temporary.mkdir()
        self.path, self.said = folder / "out", ""
        with open(self.path, "w") as out:
            self.process = subprocess.Popen(
                [sys.executable, folder / "script.py"],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
                env={**hosts.CPUS, "TMPDIR": str(self.temporary)},
                start_new_session=True,
            )

    def send(self, code):
        self.process.stdin.write(json.dumps(textwrap.dedent(code)) + "\n")
        self.process.stdin.flush()

    def answer(self):
        """Wait until the program has run what it was sent; return what it printed."""
        before = len(self.said)
        ended = False

        def is_ready():
            nonlocal ended
            ended = self.process.poll() is not None
            self.said = self.path.read_text()
            return ended or self.said[before:].endswith("ready\n")

        wait_until(is_ready, 60)
        assert not ended, self.said
        return self.said[before:].removesuffix("ready\n").removeprefix("the script runs\n")

    def run(self, code):
        self.send(code)
        return self.answer()


@pytest.fixture(scope="module", autouse=True)
def program(tmp_path_factory):
    """Start a program that is shared; it gets ready beside the first tests.

    The name is short for its sockets: the path of one may have 107 characters.
    """
    program = Program(tmp_path_factory.mktemp("s"))
    yield program
    program.process.kill()
    program.process.wait()
    program.process.stdin.close()


# What comes back


def test_results_come_in_rank_order_and_arguments_are_copies():
    words = ["a"]

    def work(x, words, scale=1):
        words.append("b")
        total = torch.tensor([x + dist.get_rank()])
        dist.all_reduce(total)
        return dist.get_rank(), dist.get_world_size(), total * scale, words

    results = d2lpar.launch(work, 10, words, nproc=3, scale=2)
    assert results == [(rank, 3, torch.tensor([66]), ["a", "b"]) for rank in range(3)]
    assert words == ["a"]


def test_ranks_have_vccl_one_thread_and_this_environment(monkeypatch):
    d2lpar.launch(dist.get_rank, nproc=1)
    monkeypatch.setenv("WORLD_SIZE", "what a tutorial says")
    monkeypatch.setenv("SET_AFTER_THE_FIRST_LAUNCH", "yes")

    def facts():
        loaded = "torch._dynamo" in sys.modules
        own = os.environ["SET_AFTER_THE_FIRST_LAUNCH"]
        method = multiprocessing.get_start_method()  # of a DataLoader, for example
        limit = dist.distributed_c10d._get_default_store().timeout.seconds
        place = os.getcwd(), os.getppid()
        return dist.get_backend(), torch.get_num_threads(), method, own, loaded, limit, *place

    (server,) = {facts[-1] for facts in d2lpar.launch(facts, nproc=2, timeout=20)}
    again = d2lpar.launch(facts, nproc=1)
    method = multiprocessing.get_start_method()
    assert again == [("cpu:gloo,vgpu:vccl", 1, method, "yes", True, 30, os.getcwd(), server)]
    assert server == multiprocessing.forkserver._forkserver._forkserver_pid


def devices_of_rank():
    """Return what a rank knows of its devices, and what it has on its own."""
    from vgpu.runtime import registry

    own = registry.current()
    dist.barrier()  # without a warning
    total = torch.ones(2, device="vgpu")
    dist.all_reduce(total)
    memory = torch.vgpu.mem_get_info()[1]
    return own.index, torch.vgpu.device_count(), own.peer_link, memory, total.cpu().tolist()


@pytest.mark.usefixtures("devices")
def test_each_rank_has_a_virtual_gpu_with_the_figures_of_those_here(capfd):
    link = d2lpar.Link(1e8)
    d2lpar.virtual_gpus(2, memory=(10**8, 2 * 10**8), peer_link=link)
    assert d2lpar.launch(devices_of_rank) == [
        (rank, 2, link, (rank + 1) * 10**8, [2, 2]) for rank in range(2)
    ]
    with pytest.raises(ValueError, match="memory must have a value for each of 3 ranks: got 2"):
        d2lpar.launch(devices_of_rank, nproc=3)
    d2lpar.virtual_gpus(2, memory=10**8)
    expected = [(rank, 3, None, 10**8, [3, 3]) for rank in range(3)]
    assert d2lpar.launch(devices_of_rank, nproc=3) == expected
    assert capfd.readouterr() == ("", "")


def test_ddp_takes_the_step_of_one_process_and_is_torn_down_well():
    torch.manual_seed(0)
    X, y = torch.randn(8, 5).double(), torch.randn(8, 1).double()

    def step(X, y, rank=0, world_size=1):
        torch.manual_seed(1)
        net = torch.nn.Linear(5, 1).double()
        if world_size > 1:
            net = torch.nn.parallel.DistributedDataParallel(net)
            net.cycle = [net]  # lives until it is collected
        loss = torch.nn.functional.mse_loss(net(X[rank::world_size]), y[rank::world_size])
        loss.backward()
        return [parameter.grad for parameter in net.parameters()]

    def parallel(X, y):
        return step(X, y, dist.get_rank(), dist.get_world_size())

    expected = step(X, y)
    for grads in d2lpar.launch(parallel, X, y):
        torch.testing.assert_close(grads, expected)


def test_launch_with_virtual_gpus_and_busy_threads_in_this_process(program):
    code = """
    devices = d2lpar.virtual_gpus(2)
    x = torch.rand(300, 300, device=devices[0])
    torch.rand(500, 500) @ torch.rand(500, 500)  # OpenMP
    torch.vgpu._sleep(0.5)
    y = x @ x

    def work(weight):
        own = torch.rand(200, 200, device="vgpu")
        total = own @ weight.to("vgpu")
        torch.distributed.all_reduce(total)
        assert own.device.index == torch.distributed.get_rank()
        return own.device.index, total.cpu()

    (a, first), (b, second) = d2lpar.launch(work, torch.ones(200, 3))
    assert (a, b) == (0, 1) and first.equal(second)
    assert torch.equal(y.cpu(), (x @ x).cpu())
    """
    assert program.run(code) == ""


def test_script_without_a_main_guard_is_not_run_again(program):
    assert program.run("print(d2lpar.launch(rank))") == "[0, 1]\n"
    assert program.said.count("the script runs") == 1


# Output


def test_lines_have_the_rank_in_front_and_are_whole(capsys):
    def talk():
        for i in range(50):
            for word in ("line", f"{i}", "of", f"{dist.get_rank()}"):
                print(word, end=" ", flush=True)
                time.sleep(0.04 * (i < 3))
            print()
        print("\udce9"), os.write(1, b"\xe9\n")  # as in the name of a file, or from C++
        print("to stderr", file=sys.stderr, end="")
        print("no newline", end="")

    d2lpar.launch(talk, nproc=2)
    out, err = capsys.readouterr()
    for rank in range(2):
        own = [line for line in out.splitlines() if line.startswith(f"[{rank}] ")]
        lines = [f"[{rank}] line {i} of {rank} " for i in range(50)]
        assert own == [*lines, rf"[{rank}] \udce9", f"[{rank}] \ufffd", f"[{rank}] no newline"]
    assert len(out.splitlines()) == 106
    assert sorted(err.splitlines()) == ["[0] to stderr", "[1] to stderr"]


def test_output_is_shown_while_the_function_runs(tmp_path, monkeypatch):
    seen = tmp_path / "seen"

    class Screen:
        def write(self, text):
            if "[0] are you there?" in text:
                seen.touch()

        def flush(self):
            pass

    def ask(seen):
        print("are you there?")
        for _ in range(1000):
            if seen.exists():
                return True
            time.sleep(0.05)

    monkeypatch.setattr(sys, "stdout", Screen())
    assert d2lpar.launch(ask, seen, nproc=1) == [True]


def test_the_end_of_a_rank_is_noticed_at_once(monkeypatch):
    ready, wait, files = [], agent.wait, agent.Agent.files

    def noted(sentinels, timeout):
        ready.append(wait(sentinels, timeout))
        if len(ready) == 1:
            raise InterruptedError  # as on Windows at Ctrl-C

    def while_all_end(self, kind):
        """Let the ranks end between a look at their exit codes and the next."""
        for process in self.processes:
            process.join()
        return files(self, kind)

    monkeypatch.setattr(agent, "wait", noted)
    monkeypatch.setattr(agent.Agent, "files", while_all_end)
    assert d2lpar.launch(dist.get_rank) == [0, 1]
    assert ready[-1] or len(ready) == 1  # otherwise the time had to run out


# Faults


def test_a_rank_that_has_ended_does_not_keep_the_agent_busy(monkeypatch, impatient):
    alive, ended, wait = [], [], agent.wait

    def counted(sentinels, timeout):
        alive.append(len(sentinels))
        ended.extend(found := wait(sentinels, timeout))
        return found

    monkeypatch.setattr(agent, "wait", counted)
    with pytest.raises(RuntimeError, match="rank 0 ended with exit code 3"):
        d2lpar.launch(lambda: time.sleep(1000) if dist.get_rank() else os._exit(3))
    assert alive.count(1) <= 5  # 0.3 s, a look in 0.1
    assert len(ended) == len({*ended})  # nobody waits for whom it knows to have ended


def test_exception_comes_back_as_it_was_and_ends_the_other_ranks(tmp_path, impatient):
    class Trouble(Exception):
        pass

    def work(folder):
        rank = dist.get_rank()
        (folder / str(rank)).write_text(str(os.getpid()))
        dist.barrier()
        if rank == 1:
            raise Trouble("of rank one", {"step": 3})  # here
        time.sleep(1000)

    with pytest.raises(Trouble, match="of rank one") as caught:
        d2lpar.launch(work, tmp_path)
    assert caught.value.args == ("of rank one", {"step": 3})
    (note,) = caught.value.__notes__
    assert "rank 1" in note and '{"step": 3})  # here' in note and "rank.py" not in note
    assert not any(is_alive(int((tmp_path / rank).read_text())) for rank in "01")
    assert d2lpar.launch(lambda: 5, nproc=1) == [5]


def test_a_traceback_has_the_lines_of_a_notebooks_cell(monkeypatch):
    lines, names = ["def work():\n", "    raise KeyError('k')  # here\n"], {}
    monkeypatch.setitem(linecache.cache, "<cell>", (9, None, lines, "<cell>"))
    exec(compile("".join(lines), "<cell>", "exec"), names)
    with pytest.raises(KeyError) as caught:
        d2lpar.launch(names["work"], nproc=1)
    assert "raise KeyError('k')  # here" in caught.value.__notes__[0]


@pytest.mark.usefixtures("devices")
def test_settings_of_ranks_are_those_of_the_last_call():
    d2lpar.virtual_gpus(2, threads=2)
    others = {"memory": None, "model": None, "values": True, "host": None}  # but for links
    assert settings_of_ranks(1) == settings_of_ranks(2) == {"n": 2, "threads": 2, **others}
    figures = {"threads": 1, "link": None, "model": "v100", "values": False}
    d2lpar.virtual_gpus(1, **figures)
    assert settings_of_ranks(3) == {"n": 3, **others, **figures}


def test_figures_that_virtual_gpus_refused_are_not_those_of_ranks(devices):
    before, x = settings_of_ranks(1), torch.ones(9, device=devices[0])
    with pytest.raises(ValueError, match="bytes in use: got 1"):
        d2lpar.virtual_gpus(1, memory=1)
    assert settings_of_ranks(1) == before and x.sum().item() == 9


@pytest.mark.parametrize("device", ["cpu", "vgpu"])
def test_rank_that_fails_is_the_reason_though_others_wait_for_it(impatient, device):
    def work():
        x = torch.ones(1, device=device)
        dist.all_reduce(x)
        if dist.get_rank() == 1:
            raise KeyError("the reason")
        dist.all_reduce(x)
        x.item()

    with pytest.raises(KeyError, match="the reason"):
        d2lpar.launch(work, nproc=3, timeout=20)


@pytest.mark.parametrize("how", ["closed", "reset"])
def test_first_exception_counts_not_the_broken_connections_that_follow(tmp_path, how):
    """A rank may learn of another's end before the other has said what its reason was."""
    broken = RuntimeError(f"[gloo/transport/tcp/pair.cc:547] Connection {how} by peer [127.0.0.1]")
    paths = [tmp_path / f"0.{rank}.error" for rank in range(4)]

    def leave(rank, error):
        paths[rank].write_bytes(rank_module.error_report(error, rank))

    leave(0, broken)
    reason = agent.failure_reason([1, None, None, None], paths)
    assert str(reason) == str(broken)  # better than nothing
    reason = agent.failure_reason([1, None, None, 3], paths)
    assert str(reason) == "rank 3 ended with exit code 3 before it returned"
    leave(2, IndexError("the reason"))
    assert repr(agent.failure_reason([1, None, 1, 3], paths)) == "IndexError('the reason')"
    for rank, error in ((1, KeyError("later")), (3, broken)):
        leave(rank, error)
    reason = agent.failure_reason([1, 1, 1, 1], paths)
    assert repr(reason) == "IndexError('the reason')" and "in rank 2" in reason.__notes__[0]


@pytest.mark.parametrize("attempt", [0, 1])
def test_others_have_time_to_say_why_they_fail_too(monkeypatch, attempt):
    """Rank 0 fails first, as a consequence; the agent has seen its end when rank 1 says why."""
    seconds = [0.1, 30][1 - attempt :]
    settling = type("Settling", (), {"__radd__": lambda self, now: now + seconds.pop(0)})
    monkeypatch.setattr("vgpu.processes.agent.SECONDS_TO_SETTLE", settling())

    def work():
        if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < attempt:
            assert dist.get_rank() == 1
            time.sleep(1000)
        pids = [None] * 2
        dist.all_gather_object(pids, os.getpid())
        if dist.get_rank() == 0:
            raise RuntimeError("gloo: Connection closed by peer [127.0.0.1]")
        wait_until(lambda: not is_alive(pids[0]), 20)
        time.sleep(0.5)  # the agent looks each 0.1 s
        raise KeyError("the reason")

    with pytest.raises(KeyError, match="the reason"):
        d2lpar.launch(work, max_restarts=attempt)


def test_an_error_of_the_last_kernel_is_raised_though_nothing_waits_for_it():
    def work():
        other = f"vgpu:{1 - dist.get_rank()}"  # not the current GPU
        torch.ones(3, device=other)[torch.tensor([7], device=other)]

    with pytest.raises(torch.AcceleratorError, match="index 7 is out of bounds"):
        d2lpar.launch(work)


def test_exception_that_does_not_pickle_comes_as_its_text():
    class Stubborn(Exception):
        def __init__(self, a, b):
            super().__init__(f"{a} and {b}")

    def work():
        raise Stubborn(1, 2)

    with pytest.raises(RuntimeError, match="Stubborn: 1 and 2") as caught:
        d2lpar.launch(work, nproc=1)
    assert "raise Stubborn(1, 2)" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    "end, message",
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "rank 1 was killed by SIGKILL"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), "rank 1 was killed by SIGTERM"),
        (lambda: os._exit(0), "rank 1 ended with exit code 0 before it returned"),
        (lambda: sys.exit(0), r"rank 1 was ended by SystemExit\(0\)"),
    ],
    ids=["SIGKILL", "SIGTERM", "exit 0", "sys.exit"],
)
def test_rank_that_ends_early_is_named_with_its_end(end, message):
    def work():
        if dist.get_rank() == 1:
            end()
        dist.all_reduce(torch.ones(1))

    with pytest.raises(RuntimeError, match=f"^{message}(\n|$)"):
        d2lpar.launch(work)


@pytest.mark.parametrize(
    "device, what", [("cpu", "collective 2"), ("vgpu", r"all_reduce\(float32\[1\], sum\)")]
)
def test_hang_before_a_collective_names_who_is_missing_and_where_it_is(impatient, device, what):
    def work():
        x, roll_call.ANSWER = torch.ones(1, device=device), 5.0
        dist.barrier()
        if dist.get_rank() == 1:
            time.sleep(1000)  # asleep
        dist.all_reduce(x)
        x.item()

    with pytest.raises(TimeoutError) as caught:
        d2lpar.launch(work, nproc=3, timeout=3)
    first, *others = str(caught.value).splitlines()
    assert re.match(rf"rank [02] waited 3 s in {what}, line \d+ of work", first)
    assert first.endswith("; rank 1 had not arrived")
    assert re.search("rank 1 had started 1 collective and .*asleep", str(caught.value))
    assert "rank.py" not in caught.value.__notes__[0]
    assert others[-1] == (
        "if ranks must work for longer than 3 s while others wait for them: "
        "launch(..., timeout=12), or --timeout 12 under torchrun"
    )


def test_who_is_missing_in_a_group_of_some_ranks_has_its_number_in_the_job(impatient):
    def work():
        limit = timedelta(seconds=3)
        x, group = torch.ones(1, device="vgpu"), dist.new_group([1, 2], limit)
        if dist.get_rank() != 1:
            time.sleep(1000)
        dist.all_reduce(x, group=group)
        x.item()

    with pytest.raises(TimeoutError, match=r"rank 1 waited .*; rank 2 had not arrived"):
        d2lpar.launch(work, nproc=3, timeout=3)


def test_hang_at_the_end_names_who_is_missing(impatient):
    def work():
        if dist.get_rank() == 1:
            time.sleep(1000)

    with pytest.raises(TimeoutError, match="waited 3 s at the end; rank 1 had not arrived"):
        d2lpar.launch(work, nproc=3, timeout=3)


@pytest.fixture
def started():
    """Processes that a test started, by id: those that still run are ended after it."""
    pids = []
    yield pids
    for pid in filter(is_alive, pids):
        os.kill(pid, signal.SIGKILL)


def start(program, code, folder, started):
    """Let a program launch `hang`, which leaves pids in `folder`; return them when it has."""
    hang = f"""
    folder = Path({str(folder)!r})
    sys.path.append({str(Path(fresh.__file__).parent)!r})
    from waiting import note_when_in
    from vgpu.processes import roll_call; roll_call.ANSWER = 30  # here, not in the ranks

    def spin():
        while True: pass

    def hang(folder):
        rank = torch.distributed.get_rank()
        note_when_in(folder / f"{{rank}}.pid", *(("spin",) if rank else ("all_reduce", 1)))
        if rank == 0:
            torch.distributed.all_reduce(torch.ones(1))
        spin()
    """
    program.send(textwrap.dedent(hang) + textwrap.dedent(code))
    wait_until(lambda: len(list(folder.glob("*.pid"))) == 2, 60)
    pids = [int(path.read_text()) for path in folder.glob("*.pid")]
    started += pids
    return pids


@pytest.mark.parametrize("whole_group", [False, True])
def test_interrupt_ends_the_ranks_and_launch_works_again(program, tmp_path, started, whole_group):
    """Jupyter and a terminal interrupt the whole group of processes, the ranks among them."""
    code = """
    try:
        d2lpar.launch(hang, folder)
    except KeyboardInterrupt as error:
        print(error)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        print("interrupted", d2lpar.launch(rank))
    """
    pids = start(program, code, tmp_path, started)
    (os.killpg if whole_group else os.kill)(program.process.pid, signal.SIGINT)
    verdict, first, second, again = program.answer().splitlines()
    assert verdict == "rank 1 had not arrived"
    waits = "  rank 0 had started 1 collective, waited for another rank and was at line"
    assert re.fullmatch(f"{waits} [0-9]+ of hang", first)
    assert re.fullmatch("  rank 1 had started 0 collectives and was at line [0-9]+ of spin", second)
    assert again == "interrupted [0, 1]"
    assert not any(map(is_alive, pids))
    assert not list(program.temporary.glob("*launch*"))


def test_nothing_is_left_behind_by_launches_good_and_bad(program):
    code = """
    def work(error):
        net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
        net(torch.ones(2, 3)).sum().backward()
        if error and torch.distributed.get_rank() == 1:
            raise error
        return net(torch.ones(2, 3)).detach()

    def traces():
        me = os.getpid()
        children = Path(f"/proc/{me}/task/{me}/children").read_text().split()
        threads = sorted(thread.name for thread in threading.enumerate())
        return children, threads, len(os.listdir("/proc/self/fd")), os.environ.copy()

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    handlers = [signal.getsignal(number) for number in numbers]
    d2lpar.launch(work, None)
    before = traces()
    for i in range(6):
        try:
            assert len(d2lpar.launch(work, ValueError("bad") if i % 3 == 2 else None)) == 2
        except ValueError:
            print("bad", i)
    after = traces()
    assert after[0] == before[0] and len(after[0]) == 2, after  # server and tracker stay
    assert after[1:] == before[1:], (before, after)
    assert handlers == [signal.getsignal(number) for number in numbers]
    """
    assert program.run(code) == "bad 2\nbad 5\n"
    # The server has a folder of its own while it lives.
    left = [path.name for path in program.temporary.iterdir()]
    assert all(name.startswith(("pymp-", "torchinductor")) for name in left), left


def test_ranks_end_with_a_process_that_is_killed(program, tmp_path, started):
    """This is the last test of the program that is shared."""
    pids = start(program, "d2lpar.launch(hang, folder)", tmp_path, started)
    program.process.kill()
    program.process.wait()
    wait_until(lambda: not any(map(is_alive, pids)), 60)
    wait_until(lambda: not list(program.temporary.glob("*launch*")), 60)


def test_launch_from_another_thread(capsys):
    results = []
    in_threads([lambda: results.append(d2lpar.launch(dist.get_rank))])
    assert results == [[0, 1]]
    assert capsys.readouterr() == ("", "")


def test_an_error_of_the_agent_ends_all_ranks_and_waits_for_their_end(monkeypatch):
    story = []

    class Process:
        def __init__(self, rank):
            self.kill = lambda: story.append(f"kill {rank}")
            self.join = lambda: story.append(f"join {rank}")

    class Broken(agent.Agent):
        processes = [Process(0), Process(1)]

        def __init__(self, *_):
            self.output = SimpleNamespace(close=lambda: story.append("close"))

        def run(self):
            story.append("run")
            raise OSError("no more memory")

    monkeypatch.setattr(agent, "Agent", Broken)
    with pytest.raises(OSError, match="no more memory"):
        d2lpar.launch(print)
    assert story == ["run", "kill 0", "kill 1", "join 0", "join 1", "close"]


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_rank_has_started_ends_with_it(started, fails):
    def work():
        make = functools.partial(multiprocessing.get_context("fork").Process, target=time.sleep)
        child, interrupted = make(args=(1000,)), make(args=(1000,))
        child.start(), interrupted.start()
        # An interrupt, which the rank itself would ignore, is lost on a fork that just begins.
        wait_until(lambda: interrupted.exitcode or os.kill(interrupted.pid, signal.SIGINT), 30)
        if fails:
            raise KeyError(child.pid)
        return child.pid

    try:
        started += d2lpar.launch(work, nproc=1)
    except KeyError as error:
        started += error.args
    wait_until(lambda: not is_alive(started[0]))


@pytest.mark.parametrize("users", [None, "SIGUSR1"])
def test_the_setting_of_torchs_agent_is_put_back(monkeypatch, users):
    name = "TORCHELASTIC_SIGNALS_TO_HANDLE"
    if users is None:
        monkeypatch.delenv(name, raising=False)
    else:
        monkeypatch.setenv(name, users)
    main = sys.modules["__main__"]
    logger = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    with pytest.raises(OSError), agent.isolated():
        assert os.environ[name] == "" and sys.modules["__main__"] is not main
        assert logger.disabled
        raise OSError
    assert os.environ.get(name) == users and sys.modules["__main__"] is main
    assert not logger.disabled


@pytest.fixture
def only_rank(monkeypatch):
    """The environment of the only rank of a job of torchrun."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {
        "RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "GROUP_WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RESTART_COUNT": 0,
    }  # fmt: skip
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)
    torch.vgpu.set_device(0)


def test_a_rank_tears_down_what_could_abort_it(monkeypatch, only_rank):
    """What holds the process group is collected before its end, and the roll call ends after it."""
    alive, calls, destroy = [], [], dist.destroy_process_group

    class RollCall(rank_module.RollCall):
        def __init__(self, *args):
            super().__init__(*args)
            calls.append(self)

    class Net:
        pass

    def fn():
        net = Net()
        net.cycle = net
        alive.append(weakref.ref(net))
        return "done"

    def destroyed():
        alive.append(alive[0]() is not None)
        destroy()

    monkeypatch.setattr(rank_module, "RollCall", RollCall)
    monkeypatch.setattr(dist, "destroy_process_group", destroyed)
    gc.disable()
    try:
        assert rank_module.run(fn, timeout=10) == "done"
        assert alive[1:] == [False]
        wait_until(lambda: not calls[0].thread.is_alive())
    finally:
        gc.enable()
        calls[0].close()


@pytest.mark.parametrize("asked, count", [("vgpu:1", 2), ("vgpu:3", 3)])
def test_each_rank_has_a_gpu_at_least(monkeypatch, only_rank, capsys, asked, count):
    """It is rank 0 of the job, which prints the result, though not the first on its machine."""
    for name, value in (("VGPU_DEVICES", asked), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)

    def facts():
        limit = dist.distributed_c10d._get_default_store().timeout
        return torch.vgpu.current_device(), torch.vgpu.device_count(), limit.seconds

    monkeypatch.setitem(sys.modules, "facts", SimpleNamespace(of_rank=facts))
    monkeypatch.setattr(sys, "argv", ["rank.py", "facts:of_rank", "--timeout=7"])
    monkeypatch.setattr(rank_module, "_end", lambda code: None)
    rank_module.main()
    assert capsys.readouterr().out == f"(1, {count}, 7)\n"


def test_attempts_of_torchrun_find_nothing_of_each_other_in_its_store(monkeypatch, only_rank):
    _agents = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=True)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for attempt in "01":
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        store = rank_module.run(dist.distributed_c10d._get_default_store)
        assert store.add("left behind", 1) == 1


def test_ranks_get_gpus_where_there_is_one_for_each(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert not rank_module.has_gpus(2)  # on_cpus
    monkeypatch.setenv("VGPU_DEVICES", "cuda")
    assert rank_module.has_gpus(2)
    monkeypatch.delenv("VGPU_DEVICES")
    assert [rank_module.has_gpus(count) for count in (1, 2, 3)] == [True, True, False]


# Restarts


def train(folder, num_steps, kill_at):
    """Train with a checkpoint after each step; rank 1 is killed once, in step `kill_at`."""
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 1)
    path, first = folder / "checkpoint.pt", 0
    if path.exists():
        saved = torch.load(path)
        net.load_state_dict(saved["net"])
        first = saved["step"] + 1
    ddp = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(first, num_steps):
        X = torch.arange(4.0).reshape(1, 4) * (step + 1) / (dist.get_rank() + 5)
        optimizer.zero_grad()
        if step == kill_at and dist.get_rank() == 1 and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        ddp(X).square().sum().backward()
        optimizer.step()
        if dist.get_rank() == 0:
            torch.save({"net": net.state_dict(), "step": step}, folder / "part")
            os.replace(folder / "part", path)
        dist.barrier()
    return first, net.state_dict()


def test_killed_rank_is_restarted_and_training_goes_on(tmp_path, capsys, impatient):
    folders = [tmp_path, tmp_path / "undisturbed"]
    folders[1].mkdir()
    by_value = functools.partial(train)
    disturbed = d2lpar.launch(by_value, folders[0], 6, 3, max_restarts=2, timeout=20)
    told = "RuntimeError: rank 1 was killed by SIGKILL; restart 1 of 2\n"
    assert capsys.readouterr().out == told
    undisturbed = d2lpar.launch(by_value, folders[1], 6, None)
    assert [first for first, _ in disturbed] == [3, 3]
    assert [first for first, _ in undisturbed] == [0, 0]
    for (_, state), (_, expected) in zip(disturbed, undisturbed, strict=True):
        torch.testing.assert_close(state, expected, rtol=0, atol=0)


def test_restarts_come_to_an_end_and_find_nothing_in_the_store(impatient, capsys):
    def work():
        print("begun")
        store = dist.distributed_c10d._get_default_store()
        assert not store.check(["left behind"])  # what is would break gloo now and then
        dist.barrier()
        store.set("left behind", "")
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        print(f"attempt {attempt} ends", end="")
        if dist.get_rank() == 1:
            raise ValueError(f"attempt {attempt}")

    with pytest.raises(ValueError, match="attempt 1"):
        d2lpar.launch(work, max_restarts=1, timeout=10)
    out = capsys.readouterr().out
    assert out.count("begun") == 4
    first, second = (out.rindex(f"[1] attempt {attempt} ends") for attempt in range(2))
    assert first < out.rindex("[1] begun") < second  # the last line of an attempt is shown with it


# Bad input


@pytest.mark.parametrize(
    "kind, message, options",
    [
        (ValueError, "nproc must be a positive integer: got 0", {"nproc": 0}),
        (ValueError, "nproc must be a positive integer: got 2.0", {"nproc": 2.0}),
        (ValueError, "nproc must be a positive integer: got True", {"nproc": True}),
        (ValueError, "timeout must be a positive number .*: got nan", {"timeout": math.nan}),
        (ValueError, "timeout must be a positive number of seconds: got 0", {"timeout": 0}),
        (ValueError, "max_restarts.* got -1", {"max_restarts": -1}),
        (TypeError, r"invalid arguments for <lambda>\(\): got an unexpected.* 'lr'$", {"lr": 1}),
        (TypeError, r"'nprocs'; did you mean nproc, not nprocs\?", {"nprocs": 2}),
        (TypeError, r"'args'; did you mean nproc, not nprocs\?", {"args": (1,), "nprocs": 2}),
        (TypeError, r"did you mean nproc, not world_size\?", {"world_size": 2}),
        (TypeError, r"did you mean nproc, not n\?", {"n": 2}),
        (TypeError, r"did you mean max_restarts, not restarts\?", {"restarts": 1}),
    ],
)
def test_bad_options(kind, message, options, monkeypatch):
    monkeypatch.setattr("tempfile.TemporaryDirectory", None)  # nothing is started
    with pytest.raises(kind, match=message):
        d2lpar.launch(lambda: None, **options)


def test_what_cannot_be_called_or_sent(monkeypatch):
    monkeypatch.setattr("tempfile.TemporaryDirectory", None)
    with pytest.raises(TypeError, match="fn must be a function: got 3"):
        d2lpar.launch(3)
    with pytest.raises(TypeError, match="argument 1, a lock, cannot be pickled"):
        d2lpar.launch(lambda a, b: None, 1, threading.Lock())
    with pytest.raises(TypeError, match="argument x, a generator, cannot be pickled"):
        d2lpar.launch(lambda x: None, x=(i for i in "ab"))
    lock = threading.Lock()
    with pytest.raises(TypeError, match="the function, <lambda>, cannot be pickled"):
        d2lpar.launch(lambda: lock)


def test_function_that_takes_a_rank(monkeypatch):
    """As torch.multiprocessing.spawn passes it."""
    monkeypatch.setattr("tempfile.TemporaryDirectory", None)

    def train(rank, lr):
        pass

    for args, missing in (((), "rank"), ((0.1,), "lr")):
        text = rf"arguments .*: missing .* '{missing}'\. .* no rank: .*\.get_rank\(\)"
        with pytest.raises(TypeError, match=text):
            d2lpar.launch(train, *args)
    with pytest.raises(TypeError, match=r"'lrs'; did you mean lr, not lrs\?"):
        d2lpar.launch(train, lrs=0.1)


def test_what_lies_on_a_virtual_gpu_is_not_sent(monkeypatch):
    monkeypatch.setattr("tempfile.TemporaryDirectory", None)
    devices = d2lpar.virtual_gpus(2)
    x, net = torch.ones(2, 3, device=devices[1]), torch.nn.Linear(4, 1).to(devices[0])

    def nothing(*args, **kwargs):
        pass

    what = r", cannot be pickled: a tensor of shape \({}\) on vgpu:{} .*call \.cpu\(\) first, or c"
    for fn, args, named, text in (
        (nothing, (0, [{"x": x}]), {}, "argument 1, a list" + what.format("2, 3", 1)),
        (nothing, (), {"net": net}, "argument net, a Linear" + what.format("1, 4", 0)),
        (lambda: x + 1, (), {}, "the function, <lambda>" + what.format("2, 3", 1)),
        (nothing, (devices,), {}, "argument 0, a list, .* device vgpu:0 .*call try_gpu"),
    ):
        with pytest.raises(TypeError, match=text):
            d2lpar.launch(fn, *args, **named)


def test_what_lies_on_a_virtual_gpu_is_not_returned():
    d2lpar.virtual_gpus(1)

    def ones(rank, on_cpu):
        if dist.get_rank() == rank:
            x = torch.ones(4, device=d2lpar.virtual_gpus(1)[0])
            return x.cpu() if on_cpu else x

    text = r"rank 1 returned .* \(4,\) on vgpu:0 .*call \.cpu\(\) first"
    with pytest.raises(TypeError, match=text):
        d2lpar.launch(ones, 1, False)
    [x] = d2lpar.launch(ones, 0, True, nproc=1)
    assert x.equal(torch.ones(4))


def test_what_cannot_be_pickled_and_what_can_but_not_read():
    with pytest.raises(TypeError, match="rank 0 returned a lock that cannot be pickled"):
        d2lpar.launch(threading.Lock, nproc=1)

    def broken(text):
        raise ValueError(text)

    class Broken:
        def __init__(self, text):
            self.text = text

        def __reduce__(self):
            return broken, (self.text,)

    with pytest.raises(TypeError, match="of rank 0 cannot be unpickled here: on the way back"):
        d2lpar.launch(lambda: Broken("on the way back"), nproc=1)
    with pytest.raises(TypeError, match="arguments cannot be unpickled in another process: there"):
        d2lpar.launch(lambda x: None, Broken("there"), nproc=1)


def test_names_that_launch_and_the_function_share():
    def work(x, timeout=5):
        return x, timeout

    with pytest.raises(TypeError, match="work has a parameter timeout.*functools.partial"):
        d2lpar.launch(work, 1, timeout=60)
    assert d2lpar.launch(work, 1, 7, timeout=60, nproc=1) == [(1, 7)]
    partial = functools.partial(work, timeout=8)
    assert d2lpar.launch(partial, 1, timeout=60, nproc=1) == [(1, 8)]


# With torchrun

TRAIN = """
import hashlib
import os

import torch
import torch.distributed as dist

def train(num_steps, name="nobody"):
    torch.manual_seed(0)
    net = torch.nn.Linear(1000, 2000)
    ddp = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    X = torch.randn(8, 1000).tensor_split(dist.get_world_size())[dist.get_rank()]
    for _ in range(num_steps):
        optimizer.zero_grad()
        ddp(X).square().mean().backward()
        optimizer.step()
    hosts = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, os.readlink("/proc/self/ns/net"))
    end = hashlib.md5(net.weight.detach().numpy().tobytes()).hexdigest()
    return f"{name} {len(set(hosts))} {torch.get_num_threads()} {end}"
"""
NUM_BYTES = 4 * (1000 * 2000 + 2000)


def test_arguments_are_literals_or_texts():
    arguments = ["lr=0.1", "sizes=[1, 2]", "name=Ann", "where=a=b", "last="]
    assert dict(map(rank_module.parse_argument, arguments)) == {
        "lr": 0.1, "sizes": [1, 2], "name": "Ann", "where": "a=b", "last": ""
    }  # fmt: skip
    with pytest.raises(ValueError, match="arguments must be name=value: got '0.1'"):
        rank_module.parse_argument("0.1")


def on_this_machine(folder, *arguments):
    job = hosts.torchrun(folder, "--standalone", "--nproc-per-node=2", arguments=arguments)
    return hosts.output_of(job)


def on_two_hosts(folder):
    with hosts.two_hosts("1gbit") as pair:
        out = hosts.torchrun_on(pair, folder, arguments=["num_steps=3"])
        return out, [sent_over(host) for host in pair]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Start what mostly waits for others at one time; futures by name."""
    folder = tmp_path_factory.mktemp("torchrun")
    (folder / "train.py").write_text(TRAIN)  # torchrun needs a file, and nothing else
    with ThreadPoolExecutor() as pool:
        yield {
            "two hosts": pool.submit(on_two_hosts, folder),
            "one host": pool.submit(on_this_machine, folder, "num_steps=3", "name=Ann"),
        }


@pytest.mark.slow
def test_torchrun_on_this_machine(jobs):
    assert jobs["one host"].result().split()[:3] == ["Ann", "1", "1"]


def test_an_error_of_the_function_is_shown_and_torchrun_is_told(tmp_path, only_rank, monkeypatch):
    """In a process such as torchrun starts."""
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", f"{tmp_path}/error.json")
    arguments = ["rank.py", f"{tmp_path}/train.py:train", "num_steps=[]"]
    code = f"import sys; sys.argv = {arguments}; from vgpu.processes import rank; rank.main()"
    done = fresh.run(code, fresh.SET_UP)
    assert done.returncode == 1
    told = json.loads((tmp_path / "error.json").read_text())["message"]["extraInfo"]["py_callstack"]
    for text in done.stderr, told:
        assert ", in train\n" in text and "cannot be interpreted" in text


def sent_over(host):
    """Return the bytes that a host has sent over its line, which lets 1 Gbit a second pass."""
    name, end = host
    command = ["tc", "-n", name, "-s", "qdisc", "show", "dev", end]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.match(r"qdisc tbf .* rate 1Gbit .*\n Sent (\d+) bytes", told)
    assert found, told
    return int(found[1])


@pytest.mark.slow
def test_training_on_two_hosts_ends_as_on_one_and_uses_the_line(jobs):
    try:
        out, sent = jobs["two hosts"].result()
    except hosts.NotAllowed as reason:
        pytest.skip(str(reason))
    name, num_hosts, threads, end = out.split()
    expected = jobs["one host"].result().split()[-1]
    assert (name, num_hosts, threads, end) == ("nobody", "2", "1", expected)
    # Both send a gradient in each step, one its parameters before; headers come on top.
    least, most = (number / NUM_BYTES for number in sorted(sent))
    assert 3 < least < 3.5 and 4 < most < 4.5
