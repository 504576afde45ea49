"""Interrupts: those that are held back, and those that come anywhere while work is issued."""

import contextlib
import ctypes
import dis
import functools
import gc
import importlib
import itertools
import os
import re
import signal
import sys
import threading
import time
import traceback
import weakref
from _thread import start_new_thread
from pathlib import Path
from types import BuiltinMethodType, CodeType, MethodWrapperType, SimpleNamespace

import fresh
import pytest
import torch
from gates import Gate, in_threads, run_what_can
from IPython.core.ultratb import VerboseTB

import vgpu
from vgpu import virtual_gpus
from vgpu.devices.device import Device
from vgpu.operators import plans
from vgpu.runtime import notebook, registry, scheduler, threads
from vgpu.runtime.interrupts import defer_interrupts, steps
from vgpu.runtime.scheduler import Op
from vgpu.tensors import tensor as tensor_module


@pytest.fixture(autouse=True)
def default_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def test_interrupt_comes_after_the_block_and_is_noted_at_once():
    done = []
    with pytest.raises(KeyboardInterrupt), defer_interrupts(lambda: done.append("noted")):
        interrupt()
        done.append("end")
    assert done == ["noted", "end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_an_interrupted_block_raises_gives_way_to_the_interrupt():
    with pytest.raises(KeyboardInterrupt), defer_interrupts():
        interrupt()
        raise EOFError("a process ended")
    with pytest.raises(EOFError), defer_interrupts():
        raise EOFError("nobody interrupted")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_and_other_handlers_are_left_alone():
    seen = []
    in_threads([lambda: defer_interrupts().__enter__()])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, lambda *_: seen.append("theirs"))
    with defer_interrupts():
        interrupt()
        assert seen == ["theirs"]


@pytest.mark.parametrize("where", ["patch_backward", "patch_data_parallel"])
def test_an_interrupt_waits_until_virtual_gpus_are_set_up(where):
    code = f"""
import os, signal, torch, d2lpar
from vgpu.devices import backend

def interrupting(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGINT)
    return real(*args, **kwargs)

real, backend.{where} = backend.{where}, interrupting
try:
    d2lpar.virtual_gpus(1)
except KeyboardInterrupt:
    print("interrupted")
backend.{where} = real
(device,) = d2lpar.virtual_gpus(1)
x = torch.ones(3, device=device)
print((x + 1).tolist())
"""
    done = fresh.run(code, fresh.SET_UP)
    assert done.stdout.splitlines() == ["interrupted", "[2.0, 2.0, 2.0]"], done.stderr


# -- an interrupt at each place where Python may raise one
#
# The tests below call a function again and again, and interrupt it at its first such place, its
# second, and so on, until a call comes to its end. Python itself finds the places: the signal is
# always pending, so Python calls the handler wherever this version checks for signals, and the
# handler raises KeyboardInterrupt at the one that was asked for. So the regions of the scheduler
# that are "one step" are tested, too: they must hold no such place.

OURS = (os.path.dirname(vgpu.__file__) + os.sep, contextlib.__file__)


class Interrupter:
    """Raises KeyboardInterrupt at place number `number` of what runs in its block.

    Args:
        number: counts the places in the files `ours` and in what is called from there.
        ours: how the names of these files begin.

    Attributes:
        places: file, line and instruction of the places so far.
        where: the one at which it came, or None.
    """

    def __init__(self, number, ours=OURS):
        self.number = number
        self.ours = ours
        self.places = []
        self.where = None
        self.ended = False

    def handle(self, signal_number, frame):
        if self.ended:
            return
        files = [each.f_code.co_filename for each in (frame, frame.f_back) if each]
        if any(file.startswith(self.ours) for file in files):
            instruction = instructions(frame.f_code)[frame.f_lasti]
            self.places.append(f"{os.path.basename(files[0])}:{frame.f_lineno} {instruction}")
            if len(self.places) > self.number:
                self.where = self.places[-1]
                raise KeyboardInterrupt
        # The signal is pending again once this frame is gone, and with it what the reference refers
        # to. The callback is a function in C: in one in Python, Python would check for signals.
        pending = set()
        self.reference = weakref.ref(pending, set_pending)

    def __enter__(self):
        self.before = signal.signal(signal.SIGINT, self.handle)
        interrupt()
        return self

    def __exit__(self, *exception):
        self.ended = True
        self.reference = None  # it would call back after this, should anyone keep a frame
        signal.signal(signal.SIGINT, self.before)


set_pending = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("PyErr_SetInterrupt", ctypes.pythonapi))


@functools.cache
def instructions(code):
    return {each.offset: each.opname for each in dis.get_instructions(code)}


STEP = """
def step(op, stream, waits, lock, hand_over):
    with lock:
        op.previous = previous = stream.last
        stream.last = op
        if stream.waits is None:
            stream.waits = waits
        stream.waits[op.number] = 1.5
        del op.number
        stream.count += 1
        hand_over(op)
"""


def test_an_interrupter_that_has_ended_interrupts_no_more(monkeypatch):
    """Another thread may keep a frame of it for a while: it has all from `sys._current_frames`."""
    frames, find, namespace = [], instructions, {}
    exec(compile("def step(): pass", "<step>", "exec"), namespace)

    def keep_frame(code):
        frames.append(sys._getframe(1))
        return find(code)

    monkeypatch.setitem(globals(), "instructions", keep_frame)
    with Interrupter(sys.maxsize, "<step>") as interrupter:
        namespace["step"]()
    assert len(interrupter.places) == len(frames) == 1  # a signal is not pending meanwhile
    try:
        frames.clear()
        time.sleep(0)
    except KeyboardInterrupt:
        pytest.fail("it interrupted after its end")


def test_no_garbage_is_collected_while_frames_are_read(monkeypatch):
    """A deadlock of Python 3.11 (gh-106883)."""
    monkeypatch.setattr(sys, "_current_frames", gc.isenabled)
    assert gc.isenabled() and not threads.current_frames() and gc.isenabled()


@pytest.mark.parametrize("before", [0, 100], ids=["cold", "specialized"])
def test_stores_and_the_call_after_them_are_one_step(before):
    """This version of Python raises an interrupt where interrupts.py says, and nowhere else."""
    namespace = {}
    exec(compile(STEP, "<step>", "exec"), namespace)

    def call():
        op, stream = SimpleNamespace(number=3), SimpleNamespace(last=None, waits=None, count=0)
        namespace["step"](op, stream, {}, threading.RLock(), [].append)

    for _ in range(before):
        call()
    with Interrupter(sys.maxsize, "<step>") as counter:
        call()
    lines = [line.strip() for line in STEP.splitlines()]
    seen = [lines[int(place.split(":")[1].split()[0]) - 1] for place in counter.places]
    assert seen == [lines[1], "hand_over(op)", "with lock:"]


# Instructions of CPython 3.11 to 3.13 at which no interrupt comes, and which make no container that
# garbage collection tracks. Not among them are the jumps backwards, RESUME and all kinds of CALL.
QUIET = re.compile(
    "(LOAD|STORE|DELETE|COPY|SWAP|POP_TOP|POP_JUMP_IF|POP_JUMP_FORWARD|JUMP_FORWARD|TO_BOOL|PUSH_NULL"
    "|BINARY_OP|BINARY_SUBSCR|UNARY|COMPARE_OP|IS_OP|CONTAINS_OP|UNPACK_SEQUENCE|RETURN|KW_NAMES"
    "|EXTENDED_ARG|CACHE|NOP)"
)


# The functions in C with which a step ends
LAST_CALLS = {
    "Memory._empty": lambda: registry.devices[0].memory.add_freed,
    "_set_all": lambda: tensor_module.original_set_data,
    "_set_contents": lambda: tensor_module.original_set_data,
}


def torn(function, ends_in_c=False):
    """Return the instructions of a function at which an interrupt may tear it: a list of names.

    Not the one at its beginning; nor, if a function in C ends it, the call of that.
    """
    names = [each.opname for each in dis.get_instructions(function) if each.opname != "CACHE"]
    names = names[names.index("RESUME") + 1 :]
    if ends_in_c:
        while names[-1] in ("RETURN_VALUE", "RETURN_CONST", "LOAD_CONST", "POP_TOP"):
            names.pop()
        assert names.pop() == "CALL"
        if names[-1] == "PRECALL":  # in 3.11, a part of the call
            names.pop()
    return [name for name in names if not QUIET.match(name)]


def test_no_interrupt_tears_a_function_that_is_one_step():
    virtual_gpus(1)
    declared = 0
    for path in sorted(Path(vgpu.__file__).parent.rglob("*.py")):
        number = len(re.findall(r"^ *@one_step$", path.read_text(), re.MULTILINE))
        if number:
            parts = path.relative_to(Path(vgpu.__file__).parents[1]).with_suffix("").parts
            importlib.import_module(".".join(parts))
            declared += number
    assert len(steps) == declared >= 8
    assert {each.__qualname__ for each in steps} >= set(LAST_CALLS)
    for step in steps:
        last = LAST_CALLS.get(step.__qualname__)
        assert not torn(step, last is not None), step.__qualname__
        assert last is None or type(last()) in (BuiltinMethodType, MethodWrapperType)


def test_the_places_at_which_a_step_may_be_torn_are_found():
    def stores(self, a, b):
        if not a.x:
            self.x, self.y = b.x, self.y[a]
        del self.z[b.x]
        self.count += 1

    def call(self, a):
        self.x = a
        self.append(a)

    def returned_call(self, a):
        return self.append(a)

    def two_calls(self, a):
        self.append(a)
        self.append(a)

    def call_of_a_call(self, a):
        self.append(len(a))

    def loop(self, a):
        while a.x:
            a.x -= 1

    def container(self, a):
        self.x = (a, self)

    def block(self, a):
        with a:
            self.x = 1

    assert torn(stores) == torn(call, True) == torn(returned_call, True) == []
    assert torn(two_calls, True) and torn(call_of_a_call, True)
    for function in (call, returned_call, loop, container, block):
        assert torn(function), function.__name__


def test_no_interrupt_leaves_a_block_with_a_lock_at_a_jump():
    """From Python 3.12 on no handler covers the jump back from an `if` that ends a loop."""
    found = set()
    for path in Path(vgpu.__file__).parent.rglob("*.py"):
        codes = [compile(path.read_text(), path, "exec")]
        for code in codes:
            codes += [each for each in code.co_consts if isinstance(each, CodeType)]
            if any(uncovered_jumps(code)):
                found.add(code.co_name)
    threads = {"complete", "_run", "_welcome", "_serve", "_look_after", "_answer"}
    # No interrupt reaches these threads; ranks ignore interrupts, and `vgpu run` handles them.
    assert found <= threads | {"report", "wait"}


def uncovered_jumps(code):
    """Yield the jumps back into a `try` or `with` block that its handler does not cover."""
    bytecode = dis.Bytecode(code)

    def handler(place):
        for entry in bytecode.exception_entries:
            if entry.start <= place < entry.end:
                if instructions(code)[entry.target] == "PUSH_EXC_INFO":
                    return entry.target
                return handler(entry.target)  # that of a comprehension or a generator: no block

    for each in bytecode:
        if "JUMP_BACKWARD" in each.opname and handler(each.offset) is None:
            if handler(each.argval) is not None:
                yield each


@pytest.fixture(scope="module")
def frozen():
    """What there is before an interrupt, so that the collections after it take a moment only."""
    virtual_gpus(8)
    gc.collect()
    gc.freeze()


@pytest.fixture
def devices(frozen):
    """The last two of eight virtual GPUs: should they hang, the tests of other files do not."""
    yield virtual_gpus(8)[6:]
    virtual_gpus(2)


def give_up(*_):
    pytest.fail("it hangs")


def interrupted_everywhere(call, every=1, at_least=4, prepare=lambda: None):
    """Prepare and call a function again and again, interrupted at one place after the other.

    Args:
        every: of how many places one is tried.
        at_least: how many must be tried.

    Yields:
        where the interrupt came, and after the last place None. The test fails if a round hangs.
    """
    count, where = 0, ""
    before = signal.signal(signal.SIGALRM, give_up)
    try:
        while where is not None:
            signal.alarm(30)
            prepare()
            where = interrupted(call, every * count)
            yield where
            count += 1
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert count > at_least + 1, "hardly anything was interrupted"


def of_ones(name, function):
    """Return a case of this name: a call with a tensor of ones on a device, and another device."""

    def case(a, b):
        x = torch.ones(2, 3, device=a)
        return lambda: function(x, b)

    case.__name__ = name
    return case


operator = of_ones("operator", lambda x, b: x + 1)
new_operator = of_ones("new_operator", lambda x, b: (plans.plans_by_key.clear(), x + 1))
operators_with_lists = of_ones(
    "operators_with_lists",
    lambda x, b: (torch.cat([x, x]), x.topk(2), x.split(1), torch._foreach_add([x, x], 1)),
)
views = of_ones("views", lambda x, b: (x.t()[1], x.view(-1), x.detach(), x.view(torch.int32)))
waiting_operators = of_ones(
    "waiting_operators", lambda x, b: (x.nonzero(), x[0, 0].item(), x[x > 0])
)
allocation = of_ones("allocation", lambda x, b: torch.empty(1000, device=x.device))
copy_to_the_cpu = of_ones("copy_to_the_cpu", lambda x, b: (x.cpu(), x.to("cpu", non_blocking=True)))
copy_between_devices = of_ones("copy_between_devices", lambda x, b: x.to(b))


def random_numbers(a, b):
    x = torch.ones(2, 3, device=a)
    generator = torch.Generator(device=a)

    def call():
        generator.manual_seed(3)
        return x.normal_(generator=generator), x.uniform_(), generator.get_state()

    return call


def changes_of_layout(a, b):
    x = torch.ones(2, 3, device=a)

    def call():
        y = x + 1
        y.t_()
        y.resize_(10)
        y.data = x * 2
        torch.add(x, 1, out=(out := torch.empty(0, device=a)))
        return y, out

    return call


def data(a, b):
    x, small, large = (torch.full((n,), n, device=a) for n in (2, 2, 300))

    def check():
        assert x.tolist() == [len(x)] * len(x)
        assert x.untyped_storage().nbytes() == x.nbytes, "half of it was replaced"

    def call():
        x.data = large

    call.check = check
    call.prepare = lambda: setattr(x, "data", small)
    return call


def allocation_of_what_a_stream_holds(a, b):
    registry.find(a).memory.set_limit(registry.find(a).memory.allocated + 3000)
    side = torch.vgpu.Stream(a)

    def call():
        with held(side):
            x = torch.empty(500, device=a)
            x.record_stream(side)
            del x
            return torch.empty(500, device=a)

    return call


@contextlib.contextmanager
def held(stream):
    """Hold a stream until a thread waits for it, at the latest at the end of the block.

    An interrupt may come anywhere in this, too. No thread looks at the frames of this one, as gates
    do: while it has one of `Interrupter.handle`, the signal is not pending.
    """
    end = threading.Event()

    def work(op):
        while not end.is_set() and not op.waiters:
            time.sleep(1e-4)

    device = stream._stream.device
    try:
        stream._stream.issue(Op("held", "kernel", device.compute, work))
        yield
    finally:
        end.set()


def copy_to_a_device(a, b):
    x = torch.ones(3)
    return lambda: (x.to(a), x.pin_memory().to(a, non_blocking=True))


def events(a, b):
    first, second = torch.vgpu.Stream(a), torch.vgpu.Stream(b)
    event = torch.vgpu.Event()

    def call():
        with held(first):
            event.record(first)
            second.wait_event(event)
            torch.vgpu.current_stream(b).wait_stream(second)
            with torch.vgpu.device(b):
                torch.vgpu._sleep(0)
            event.synchronize()

    return call


def streams(a, b):
    first = torch.vgpu.Stream(a)

    def call():
        with torch.vgpu.stream(torch.vgpu.Stream(b)), first:
            pass

    return call


def backward(a, b):
    x = torch.ones(3, device=a, requires_grad=True)
    sides = torch.vgpu.Stream(a), torch.vgpu.Stream(b)

    def call():
        with torch.vgpu.stream(sides[0]):
            y = x * 2
        with torch.vgpu.stream(sides[1]):
            sides[1].wait_stream(sides[0])
            z = y.to(b) * 3
            z.sum().backward()

    call.prepare = lambda: setattr(x, "grad", None)
    return call


@functools.cache
def hear_of_new_threads():
    """Have Python call a function of ours each time before a thread starts, from now on."""
    sys.addaudithook(lambda event, arguments: None)


def first_op_of_an_engine(a, b):
    hear_of_new_threads()
    devices = []

    def prepare():
        for device in devices:
            device.compute.end()
            device.compute.join()
        devices[:] = [Device(torch.device("vgpu", 7), 1, 1000, None, None)]

    def call():
        (device,) = devices
        stream = device.default_stream
        try:
            stream.issue(Op("nothing", "kernel", device.compute, lambda op: None))
        finally:
            for op in stream.tail():
                scheduler.wait(op, device.torch_device)

    call.prepare = prepare
    return call


CASES = [
    operator, new_operator, operators_with_lists, views, waiting_operators, random_numbers,
    changes_of_layout, data, allocation, allocation_of_what_a_stream_holds, copy_to_a_device,
    copy_to_the_cpu, copy_between_devices, events, streams, backward, first_op_of_an_engine,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[case.__name__ for case in CASES])
def test_an_interrupt_anywhere_does_no_harm(devices, case):
    assert [*harmless_interrupts(case(*devices), devices)]


def harmless_interrupts(call, devices, every=1):
    """Yield what `interrupted_everywhere` does, once all is as without the interrupt."""
    prepare, check = (getattr(call, name, lambda: None) for name in ("prepare", "check"))
    for _ in range(2):  # the first lets torch import what it does
        prepare()
        call()
        settle(devices)
        prepare()
        before = figures(devices)
        check_answers(devices)
    for where in interrupted_everywhere(call, every, prepare=lambda: (prepare(), settle(devices))):
        settle(devices)
        check()
        prepare()
        assert quick_figures(devices) == before or figures(devices) == before, where
        check_answers(devices, where)
        yield where


def interrupted(call, number):
    """Call a function and interrupt it at place `number`; return where that is, or None."""
    came = False
    with Interrupter(number) as interrupter:
        try:
            call()
        except KeyboardInterrupt:
            came = True
    where = interrupter.where
    assert came == (where is not None), f"the interrupt at {where} was lost"
    return where


def test_an_interrupt_while_a_block_ends_does_not_keep_it_entered(devices):
    side, where = torch.vgpu.Stream(devices[1]), ""
    for number in itertools.count(1):  # 0 is the beginning of `leave`
        side.__enter__()
        where = interrupted(threads.leave, number)
        assert not threads.thread.entered, where
        assert torch.vgpu.current_stream(devices[1]) != side and torch.vgpu.current_device() == 0
        if where is None:
            break
    assert number > 4


def settle(devices):
    """Wait for the devices; end what an interrupted `with stream` block left entered."""
    threads.leave_all()
    torch.vgpu.set_device(0)
    for device in devices:
        torch.vgpu.synchronize(device)


def figures(devices):
    """Return what an interrupted call must leave as it was."""
    gc.collect()
    return quick_figures(devices)


def quick_figures(devices):
    """Return what `figures` does, without a collection, which takes most of the time."""
    found = []
    for device in devices:
        memory = registry.find(device).memory
        memory.collect()
        found.append((memory.allocated, memory.held, memory.recorded, memory.num_blocks))
        found.append(torch.vgpu.current_stream(device) == torch.vgpu.default_stream(device))
    return found, len(threads.thread.entered), torch.is_grad_enabled()


def check_answers(devices, where=None):
    """In this thread and in another, which notices a lock that this one has left locked."""
    answers = []

    def ask():
        a, b = devices
        x = torch.arange(3.0, device=a)
        side = torch.vgpu.Stream(b)
        with torch.vgpu.stream(side):
            y = (x * 2).to(b) + 1
        torch.vgpu.current_stream(b).wait_stream(side)
        answers.append((y + 1).tolist())

    ask()
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(10)
    assert answers == [[2, 4, 6]] * 2, where


def test_an_error_in_backward_is_that_error_in_every_mode():
    for mode in (torch.no_grad, torch.inference_mode):
        (device,) = virtual_gpus(1)
        y = torch.ones(3, device=device, requires_grad=True) * 2
        y.register_hook(lambda grad: 1 / 0)
        loss = y.sum()
        with mode(), pytest.raises(ZeroDivisionError):
            loss.backward()


def test_data_is_set_in_one_step_under_a_default_device():
    """`torch.set_default_device` brings every call of torch back to Python, but not this one."""
    (device,) = virtual_gpus(1)
    x, y = torch.ones(3, device=device), torch.zeros(2, 2, device=device)
    seen = []

    class Seeing(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Seeing():
        x.data = y
    assert x.shape == (2, 2) and x.tolist() == [[0, 0], [0, 0]]
    assert torch.Tensor.data.__set__ not in seen


@pytest.mark.parametrize("where", ["vgpu:0", "cpu"])
def test_a_time_out_right_behind_the_step_that_sets_data_leaves_it_done(monkeypatch, where):
    devices = virtual_gpus(1)
    x, new = torch.ones(3, device=devices[0]), torch.full((2, 2), 7.0, device=where)
    set_data = tensor_module.original_set_data

    def then_time_out(*arguments):
        set_data(*arguments)
        raise TimeoutError  # as the handler of a signal may

    monkeypatch.setattr(tensor_module, "original_set_data", then_time_out)
    with pytest.raises(TimeoutError):
        x.data = new
    monkeypatch.undo()
    assert x.device == new.device and x.tolist() == [[7, 7], [7, 7]]
    assert (x + 1).sum().item() == 32


# -- errors in a notebook


@pytest.mark.parametrize("cause", [False, True])
def test_no_frames_of_virtual_gpus_show_in_an_error_or_in_that_behind_it(cause):
    a, b = (torch.ones(3, device=device) for device in virtual_gpus(2))
    try:
        try:
            a + b
        except RuntimeError as error:
            first = error
            if cause:
                raise ValueError("second") from error
            b + a
    except (RuntimeError, ValueError) as error:
        second = error
    assert any(map(is_ours, files_of(first.__traceback__)))
    notebook.hide_frames(second)
    assert second.__context__ is first
    for error in (first, second):
        files = files_of(error.__traceback__)
        assert files[0] == __file__ and not any(map(is_ours, files))


def test_ipython_shows_an_error_where_code_has_no_line():
    """Python 3.11 raises some interrupts there, and IPython's own formatting fails then."""
    stopped.__code__ = stopped.__code__.replace(co_linetable=b"")
    with pytest.raises(KeyboardInterrupt) as caught:
        stopped()
    assert [line for _, line in traceback.walk_tb(caught.tb)][-1] is None
    notebook.hide_frames(caught.value)
    error = caught.value
    shown = VerboseTB("nocolor").structured_traceback(type(error), error, error.__traceback__)
    assert f"{stopped.__code__.co_firstlineno}, in stopped()" in "\n".join(shown)


def stopped():
    raise KeyboardInterrupt


def files_of(tb):
    return [frame.f_code.co_filename for frame, _ in traceback.walk_tb(tb)]


def is_ours(path):
    return path.startswith(os.path.dirname(vgpu.__file__))


class Shell:
    """What `notebook` uses of an IPython shell."""

    def __init__(self, custom_exceptions=()):
        self.custom_exceptions = custom_exceptions
        self.before_cell, self.after_cell, self.shown = [], [], []
        self.events = self

    def register(self, event, function):
        {"pre_run_cell": self.before_cell, "post_run_cell": self.after_cell}[event].append(function)

    def end_cell(self, error):
        for function in self.after_cell:
            function(SimpleNamespace(error_in_exec=error))

    def set_custom_exc(self, kinds, handler):
        self.custom_exceptions, self.handler = kinds, handler

    def showsyntaxerror(self):
        self.shown.append("syntax")

    def showtraceback(self, error, tb_offset, running_compiled_code):
        self.shown.append(error)


@pytest.fixture
def adapted(monkeypatch):
    """Return a function of a shell that adapts virtual GPUs to it."""
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    monkeypatch.setattr(scheduler, "at_long_wait", None)
    monkeypatch.setattr(notebook, "_launched", {})

    def adapt(shell):
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
        notebook.adapt_to_notebook()
        return shell

    return adapt


def test_a_cell_starts_on_the_stream_from_before_the_one_that_was_stopped(adapted):
    (device,) = virtual_gpus(1)
    shell, before = adapted(Shell()), torch.vgpu.current_stream(device)
    torch.vgpu.Stream(device).__enter__()
    for function in shell.before_cell:
        function(None)
    assert torch.vgpu.current_stream(device) == before and not threads.thread.entered


@pytest.fixture
def waiting(monkeypatch):
    """Return a function that waits for a virtual GPU until the host has looked ten times how it is.

    A gate holds the device back until then; `launched` operators are issued behind it, and then the
    cell ends with `error`.
    """
    monkeypatch.setattr(scheduler, "LIVENESS_SECONDS", 0.001)
    look = scheduler.check_engines_alive

    def wait(shell, device, launched, error):
        looks = iter(range(10))
        with Gate(device) as gate:
            for _ in range(launched):
                torch.zeros(1, device=device)
            shell.end_cell(error)
            with torch.vgpu.stream(torch.vgpu.Stream(device)):  # what comes after does not count
                torch.ones(1).pin_memory().to(device, non_blocking=True)
            run_what_can()
            with monkeypatch.context() as patch:
                patch.setattr(
                    scheduler, "check_engines_alive",
                    lambda: gate.let_go() if next(looks, None) is None else look(),
                )  # fmt: skip
                torch.vgpu.synchronize(device)

    return wait


def test_a_cell_that_waits_for_a_stopped_one_says_so_once(adapted, waiting, capsys):
    shell, (first, second) = adapted(Shell()), virtual_gpus(2)
    behind = "launched before the stop\n"
    waiting(shell, second, 3, KeyboardInterrupt())  # the gate is an operator, too
    assert capsys.readouterr().out == f"vgpu:1 is still working off 4 operators {behind}"
    waiting(shell, second, 3, None)
    assert capsys.readouterr().out == ""
    with Gate(first) as gate:
        waiting(shell, second, 0, KeyboardInterrupt())
        told = capsys.readouterr().out
        assert told == f"vgpu:0, vgpu:1 are still working off 2 operators {behind}"
        waiting(shell, second, 0, None)  # vgpu:0 still is
        assert capsys.readouterr().out == ""
        gate.let_go()
    torch.vgpu.synchronize(first)  # or the next stop would leave the gate behind
    shell.end_cell(KeyboardInterrupt())
    waiting(shell, second, 0, ValueError())  # the gate came after the stop
    assert capsys.readouterr().out == ""


def test_what_a_stopped_cell_has_launched_on_a_modelled_gpu_is_counted(adapted, capsys):
    shell, (device,) = adapted(Shell()), virtual_gpus(1, model="v100")
    torch.zeros(1, device=device)
    torch.vgpu.synchronize(device)
    shell.end_cell(KeyboardInterrupt())
    scheduler.at_long_wait()
    assert capsys.readouterr().out == ""
    torch.zeros(1, device=device)
    shell.end_cell(KeyboardInterrupt())
    scheduler.at_long_wait()
    said = "vgpu:0 is still working off 1 operator launched before the stop\n"
    assert capsys.readouterr().out == said
    virtual_gpus(2)


def test_a_notebook_raises_an_interrupt_that_came_in_a_destructor(adapted, monkeypatch):
    class Dropped:
        def __del__(self):
            interrupt()

    def start(function, arguments):  # and let it run before the hook returns
        start_new_thread(function, arguments)
        time.sleep(0.05)

    others = []
    monkeypatch.setattr(sys, "unraisablehook", others.append)
    monkeypatch.setattr(notebook, "start_new_thread", start)
    adapted(Shell())
    with pytest.raises(KeyboardInterrupt):
        Dropped()
        for _ in range(1000):
            time.sleep(0.01)
    Dropped.__del__ = lambda self: 1 / 0
    Dropped()
    assert [each.exc_type for each in others] == [ZeroDivisionError]


def test_a_notebook_shows_an_error_without_the_frames_of_virtual_gpus(adapted):
    assert adapted(Shell((ValueError,))).custom_exceptions == (ValueError,), "it has a handler"
    shell = adapted(Shell())
    a, b = (torch.ones(3, device=device) for device in virtual_gpus(2))
    with pytest.raises(RuntimeError) as caught:
        a + b
    shell.handler(shell, caught.type, caught.value, caught.tb)
    [(kind, error, shown)] = shell.shown
    assert (kind, error) == (RuntimeError, caught.value)
    assert files_of(shown) and not any(map(is_ours, files_of(shown)))
    shell.handler(shell, SyntaxError, SyntaxError("no"), None)
    assert shell.shown[1:] == ["syntax"]


def test_an_interrupt_after_a_bit_has_changed_puts_it_back(monkeypatch):
    """`x.data = y.conj()` sets a bit of `x` before it takes the values."""
    (device,) = virtual_gpus(1)
    x, y = (torch.tensor([value], device=device) for value in (1 + 2j, 3 + 4j))
    set_neg = tensor_module.set_neg

    def interrupted(tensor, neg):
        set_neg(tensor, neg)
        monkeypatch.setattr(tensor_module, "set_neg", set_neg)
        interrupt()

    monkeypatch.setattr(tensor_module, "set_neg", interrupted)
    with pytest.raises(KeyboardInterrupt):
        x.data = y.conj()
    assert not x.is_conj() and x.tolist() == [1 + 2j]
    x.data = y.conj()
    assert x.is_conj() and x.tolist() == [3 - 4j]
