"""A process that can harm nothing but itself: what runs the code of others.

`Sandbox` forks this process. The fork sees no other process, no network, none of the user's files,
and of the machine only what Python needs, read-only. It may write to a small /tmp and /dev/shm in
memory. This takes namespaces, which Linux 5.14 or newer grants to root, in a container only if that
is told to, and to other users where the system does not switch them off. It takes no other program.

The fork has what this process has in memory: start it before you read what it must not know.
"""

import contextlib
import ctypes
import json
import os
import platform
import shutil
import signal
import socket
import struct
import sys
import tempfile
from pathlib import Path

with contextlib.suppress(ImportError):  # there is neither on Windows, nor is there a sandbox
    import fcntl
    import resource

MEMORY = 4 * 2**30  # of all processes together, and of each
TMP = 2**29
WRITABLE = {"/tmp": TMP, "/dev/shm": 2**29}  # bytes
PROCESSES = 64
THREADS = 512
FOLDER = "/tmp/work"  # the current one

# What programs need of a Linux system beside Python itself. Of /etc, nothing that is the user's.
SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/sys/devices/system"),
    *("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives"),
)
DEVICES = ("null", "zero", "full", "random", "urandom")
FILES = {
    "/etc/passwd": "student:x:{uid}:{gid}::/tmp/work:/bin/sh\n",
    "/etc/group": "student:x:{gid}:\n",
    "/etc/hosts": "127.0.0.1 localhost sandbox\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}

# From the headers of Linux: sched.h, mount.h, prctl.h, capability.h, sockios.h
CLONE_NEWUSER = 0x10000000
CLONE_NEW = 0x20000 | 0x4000000 | 0x8000000 | 0x20000000 | 0x40000000  # mount, uts, ipc, pid, net
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 0x1000, 0x4000, 0x40000
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, ATTR_RDONLY, ATTR_NOSUID = 442, -100, 0x8000, 1, 2
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
CAPABILITY_VERSION_3 = 0x20080522
SIOCSIFFLAGS, IFF_UP = 0x8914, 1

# System calls that give memory which belongs to no process, or further namespaces, by machine:
# memfd_create, memfd_secret, shmget, io_uring_setup, mount, fsopen, unshare, setns.
REFUSED = {
    "x86_64": (0xC000003E, (319, 447, 29, 425, 165, 430, 272, 308)),
    "aarch64": (0xC00000B7, (279, 447, 194, 425, 40, 430, 97, 268)),
}


class NoSandbox(Exception):
    """The system does not grant what a sandbox is made of."""


class Sandbox:
    """A process in a sandbox; what it tells are lines of JSON.

    Args:
        serve: what it runs: a function of its `Channel`.
        hidden: folders that it must not see, wherever they are.
        package: the folder of a package that it may import, beside the installed ones.

    Raises:
        NoSandbox: with the reason.
    """

    def __init__(self, serve, hidden=(), package=None):
        if sys.platform != "linux" or platform.machine() not in REFUSED:
            raise NoSandbox(f"there is none for {sys.platform} on {platform.machine()}")
        self._root = tempfile.mkdtemp(prefix="d2lpar-sandbox-")
        ours, its = socket.socketpair()
        self.pid = os.fork()
        if not self.pid:
            _in_fork(_be_keeper, its, self._root, serve, hidden, package)
        its.close()
        self.channel = Channel(ours)
        refusal = self.channel.read() or "it ended at once"
        if refusal != "ready":
            self.end()
            raise NoSandbox(refusal)

    def end(self):
        """End all its processes."""
        os.kill(self.pid, signal.SIGTERM)
        os.waitpid(self.pid, 0)
        self.channel.close()
        shutil.rmtree(self._root)


class Channel:
    """One end of a connection that carries values as lines of JSON."""

    def __init__(self, end):
        self.end, self._lines = end, end.makefile("rb")

    def write(self, value):
        """Send a value."""
        self.end.sendall(json.dumps(value).encode() + b"\n")

    def read(self, num_bytes=2**26):
        """Return the next value, or None if there is no more, or a longer one."""
        line = self._lines.readline(num_bytes)
        return json.loads(line) if line.endswith(b"\n") else None

    def close(self):
        """Close this end."""
        self._lines.close()
        self.end.close()


def overrun():
    """Return what process 1 of a sandbox sees used up: "memory", "processes" or nothing."""
    pids = [pid for pid in os.listdir("/proc") if pid.isdecimal() and pid != "1"]
    if len(pids) > PROCESSES:
        return "processes"
    if sum(map(_resident, pids)) <= MEMORY:
        return ""
    _signal_all(signal.SIGSTOP)  # to look takes time, in which they could grow
    used = sum(map(_own_share, pids))
    _signal_all(signal.SIGCONT)
    return "memory" if used > MEMORY else ""


def _resident(pid):
    """Return the bytes of memory of a process, those included that it shares with others."""
    return _bytes_in(f"/proc/{pid}/status", (b"RssAnon:", b"RssShmem:", b"VmSwap:"))


def _own_share(pid):
    """Return the bytes of memory of a process, of those that n processes share the n-th part."""
    # A process that keeps us from reading this, as we do ourselves, is told by the other figure.
    return _bytes_in(f"/proc/{pid}/smaps_rollup", (b"Pss_Anon:", b"Pss_Shmem:", b"SwapPss:")) or (
        _resident(pid)
    )


def _bytes_in(path, names):
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return sum(1024 * int(line.split()[1]) for line in file if line.startswith(names))
    return 0


def be_seen():
    """Let process 1 see what memory this process shares, and all that it will start."""
    _prctl(PR_SET_DUMPABLE, 1)


def clear():
    """End all processes of a sandbox but process 1, which calls this, and delete their files."""
    _signal_all(signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
    for folder in WRITABLE:
        for entry in os.scandir(folder):
            if _leads_to_a_mount(entry.path):  # Python's own folder may lie in /tmp
                continue
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                os.unlink(entry.path)
    os.makedirs(FOLDER, exist_ok=True)


def _leads_to_a_mount(path):
    """Tell whether something is mounted at a path or below it."""
    with open("/proc/self/mountinfo", "rb") as file:
        points = [line.split()[4] for line in file]
    return any(point == path.encode() or point.startswith(path.encode() + b"/") for point in points)


def _signal_all(number):
    """Send a signal to all processes of the sandbox but process 1, which calls this."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, number)


def _in_fork(function, *arguments):
    """Call a function in a forked process, and end that in any case."""
    try:
        function(*arguments)
    finally:
        os._exit(1)


def _be_keeper(its, root, serve, hidden, package):
    """Be the process that its namespaces begin with: start process 1, and end it when told to."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(0, 1)
    os.dup2(0, 2)
    os.dup2(its.fileno(), 3)  # now nothing else is open: no file, no terminal
    os.closerange(4, os.sysconf("SC_OPEN_MAX"))
    its.detach()
    channel = Channel(socket.socket(fileno=3))
    uid, gid = os.getuid(), os.getgid()
    try:
        if uid == 0:
            _call("unshare", CLONE_NEW)
        else:
            _call("unshare", CLONE_NEW | CLONE_NEWUSER)
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
            Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    except OSError as error:
        channel.write(f"no namespaces: {error}")
        return
    if uid == 0:  # someone whom nobody knows, in each sandbox another one
        uid = gid = 60_000 + os.getpid() % 5000
    first = os.fork()
    if not first:
        _in_fork(_be_first, channel, root, serve, hidden, package, uid, gid)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(first, signal.SIGKILL))
    channel.close()
    os.waitpid(first, 0)
    os._exit(0)


def _be_first(channel, root, serve, hidden, package, uid, gid):
    """Be process 1: build the sandbox, give up all rights, and serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _build(root, _visible(hidden, package), hidden, uid, gid)
        _give_up_rights(uid, gid)
    except OSError as error:
        channel.write(str(error))
        return
    channel.write("ready")
    clear()
    os.chdir(FOLDER)
    serve(channel)
    os._exit(0)


def _visible(hidden, package):
    """List the paths that the sandbox shows."""
    hiding = {str(parent) for path in hidden for parent in (Path(path), *Path(path).parents)}
    packages = [path for path in sys.path if path.endswith("-packages") and path not in hiding]
    wanted = [sys.base_prefix, sys.prefix, *SYSTEM, *packages, *([package] if package else [])]
    paths = []
    for path in dict.fromkeys(str(path) for path in wanted if os.path.exists(path)):
        for name in dict.fromkeys((path, os.path.realpath(path))):
            if not any(Path(name).is_relative_to(parent) for parent in paths):
                paths.append(name)
    return sorted(paths)


def _build(root, visible, hidden, uid, gid):
    """Make `root` the root of the file system, with nothing in it but what is meant to be."""
    _call("mount", None, "/", None, MS_REC | MS_PRIVATE, None)
    flags = MS_NOSUID | MS_NODEV
    _call("mount", "tmpfs", root, "tmpfs", flags, "mode=755,size=1m")
    for name, size in WRITABLE.items():  # first, because what is visible may lie below them
        os.makedirs(root + name)
        options = f"mode=1777,size={size},nr_inodes=100k"
        _call("mount", "tmpfs", root + name, "tmpfs", flags, options)
    for path in [*visible, *(f"/dev/{name}" for name in DEVICES)]:
        target = Path(root + path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if os.path.islink(path) and path in SYSTEM:
            target.symlink_to(os.readlink(path))
            continue
        target.mkdir(exist_ok=True) if os.path.isdir(path) else target.touch()
        _call("mount", path, target, None, MS_BIND | MS_REC, None)
    for path in hidden:
        if os.path.isdir(f"{root}{path}"):
            _call("mount", "tmpfs", f"{root}{path}", "tmpfs", flags, "mode=0,size=4k")
    for path, text in FILES.items():
        Path(root + path).parent.mkdir(exist_ok=True)
        Path(root + path).write_text(text.format(uid=uid, gid=gid))
    os.symlink("/proc/self/fd", f"{root}/dev/fd")
    os.mkdir(f"{root}/proc")
    _set_attributes(root, AT_RECURSIVE, ATTR_RDONLY | ATTR_NOSUID, 0)
    for name in WRITABLE:
        _set_attributes(root + name, 0, 0, ATTR_RDONLY)
    _call("mount", "proc", f"{root}/proc", "proc", flags | MS_NOEXEC, None)
    os.chdir(root)
    _call("pivot_root", ".", ".")
    _call("umount2", ".", MNT_DETACH)
    os.chdir("/")
    socket.sethostname("sandbox")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))


def _set_attributes(path, how_far, added, removed):
    """Change the attributes of a mount, or of all below it."""
    attributes = struct.pack("4Q", added, removed, 0, 0)
    _call("syscall", SYS_MOUNT_SETATTR, AT_FDCWD, path, how_far, attributes, len(attributes))


def _give_up_rights(uid, gid):
    """Become an ordinary user, for ever, with limits."""
    limits = {
        resource.RLIMIT_DATA: MEMORY,
        resource.RLIMIT_NPROC: THREADS,
        resource.RLIMIT_FSIZE: TMP,
        resource.RLIMIT_NOFILE: 4096,
        resource.RLIMIT_CORE: 0,
    }
    for limit, value in limits.items():
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    _call("capset", struct.pack("Ii", CAPABILITY_VERSION_3, 0), bytes(24))
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _prctl(PR_SET_DUMPABLE, 0)  # no process of the same user may look into this one
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    program = _filter(*REFUSED[platform.machine()])
    text = ctypes.create_string_buffer(program)
    _prctl(PR_SET_SECCOMP, 2, struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(text)))


def _filter(machine, refused):
    """Return a program for the kernel that fails these system calls with EPERM."""
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06
    kill, allow, fail = 0x80000000, 0x7FFF0000, 0x00050001
    lines = [(load, 0, 0, 4), (equal, 1, 0, machine), (give, 0, 0, kill), (load, 0, 0, 0)]
    tests = [(at_least, 0x40000000), *((equal, number) for number in refused)]
    lines += [(code, len(tests) - i, 0, number) for i, (code, number) in enumerate(tests)]
    lines += [(give, 0, 0, allow), (give, 0, 0, fail)]
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def _prctl(option, value, pointer=0):
    _call("prctl", option, value, pointer, 0, 0)


def _call(name, *arguments):
    """Call a function of the C library; raise OSError with its name if it fails."""
    libc = ctypes.CDLL(None, use_errno=True)
    values = [
        os.fsencode(value)
        if isinstance(value, str | Path)
        else ctypes.c_ulong(value)
        if isinstance(value, int) and value >= 0
        else value
        for value in arguments
    ]
    if libc[name](*values) < 0:
        number = ctypes.get_errno()
        shown = ", ".join(str(value) for value in arguments if isinstance(value, str | Path))
        raise OSError(number, f"{name}({shown}): {os.strerror(number)}")
