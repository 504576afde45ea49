"""Programs run as `vgpu run` runs them, with an entry point of torch that is the one here.

The entry point belongs to an installed package. Where that is another one, or an older one, a
folder with the metadata of a package of this name goes before it.
"""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENTRY_POINTS = """
[torch.backends]
vgpu = vgpu_autoload:autoload
"""
# A short program spends a third of its time on garbage that imports have not left.
LITTLE_COLLECTING = """
import atexit, gc
gc.set_threshold(100_000, 50, 50)
atexit.register(gc.freeze)
"""
# Ranks as torchrun starts them, but forks of one process that has imported torch.
RANKS = """
import os, runpy, socket, sys
import torch.distributed.fsdp, torch.distributed.tensor.parallel
from torch import multiprocessing

def run(rank, size, port, program):
    found = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in found.items()}, MASTER_ADDR="127.0.0.1")
    runpy.run_path(program, run_name="__main__")

size, program = int(sys.argv[1]), sys.argv[2]
free = socket.socket()  # does not listen, so rank 0 may, and nobody else is given its port
free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
free.bind(("127.0.0.1", 0))
port = free.getsockname()[1]
multiprocessing.start_processes(run, (size, port, program), size, start_method="fork")
"""


def environment(folder, **variables):
    """Return the environment of a process that finds this package and its entry point.

    Args:
        folder: where to put the metadata, a `Path`.
        **variables: further variables.
    """
    packages = folder / "packages"
    metadata = packages / "d2lpar-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: d2lpar\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    (packages / "sitecustomize.py").write_text(LITTLE_COLLECTING)
    paths = [str(packages), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **variables}


def written(folder, code, name="program.py"):
    """Return the path of a program with the text `code`, dedented, in a folder."""
    path = folder / name
    path.write_text(textwrap.dedent(code))
    return str(path)


def ranks(folder, size):
    """Return a command that runs the program that follows it in so many ranks."""
    return [sys.executable, written(folder, RANKS, "ranks.py"), str(size)]


def vgpu(folder, *arguments, timeout=120):
    """Run the command `vgpu` with some arguments; return the ended process and its output."""
    return subprocess.run(
        [sys.executable, "-m", "vgpu", *arguments],
        env=environment(folder),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
