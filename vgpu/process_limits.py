"""CPU cores and memory of this process, which may be less than the machine's.

On Linux, CPU affinity and control groups limit them, as in a container.
"""

import ctypes
import os
import sys
from pathlib import Path, PurePosixPath

CGROUPS = Path("/sys/fs/cgroup")  # where control groups are mounted, of either version
MEMBERSHIP = Path("/proc/self/cgroup")  # the control groups of this process


def cores_of_this_process():
    """Return the number of CPU cores that this process may use, at least one.

    With a CPU quota, it is the number of whole cores that the quota covers.
    """
    affinity = getattr(os, "sched_getaffinity", None)  # not on Windows and macOS
    cores = [len(affinity(0)) if affinity else os.cpu_count() or 1]
    for folder in _groups("cpu"):
        quota = _words(folder / "cpu.max")  # microseconds per period, and the period
        quota = quota or _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
        match quota:
            case [limit, period] if limit.isdecimal():  # otherwise "max", or -1 in version 1
                cores.append(int(limit) // int(period))
    return max(1, min(cores))


def memory_of_this_process():
    """Return the bytes of memory of the machine, or the lowest limit of its control groups."""
    limits = [memory_of_this_machine()]
    for folder in _groups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limits += [int(word) for word in _words(folder / name) if word.isdecimal()]
    return min(limits)


def memory_of_this_machine():
    if sys.platform == "win32":
        status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
        ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))
        return status.total
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class _MemoryStatus(ctypes.Structure):
    """Windows' MEMORYSTATUSEX."""

    _fields_ = [
        ("length", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        ("total", ctypes.c_uint64),
        ("others", ctypes.c_uint64 * 6),
    ]


def _groups(controller):
    """Return the folders of this process's control groups for `controller`, and their parents.

    Versions 1 (`4:memory:/a/b`) and 2 (`0::/a/b`). In a container the path may be the machine's, of
    which only the outermost folder is visible.
    """
    found = []
    for line in _lines(MEMBERSHIP):
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            mount = CGROUPS / controller if controllers else CGROUPS
            inner = PurePosixPath(path).relative_to("/")
            found += [mount / part for part in (inner, *inner.parents)]
    return found


def _lines(path):
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:  # another system, or a group without this limit
        return []


def _words(path):
    return [word for line in _lines(path) for word in line.split()]
