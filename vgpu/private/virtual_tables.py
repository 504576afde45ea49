"""Machine code in C++ virtual tables, which answers where torch's C++ code may not call Python.

torch asks a device guard for streams and devices in places where an exception would end the
process: in forward when it records an operator for backward, and in backward even while an
exception unwinds. A guard written in Python cannot answer there: an interrupt may be raised in it,
and it cannot run at all while an exception is pending. But all answers are constants: device 0 of
type PrivateUse1, its stream 0, and True. So a few bytes of machine code that return a constant
replace the virtual methods that would ask Python.

The methods are found by their places in C++ virtual tables, which no interface promises. So all of
it is tried in a fork of this process first, where a wrong place may crash. `_check_asking` shows
that the methods in these places ask Python, `_check_answers` that torch then gets its answers
without it. On any surprise nothing is patched, and a warning says what is lost.
"""

import contextlib
import ctypes
import faulthandler
import functools
import mmap
import os
import platform
import signal
import sys
import tempfile
import warnings

import torch

PRIVATE_USE_1 = 20  # DeviceType.PrivateUse1
_CUDA = 1  # DeviceType.CUDA
_NO_INDEX = 0xFF00  # in the two bytes of a c10::Device the index, -1 for none, follows the type
# The places of virtual methods, which are the same in torch 2.11 to 2.15: type, exchangeDevice,
# getDevice, getStream, getNewStream and exchangeStream in c10/core/impl/DeviceGuardImplInterface.h;
# isBuilt, isAvailable, hasPrimaryContext and, for C++ code that asks for pinned memory,
# getPinnedMemoryAllocator in ATen/detail/AcceleratorHooksInterface.h, where the destructor takes
# the first two places. Beside each is the method in Python that it asks.
_TYPE, _EXCHANGE_DEVICE, _GET_DEVICE = 0, 1, 2
_GUARD_METHODS = dict.fromkeys((_TYPE, _EXCHANGE_DEVICE, _GET_DEVICE, 5, 8, 9), "type_")
_HOOKS_METHODS = {2: "is_built", 3: "is_available", 4: "has_primary_context"}
_GET_ALLOCATOR = 12
_NUM_METHODS, _BEFORE = 128, 2  # far more than there are; two other words come before them
_WORD = ctypes.sizeof(ctypes.c_void_p)
_TIME_LIMIT_MS = 60_000  # for a fork: 0.1 s, and 2 s beside twenty busy processes

_failure = None  # why Python answers; None where machine code does
_asked = set()  # names of the methods that torch has asked in Python
_replaced = []  # (pointer, what it pointed to)


class DeviceGuard(torch._C._acc.DeviceGuard):
    def type_(self):
        _asked.add("type_")
        return torch._C._autograd.DeviceType.PrivateUse1


class Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self):
        _asked.add("is_available")
        return True

    def is_built(self):
        _asked.add("is_built")
        return True

    def has_primary_context(self, device_index):
        _asked.add("has_primary_context")
        return True


def can_answer_without_python():
    """Return whether machine code for this machine is known."""
    return sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")


def answer_without_python():
    """Make the registered guard and hooks answer without Python; return a warning, or None."""
    global _failure
    _failure = _failure_of(_patch_guard_and_hooks)
    if _failure is not None:
        return (
            "virtual GPUs work, but an interrupt or an error in backward may end this process, "
            'x.to("vgpu") is the first GPU, even where another one is current, which launch does '
            "not bear, torch.empty(..., pin_memory=True) fails, and vgpu run is refused: torch "
            f"asks Python about devices, because {_failure}"
        )
    failure = _failure_of(_mark_pinned)
    return failure and f"torch.empty(..., pin_memory=True) does not pin memory, because {failure}"


def install_cuda_guard():
    """Install a device guard for CUDA that answers without Python.

    A tensor stays of type PrivateUse1 in C++. Only the devices that a program asks for are CUDA's,
    and all that torch does with one is to ask its guard which index a bare "cuda" has, and to look
    for CUDA's kernel of the operator that makes a tensor.

    Raises:
        RuntimeError: torch asks Python about devices, see what `answer_without_python` returns.
    """
    failure = _failure or _failure_of(_patch_cuda)
    if failure is not None:
        raise RuntimeError(f"virtual GPUs cannot stand for CUDA's: {failure}")


def _failure_of(patch):
    """Call `patch` in a fork of this process, and then here; return why that failed, or None."""
    if not can_answer_without_python():
        return (
            "what replaces it is known for Linux, on x86-64 and 64-bit ARM (on Windows, in WSL); "
            f"this is {sys.platform} on {platform.machine()}"
        )
    before = len(_replaced)
    try:
        _try_in_a_fork(patch)
        patch()
    except BaseException as error:
        while len(_replaced) > before:
            pointer, original = _replaced.pop()
            pointer.value = original
        if not isinstance(error, Exception):  # an interrupt
            raise
        return f"{type(error).__name__}: {error}"
    return None


def _try_in_a_fork(patch):
    """Raise RuntimeError where `patch` fails, or ends the process, in a fork of this one.

    A new process would have to import torch, which takes seconds. The fork has this thread alone;
    should it wait for a lock of another one, it is ended.
    """
    if sys.platform != "linux":  # mypy understands this
        raise NotImplementedError
    import select

    read, write = os.pipe()
    with open(read, "rb", buffering=0) as answer, open(write, "wb", buffering=0) as answering:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: fork beside threads
            pid = os.fork()
        if pid == 0:
            _run_and_exit(patch, answering)
        answering.close()
        poll = select.poll()
        poll.register(answer, select.POLLIN)
        if poll.poll(_TIME_LIMIT_MS):
            said = answer.read(1000).decode(errors="replace")
        else:
            said = "it hung"
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # a process that ignores SIGCHLD has none
            os.waitpid(pid, 0)
    if said != "fine":
        raise RuntimeError(f"tried in a process of its own, {said or 'it crashed'}")


def _run_and_exit(patch, answering):
    """Write to a pipe what `patch` raises, or "fine", and end this process without a trace."""
    if sys.platform != "linux":  # mypy understands this
        raise NotImplementedError
    said = "it was interrupted"
    try:
        import resource

        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        patch()
        said = "fine"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    finally:
        answering.write(said.encode()[:1000])
        os._exit(0)


# -- what is patched, and how it is checked


def _patch_guard_and_hooks():
    guard, hooks = _guards()[PRIVATE_USE_1], _hooks("PrivateUse1")
    _check_asking(guard, _GUARD_METHODS)
    _check_asking(hooks, _HOOKS_METHODS)
    # Which device is current is answered by one without an index: torch hands it on, in
    # `x.to("vgpu")`, and our operators know the index.
    current = PRIVATE_USE_1 | _NO_INDEX
    _answer(guard, {**dict.fromkeys(_GUARD_METHODS, PRIVATE_USE_1), _GET_DEVICE: current})
    _answer(hooks, dict.fromkeys(_HOOKS_METHODS, True))
    _check_answers()


def _patch_cuda():
    guards = _guards()
    guard = (ctypes.c_void_p * 8)(ctypes.c_void_p.from_address(guards[PRIVATE_USE_1]).value)
    _keep(guard)
    # "cuda" stays as it is, without an index
    without_index = dict.fromkeys((_EXCHANGE_DEVICE, _GET_DEVICE), _CUDA | _NO_INDEX)
    _answer(ctypes.addressof(guard), {**dict.fromkeys(_GUARD_METHODS, _CUDA), **without_index})
    _point(ctypes.addressof(guards) + _CUDA * _WORD, ctypes.addressof(guard))
    stream = torch._C.Stream(device=torch.device("cuda", 0))
    if (stream.device, stream.stream_id) != (torch.device("cuda", 0), 0) or _asked:
        raise RuntimeError(f"torch gets the stream {stream} and asks {_asked or 'nothing'}")


def _check_asking(address, methods):
    """Raise RuntimeError unless each of the places of a C++ object asks its method in Python."""
    for place, name in methods.items():
        _asked.clear()
        _call(address, place)
        if _asked != {name}:
            raise RuntimeError(f"virtual method {place} asks {_asked or 'nothing'}, not {name}")


def _check_answers():
    """Raise RuntimeError unless torch's own functions get the answers, and none from Python."""
    _asked.clear()
    stream = torch._C.Stream(device=torch.device("vgpu", 0))
    torch._C._accelerator_setStream(stream)
    current = torch._C._accelerator_getStream(0)
    answers = (
        torch._C._accelerator_getDeviceIndex(),
        torch._C._accelerator_exchangeDevice(0),
        *(stream.device.index, stream.stream_id, current.device.index, current.stream_id),
    )
    if answers != (-1, 0, 0, 0, 0, 0) or _asked:
        raise RuntimeError(f"torch gets the answers {answers} and asks {_asked or 'nothing'}")


def _answer(address, answers):
    """Make virtual methods of the C++ object at `address` return constants.

    The object gets a copy of its table of methods with other addresses in it.

    Args:
        address: the address of the object.
        answers: {place of the method: constant below 65536}.

    Raises:
        RuntimeError: a method returns something else, or asks Python.
    """
    codes = {place: _code(constant) for place, constant in answers.items()}
    _replace_methods(address, codes)
    _asked.clear()
    for place, constant in answers.items():
        if _call(address, place) != constant or _asked:
            raise RuntimeError(f"virtual method {place} does not return {constant}")


def _replace_methods(address, codes):
    methods = ctypes.c_void_p.from_address(address).value - _BEFORE * _WORD
    copied = ctypes.string_at(methods, (_BEFORE + _NUM_METHODS) * _WORD)
    table = (ctypes.c_void_p * (_BEFORE + _NUM_METHODS)).from_buffer_copy(copied)
    for place, code in codes.items():
        table[_BEFORE + place] = _executable(code)
    _keep(table)
    _point(address, ctypes.addressof(table) + _BEFORE * _WORD)


def _keep(array):
    """Let an array outlive Python: C++ code has its address, and uses it to the very end."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(array))


def _point(address, target):
    """Make the pointer at `address` point to `target`, until it is put back."""
    pointer = ctypes.c_void_p.from_address(address)
    _replaced.append((pointer, pointer.value))
    pointer.value = target


def _call(address, place):
    """Return the two bytes that a virtual method of the C++ object at `address` returns."""
    methods = ctypes.c_void_p.from_address(address).value
    method = ctypes.c_void_p.from_address(methods + place * _WORD).value
    function = ctypes.CFUNCTYPE(ctypes.c_uint16, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
    return function(method)(address, 0, 0)


def _guards():
    """Return torch's table of device guards, one address for each type of device."""
    name = "_ZN3c104impl26device_guard_impl_registryE"
    return (ctypes.c_void_p * (PRIVATE_USE_1 + 1)).in_dll(_library("c10"), name)


def _hooks(device_type):
    """Return the address of the hooks of a type of device, "PrivateUse1" or "CUDA"."""
    name = f"get{device_type}Hooks"
    get_hooks = _library("torch_cpu")[f"_ZN2at6detail{len(name)}{name}Ev"]
    get_hooks.restype = ctypes.c_void_p
    return get_hooks()


def _library(name):
    return ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", f"lib{name}.so"))


# -- machine code


def _code(constant):
    """Return code that returns a constant below 65536, and 0 in the second register of a result."""
    if platform.machine() == "x86_64":  # mov eax, constant; xor edx, edx; ret
        return b"\xb8" + constant.to_bytes(4, "little") + bytes.fromhex("31d2 c3")
    move = 0x52800000 | constant << 5  # mov w0, constant; mov x1, 0; ret
    return move.to_bytes(4, "little") + bytes.fromhex("010080d2 c0035fd6")


def _code_of_address(address):
    """Return code that returns an address."""
    code = {"x86_64": "48b8 {} c3", "aarch64": "40000058 c0035fd6 {}"}[platform.machine()]
    return bytes.fromhex(code.format(address.to_bytes(_WORD, "little").hex()))


@functools.cache
def _executable(code):
    """Return the address of an executable page with this code; the page was never writable.

    Raises:
        OSError: the system denies such pages.
    """
    if sys.platform != "linux":  # mypy understands this
        raise NotImplementedError
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (*[ctypes.c_void_p, ctypes.c_size_t], *[ctypes.c_int] * 3, ctypes.c_long)
    try:
        file = os.memfd_create("vgpu")
    except PermissionError:  # in the sandbox of `make grade`
        file = os.open(tempfile.gettempdir(), os.O_TMPFILE | os.O_RDWR)
    try:
        os.write(file, code)
        prot = mmap.PROT_READ | mmap.PROT_EXEC
        address = libc.mmap(None, mmap.PAGESIZE, prot, mmap.MAP_PRIVATE, file, 0)
    finally:
        os.close(file)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "the system denies executable pages")
    return address


# -- pinned memory


def _mark_pinned():
    """Give C++ code, such as `torch.empty(..., pin_memory=True)`, pinned memory.

    It is memory of the CPU from a copy of torch's allocator, which has nothing but methods. The
    address of the copy tells it from other memory. Where there are real GPUs, torch asks CUDA's
    hooks for it and not ours, see GetCPUAllocatorMaybePinned in aten/src/ATen/EmptyTensor.cpp.
    """
    global _place_of_allocator
    get_allocator = _library("c10")["_ZN3c1015GetCPUAllocatorEv"]
    get_allocator.restype = ctypes.c_void_p
    _allocator[:] = ctypes.string_at(get_allocator(), _WORD)
    address = ctypes.addressof(_allocator)
    _keep(_allocator)
    for device_type in ("PrivateUse1", "CUDA") if torch.cuda.device_count() else ("PrivateUse1",):
        _replace_methods(_hooks(device_type), {_GET_ALLOCATOR: _code_of_address(address)})
    storage = torch.empty(1, pin_memory=True, device="cpu").untyped_storage()
    words = (ctypes.c_void_p * _NUM_WORDS).from_address(storage._cdata)
    if address not in words:
        raise RuntimeError("pinned memory does not come from the allocator of virtual GPUs")
    _place_of_allocator = words[:].index(address)


_allocator = ctypes.create_string_buffer(_WORD)
_place_of_allocator = None
_NUM_WORDS = 12  # of a storage in C++; its allocator is the last


def is_from_pinned_allocator(tensor):
    """Return whether C++ code has allocated the memory of a CPU tensor as pinned memory."""
    if _place_of_allocator is None:
        return False
    address = tensor.untyped_storage()._cdata + _place_of_allocator * _WORD
    return ctypes.c_void_p.from_address(address).value == ctypes.addressof(_allocator)
