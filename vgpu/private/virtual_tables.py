"""Machine code in C++ virtual tables, where torch's C++ code must not call Python.

torch queries a device guard for streams and devices where an exception would end the process: in
forward when it records an operator for backward, and in backward even while an exception unwinds.
A guard in Python may be interrupted there, and cannot run while an exception is pending. But all
results are constants: device 0 of type PrivateUse1, its stream 0, and True. So a few bytes of
machine code return them.

The methods are identified by their index in C++ virtual tables, which no interface guarantees. So
everything is tried in a fork of this process first, where a wrong index may crash. If a check
fails, nothing is patched, and a warning names the consequences.
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
_NO_INDEX = 0xFF00  # a c10::Device is two bytes: the type, and the index, -1 for none
# Indices of virtual methods, equal in torch 2.11 to 2.15: type, exchangeDevice, getDevice,
# getStream, getNewStream and exchangeStream in c10/core/impl/DeviceGuardImplInterface.h; isBuilt,
# isAvailable, hasPrimaryContext and, for pinned memory in C++, getPinnedMemoryAllocator in
# ATen/detail/AcceleratorHooksInterface.h, where the destructor takes the first two. The values
# are the methods that they call in Python.
_TYPE, _EXCHANGE_DEVICE, _GET_DEVICE = 0, 1, 2
_GUARD_METHODS = dict.fromkeys((_TYPE, _EXCHANGE_DEVICE, _GET_DEVICE, 5, 8, 9), "type_")
_HOOKS_METHODS = {2: "is_built", 3: "is_available", 4: "has_primary_context"}
_GET_ALLOCATOR = 12
_NUM_METHODS, _BEFORE = 128, 2  # more than there are; two other words precede them
_WORD = ctypes.sizeof(ctypes.c_void_p)
_TIME_LIMIT_MS = 60_000  # for a fork, which takes 0.1 s, or 2 s beside twenty busy processes

_failure = None  # why machine code is not in use; None if it is
_asked = set()  # names of the Python methods that torch has called
_replaced = []  # (pointer, its original value)


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
    return sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")


def answer_without_python():
    """Replace the methods of the registered guard and hooks; return a warning, or None."""
    global _failure
    _failure = _failure_of(_patch_guard_and_hooks)
    if _failure is not None:
        return (
            "virtual GPUs work, but an interrupt or an error in backward may end this process, "
            'x.to("vgpu") uses the first GPU even if another one is current, launch will not work, '
            "torch.empty(..., pin_memory=True) fails, and vgpu run is refused: torch calls Python "
            f"for devices, because {_failure}"
        )
    failure = _failure_of(_mark_pinned)
    return failure and f"torch.empty(..., pin_memory=True) does not pin memory, because {failure}"


def install_cuda_guard():
    """Install a device guard for CUDA in machine code; RuntimeError if none is in use.

    Tensors keep the type PrivateUse1 in C++. Only the devices that a program requests are CUDA's:
    for them torch queries the guard for the index of a bare "cuda".
    """
    failure = _failure or _failure_of(_patch_cuda)
    if failure is not None:
        raise RuntimeError(f"virtual GPUs cannot stand for CUDA's: {failure}")


def _failure_of(patch):
    """Call `patch` in a fork of this process, then here; return the error as text, or None."""
    if not can_answer_without_python():
        return (
            "machine code exists for Linux on x86-64 and 64-bit ARM only (on Windows, use WSL); "
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
    """Raise RuntimeError if `patch` fails, or crashes, in a fork of this process.

    A new process would import torch, for seconds. The fork has only this thread; if it waits for a
    lock of another one, it is killed.
    """
    assert sys.platform == "linux"  # mypy understands this
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
        with contextlib.suppress(ChildProcessError):  # this process ignores SIGCHLD
            os.waitpid(pid, 0)
    if said != "fine":
        raise RuntimeError(f"tried in a fork, {said or 'it crashed'}")


def _run_and_exit(patch, answering):
    """Call `patch`, write its error or "fine" to a pipe, and end this process silently."""
    assert sys.platform == "linux"
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


# -- patches and their checks


def _patch_guard_and_hooks():
    guard, hooks = _guards()[PRIVATE_USE_1], _hooks("PrivateUse1")
    _check_python_methods(guard, _GUARD_METHODS)
    _check_python_methods(hooks, _HOOKS_METHODS)
    # The current device has no index: torch passes it on, in `x.to("vgpu")`, and our operators
    # look up the index.
    current = PRIVATE_USE_1 | _NO_INDEX
    _answer(guard, {**dict.fromkeys(_GUARD_METHODS, PRIVATE_USE_1), _GET_DEVICE: current})
    _answer(hooks, dict.fromkeys(_HOOKS_METHODS, True))
    _check_answers()


def _patch_cuda():
    guards = _guards()
    guard = (ctypes.c_void_p * 8)(ctypes.c_void_p.from_address(guards[PRIVATE_USE_1]).value)
    _leak(guard)
    # "cuda" keeps having no index
    without_index = dict.fromkeys((_EXCHANGE_DEVICE, _GET_DEVICE), _CUDA | _NO_INDEX)
    _answer(ctypes.addressof(guard), {**dict.fromkeys(_GUARD_METHODS, _CUDA), **without_index})
    _set_pointer(ctypes.addressof(guards) + _CUDA * _WORD, ctypes.addressof(guard))
    stream = torch._C.Stream(device=torch.device("cuda", 0))
    if (stream.device, stream.stream_id) != (torch.device("cuda", 0), 0) or _asked:
        raise RuntimeError(f"torch gets the stream {stream} and calls {_asked or 'nothing'}")


def _check_python_methods(address, methods):
    """Raise RuntimeError unless each virtual method of a C++ object calls its Python method."""
    for index, name in methods.items():
        _asked.clear()
        _call(address, index)
        if _asked != {name}:
            raise RuntimeError(f"virtual method {index} calls {_asked or 'nothing'}, not {name}")


def _check_answers():
    """Raise RuntimeError unless torch's functions get the constants, without calling Python."""
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
        raise RuntimeError(f"torch gets the answers {answers} and calls {_asked or 'nothing'}")


def _answer(address, answers):
    """Make virtual methods of the C++ object at `address` return constants below 65536.

    `answers` has them by the index of the method. RuntimeError if a method returns another value,
    or calls Python.
    """
    codes = {index: _code(constant) for index, constant in answers.items()}
    _replace_methods(address, codes)
    _asked.clear()
    for index, constant in answers.items():
        if _call(address, index) != constant or _asked:
            raise RuntimeError(f"virtual method {index} does not return {constant}")


def _replace_methods(address, codes):
    methods = ctypes.c_void_p.from_address(address).value - _BEFORE * _WORD
    copied = ctypes.string_at(methods, (_BEFORE + _NUM_METHODS) * _WORD)
    table = (ctypes.c_void_p * (_BEFORE + _NUM_METHODS)).from_buffer_copy(copied)
    for index, code in codes.items():
        table[_BEFORE + index] = _executable(code)
    _leak(table)
    _set_pointer(address, ctypes.addressof(table) + _BEFORE * _WORD)


def _leak(array):
    """Leak deliberately: C++ keeps the pointer."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(array))


def _set_pointer(address, target):
    """Make the pointer at `address` point to `target`; `_failure_of` may restore it."""
    pointer = ctypes.c_void_p.from_address(address)
    _replaced.append((pointer, pointer.value))
    pointer.value = target


def _call(address, index):
    """Return the two bytes that a virtual method of the C++ object at `address` returns."""
    methods = ctypes.c_void_p.from_address(address).value
    method = ctypes.c_void_p.from_address(methods + index * _WORD).value
    function = ctypes.CFUNCTYPE(ctypes.c_uint16, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
    return function(method)(address, 0, 0)


def _guards():
    """Return torch's table of device guards, one address for each device type."""
    name = "_ZN3c104impl26device_guard_impl_registryE"
    return (ctypes.c_void_p * (PRIVATE_USE_1 + 1)).in_dll(_library("c10"), name)


def _hooks(device_type):
    """Return the address of the hooks of a device type, "PrivateUse1" or "CUDA"."""
    name = f"get{device_type}Hooks"
    get_hooks = _library("torch_cpu")[f"_ZN2at6detail{len(name)}{name}Ev"]
    get_hooks.restype = ctypes.c_void_p
    return get_hooks()


def _library(name):
    return ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", f"lib{name}.so"))


# -- machine code


def _code(constant):
    """Return code for `return constant`, below 65536, with 0 in the second result register."""
    if platform.machine() == "x86_64":  # mov eax, constant; xor edx, edx; ret
        return b"\xb8" + constant.to_bytes(4, "little") + bytes.fromhex("31d2 c3")
    move = 0x52800000 | constant << 5  # mov w0, constant; mov x1, 0; ret
    return move.to_bytes(4, "little") + bytes.fromhex("010080d2 c0035fd6")


def _code_of_address(address):
    code = {"x86_64": "48b8 {} c3", "aarch64": "40000058 c0035fd6 {}"}[platform.machine()]
    return bytes.fromhex(code.format(address.to_bytes(_WORD, "little").hex()))


@functools.cache
def _executable(code):
    """Return the address of an executable page with this code, never writable."""
    assert sys.platform == "linux"
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
    """Support pinned memory in C++ code, such as `torch.empty(..., pin_memory=True)`.

    It is CPU memory from a copy of torch's allocator, which is a virtual table only; the address of
    the copy identifies it. With real GPUs, torch calls CUDA's hooks and not ours, see
    GetCPUAllocatorMaybePinned in aten/src/ATen/EmptyTensor.cpp.
    """
    global _place_of_allocator
    get_allocator = _library("c10")["_ZN3c1015GetCPUAllocatorEv"]
    get_allocator.restype = ctypes.c_void_p
    _allocator[:] = ctypes.string_at(get_allocator(), _WORD)
    address = ctypes.addressof(_allocator)
    _leak(_allocator)
    for device_type in ("PrivateUse1", "CUDA") if torch.cuda.device_count() else ("PrivateUse1",):
        _replace_methods(_hooks(device_type), {_GET_ALLOCATOR: _code_of_address(address)})
    storage = torch.empty(1, pin_memory=True, device="cpu").untyped_storage()
    words = (ctypes.c_void_p * _NUM_WORDS).from_address(storage._cdata)
    if address not in words:
        raise RuntimeError("pinned memory does not come from the allocator of virtual GPUs")
    _place_of_allocator = words[:].index(address)


_allocator = ctypes.create_string_buffer(_WORD)
_place_of_allocator = None
_NUM_WORDS = 12  # of a C++ storage; the last is its allocator


def is_from_pinned_allocator(tensor):
    """Return whether C++ code has allocated a CPU tensor in pinned memory."""
    if _place_of_allocator is None:
        return False
    address = tensor.untyped_storage()._cdata + _place_of_allocator * _WORD
    return ctypes.c_void_p.from_address(address).value == ctypes.addressof(_allocator)
