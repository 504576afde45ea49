"""Run a program in bubblewrap (bwrap), where it can harm nothing but itself.

The program has no access to other processes, the network or the user's files. It can read what
Python needs, and write to a /tmp and a /dev/shm in memory. This module adds what bubblewrap lacks:
limits, and a filter of system calls. Only a control group can limit the memory of several processes
together, and few users may create one. So `Sandbox.overrun` adds up the memory of all processes,
and system calls that allocate memory outside of processes are refused.
"""

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

MEMORY = 4 * 2**30  # bytes, for all processes together and for each
TMP = 2**29
WRITABLE = {"/tmp": TMP, "/dev/shm": 2**29}  # bytes
FILES = 100_000  # in each of them: an empty file takes 1 kB of kernel memory
SOCKETS = 1000  # each can buffer up to 0.4 MB of kernel memory
PROCESSES = 64
THREADS = 512
FOLDER = "/tmp/work"  # the working directory of the program
NOBODY = "65534"

# Paths of a Linux system that programs need beside Python; nothing user-specific of /etc.
SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/sys/devices/system"),
    *("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives"),
)
REFUSED = (
    # memory that belongs to no process
    *("memfd_create", "shmget", "msgget", "semget", "io_uring_setup"),
    # keys have no namespace
    *("add_key", "request_key"),  # and keyctl except for one use, see `_filter`
    # not needed by answers, and the start of many exploits
    *("bpf", "perf_event_open", "userfaultfd"),
)
JOIN_SESSION_KEYRING = 1  # of keyctl; repeated in session.py, which cannot import this module
FAMILIES = (1, 2, 10, 16)  # AF_UNIX, AF_INET, AF_INET6, AF_NETLINK; AF_VSOCK leaves the namespace

CURES = """Debian, Ubuntu: `sudo apt-get install bubblewrap` (version 0.8 or newer).
It needs Linux 5.14 and user namespaces. In Docker or Podman, and so on macOS and Windows, start the
container with --privileged. Where Ubuntu refuses them to ordinary users:
`sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0`."""


class NoSandbox(Exception):
    """bubblewrap is missing or does not work; the message gives advice."""


class Sandbox:
    """A program in a sandbox; it and all its children are killed at the end of the `with` block.

    `program`: the command and its arguments; `hidden`: folders that must be hidden from it;
    `shown`: further files and folders that it can read; `passed`: a file descriptor to inherit.
    """

    def __init__(self, program, hidden, shown, passed):
        info, written = os.pipe()
        with open(info) as said:
            self._process = _start(program, written, hidden, shown, [passed])
            os.close(written)
            lines = [""]
            while lines[-1] != "}\n":  # read to the end: otherwise bwrap dies
                lines.append(said.readline())
                if not lines[-1]:
                    code = self._process.wait()
                    raise NoSandbox(f"bubblewrap ended with code {code} at its start. {CURES}")
        self._first = json.loads("".join(lines))["child-pid"]
        self._root = f"/proc/{self._first}/root"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._first, signal.SIGKILL)  # process 1 of the sandbox: all others end with it
        self._process.wait()

    def overrun(self):
        """Return the exceeded limit, "memory" or "processes", or ""."""
        with contextlib.suppress(OSError):  # the program has just ended
            pids = [pid for pid in os.listdir(f"{self._root}/proc") if pid.isdecimal()]
            if len(pids) > PROCESSES:
                return "processes"
            with open(f"{self._root}/proc/{pids[0]}/net/sockstat", encoding="ascii") as file:
                if int(file.readline().split()[-1]) > SOCKETS:  # "sockets: used 27"
                    return "memory"
            for folder in WRITABLE:
                files = os.statvfs(f"{self._root}{folder}")
                if files.f_files - files.f_ffree > FILES:
                    return "memory"
            if sum(map(self._resident, pids)) > MEMORY and sum(map(self._share, pids)) > MEMORY:
                return "memory"
        return ""

    def _resident(self, pid):
        """Return the memory of a process in bytes; shared memory counts fully for each process."""
        return self._bytes(f"{pid}/status", (b"RssAnon:", b"RssShmem:", b"VmSwap:"))

    def _share(self, pid):
        """Return the memory of a process in bytes; memory shared by n processes counts 1/n."""
        names = b"Pss_Anon:", b"Pss_Shmem:", b"SwapPss:"
        return self._bytes(f"{pid}/smaps_rollup", names) or self._resident(pid)

    def _bytes(self, path, names):
        with contextlib.suppress(OSError), open(f"{self._root}/proc/{path}", "rb") as file:
            return sum(1024 * int(line.split()[1]) for line in file if line.startswith(names))
        return 0


def check():
    """Raise `NoSandbox`, with the reason and advice, if bubblewrap does not work."""
    if sys.platform != "linux" or not shutil.which("bwrap"):
        raise NoSandbox(f"bubblewrap (bwrap) is not installed. {CURES}")
    with tempfile.TemporaryFile() as said:
        if _start(["true"], 1, stderr=said).wait():
            said.seek(0)
            raise NoSandbox(f"bubblewrap does not work here: {said.read().decode()}{CURES}")


def _start(program, info, hidden=(), shown=(), passed=(), stderr=subprocess.DEVNULL):
    """Start a program as in `Sandbox`; bwrap writes its process id to the descriptor `info`."""
    # Not by --clearenv: process 1 is bwrap itself, and the program can read its environment.
    environment = {
        "HOME": FOLDER,
        "IPYTHONDIR": "/tmp/ipython",
        "JUPYTER_RUNTIME_DIR": "/tmp/jupyter",
        "LANG": "C.UTF-8",
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "PATH": f"{os.path.dirname(sys.executable)}:/usr/local/bin:/usr/bin:/bin",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        "PYTHONHASHSEED": "0",
        "USER": "student",
    }
    with tempfile.TemporaryFile() as refused, tempfile.TemporaryFile() as hosts:
        _filter().export_bpf(refused)
        hosts.write(b"127.0.0.1 localhost sandbox\n")
        for file in refused, hosts:
            file.seek(0)
        return subprocess.Popen(
            _command(program, hidden, shown, refused.fileno(), hosts.fileno(), info),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            pass_fds=[refused.fileno(), hosts.fileno(), info, *passed],
        )


def _command(program, hidden, shown, refused, hosts, info):
    """Return the command that runs a program as in `Sandbox`.

    File descriptors: `refused`: filter of system calls; `hosts`: /etc/hosts; `info`: see `_start`.
    """
    mounts = ["--size", TMP, "--tmpfs", "/tmp"]  # first: Python may be installed in /tmp
    readable = [os.path.realpath(path) for path in (sys.base_prefix, sys.prefix, *shown)]
    for path in dict.fromkeys([*SYSTEM, sys.base_prefix, sys.prefix, *shown, *readable]):
        for parent in list(Path(path).parents)[-2::-1]:
            mounts += ["--dir", parent]  # otherwise bwrap creates some for root only
        link = os.path.islink(path)
        mounts += ["--symlink", os.readlink(path), path] if link else ["--ro-bind-try", path, path]
    for path in hidden:
        if any(Path(path).is_relative_to(parent) for parent in (*SYSTEM, *readable)):
            mounts += ["--tmpfs", path, "--remount-ro", path]
    command = [
        *("bwrap", "--unshare-all", "--unshare-user", "--disable-userns", "--new-session"),
        *("--die-with-parent", "--hostname", "sandbox", "--seccomp", refused, "--info-fd", info),
        *(*mounts, "--ro-bind-data", hosts, "/etc/hosts", "--proc", "/proc", "--dev", "/dev"),
        *("--size", WRITABLE["/dev/shm"], "--tmpfs", "/dev/shm"),
        *("--remount-ro", "/dev", "--dir", FOLDER, "--remount-ro", "/", "--chdir", FOLDER),
        *("prlimit", f"--data={MEMORY}", f"--fsize={TMP}", f"--nproc={THREADS}"),
        *("--nofile=1024", "--core=0", *program),
    ]
    if os.getuid() == 0:  # change the user: Linux does not limit the number of root's processes
        system = ["--dev-bind", "/proc", "/proc", "--dev-bind", "/dev", "/dev"]
        nobody = ["setpriv", "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups"]
        nobody += ["timeout", "-s", "KILL", "900"]  # --die-with-parent fails across users
        command = ["bwrap", *mounts, *system, *nobody, *command]
    return [str(word) for word in command]


def _filter():
    """Return the filter of system calls."""
    import pyseccomp as seccomp

    calls = seccomp.SyscallFilter(seccomp.ALLOW)
    for name in REFUSED:
        calls.add_rule(seccomp.ERRNO(errno.EPERM), name)
    # keyctl may only join an anonymous keyring, as each session does (session.py).
    refuse = seccomp.ERRNO(errno.EPERM)
    calls.add_rule(refuse, "keyctl", seccomp.Arg(0, seccomp.NE, JOIN_SESSION_KEYRING))
    calls.add_rule(refuse, "keyctl", seccomp.Arg(1, seccomp.NE, 0))
    refuse = seccomp.ERRNO(errno.EAFNOSUPPORT)
    calls.add_rule(refuse, "socket", seccomp.Arg(0, seccomp.GT, max(FAMILIES)))
    for family in {*range(max(FAMILIES))} - {*FAMILIES}:
        calls.add_rule(refuse, "socket", seccomp.Arg(0, seccomp.EQ, family))
    return calls
