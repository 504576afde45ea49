"""What importing costs: d2lpar behind torch, and both against d2l, in fresh processes, in turn.

Limits: `import d2lpar` at most 1.05 times `import torch`, and at most 0.45 times
`from d2l import torch`. Loading every public name of d2lpar is held to the same limits. `import
torch` with our entry point, which PyTorch calls, takes at most 1.01 times what it takes without.
A second of `import torch` varies by more than that, so what comes on top of it is timed behind it,
in the same process.
Exits with status 1 when a limit is exceeded.
"""

import argparse
import json
import os
import subprocess
import sys
from statistics import median

from report import ratio_row

# The first process stores what it has compiled of d2lpar, as pip has done of torch.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
TORCH, OURS, NAMES = "import torch", "import d2lpar", "from d2lpar import *"
POINTS = "import importlib.metadata as m; points = m.entry_points(group='torch.backends')"
CALLS = "[point.load()() for point in points if point.name == 'd2lpar']"
D2L = "from d2lpar._d2l import load; load()"  # torchvision needs a hand on a CPU build of torch


def seconds(*statements, **environment):
    """Return how long each statement takes in a fresh process, one after the other, a list."""
    code = """
import json, sys, time
seconds = []
for statement in sys.argv[1:]:
    start = time.perf_counter()
    exec(statement)
    seconds.append(time.perf_counter() - start)
print(json.dumps(seconds))
"""
    command = [sys.executable, "-c", code, *statements]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**ENVIRONMENT, **environment}
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip().split("\n")[-1])
    return json.loads(done.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    imports, points, with_d2l = [], [], []
    for _ in range(repeats + 1):
        imports.append(seconds(TORCH, OURS, NAMES))
        points.append(seconds(TORCH, POINTS, CALLS, TORCH_DEVICE_BACKEND_AUTOLOAD="0"))
        try:
            with_d2l.append(seconds(D2L)[0])
        except RuntimeError as error:
            missing = f"d2l            not measured: {error}"
    imports, points, with_d2l = imports[1:], points[1:], with_d2l[1:]  # the first fills caches
    torch, ours, names = ([sum(row[:n]) for row in imports] for n in (1, 2, 3))
    rows = (torch, "torch"), (ours, "and d2lpar"), (names, "and its names"), (with_d2l, "d2l")
    for times, name in rows:
        print(f"{name:14} {median(times):.3f} s, median of {repeats}" if times else missing)

    def ratio(times, bases):
        return median(time / base for time, base in zip(times, bases, strict=True))

    kept = [
        ratio_row("import torch, d2lpar / import torch", ratio(ours, torch), 1.05, False),
        ratio_row("... and every name of d2lpar", ratio(names, torch), 1.05, False),
        ratio_row(
            "import torch / the same without our entry point",
            1 + median(call / torch for torch, _, call in points),
            1.01,
            False,
        ),
    ]
    if with_d2l:
        kept += [
            ratio_row(
                "import torch, d2lpar / from d2l import torch", ratio(ours, with_d2l), 0.45, False
            ),
            ratio_row("... and every name of d2lpar", ratio(names, with_d2l), 0.45, False),
        ]
    return int(not all(kept))


if __name__ == "__main__":
    sys.exit(main())
