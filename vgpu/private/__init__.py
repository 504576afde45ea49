"""All uses of torch's private interface, a module for each subject.

    patching        replaces names in modules of other packages, now or when they are imported
    tensors         wrapper tensors, their storages, and pickling
    dispatch        schemas, kernels, shape inference, autocast and TF32
    autograd        the backward pass
    registration    the device type, and torch's classes and functions for devices
    virtual_tables  device guard and hooks: machine code, where torch must not call Python
    modules         nn.Module, nn.DataParallel and optimizers
    cuda            torch.cuda, and "cuda" in torch's C++ code
    kineto          torch's profiler
    torch_compile   torch.compile, and flex_attention in its dense form
    process_groups  torch.distributed
    dtensor         DTensor

Nothing here imports the rest of vgpu; functions that torch is to call are passed in. No other
module of vgpu or d2lpar uses a private name of torch: `tests/lint/test_private_names.py` checks.
"""

import platform
import sys
import sysconfig

FIRST, LAST = (2, 11), (2, 15)  # versions of torch
FIRST_PYTHON, LAST_PYTHON = (3, 11), (3, 13)


def check_version(version):
    """Raise RuntimeError if this version of torch is not supported."""
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if not FIRST <= numbers <= LAST:
        raise RuntimeError(
            f"virtual GPUs require torch {FIRST[0]}.{FIRST[1]} to {LAST[0]}.{LAST[1]}; "
            f"this is torch {version}"
        )


def check_python():
    """Raise RuntimeError if this Python is not supported.

    Virtual GPUs rely on CPython's lock, and on where CPython raises KeyboardInterrupt.
    """
    name, version = platform.python_implementation(), platform.python_version()
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        name = "free-threaded CPython"
    tried = FIRST_PYTHON <= sys.version_info[:2] <= LAST_PYTHON
    if name != "CPython" or not tried:
        first, last = (".".join(map(str, numbers)) for numbers in (FIRST_PYTHON, LAST_PYTHON))
        raise RuntimeError(
            f"virtual GPUs require CPython {first} to {last}, with its global lock; this is {name} "
            f"{version}: create an environment with CPython {last}"
        )
