"""Two hosts on one machine: network namespaces, with a line of a limited rate between them."""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CPUS = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}


class NotAllowed(Exception):
    """This machine does not let us make hosts; says why."""


@contextlib.contextmanager
def two_hosts(rate):
    """Make two hosts, 10.77.0.1 and 10.77.0.2, and take them down again.

    Args:
        rate: bits a second of the line between them, in either direction, as `tc` writes it.

    Yields:
        For each host its name and that of its network interface.

    Raises:
        NotAllowed: programs or rights for it are missing here.
    """
    names = [f"d2lpar-{os.getpid()}-{i}" for i in range(2)]
    ends = [f"veth{i}" for i in range(2)]
    peer = ["peer", "name", ends[1], "netns", names[1]]
    try:
        for name in names:
            _call("ip", "netns", "add", name)
        _call("ip", "link", "add", ends[0], "netns", names[0], "type", "veth", *peer)
        for i, (name, end) in enumerate(zip(names, ends, strict=True)):
            _call("ip", "-n", name, "address", "add", f"10.77.0.{i + 1}/24", "dev", end)
            _call("ip", "-n", name, "link", "set", "lo", "up")
            _call("ip", "-n", name, "link", "set", end, "up")
            shape = f"qdisc add dev {end} root tbf rate {rate} burst 1mb latency 50ms"
            _call("tc", "-n", name, *shape.split())
        yield list(zip(names, ends, strict=True))
    finally:
        for name in names if shutil.which("ip") else ():
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _call(program, *words):
    if not shutil.which(program):
        raise NotAllowed(f"{program} is not installed (apt-get install iproute2)")
    done = subprocess.run([program, *words], capture_output=True, text=True)
    if done.returncode:
        raise NotAllowed(f"two hosts of network namespaces are not allowed here: {done.stderr}")


def torchrun(folder, *options, function="train.py:train", arguments=(), prefix=()):
    """Start torchrun for a function of a file in `folder`; return the process."""
    command = [*prefix, sys.executable, "-m", "torch.distributed.run", *options]
    return subprocess.Popen(
        [*command, "-m", "vgpu.processes.rank", function, *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=CPUS,
    )


def torchrun_on(hosts, folder, **options):
    """Run torchrun on each host, one process on each; return what both printed.

    Raises RuntimeError with the error output if one fails.
    """
    jobs = [
        torchrun(
            folder,
            "--nnodes=2",
            "--nproc-per-node=1",
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=10.77.0.1:29400",
            f"--rdzv-conf=is_host={1 - i}",
            f"--local-addr=10.77.0.{i + 1}",
            prefix=["ip", "netns", "exec", name, "env", f"GLOO_SOCKET_IFNAME={end}"],
            **options,
        )
        for i, (name, end) in enumerate(hosts)
    ]
    return output_of(*jobs)


def output_of(*jobs, timeout=200):
    """Wait for processes of `torchrun`; return what they printed, one after the other."""
    results = [job.communicate(timeout=timeout) for job in jobs]
    if any(job.returncode for job in jobs):
        raise RuntimeError("\n".join(err for _, err in results))
    return "".join(out for out, _ in results)
