"""What importing costs: d2lpar against torch and against d2l, in fresh processes, in turn.

Limits: `import d2lpar` at most 1.05 times `import torch`, and at most 0.45 times
`from d2l import torch`. Loading every public name of d2lpar is held to the same limits. `import
torch` with our entry point, which PyTorch calls, takes at most 1.01 times what it takes without.
Exits with status 1 when one is exceeded.
"""

import argparse
import os
import statistics
import subprocess
import sys

# The first process stores what it has compiled of d2lpar, as pip has done of torch.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
TORCH, OURS, NAMES = "import torch", "import torch, d2lpar", "import torch; from d2lpar import *"
D2L = "from d2l import torch"
WITHOUT = "import torch, no entry point"
STATEMENTS = {
    TORCH: TORCH,
    # It looks for entry points as ever, and finds none.
    WITHOUT: "import importlib.metadata as m; e = m.entry_points; "
    "m.entry_points = lambda **group: e(**group) and (); import torch",
    OURS: OURS,
    NAMES: NAMES,
    # Through d2lpar, since torchvision needs a hand on a CPU build of torch.
    D2L: "from d2lpar._d2l import load; load()",
}
LIMITS = (
    (OURS, TORCH, 1.05),
    (NAMES, TORCH, 1.05),
    (OURS, D2L, 0.45),
    (NAMES, D2L, 0.45),
    (TORCH, WITHOUT, 1.01),
)


def seconds(statement):
    """Return how long a statement takes in a fresh process, as that process measures it."""
    code = f"import time; t = time.perf_counter(); {statement}; print(time.perf_counter() - t)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().split("\n")[-1])
    return float(done.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    times, missing = {}, {}
    for _ in range(repeats + 1):
        for name, statement in STATEMENTS.items():
            if name in missing:
                continue
            try:
                times.setdefault(name, []).append(seconds(statement))
            except RuntimeError as error:
                missing[name] = error
    # The first round warms the file cache.
    medians = {n: statistics.median(t[1:]) for n, t in times.items() if n not in missing}
    for name, median in medians.items():
        print(f"{name:36}  median of {repeats}: {median:.3f} s")
    for name, error in missing.items():
        print(f"{name:36}  not measured: {error}")
    print(f"{'ratio':62} {'value':>6}  {'limit':>6}  ok")
    failed = False
    for name, base, limit in LIMITS:
        if name in medians and base in medians:
            rounds = zip(times[name][1:], times[base][1:], strict=True)
            ratio = statistics.median(own / other for own, other in rounds)
            failed |= ratio > limit
            print(f"{name + ' / ' + base:62} {ratio:6.3f}  {limit:6.2f}  {ratio <= limit}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
