"""What rests on the layout of torch's C++ tables: wrong numbers, denied pages, and the way back.

A wrong place may crash, so each test has a process of its own.
"""

import platform
import re
import sys
import warnings

import fresh
import pytest

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"),
    reason="machine code is known for Linux on x86-64 and 64-bit ARM",
)

BEGIN = """
import ctypes, mmap, os, platform, signal, warnings
import torch
import vgpu
from vgpu.private import virtual_tables

def tables():
    "Return the addresses of the tables of methods that torch uses."
    guard = virtual_tables._guards()[virtual_tables.PRIVATE_USE_1]
    objects = guard, *map(virtual_tables._hooks, ("PrivateUse1", "CUDA"))
    return [ctypes.c_void_p.from_address(object).value for object in objects]

def patch():
    virtual_tables._patch_guard_and_hooks()
    virtual_tables._mark_pinned()

def work(device):
    x = torch.ones(3, 3, device=device, requires_grad=True)
    (x @ x).sum().backward()
    y = torch.ones(3).pin_memory().to("vgpu", non_blocking=True)
    assert x.grad.cpu().eq(6).all() and (y + 1).sum().item() == 6 and y.device == device

def switch_on():
    "Return a device and the warnings."
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (device,) = vgpu.virtual_gpus(1)
    work(device)
    return device, caught

CRASH, HANG = {"x86_64": ("0f0b", "ebfe"), "aarch64": ("00000000", "00000014")}[platform.machine()]
"""

WITHOUT = """
device, caught = switch_on()
(warning,) = caught
print(warning.message)
assert warning.filename == "<string>"  # the line that calls virtual_gpus, as far as it goes
assert "an error in backward may end this process" in str(warning.message)
virtual_tables._asked.clear()
work(device)
assert "type_" in virtual_tables._asked  # torch calls Python, by its own table
assert not torch.empty(1).is_pinned()
from vgpu.cuda import cuda_device
try:
    cuda_device.register_cuda(None, None)
except RuntimeError as error:
    assert "virtual GPUs cannot stand for CUDA's" in str(error), error
else:
    raise AssertionError("vgpu run is not refused")
"""


def run(code):
    done = fresh.run(BEGIN + code, fresh.SET_UP)
    assert done.returncode == 0, done.stderr
    # Triton, which comes with CUDA builds of torch, may report leaks at the end.
    assert not re.search("Traceback|Fatal|Warning|terminate", done.stderr), done.stderr
    return done.stdout


@pytest.mark.parametrize("also", ["", "signal.signal(signal.SIGCHLD, signal.SIG_IGN)"])
def test_torch_gets_answers_without_python(also):
    said = run(f"""
{also}
device, caught = switch_on()
assert not caught, caught[0].message
assert not open("/proc/thread-self/children").read(), "a process is left"
virtual_tables._asked.clear()
work(device)
assert not virtual_tables._asked and torch.empty(1, pin_memory=True).is_pinned()
print("fine")
""")
    assert said == "fine\n"


SURPRISES = {  # and the reason that is given
    "virtual method 4 calls nothing, not type_": """
virtual_tables._GUARD_METHODS = {4: 'type_', **virtual_tables._GUARD_METHODS}
""",
    "it crashed": "virtual_tables._code = lambda constant: bytes.fromhex(CRASH)",
    "it hung": """
virtual_tables._code, virtual_tables._TIME_LIMIT_MS = lambda constant: bytes.fromhex(HANG), 300
""",
    "memfd_create is not permitted": """
def refuse(*_):
    raise PermissionError("memfd_create is not permitted")
os.memfd_create = virtual_tables.tempfile.gettempdir = refuse  # an unnamed file would do, too
""",
    "the system denies executable pages": "mmap.MAP_PRIVATE = 0  # which mmap refuses",
    "no further process": """
def refuse():
    raise BlockingIOError("no further process")
os.fork = refuse
""",
}


@pytest.mark.parametrize("reason", SURPRISES)
def test_a_surprise_leaves_virtual_gpus_that_ask_python(reason):
    assert reason in run(SURPRISES[reason] + WITHOUT)


def test_without_pinned_memory_the_rest_works():
    said = run("""
def refuse(address):
    raise OSError("no page for the address of an allocator")
virtual_tables._code_of_address = refuse
device, caught = switch_on()
print(caught[0].message)
assert len(caught) == 1 and not virtual_tables._failure
virtual_tables._asked.clear()
work(device)
assert not virtual_tables._asked
""")
    assert "pin_memory=True) does not pin memory, because RuntimeError" in said


def test_beside_real_gpus_pinned_memory_is_ours():
    """Where there are real GPUs, torch asks CUDA's hooks for pinned memory."""
    run("""
torch.cuda.device_count = lambda: 1
device, caught = switch_on()
assert not caught, caught[0].message
table = ctypes.c_void_p.from_address(virtual_tables._hooks("CUDA")).value
method = ctypes.c_void_p.from_address(table + virtual_tables._GET_ALLOCATOR * 8).value
allocator = ctypes.CFUNCTYPE(ctypes.c_void_p)(method)()
assert allocator == ctypes.addressof(virtual_tables._allocator)
""")


def test_every_wrong_number_is_noticed():
    """Each place off by one, in both directions, and tables that are too short."""
    run("""
(device,), _ = vgpu.virtual_gpus(1), switch_on()
right = {name: getattr(virtual_tables, name) for name in dir(virtual_tables) if name.isupper()}
for pointer, original in reversed(virtual_tables._replaced):
    pointer.value = original
before = tables()

cases = [("_NUM_METHODS", 4), ("_NUM_METHODS", 9), ("_NUM_METHODS", 12)]
cases += [("_GET_ALLOCATOR", 11), ("_GET_ALLOCATOR", 13), ("_GET_DEVICE", 1)]
for name in ("_GUARD_METHODS", "_HOOKS_METHODS"):
    methods = right[name]
    for by in (-1, 1):
        cases.append((name, {place + by: method for place, method in methods.items()}))
        for place in {place for place in methods if place + by not in methods}:
            moved = {number + by * (number == place): methods[number] for number in methods}
            cases.append((name, moved))
for missing in (1, 5, 8, 9):
    others = dict.fromkeys(right["_GUARD_METHODS"].keys() - {missing}, "type_")
    cases.append(("_GUARD_METHODS", others))
for name, wrong in cases:
    setattr(virtual_tables, name, wrong)
    failure = virtual_tables._failure_of(patch)
    assert failure and tables() == before, (name, wrong, failure)
    setattr(virtual_tables, name, right[name])
failure = virtual_tables._failure_of(patch)
assert failure is None and tables() != before, failure
work(device)
""")


def test_what_fails_or_is_interrupted_only_here_is_put_back():
    run("""
(device,), _ = vgpu.virtual_gpus(1), switch_on()
before, parent, cuda = tables(), os.getpid(), virtual_tables._guards()[virtual_tables._CUDA]

def fail(error):
    virtual_tables._patch_cuda()
    if os.getpid() == parent:
        raise error("not here")

for error in RuntimeError, KeyboardInterrupt:
    try:
        failure = virtual_tables._failure_of(lambda: fail(error))
    except KeyboardInterrupt as interrupt:
        failure = f"RuntimeError: {interrupt}"
    assert failure == "RuntimeError: not here"
    assert tables() == before and virtual_tables._guards()[virtual_tables._CUDA] == cuda
work(device)
assert virtual_tables._failure_of(virtual_tables._patch_cuda) is None
assert virtual_tables._guards()[virtual_tables._CUDA] != cuda
""")


def test_pages_are_never_writable_and_executable():
    run("""
def mappings():
    with open("/proc/self/maps") as file:
        return [line.split() for line in file]

def both():
    return [line for line in mappings() if "w" in line[1] and "x" in line[1]]

before = both(), os.listdir("/proc/self/fd")
virtual_tables._executable(virtual_tables._code(7))
pages = [line[1] for line in mappings() if "memfd:vgpu" in line[-2]]
assert pages == ["r-xp"] and (both(), os.listdir("/proc/self/fd")) == before, pages
""")


def test_a_system_that_denies_writable_pages_that_become_executable():
    """`PR_SET_MDWE` is systemd's MemoryDenyWriteExecute."""
    said = run("""
PR_SET_MDWE, REFUSE_EXEC_GAIN = 65, 1
if ctypes.CDLL(None).prctl(PR_SET_MDWE, REFUSE_EXEC_GAIN, 0, 0, 0):
    print("unknown")
else:
    device, caught = switch_on()
    assert not caught, caught[0].message
    try:
        mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except PermissionError:
        print("denied")
""")
    if said == "unknown\n":
        pytest.skip("this kernel cannot deny them (Linux 6.3 can)")
    assert said == "denied\n"


def test_a_warning_that_is_raised_comes_after_virtual_gpus_are_there():
    run(f"""
{SURPRISES["no further process"]}
with warnings.catch_warnings():
    warnings.simplefilter("error")
    try:
        vgpu.virtual_gpus(1)
    except UserWarning as warning:
        assert "no further process" in str(warning), warning
    else:
        raise AssertionError("no warning")
device, caught = switch_on()
assert not caught, caught[0].message
""")


@pytest.mark.parametrize("tried", [True, False])
def test_a_test_fails_where_torch_asks_python_despite_known_machine_code(tried, monkeypatch):
    """Later tests, which raise in backward, may end the process of pytest without a word."""
    from vgpu.private import virtual_tables

    def fail(patch):
        raise RuntimeError("it hung")

    monkeypatch.setattr(virtual_tables, "_failure", None)
    monkeypatch.setattr(virtual_tables, "_try_in_a_fork", fail)
    monkeypatch.setattr(virtual_tables, "can_answer_without_python", lambda: tried)
    said = virtual_tables.answer_without_python()
    fails = pytest.raises(UserWarning, match="it hung")
    with fails if tried else warnings.catch_warnings(record=True):
        warnings.warn(said, stacklevel=1)
