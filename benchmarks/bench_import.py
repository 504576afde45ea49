"""What d2lpar adds to `import torch`, and both against d2l, in fresh processes, in turn.

Limits: `import torch, d2lpar` takes at most 1.05 times as long as `import torch`, and at most 0.45
times as long as `from d2l import torch`, also when every public name of d2lpar is loaded. Our entry
point, which PyTorch calls, adds at most 1 % to `import torch`. Two runs of `import torch` differ by
more than that, so what comes on top of it is timed right after it, in the same process.
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
CALL = "[point] = [point for point in points if point.name == 'vgpu']; point.load()()"
# Not `from d2l import torch`: torchvision needs a hand on a CPU build of torch
D2L = "from d2lpar._d2l import load; load()"


def seconds(*statements, **environment):
    """Return the seconds that statements take one after the other in a fresh process, a list."""
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
    imports, points, with_d2l, missing = [], [], [], None
    for _ in range(repeats + 1):
        imports.append(seconds(TORCH, OURS, NAMES))
        points.append(seconds(TORCH, POINTS, CALL, TORCH_DEVICE_BACKEND_AUTOLOAD="0"))
        try:
            with_d2l += seconds(D2L) if missing is None else []
        except RuntimeError as error:
            missing, with_d2l = error, []
    imports, points, with_d2l = imports[1:], points[1:], with_d2l[1:]  # the first fills caches
    torch, ours, names = ([sum(row[:n]) for row in imports] for n in (1, 2, 3))
    rows = (torch, "torch"), (ours, "and d2lpar"), (names, "and its names"), (with_d2l, "d2l")
    for times, name in rows:
        said = f"{median(times):.3f} s, median of {repeats}" if times else f"failed: {missing}"
        print(f"{name:14} {said}")

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
