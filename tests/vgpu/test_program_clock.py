"""What `time.time`, `timeit` and their kin tell a program while GPUs are modelled."""

import importlib
import logging
import os
import pickle
import signal
import sys
import time
import timeit
from types import ModuleType

import pytest
import torch
from gates import error_of, in_threads
from modelling import fixed_gpus
from programs import vgpu, written

from vgpu import clock, virtual_gpus
from vgpu.modelled import program_clock
from vgpu.modelled.program_clock import SECONDS_OF_A_READING

SECONDS = ("time", "perf_counter", "process_time")
NANOSECONDS = tuple(f"{name}_ns" for name in SECONDS)
READING = pytest.approx(SECONDS_OF_A_READING, abs=2.4e-7)  # as exact as `time.time` is
REAL = {name: getattr(time, name) for name in (*SECONDS, *NANOSECONDS, "sleep", "monotonic")}


@pytest.fixture
def device():
    """A modelled GPU whose kernels take 2 s each, and nothing else takes any time."""
    program_clock.enable()
    (device,) = fixed_gpus(1, seconds=2.0)
    yield device
    program_clock.enabled = False
    virtual_gpus(1)


def run_a_kernel(device):
    torch.ones(3, device=device).add_(1)  # two kernels
    torch.vgpu.synchronize(device)


@pytest.mark.parametrize("name", SECONDS + NANOSECONDS)
def test_a_clock_contains_the_kernels_that_the_host_has_waited_for(device, name):
    read, units = getattr(time, name), 1e9 if name in NANOSECONDS else 1.0
    before = read()
    torch.ones(3, device=device).add_(1)  # issued, not waited for
    assert (read() - before) / units == READING
    torch.vgpu.synchronize(device)
    # The second reading took place beside the kernels.
    assert (read() - before) / units == pytest.approx(4 + SECONDS_OF_A_READING, abs=2.4e-7)


def test_the_date_is_todays_and_what_stays_real(device, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(time.time, "real", lambda: 2**33)  # in the year 2242
        fixed_gpus(1)  # the program's clock begins anew, at a whole second and a fraction
        assert 2**33 <= time.time() < 2**33 + 3
    assert time.monotonic is REAL["monotonic"]
    time.time()
    run_a_kernel(device)
    before = REAL["time"]()
    record = logging.LogRecord("", 0, "", 0, "", (), None)  # Ray has a factory of its own
    assert before <= record.created <= REAL["time"](), "logs have real stamps"
    for module in ("torch.distributed.elastic.timer", "vgpu.cuda.report", "selectors", "d2lpar"):
        names, before = {"__name__": module, "time": time}, REAL["perf_counter"]()
        exec("now = time.perf_counter()", names)
        assert before <= names["now"] <= REAL["perf_counter"]()


def test_timeit_and_torchs_timer(device):
    names = {"device": device, "run_a_kernel": run_a_kernel}
    call = "run_a_kernel(device)"
    each = pytest.approx(4.0, abs=1e-5)
    assert [t / 3 for t in timeit.repeat(call, globals=names, repeat=2, number=3)] == [each] * 2
    assert timeit.timeit(call, globals=names, number=1) == each
    assert timeit.Timer(call, globals=names).timeit(1) == each
    start = timeit.default_timer()
    run_a_kernel(device)
    assert timeit.default_timer() - start == each
    # anew, as torch 2.11 looks for an accelerator when the module is imported
    benchmark = importlib.reload(importlib.import_module("torch.utils.benchmark.utils.timer"))
    timer = benchmark.Timer("torch.ones(3, device=device).add_(1)", globals=names)
    assert timer.timeit(2).mean == each


def test_modules_that_had_imported_a_clock_before_and_later():
    early, late = ModuleType("early"), ModuleType("late")
    exec("from time import time, sleep\nfrom timeit import default_timer", vars(early))
    sys.modules.update(early=early, late=late)
    try:
        program_clock.enable()
        (device,) = fixed_gpus(1, seconds=2.0)
        exec("from time import time", vars(late))
        starts = early.time(), late.time(), early.default_timer()
        run_a_kernel(device)
        ends = early.time(), late.time(), early.default_timer()
        four = pytest.approx(4, abs=1e-5)
        assert [end - start for start, end in zip(starts, ends, strict=True)] == [four] * 3
        program_clock.enabled = False
        virtual_gpus(1)
        assert (early.time, early.sleep) == (REAL["time"], REAL["sleep"])
        before = REAL["time"]()
        assert before <= late.time() <= REAL["time"]()
    finally:
        del sys.modules["early"], sys.modules["late"]
        program_clock.enabled = False
        virtual_gpus(1)


def test_a_module_of_the_program_that_is_called_like_one_of_pythons(device, monkeypatch):
    theirs = ModuleType("turtle")  # nobody has imported Python's
    theirs.__file__ = os.path.join("project", "turtle.py")
    monkeypatch.setitem(sys.modules, "turtle", theirs)
    exec("import time\ndef read(): return time.perf_counter()", vars(theirs))
    start = theirs.read()
    run_a_kernel(device)
    assert theirs.read() - start == pytest.approx(4, abs=1e-5)


def test_the_wall_clock_puts_everything_back(device):
    functions = timeit.Timer.__init__, timeit.timeit, timeit.repeat
    assert time.time is not REAL["time"]
    time.perf_counter_ns = 5  # a program's own stays
    virtual_gpus(1)
    own, time.perf_counter_ns = time.perf_counter_ns, REAL["perf_counter_ns"]
    assert own == 5
    assert all(getattr(time, name) is real for name, real in REAL.items())
    assert timeit.default_timer is REAL["perf_counter"]
    assert all(REAL["perf_counter"] in function.__defaults__ for function in functions)
    assert timeit.timeit.__defaults__ == ("pass", "pass", REAL["perf_counter"], 1000000, None)
    (device,) = fixed_gpus(1, seconds=2.0)  # and again
    start = time.perf_counter()
    run_a_kernel(device)
    assert time.perf_counter() - start == pytest.approx(4, abs=1e-5)
    program_clock.enabled = False  # where nobody has asked nothing changes
    fixed_gpus(1)
    assert all(getattr(time, name) is real for name, real in REAL.items())


def test_a_loop_that_polls_ends(device):
    end = time.time() + 1e-3
    readings = next((n for n in range(10_000) if time.time() >= end), None)
    assert readings == pytest.approx(1000, abs=2)


@pytest.fixture
def waits(monkeypatch):
    """A function that waits for ten real seconds, and no real time passes otherwise."""
    real = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: real[0])
    return lambda: real.__setitem__(0, real[0] + 10.0)


def test_a_loop_that_waits_otherwise_than_by_sleep_ends(device, waits):
    end, model = time.time() + 60, clock()
    readings = next((n for n in range(1, 100) if waits() or time.time() >= end), None)
    assert readings == program_clock.WAITS + 6, "then six times ten seconds"
    assert clock() - model < 1e-3, "and the GPUs' clock has none of it"


def test_waits_with_work_in_between_take_no_time(device, waits):
    start = time.time()
    for _ in range(100):
        waits()  # for the data of a step, say
        time.time()
        run_a_kernel(device)
    assert time.time() - start == pytest.approx(400, abs=1e-3)


def test_another_thread_that_waits_is_told_the_time_of_the_model(device, waits):
    told = []

    def watch():
        for _ in range(100):
            waits()
            told.append(time.time())

    start = time.time()
    for _ in range(program_clock.WAITS + 1):
        waits()
        time.time()
    in_threads([watch])
    assert len(told) == 100
    assert told[-1] - told[0] < 1e-3
    assert told[0] - start == pytest.approx(10, abs=1e-3), "not before the thread began"


@pytest.mark.parametrize("name", SECONDS + NANOSECONDS)
def test_a_program_may_have_read_the_clock_before_torch_was_imported(device, monkeypatch, name):
    read, second = getattr(time, name), 10**9 if name in NANOSECONDS else 1
    with monkeypatch.context() as patch:
        # A quarter past a whole second, as if torch were imported at once.
        patch.setattr(read, "real", lambda: 7 * second + 5 * second / 4)
        read.start()
        assert read() >= read.real()


@pytest.mark.parametrize("name", SECONDS + NANOSECONDS)
def test_no_two_ranks_take_the_same_name_or_seed_from_the_clock(device, monkeypatch, name):
    """And whatever the process, what passes between two readings is the same."""
    read, told = getattr(time, name), []
    for pid in (1000, 1001, 2**22 - 1):
        monkeypatch.setattr("os.getpid", lambda pid=pid: pid)
        fixed_gpus(1)
        read.start()
        told.append([read() for _ in range(5)])
    assert len({readings[0] for readings in told}) == 3
    assert isinstance(told[0][0], int) == (name in NANOSECONDS)
    passed = {tuple(b - readings[0] for b in readings) for readings in told}
    assert len(passed) == 1


def test_a_sleep_takes_its_time_on_both_clocks(device, monkeypatch):
    slept = []
    with monkeypatch.context() as patch:  # `stop` puts back what is real
        patch.setattr(time.sleep, "real", slept.append)
        start = time.perf_counter()
        time.sleep(3)
        assert time.perf_counter() - start == pytest.approx(3, abs=1e-5)
        exec("time.sleep(5)", {"__name__": "concurrent.futures", "time": time})
        assert time.perf_counter() - start == pytest.approx(3, abs=1e-5)
    assert slept == [3, 5]


def test_a_clock_is_as_good_as_the_function_that_it_stands_for(device):
    class Timed:
        read = time.perf_counter  # a function of Python would become a method

    assert Timed().read() > 0
    assert pickle.loads(pickle.dumps(time.time)) is time.time
    with pytest.raises(TypeError):
        time.time(1)


def test_each_thread_reads_its_own_clock(device):
    """It begins when the thread is started, and joining the thread waits for it."""
    read, begun = [], time.perf_counter()

    def work():
        read.append(time.perf_counter() - begun)
        run_a_kernel(device)
        read.append(time.perf_counter() - begun)

    run_a_kernel(device)
    in_threads([work])
    assert read == [pytest.approx(4, abs=1e-5), pytest.approx(8, abs=1e-5)]
    assert time.perf_counter() - begun == pytest.approx(8, abs=1e-5)


def test_a_fork_reads_the_real_clock(device):
    run_a_kernel(device)
    before, child = REAL["perf_counter"](), os.fork()
    if child == 0:
        signal.alarm(30)  # what a thread of the parent would answer is refused at once
        real = before <= time.perf_counter() <= REAL["perf_counter"]()
        os._exit(0 if real and "forked" in str(error_of(torch.vgpu.memory_reserved)) else 7)
    assert os.waitpid(child, 0)[1] == 0


def test_differences_do_not_depend_on_when_the_process_began(device, monkeypatch):
    """A sum between two floating-point numbers is rounded to the even one of them."""
    monkeypatch.setattr(program_clock, "SECONDS_OF_A_READING", 0.0)
    read, found = time.time, set()
    for fraction in (0.0, 2**-22, 3 * 2**-22):
        (device,) = fixed_gpus(1, seconds=2**-23)  # half of what such numbers differ by
        with monkeypatch.context() as patch:
            patch.setattr(read, "real", lambda: 1_764_000_000 + fraction)  # noqa: B023
            read.start()
            before = read()
            torch.ones(3, device=device)
            torch.vgpu.synchronize(device)
            found.add(read() - before)
    assert len(found) == 1


PROGRAM = """
    import time, timeit
    from time import perf_counter
    import torch, tqdm

    def run():
        torch.cuda._sleep(1_500_000_000)  # cycles of a nanosecond
        torch.cuda.synchronize()

    start, begun = time.time(), perf_counter()
    run()
    print(time.time() - start, perf_counter() - begun, timeit.repeat(run, repeat=2, number=2))
    bar = tqdm.tqdm(total=3)
    for _ in range(3):
        run()
        bar.update()
    print(f"{bar.format_dict['elapsed']:.3f}")
    bar.close()  # CPython 3.13.0 crashes in the __del__ of one that is open, without us, too
"""


def test_a_program_reads_the_same_in_every_run(tmp_path):
    run = "run", "--model", "v100"
    program = sys.executable, written(tmp_path, PROGRAM)
    first, second = (vgpu(tmp_path, *run, *program) for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    once, again, *repeated, tqdms = first.stdout.replace("[", "").replace("]", "").split()
    assert [float(once), float(again)] == [pytest.approx(1.5, abs=1e-4)] * 2
    assert [float(each.strip(",")) for each in repeated] == [pytest.approx(3, abs=1e-4)] * 2
    assert float(tqdms) == pytest.approx(4.5, abs=1e-3)
    assert "modelled; the program's clock: model" in first.stderr.splitlines()[-5]


def test_a_program_reads_the_wall_clock_if_asked(tmp_path):
    code = "import time, timeit, torch; torch.ones(3, device='cuda'); "
    code += "print(time.time, time.sleep, timeit.default_timer, timeit.repeat.__defaults__[2])"
    program = sys.executable, "-c", code
    done = vgpu(tmp_path, "run", "--model", "v100", "--clock", "wall", *program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("<built-in function") == 4
    assert "modelled; the program's clock: wall" in done.stderr
