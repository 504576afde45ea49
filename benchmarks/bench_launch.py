"""(g) A warm `launch` of an empty function on two ranks against `torch.multiprocessing.spawn`.
(h) DDP through `launch`: two processes of one thread against one, ResNet-18, batch 64; held
    against what two plain threads gain in the same round.
(i) The same step through `launch` and under plain torchrun.
"""

import os
import subprocess
import sys
from statistics import median

import ddp_step
import torch.distributed as dist
import torch.multiprocessing as mp
from hosts import CPUS
from report import cores_of_two_threads, ratio_row, seconds

import d2lpar

ROUNDS, BATCH_SIZE, NUM_STEPS = 9, 64, 3
PROCESSES = 2


def empty():
    pass


def empty_in_group(rank, port):
    """What a function that `spawn` calls has to do to have a process group too."""
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=PROCESSES)
    dist.destroy_process_group()


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
    os.environ["VGPU_DEVICES"] = "vgpu"  # gloo on CPUs, wherever this runs
    d2lpar.launch(empty, nproc=PROCESSES)
    warm, spawned = [], []
    for round in range(ROUNDS):
        warm.append(seconds(lambda: d2lpar.launch(empty, nproc=PROCESSES)))
        spawned.append(seconds(lambda round=round: spawn(round)))
    gains, against = [], []
    for _ in range(ROUNDS):
        one, two, by_torchrun = launched_step(1), launched_step(PROCESSES), torchrun_step()
        cores = cores_of_two_threads()
        gains.append(one / two * 2 / cores)
        against.append(two / by_torchrun)
        print(f"    seconds a step: one {one:.3f}, two {two:.3f}, by torchrun ", end="")
        print(f"{by_torchrun:.3f}; cores {cores:.2f}")
    print(f"warm launch {median(warm):.2f} s, mp.spawn {median(spawned):.2f} s")
    name = "(h) DDP through launch, one process / two, on two whole cores"
    kept = [
        ratio_row(
            "(g) a warm launch / mp.spawn, two ranks", median(warm) / median(spawned), 0.5, False
        ),
        ratio_row(name, median(gains), 1.7),
        ratio_row(
            "(i) step of two ranks, launch / torchrun", median(against), 1.02, False, reached=1.05
        ),
    ]
    return int(not all(kept))


if __name__ == "__main__":
    sys.exit(main())
