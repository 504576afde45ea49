"""(g) A warm `launch` of an empty function on two ranks against `torch.multiprocessing.spawn`.
(h) DDP through `launch`: two processes of one thread against one, ResNet-18, batch 64.
(i) The same step through `launch` and under plain torchrun.
"""

import os
import subprocess
import sys
import time

import ddp_step
import torch.distributed as dist
import torch.multiprocessing as mp
from hosts import CPUS
from report import median, ratio_row

import d2lpar

ROUNDS, BATCH_SIZE, NUM_STEPS = 5, 64, 3
PROCESSES = 2


def empty():
    pass


def empty_in_group(rank, port):
    """What a function that `spawn` calls has to do to have a process group too."""
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=PROCESSES)
    dist.destroy_process_group()


def seconds_of(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def spawn(round):
    mp.spawn(empty_in_group, (29600 + round,), PROCESSES)


def launched_step(nproc):
    return max(d2lpar.launch(ddp_step.step_seconds, BATCH_SIZE, NUM_STEPS, nproc=nproc))


def torchrun_step():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={PROCESSES}", ddp_step.__file__, str(BATCH_SIZE), str(NUM_STEPS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=CPUS)
    return float(done.stdout)


def main():
    os.environ["D2LPAR_DEVICES"] = "vgpu"  # gloo on CPUs, wherever this runs
    d2lpar.launch(empty, nproc=PROCESSES)
    warm, spawned = [], []
    for round in range(ROUNDS):
        warm.append(seconds_of(lambda: d2lpar.launch(empty, nproc=PROCESSES)))
        spawned.append(seconds_of(lambda round=round: spawn(round)))
    one, two, under_torchrun = [], [], []
    for _ in range(ROUNDS):
        one.append(launched_step(1))
        two.append(launched_step(PROCESSES))
        under_torchrun.append(torchrun_step())
    print(f"warm launch {median(warm):.2f} s, mp.spawn {median(spawned):.2f} s; step ", end="")
    print(f"{median(one):.3f} s, {median(two):.3f} s, {median(under_torchrun):.3f} s by torchrun")
    name = "(i) step of two ranks, launch / torchrun"
    kept = [
        ratio_row(
            "(g) a warm launch / mp.spawn, two ranks", median(warm) / median(spawned), 0.5, False
        ),
        ratio_row("(h) DDP through launch, one process / two", median(one) / median(two), 1.7),
        ratio_row(name, median(two) / median(under_torchrun), 1.02, False),
    ]
    return int(not all(kept))


if __name__ == "__main__":
    sys.exit(main())
