"""(k) A step of DDP on two hosts, network namespaces of this machine, predicted and measured.

The line between them has the rate of 1 or 10 Gbit Ethernet. Predicted: with overlap the step of
two processes on one host, or what a line that never rests needs, whichever is longer; without
overlap the sum of both. What is measured should lie between the two, in the median of rounds.
"""

import sys
from pathlib import Path
from statistics import median

import torch
from hosts import NotAllowed, output_of, torchrun, torchrun_on, two_hosts

ROUNDS, BATCH_SIZE = 5, 64
HERE = Path(__file__).resolve().parent
STEP = {
    "function": "ddp_step.py:step_seconds",
    "arguments": (f"batch_size={BATCH_SIZE}", "num_steps=3"),
}


def main():
    from d2lpar.models import resnet18

    with torch.device("meta"):
        num_bytes = sum(p.nbytes for p in resnet18(10).parameters())
    status = 0
    for rate in (1, 10):
        one_host, measured = [], []
        for _ in range(ROUNDS):
            job = torchrun(HERE, "--standalone", "--nproc-per-node=2", **STEP)
            one_host.append(float(output_of(job)))
            try:
                with two_hosts(f"{rate}gbit") as hosts:
                    measured.append(float(torchrun_on(hosts, HERE, **STEP)))
            except NotAllowed as reason:
                print(reason)
                return 0
        line = num_bytes / (rate * 1e9 / 8)
        rounds = list(zip(one_host, measured, strict=True))
        within = (
            median(seconds / max(alone, line) for alone, seconds in rounds) >= 0.95
            and median(seconds / (alone + line) for alone, seconds in rounds) <= 1.1
        )
        alone, seconds = median(one_host), median(measured)
        status |= not within
        print(f"(k) {rate:2} Gbit: one host {alone:.3f} s, line {line:.3f} s, ", end="")
        print(f"predicted {max(alone, line):.3f} to {alone + line:.3f} s, ", end="")
        print(f"measured {seconds:.3f} s: {'ok' if within else 'MISSED'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
