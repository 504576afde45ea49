"""`vgpu run`: what the command sees, what is said of it, and what is left behind."""

import _thread
import contextlib
import ctypes
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gates import frame_in
from modelling import fixed_gpus, sleep
from programs import environment, vgpu, written
from waiting import is_alive, wait_until

import d2lpar as d2lpar_package
from vgpu import Span
from vgpu.__main__ import MODELS, main
from vgpu.cuda import report as report_module
from vgpu.cuda import run
from vgpu.cuda.run import run_command
from vgpu.cuda.summary import read_reports, summary, write_trace
from vgpu.modelled.datasheets import GPUS
from vgpu.modelled.hardware import MACHINES

TRAIN = """
    import multiprocessing, torch
    from torch import nn
    from vgpu.cuda import report
    report.SECONDS_BETWEEN_REPORTS = 1000  # so that a fork finds what its parent has yet to write
    net = nn.Linear(64, 64).cuda()
    trainer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(4):
        x = torch.ones(32, 64).cuda()
        trainer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        trainer.step()
    torch.cuda.synchronize()
    child = multiprocessing.get_context("fork").Process(target=int)
    child.start()
    child.join()
    print("trained", loss.device, torch.cuda.device_count())
    x = torch.ones(500, 500, device="cuda:2")
    for _ in range(40):
        x @ x
"""


def rows(text):
    return [line.split() for line in text.splitlines()]


def steps_of(text):
    """Return the rank and the number of steps in each row of the last table of a summary."""
    table = text.rpartition("steps/s")[2].partition("(times of")[0].splitlines()[1:]
    return [line.split()[:2] for line in table if line.startswith("  ")]


def test_a_program_and_its_summary(tmp_path):
    """A child has its parent's spans, and leaves them alone; what is queued at the end counts."""
    program = written(tmp_path, TRAIN)
    trace = tmp_path / "trace.json"
    done = vgpu(tmp_path, "run", "--gpus", "3", "--trace", trace.name, sys.executable, program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["trained", "cuda:0", "3"]
    assert "3 x virtual GPU\nprocesses that used them: 1;" in done.stderr
    assert "exit code 0" in done.stderr
    said = rows(done.stderr)
    # 4 times 32 x 64 numbers, the weight, and the bias
    copied = f"{(4 * 32 * 64 + 64 * 64 + 64) * 4 / 1e6:.3f}"
    assert ["-", "cpu", "->", "cuda:0", "6", copied] in [row[:6] for row in said]
    assert steps_of(done.stderr) == [["-", "4"]]
    (queued,) = [row[2] for row in said if row[:2] == ["-", "cuda:2"]]
    assert queued == "41", done.stderr
    events = json.loads(trace.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert sum(event["name"] == "copy" for event in spans) == 6
    assert all(0 < event["ts"] < 120e6 for event in spans)  # from the start of the command


def test_a_step_takes_as_long_as_the_gpu_though_the_host_goes_on(tmp_path):
    """Two products of 8192 x 8192 matrices at the 15.7 TFLOP/s of a V100, and the host's 1 ms.

    The products on another GPU are not simulated yet when the program ends.
    """
    program = written(
        tmp_path,
        """
        import torch
        with torch.device("cuda"):
            net, x = torch.nn.Linear(8192, 8192, bias=False), torch.empty(8192, 8192)
        trainer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(4):
            net(x).sum().backward()
            trainer.step()
        x = torch.ones(1000, 1000, device="cuda:1")
        for _ in range(40):
            x @ x
        """,
    )
    options = "--gpus", "2", "--model", "v100", "--no-values"
    done = vgpu(tmp_path, "run", *options, sys.executable, program)
    assert done.returncode == 0, done.stderr
    assert steps_of(done.stderr) == [["-", "4"]] and "(times of the model; " in done.stderr
    (step,) = [row for row in rows(done.stderr) if row[:2] == ["-", "4"]]
    assert step[3] == "ms" and 1e3 * 4 * 8192**3 / 15.7e12 < float(step[2]) < 180, done.stderr
    (queued,) = [row[2] for row in rows(done.stderr) if row[:2] == ["-", "cuda:1"]]
    assert queued == "41", done.stderr


@pytest.mark.parametrize("code", ["exit 0", "exit 3", "kill -TERM $$"])
def test_the_exit_code_is_that_of_the_command(code, capfd):
    wanted = {"exit 0": 0, "exit 3": 3}.get(code, 128 + signal.SIGTERM)
    assert run_command(["sh", "-c", code], 2) == wanted
    printed = capfd.readouterr()
    assert not printed.out and f"exit code {wanted}" in printed.err
    said = "failed before any process gave them work" if wanted else "is d2lpar installed"
    assert said in printed.err


def test_commands_that_cannot_be_run(tmp_path, capfd):
    assert run_command([str(tmp_path / "none")], 1) == 127
    assert "No such file" in capfd.readouterr().err
    assert run_command([str(tmp_path)], 1) == 126
    assert run_command(["true"], 1, trace=str(tmp_path / "none" / "trace.json")) == 126
    assert "folder of the trace" in capfd.readouterr().err


def test_children_from_before_the_command_live_on(tmp_path):
    """Also a child of theirs that they start while it runs."""
    told, begun = tmp_path / "told", tmp_path / "begun"
    code = "until [ -e {} ]; do sleep 0.05; done; "
    after = f"{code.format(told)} (touch {begun}; exec sleep 20); true"
    with subprocess.Popen(["sh", "-c", after]) as child:
        try:
            assert run_command(["sh", "-c", f"touch {told}; {code.format(begun)}"], 1) == 0
            assert child.poll() is None
        finally:
            child.kill()


def test_the_environment_of_the_command(monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    code = 'echo $VGPU_CUDA $TORCH_DEVICE_BACKEND_AUTOLOAD; test -d "$VGPU_REPORTS"'
    assert run_command(["sh", "-c", code], 8, model="dgx1") == 0
    assert capfd.readouterr().out.split() == ["dgx1:8", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert run_command(["true"], 2) == 0
    assert "no process gave them work; CUDA_VISIBLE_DEVICES is ''" in capfd.readouterr().err
    assert run_command(["no such command"], 1) == 127
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "usage"),
        ("run", "usage"),
        ("run --gpus 0 echo ran", "must be a positive integer: got '0'"),
        ("run --gpus x echo ran", "must be a positive integer: got 'x'"),
        ("run --no-values echo ran", "--no-values requires modelled GPUs"),
        ("run --clock model echo ran", "--clock model requires modelled GPUs"),
        ("run --model z80 echo ran", "'z80'"),
        ("run --model z80 echo ran", "v100-32gb"),
    ],
)
def test_wrong_arguments(capfd, arguments, said):
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    printed, error = capfd.readouterr()
    assert ended.value.code == 2 and not printed and said in error


@pytest.mark.parametrize("option", [("--clock", "wall"), ("--model", "V100"), ("--",)])
def test_right_arguments(capfd, option):
    assert main(["run", *option, "echo", "ran"]) == 0
    assert capfd.readouterr().out.startswith("ran\n")


def test_the_models_that_can_be_named():
    """The command's list, made without torch, and that of the page are those of the tables."""
    root = Path(d2lpar_package.__file__).parents[1]
    page = (root / "docs" / "modelled_gpus.md").read_text(encoding="utf-8")
    known = re.search(r"^Known are the GPUs (.*?)\.\s", page, re.DOTALL | re.MULTILINE)[1]
    gpus, machines = known.split("machines")
    assert MODELS == (*GPUS, *MACHINES)
    assert set(re.findall(r"[a-z]+\d[\w.-]*|bigbasin", gpus)) == {*GPUS}
    assert set(re.findall(r"[a-z]+\d[\w.-]*|bigbasin", machines)) == {*MACHINES}


# -- ending


def test_what_the_command_leaves_is_ended(tmp_path, monkeypatch):
    """Also what has a session of its own and ignores SIGTERM."""
    monkeypatch.setattr(run, "SECONDS_FOR_CHILDREN", 0.1)
    monkeypatch.setattr(run, "SECONDS_TO_END", 0.3)
    code = f"""
        import subprocess, sys
        child = [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); "
                 "open('/proc/self/comm', 'w').write('a) b'); "
                 "print('ready', flush=True); time.sleep(300)"]
        child = subprocess.Popen(child, start_new_session=True, stdout=subprocess.PIPE)
        child.stdout.readline()
        open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
    """
    assert run_command([sys.executable, written(tmp_path, code)], 1) == 0
    wait_until(lambda: not is_alive(int((tmp_path / "pid").read_text())))


def test_what_the_command_leaves_may_end_by_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "SECONDS_FOR_CHILDREN", 30.0)
    monkeypatch.setattr(run.os, "kill", pytest.fail)
    assert run_command(["sh", "-c", f"(sleep 0.3; touch {tmp_path}/flag) &"], 1) == 0
    assert (tmp_path / "flag").exists()


def test_what_the_command_leaves_is_asked_to_end_before_it_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "SECONDS_FOR_CHILDREN", 0.1)
    monkeypatch.setattr(run, "SECONDS_TO_END", 30.0)
    asked, ready = tmp_path / "asked", tmp_path / "ready"
    child = f"(trap 'touch {asked}; exit' TERM; touch {ready}; while :; do sleep 0.05; done) &"
    code = f"{child} until [ -e {ready} ]; do sleep 0.05; done"
    assert run_command(["sh", "-c", code], 1) == 0
    assert asked.exists()


def started(tmp_path, program, seconds_to_end=60):
    """Start a command, until it is ready; what does not end is killed, none from before it is."""
    code = "import subprocess; from vgpu.cuda import run; "
    code += "before = subprocess.Popen(['cat'], stdin=subprocess.PIPE); "
    code += f"run.SECONDS_TO_END = run.SECONDS_FOR_CHILDREN = {seconds_to_end}; "
    code += f"code = run.run_command([{sys.executable!r}, {program!r}], 1); "
    code += "raise SystemExit('a process has ended' if before.poll() is not None else code)"
    job = subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment(tmp_path, TMPDIR=str(tmp_path)),
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert job.stdout.readline() == "ready\n"
    return job


def waiting(tmp_path, handler, first=""):
    code = f"""
        import os, signal, sys, time; parent = os.getpid()
        {first}
        while os.getppid() == parent: pass  # if this is its child, until it has ended
        for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:
            signal.signal(number, {handler})
        os.write(1, b"ready\\n")  # a handler must not print while this prints
        while True: time.sleep(0.05)
    """
    return written(tmp_path, code)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_request_to_end_is_passed_on_once(tmp_path, number):
    """The command may take five times as long to end as children get that it leaves behind."""
    handler = "lambda number, _: (time.sleep(1), print(number, flush=True), sys.exit(9))"
    job = started(tmp_path, waiting(tmp_path, handler), seconds_to_end=0.2)
    job.send_signal(number)
    out, error = job.communicate(timeout=60)
    assert (job.returncode, out) == (9, f"{number:d}\n"), error
    assert not list(tmp_path.glob("vgpu-run-*"))


@pytest.mark.parametrize("left, code", [("", 128 + signal.SIGKILL), ("os.fork() and exit()", 0)])
def test_a_second_interrupt_ends_everything(tmp_path, left, code):
    """Also what the command has left."""
    job = started(tmp_path, waiting(tmp_path, "lambda *_: print('no', flush=True)", left))
    job.send_signal(signal.SIGINT)
    assert job.stdout.readline() == "no\n"
    job.send_signal(signal.SIGINT)
    out, error = job.communicate(timeout=60)
    assert (job.returncode, out) == (code, ""), error
    assert not list(tmp_path.glob("vgpu-run-*"))


def test_a_job_may_be_stopped_and_continued(monkeypatch, capfd):
    """Python then returns garbage from a wait for signals that was to end in the meantime."""
    real, garbage = signal.sigtimedwait, SimpleNamespace(si_signo=2**27, si_code=-1)

    def stopped(signals, seconds):
        return garbage if seconds > 0 else real(signals, seconds)

    monkeypatch.setattr(signal, "sigtimedwait", stopped)
    assert run_command(["sleep", "0.3"], 1) == 0, capfd.readouterr().err


def test_a_terminal_belongs_to_the_command_while_it_runs(tmp_path):
    """It reads its input and gets the interrupt; what comes behind it can read again."""
    import pty

    run = f"{sys.executable} -m vgpu run {sys.executable} -c"
    code = f"""{run} 'print("got", input("name? "))'; """
    code += f"""{run} 'import time; print("stop me: ", flush=True); time.sleep(90)'; """
    code += 'read -p "end? " x; echo said $x'
    child, terminal = pty.fork()
    if child == 0:
        os.execvpe("bash", ["bash", "-c", code], environment(tmp_path))
    said = ""
    answers = {"name? ": "bob\n", "stop me: ": "\x03", "end? ": "yes\n", "said yes": ""}
    try:
        for wanted, answer in answers.items():
            while wanted not in said:
                assert select.select([terminal], [], [], 60)[0], said
                said += os.read(terminal, 1000).decode()
            os.write(terminal, answer.encode())
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(terminal)
        os.waitpid(child, 0)
    assert "got bob" in said and "KeyboardInterrupt" in said and "exit code 130" in said


# -- reports


REPORT = {
    "pid": 7,
    "rank": 1,
    "name": "train.py",
    "started": 100,
    "modelled": "",
    "devices": {
        "cuda:1": {
            "busy": {"compute": 2.0, "h2d": 0.2, "d2h": 0.1, "p2p": 0.2, "collectives": 0.1},
            "ops": 9,
            "peak": 2**21,
        }
    },
    "links": [["cpu", "cuda:1", 3_000_000, 0.5, 4], ["cuda:1", "cuda:1", 8, 0.1, 1]],
    "waiting": 0.25,
    "begin": 10.0,
    "end": 18.0,
    "steps": 5,
    "step_seconds": 0.02,
    "ended": False,
    "error": None,
}


def written_reports(folder, *reports):
    for report in reports:
        (folder / f"{report['pid']}.json").write_text(json.dumps(report))
    return read_reports(folder)


def test_summary(tmp_path):
    first = {**REPORT, "pid": 8, "rank": 0, "ended": True, "started": 99}
    reports = written_reports(tmp_path, REPORT, first)
    assert [report["rank"] for report in reports] == [0, 1], "they are not in order of their starts"
    text = summary(reports, 2, 30.0, 0)
    said = [" ".join(row) for row in rows(text)]
    assert "1 cuda:1 9 2.000 s 500.000 ms 250.000 ms 2.0 MiB 25% train.py" in said
    assert "1 cpu -> cuda:1 4 3.000 500.000 ms train.py" in said
    assert "1 cuda:1, collectives 1 0.000 100.000 ms train.py" in said
    assert "1 5 20.000 ms 50 train.py" in said
    assert "rank 1, process 7 (train.py) was killed, or left without" in text
    assert "process 8" not in text


def test_how_processes_ended(tmp_path):
    """By an error, by Ray, which kills its workers, here at once, or by a signal."""
    failed = {"rank": 0, "error": "ValueError", "ended": True}
    ends = failed, {"name": "Ray worker", "begin": 18.0}, {"rank": None}
    reports = [{**REPORT, "pid": 70 + i, **end} for i, end in enumerate(ends)]
    text = " ".join(summary(written_reports(tmp_path, *reports), 2, 30.0, 1).split())
    assert "rank 0, process 70 (train.py) ended with an error: ValueError process 72" in text
    assert "process 72 (train.py) was killed, or left without" in text
    assert "Ray kills its workers, as usual" in text and "process 71" not in text


def test_a_summary_is_100_columns_wide_and_tells_processes_apart(tmp_path):
    """Six have the same rank and the same long name; peaks have the unit that shows them."""
    name = "Process-1: test_that_has_a_name_of_very_many_words_and_of_even_more_of_them"
    device = {**REPORT["devices"]["cuda:1"], "ops": 10**7}
    reports = []
    for i, peak in enumerate((0, 512, 3 * 2**10, 2**20, 5 * 2**30)):
        devices = {"cuda:1": {**device, "peak": peak}}
        reports.append({**REPORT, "pid": 4194300 + i, "name": name, "devices": devices})
    reports = written_reports(tmp_path, *reports, {**REPORT, "rank": None, "name": "short.py"})
    text = summary(reports, 2, 30.0, 0)
    assert max(map(len, text.splitlines())) == 100
    words = [" ".join(row) for row in rows(text)]
    for peak in ("0 B", "512 B", "3.0 KiB", "1.0 MiB", "5.0 GiB"):
        assert sum(f" {peak} 25%" in row for row in words) == 1, text
    assert sum("4194300: Process-1: test_" in row for row in words) == 4, text
    assert sum(row.endswith(" short.py") for row in words) == 4, text
    assert max(map(len, summary([], 2, 30.0, 0).splitlines())) <= 100


@pytest.mark.parametrize(
    ("argv", "parent", "test", "name"),
    [
        (["/a/train.py", "--lr", "1"], None, "", "train.py"),
        (["/lib/pytest/__main__.py", "-q"], None, "test_a.py::test_b (call)", "pytest"),
        (["-c"], None, "", "python -c"),
        (["/a/train.py"], "MainProcess", "", "MainProcess: train.py"),
        (["/b/pytest"], "MainProcess", "t/test_a.py::TestA::test_b (call)", "MainProcess: test_b"),
        (["/lib/ray/_private/workers/default_worker.py"], None, "", "Ray worker"),
    ],
)
def test_names_of_processes(monkeypatch, argv, parent, test, name):
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(report_module.multiprocessing, "parent_process", lambda: parent)
    monkeypatch.setenv("PYTEST_CURRENT_TEST", test)
    assert report_module.name_of_this_process() == name


CHILDREN = """
    import gc, multiprocessing, os, signal, sys, time
    import torch, torch._dynamo
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from vgpu.runtime import scheduler

    def fails():
        torch.ones(10, device="cuda:1").cpu()
        try:
            raise KeyError
        finally:
            raise ValueError

    def exits():
        torch.ones(10, device="cuda").cpu()
        sys.exit(1)

    def exits_after_an_error():
        torch.ones(10, device="cuda").cpu()
        try:
            raise KeyError
        except KeyError:
            sys.exit(1)  # as torch.multiprocessing.spawn does

    def is_killed():
        torch.ones(10, device="cuda").cpu()
        for _ in range(400):
            time.sleep(0.05)
            if os.path.exists(f"{os.environ['VGPU_REPORTS']}/{os.getpid()}.json"):
                break
        os.kill(os.getpid(), signal.SIGKILL)

    def ends_well():
        torch.ones(10, device="cuda").cpu()
        sys.exit(0)

    def is_asked_to_end_while_a_wait_is_noted():
        x = torch.ones(3, device="cuda")
        x.cpu()
        signal.signal(signal.SIGTERM, lambda *_: print("saved", x.sum().item(), flush=True))

        class Spans(tuple):
            def __iter__(self):
                signal.raise_signal(signal.SIGTERM)
                return super().__iter__()

        (report,) = scheduler._recordings
        report.extend(Spans())
        report.write(ended=False)

    def steps():
        torch.empty(2**20, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        for device, steps in (("cpu", 9), ("cuda", 3), ("cuda", 5), ("cuda", 4)):
            train(nn.Linear(4, 4).to(device), device, steps)
            gc.collect()
        sys.exit()

    def steps_of_sharded_parameters():
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        train(fully_shard(nn.Linear(4, 4).cuda()), "cuda", 3)
        dist.destroy_process_group()

    def train(net, device, steps):
        trainer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(steps):
            net(torch.ones(2, 4, device=device)).sum().backward()
            trainer.step()
        torch.cuda.synchronize()  # a child does not wait at its end

    for function in (
        fails, exits, exits_after_an_error, is_killed, ends_well,
        is_asked_to_end_while_a_wait_is_noted, steps, steps_of_sharded_parameters,
    ):
        child = multiprocessing.get_context("fork").Process(target=function)
        child.start()
        child.join(60)
        child.kill()
    fails()
"""


@pytest.fixture(scope="module")
def children(tmp_path_factory):
    """What a command printed whose children, by fork, have done one thing each."""
    folder = tmp_path_factory.mktemp("children")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTEST_CURRENT_TEST")  # otherwise it is in the children's names
        program = written(folder, CHILDREN)
        return vgpu(folder, "run", "--gpus", "2", sys.executable, program)


def test_processes_say_who_they_are_and_how_they_ended(children):
    said = children.stderr
    assert "processes that used them: 9;" in said and "did not" not in said, said
    found = [line.split("%  ")[1] for line in said.splitlines() if "%  " in line]
    program = "program.py"
    assert found == [program, *(f"ForkProcess-{i}: {program}" for i in range(1, 9))], said
    _, _, notes = said.rpartition("(times of")
    said = [line.partition("(")[2] for line in notes.splitlines() if line.startswith("process ")]
    assert [text.partition(")")[::2] for text in said] == [
        (program, " ended with an error: ValueError"),
        (f"ForkProcess-1: {program}", " ended with an error: ValueError"),
        (f"ForkProcess-2: {program}", " ended with an error: SystemExit"),
        (f"ForkProcess-3: {program}", " ended with an error: KeyError"),
        (
            f"ForkProcess-4: {program}",
            " was killed, or left without Python's clean-up: its figures",
        ),
    ], notes


def test_a_signal_handler_may_use_a_gpu_while_a_wait_is_noted(children):
    """SIGTERM comes as spans are read, which the main thread did with a lock in its hands."""
    assert children.stdout == "saved 3.0\n", children.stderr


def test_steps_are_those_of_one_optimizer_on_a_gpu(children):
    """Those of DTensors count, which have tensors on virtual GPUs and are none."""
    assert steps_of(children.stderr) == [["-", "5"], ["0", "3"]], children.stderr
    (peak,) = [row[9] for row in rows(children.stderr) if "MiB" in row]
    assert peak == "4.0", "a peak counts though the program has reset its own"


def test_a_report_sums_spans_and_counts_steps_of_the_busiest_optimizer(tmp_path, monkeypatch):
    (device,) = d2lpar_package.virtual_gpus(1)
    monkeypatch.setenv("RANK", "3")
    report = report_module.Report(tmp_path, False)
    cpu = torch.device("cpu")
    spans = [
        Span("aten.mm", "kernel", device, 0, "compute", 3.0, 5.0),
        Span("copy", "copy", device, 0, "h2d", 2.0, 2.5, None, 80, cpu, device),
        Span("copy", "copy", device, 0, "h2d", 6.0, 6.25, None, 20, cpu, device),
        Span("all_reduce", "collective", device, 1, "collectives", 7, 9, None, 8, device, device),
        Span("copy", "copy", device, 0, "p2p", 6.5, 6.5, None, 40, device, torch.device("meta")),
        Span("wait", "wait", device, 0, "host", 1.0, 1.25),
        Span("wait", "wait", device, 0, "host", 2.0, 2.5),
        Span("wait", "wait", device, 0, "stream", 1.0, 11.0),
    ]
    with monkeypatch.context() as patch:  # it writes at the end only
        patch.setattr(_thread, "start_new_thread", lambda *args: None)
        report.extend(spans)
    groups = [{"params": [torch.ones(1, device=where)]} for where in (cpu, device)]
    torch.vgpu.synchronize()
    often, rarely = (torch.optim.SGD(groups) for _ in range(2))
    steps = [(1.0, rarely), *((now, often) for now in (2.0, 4.0, 7.0, 87.0)), (99.0, rarely)]
    for now, optimizer in steps:
        clock = SimpleNamespace(now=lambda now=now: now)
        monkeypatch.setattr(report_module, "scheduler", SimpleNamespace(clock=clock))
        report.note_step(optimizer, (), {})
    report.note_step(torch.optim.SGD([torch.ones(1)]), (), {})
    report.write_last()
    said = json.loads((tmp_path / f"{os.getpid()}.json").read_text())
    assert (said["begin"], said["end"], said["waiting"], said["rank"]) == (2.0, 9.0, 0.75, 3)
    assert 0 < said["started"] / os.sysconf("SC_CLK_TCK") <= time.clock_gettime(time.CLOCK_BOOTTIME)
    (figures,) = said["devices"].values()
    assert figures["ops"] == 5
    assert figures["busy"] == {"compute": 2.0, "h2d": 0.75, "collectives": 2.0, "p2p": 0.0}
    assert said["links"] == [
        ["cpu", str(device), 100, 0.75, 2], [str(device), str(device), 8, 2.0, 1]
    ]  # fmt: skip
    assert (said["steps"], said["step_seconds"]) == (4, 3.0)  # the median of 2, 3 and 80


def test_a_report_while_a_step_is_under_way_does_not_make_it_shorter(tmp_path, monkeypatch):
    """Reports are written each second, however far the host is ahead of a stream of the GPU."""
    _, device = fixed_gpus(2)  # the other one is current
    report = report_module.Report(tmp_path, False)
    with monkeypatch.context() as patch:  # it writes below
        patch.setattr(_thread, "start_new_thread", lambda *args: None)
        report.extend([Span("sleep", "kernel", device, 0, "compute", 0.0, 5.0)])
    trainer = torch.optim.SGD([torch.ones(1, device=device)])
    side = torch.vgpu.Stream(device)
    with torch.vgpu.stream(side), torch.vgpu.device(0):
        for _ in range(3):
            sleep(device, 5, side)
            report.note_step(trainer, (), {})
            report.write(ended=False)
    trainer = weakref.ref(trainer)
    assert trainer() is None, "an optimizer that nobody else holds, and its tensors"
    torch.vgpu.synchronize(device)
    report.write_last()
    said = json.loads((tmp_path / f"{os.getpid()}.json").read_text())
    assert (said["steps"], said["step_seconds"]) == (3, 5.0)


def test_nothing_is_written_over_the_last_report(tmp_path, monkeypatch):
    """Neither by a thread that waits for the lock at that moment, nor for an op that ends later."""
    threads, dump = [], json.dump
    span = Span("aten.mm", "kernel", "cuda:0", 0, "compute", 3.0, 5.0)
    monkeypatch.setattr(_thread, "start_new_thread", lambda *args: threads.append(args))
    report = report_module.Report(tmp_path, False)
    report.extend([Span("mark", "mark", "cpu", 0, "ranges, MainThread", 1.0, 1.0)])
    assert not threads, "a program that marks ranges has not used a GPU"
    report.extend([span])
    ((write_every_second, arguments),) = threads
    monkeypatch.setattr(report_module, "time", SimpleNamespace(sleep=lambda _: sys.exit()))

    def write_once():
        with contextlib.suppress(SystemExit):
            write_every_second(*arguments)

    other = threading.Thread(target=write_once)

    def dump_while_another_thread_writes(contents, file):
        read_reports(tmp_path)  # finds none that is half written
        if contents["ended"]:
            other.start()
            wait_until(lambda: frame_in(other.ident, report_module.Report.write))
        dump(contents, file)

    monkeypatch.setattr(report_module.json, "dump", dump_while_another_thread_writes)
    report.write_last()
    other.join(60)
    assert not other.is_alive()
    report.extend([span])
    assert json.loads((tmp_path / f"{os.getpid()}.json").read_text())["ended"]
    assert len(threads) == 1


@pytest.mark.parametrize(
    ("modelled", "start", "issued"), [("", 2e6, 1.5e6), ("v100", 12e6, 11.5e6)]
)
def test_a_trace_of_a_rank_that_was_killed_as_it_wrote(tmp_path, modelled, start, issued):
    """Its times count from the start of the command, those of a model from its own start."""
    span = ["aten.mm", "kernel", "cuda:1", 0, "compute", 12.0, 13.0, 11.5, 0, None, None]
    path, reports = tmp_path / "trace.json", []
    for pid in 7, 8:
        (tmp_path / f"{pid}.spans").write_text(json.dumps(span) + "\n" + json.dumps(span)[:20])
        reports.append({**REPORT, "modelled": modelled, "pid": pid})
    write_trace(path, reports, tmp_path, 10.0)
    events = json.loads(path.read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["rank 1, host", "rank 1, cuda:1"] * 2
    event, other = [event for event in events if event["ph"] == "X"]
    assert (event["ts"], event["dur"], event["args"]) == (start, 1e6, {"issued_us": issued})
    assert other == {**event, "pid": other["pid"]} != event, "each rank has processes of its own"


def test_a_signal_is_passed_on_to_the_group_of_the_command_only(tmp_path):
    """What has a group of its own, such as a worker that its parent ends, does not get it."""
    code = """
        import os, signal, subprocess, sys, time
        other = "import signal, time; signal.signal(2, lambda *_: open('asked', 'w').close()); "
        other += "print('ready', flush=True); time.sleep(300)"
        other = subprocess.Popen(
            [sys.executable, "-c", other], stdout=subprocess.PIPE, process_group=0
        )
        other.stdout.readline()
        def handler(*_):
            time.sleep(0.5)  # in which the other one would get its own
            other.kill()
            print("asked" if os.path.exists("asked") else "alone", flush=True)
            sys.exit(9)
        signal.signal(signal.SIGINT, handler)
        os.write(1, b"ready\\n")
        time.sleep(300)
    """
    job = started(tmp_path, written(tmp_path, code))
    job.send_signal(signal.SIGINT)
    out, error = job.communicate(timeout=60)
    assert (job.returncode, out) == (9, "alone\n"), error


def test_d2lpar_may_be_imported_before_torch(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    code = "from vgpu import Link; import d2lpar; print(d2lpar.try_gpu(), d2lpar.num_gpus()); "
    code += "d2lpar.ensure_gpus(2)"
    done = vgpu(tmp_path, "run", "--gpus", "3", sys.executable, "-c", code)
    assert done.stdout.startswith("cuda:0 2\n"), done.stderr
    assert "2 virtual GPUs in the place of CUDA's" in done.stdout


def test_this_process_is_as_it_was():
    def state():
        adopts = ctypes.c_int()
        ctypes.CDLL(None).prctl(37, ctypes.byref(adopts), 0, 0, 0)  # PR_GET_CHILD_SUBREAPER
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        return signal.getsignal(signal.SIGINT), mask, adopts.value, os.getcwd()

    before = state()
    run_command(["true"], 1)
    assert state() == before
    run_command(["no such command"], 1)
    assert state() == before


@pytest.mark.slow
def test_a_rank_that_fails_does_not_wait_for_the_others(tmp_path):
    """Its collectives of two groups never begin, and an engine of each is stuck as it ends."""
    program = written(
        tmp_path,
        """
        import os, time, torch, torch.distributed as dist
        rank = 0 if os.fork() else 1
        torch.cuda.set_device(rank)
        store = dist.FileStore("store", 2)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=2)
        other, x = dist.new_group(), torch.ones(4, device="cuda")
        dist.all_reduce(x)
        x.cpu()
        if rank == 1:
            time.sleep(200)
        dist.all_reduce(x, async_op=True)
        dist.all_reduce(torch.ones(4, device="cuda"), group=other, async_op=True)
        raise ValueError("rank 0 has failed")
        """,
    )
    done = vgpu(tmp_path, "run", "--gpus", "2", sys.executable, program)  # the limit is 120 s
    assert done.returncode == 1 and "ValueError: rank 0 has failed" in done.stderr, done.stderr


@pytest.mark.slow
def test_ranks_that_share_a_gpu_raise_as_with_nccl_but_not_with_gloo(tmp_path):
    """The text is NCCL's; gloo copies GPU tensors through the CPU. A barrier guesses the GPU."""
    program = written(
        tmp_path,
        """
        import os, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        x = torch.ones(2, device="cuda")
        dist.all_reduce(x)
        assert x.tolist() == [2, 2]
        group = dist.new_group(backend="nccl")
        dist.barrier(group)
        os.environ["GROUP_RANK"] = os.environ["RANK"]  # of nodes, each with GPUs of its own
        dist.all_reduce(x, group=dist.new_group(backend="nccl"))
        os.environ["GROUP_RANK"] = "0"
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["RANK"]  # the same number, another GPU
        dist.all_reduce(x, group=dist.new_group(backend="nccl"))
        del os.environ["CUDA_VISIBLE_DEVICES"]
        print("so far", flush=True)
        dist.all_reduce(x.to(f"cuda:{dist.get_rank()}"), group=group)
        dist.all_reduce(x, group=dist.new_group(backend="nccl"))
        """,
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = vgpu(tmp_path, "run", "--gpus", "2", *torchrun, program)
    assert done.returncode == 1 and done.stdout.count("so far") == 2
    assert "DistBackendError: Duplicate GPU detected : rank" in done.stderr, done.stderr
    assert "both on CUDA device 0" in done.stderr


def test_a_child_that_may_not_be_signalled_is_left_alone(monkeypatch, capfd):
    """One under sudo, for example: the kernel answers EPERM."""

    def kill(pid, number):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(run, "SECONDS_FOR_CHILDREN", 0.1)
    monkeypatch.setattr(run, "SECONDS_TO_END", 0.1)
    monkeypatch.setattr(run.os, "kill", kill)
    assert run_command(["sh", "-c", "sleep 3 & exit 5"], 1) == 5
    assert "exit code 5" in capfd.readouterr().err
