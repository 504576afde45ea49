"""(j) A push and a pull through a parameter server, against a bare Ray actor's calls.

The bare actor adds what it is sent and returns its values; the same tensor, of 256 kB, 1 MB and
4 MB, travels both ways, and a tensor comes back. Rounds alternate in one run. The store also counts
pushes, so that none is added twice. Its throughput is at least 0.9 times the bare one.
"""

import sys
import time
from statistics import median

import numpy as np
import torch
from report import ratio_row

from d2lpar.chapters.parameter_server.ray_setup import start_ray
from d2lpar.chapters.parameter_server.store import parameter_servers

ROUNDS, SIZES = 31, {"256 kB": 1 << 16, "1 MB": 1 << 18, "4 MB": 1 << 20}  # elements


class Bare:
    """The least that a server can be."""

    def __init__(self, numel):
        self.values = np.zeros(numel, np.float32)

    def push(self, values):
        self.values += values

    def pull(self):
        return self.values


def seconds_of(push_and_pull, repeats):
    start = time.perf_counter()
    for _ in range(repeats):
        push_and_pull()
    return (time.perf_counter() - start) / repeats


def ratio(ray, numel):
    """Return the bare actor's seconds over the store's, the median of alternating rounds."""
    x = torch.ones(numel)
    bare = ray.remote(num_cpus=0)(Bare).remote(numel)

    def through_bare():
        ray.get(bare.push.remote(x.numpy()))
        return torch.from_numpy(ray.get(bare.pull.remote()).copy())

    with parameter_servers({"x": torch.zeros(numel)}) as store:

        def through_store():
            store.push("x", x)
            return store.pull("x")

        calls, seconds = (through_bare, through_store), ([], [])
        repeats = max(4, (1 << 21) // numel)
        for call in calls:
            seconds_of(call, repeats)
        for i in range(ROUNDS):
            for j in (0, 1) if i % 2 else (1, 0):
                seconds[j].append(seconds_of(calls[j], repeats))
        assert torch.equal(through_bare(), through_store())
    ray.kill(bare)
    return median([a / b for a, b in zip(*seconds, strict=True)])


def main():
    ray = start_ray()
    try:
        rows = [
            ratio_row(f"(j) push and pull of {name}: store over a bare actor", ratio(ray, n), 0.9)
            for name, n in SIZES.items()
        ]
    finally:
        ray.shutdown()
    return int(not all(rows))


if __name__ == "__main__":
    sys.exit(main())
