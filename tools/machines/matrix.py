"""Run chapters, exercises and the quick tests as other machines would; print what failed where.

python tools/machines/matrix.py                     everything, under every condition: some hours
python tools/machines/matrix.py avx2 sse4           under two of them
python tools/machines/matrix.py avx2 --parts chapters --names 03 09
python tools/machines/matrix.py --table             the tables of what has been run so far

What came out stands under build/machines, a folder for each condition.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "machines"
HERE = Path(__file__).resolve().parent
PARTS = ("chapters", "exercises", "tests")
GIB = 2**30
LIMIT = 8_000_000_000  # bytes, what README promises


def instruction_set(aten, onednn, mkl):
    """Return the variables by which libraries take older kernels than the processor allows.

    torch.compile obeys ATen's. But the key of its cache does not have it: code whose loops take
    sixteen numbers at a time is then compiled for vectors of eight, and half of the results are
    missing. So each set has a cache of its own.
    """
    return {
        "ATEN_CPU_CAPABILITY": aten,
        "ONEDNN_MAX_CPU_ISA": onednn,
        "MKL_ENABLE_INSTRUCTIONS": mkl,
        "TORCHINDUCTOR_CACHE_DIR": str(OUT / f"compiled-{aten}"),
    }


@dataclass
class Condition:
    """A way in which another machine, or its user, differs from this one.

    Attributes:
        variables: of the environment.
        prefix: a command that runs the command behind it in that way.
        seeds: what is added to the number of each `manual_seed` of notebooks.
        folder: the name of the clone in which everything runs; "" for this tree.
        busy: how many other processes compute all the time.
        one_by_one: run chapters alone, with the peak of their memory.
    """

    variables: dict = field(default_factory=dict)
    prefix: tuple = ()
    seeds: int = 0
    folder: str = ""
    busy: int = 0
    one_by_one: bool = False


def conditions():
    """Return all conditions by name."""
    no_network = ("unshare", "--map-root-user", "--net", "sh", "-c")
    return {
        "native": Condition(),
        "avx2": Condition(instruction_set("avx2", "AVX2", "AVX2")),
        "sse4": Condition(instruction_set("default", "SSE41", "SSE4_2")),
        **{f"seeds-{n}": Condition(seeds=1000 * n, folder="d2lpar") for n in (1, 2, 3)},
        "one-core": Condition(prefix=("taskset", "--cpu-list", "0")),
        "one-thread": Condition({"OMP_NUM_THREADS": "1"}),
        "busy": Condition(busy=2),
        "8-GB": Condition(prefix=_memory_limit(), one_by_one=True),
        "not-root": Condition(
            prefix=("unshare", "--user", "--map-user=1000", "--map-group=1000"), folder="d2lpar"
        ),
        "no-home": Condition({"HOME": "/dev/null/home"}),
        "odd-path": Condition(folder="ein Weg/für alle"),
        "c-locale": Condition({"LC_ALL": "C", "LANG": "C"}),
        "time-zone": Condition({"TZ": "Pacific/Kiritimati"}),
        "no-network": Condition(prefix=(*no_network, 'ip link set lo up; exec "$@"', "sh")),
    }


def _memory_limit():
    """Return the prefix of a command that may use `LIMIT` bytes with its children, or ()."""
    scope = ("systemd-run", "--user", "--scope", "--quiet", f"--property=MemoryMax={LIMIT}")
    if (
        shutil.which(scope[0])
        and subprocess.run([*scope, "true"], capture_output=True).returncode == 0
    ):
        return scope
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        path = next(line.split(":", 2)[2] for line in lines if ":memory:" in line)
        group = Path(f"/sys/fs/cgroup/memory{path}", "d2lpar-machines")
        group.mkdir(exist_ok=True)
        (group / "memory.limit_in_bytes").write_text(f"{LIMIT}")
        return ("sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh")
    return ()


def _works(command):
    return subprocess.run(command, capture_output=True).returncode == 0


def why_not(name, condition):
    """Return why a condition cannot be imitated on this machine, or ""."""
    newer = {"avx2": "avx512f", "sse4": "avx2"}.get(name)  # that its processor lacks
    if newer and newer not in Path("/proc/cpuinfo").read_text().split():
        return f"this processor has no {newer} itself"
    if name == "8-GB" and not condition.prefix:
        return "no control group for memory can be made here, and there is no systemd-run --user"
    if condition.prefix:
        with contextlib.suppress(OSError):
            done = subprocess.run([*condition.prefix, "true"], capture_output=True, text=True)
            if done.returncode == 0:
                return ""
            return f"{condition.prefix[0]}: {done.stderr.strip()}"
        return f"no command {condition.prefix[0]}"
    return ""


@contextlib.contextmanager
def tree(condition):
    """Yield the tree to run in: this one, or a copy of it with other seeds or another path."""
    if not condition.folder:
        yield ROOT
        return
    with tempfile.TemporaryDirectory(prefix="d2lpar-machines-") as folder:
        copy = Path(folder, condition.folder)
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        names = subprocess.check_output(listed, cwd=ROOT, text=True).split("\0")
        for name in filter(None, names):
            if (ROOT / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name)
        if condition.seeds:
            for path in copy.glob("notebooks/**/*.ipynb"):
                path.write_text(_with_seeds(path.read_text("utf-8"), condition.seeds), "utf-8")
        for command in (["init", "--quiet"], ["add", "--all"]):
            subprocess.run(["git", *command], cwd=copy, check=True)
        yield copy


def _with_seeds(text, more):
    return re.sub(r"(manual_seed\()(\d+)\)", lambda m: f"{m[1]}{int(m[2]) + more})", text)


@contextlib.contextmanager
def busy(number):
    """Keep some processes computing."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


class Peak(threading.Thread):
    """Looks every quarter of a second at the memory of a process and of all its children."""

    def __init__(self, pid):
        super().__init__(daemon=True)
        self.pid, self.bytes, self.over = pid, 0, threading.Event()
        self.start()

    def run(self):
        """Keep the largest sum of the proportional set sizes."""
        while not self.over.wait(0.25):
            self.bytes = max(self.bytes, sum(map(_proportional_set_size, _family(self.pid))))

    def stop(self):
        """Return the peak in bytes."""
        self.over.set()
        self.join()
        return self.bytes


def _family(pid):
    import psutil

    with contextlib.suppress(psutil.Error):
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return []


def _proportional_set_size(pid):
    with contextlib.suppress(OSError):
        text = Path("/proc", str(pid), "smaps_rollup").read_text()
        return 1024 * int(re.search(r"^Pss:\s+(\d+)", text, re.MULTILINE)[1])
    return 0


def run(name, condition, parts, names):
    """Run the parts under one condition, and write what was found behind that of other parts.

    It is a dictionary: failures, pairs of a part and a text; peaks, bytes by chapter; seconds by
    part.

    Returns:
        The number of failures.
    """
    out = OUT / name
    out.mkdir(parents=True, exist_ok=True)
    found = {"failures": [], "peaks": {}, "seconds": {}}
    if (file := out / "result.json").exists():
        found = json.loads(file.read_text())
        found["failures"] = [each for each in found["failures"] if each[0] not in parts]
    before = len(found["failures"])
    with tree(condition) as root, busy(condition.busy):
        variables = os.environ | condition.variables
        variables["PYTHONPATH"] = os.pathsep.join([str(root), str(HERE)])
        for part in parts:
            (parities := out / f"{part}.jsonl").unlink(missing_ok=True)
            variables["D2LPAR_PARITIES"] = str(parities)
            start = time.monotonic()
            for label, command, more in _commands(part, root, out, names, condition.one_by_one):
                with (out / f"{label}.log").open("w") as log:
                    process = subprocess.Popen(
                        [*condition.prefix, *command],
                        cwd=root,
                        env=variables | more,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                    peak = Peak(process.pid) if condition.one_by_one else None
                    status = process.wait()
                if peak:
                    found["peaks"][label] = peak.stop()
                text = (out / f"{label}.log").read_text("utf-8", "replace")
                failures = _failures(part, text) or ([f"exit status {status}"] if status else [])
                found["failures"] += [(part, failure) for failure in failures]
            found["seconds"][part] = round(time.monotonic() - start)
            file.write_text(json.dumps(found))
            print(f"{name}: {part} took {found['seconds'][part]} s", flush=True)
    return len(found["failures"]) - before


def _commands(part, root, out, names, one_by_one):
    """Yield the name, the command and the variables of each run of a part."""
    if part == "tests":
        make = ["make", "--no-print-directory", "test", "FAST=1", f"VENV={ROOT / '.venv'}"]
        yield part, make, {"PYTEST_ADDOPTS": "-p parities"}
        return
    folder = root / "notebooks" / ("exercises" if part == "exercises" else "")
    files = sorted(folder.glob("[0-9][0-9]_*.ipynb"))
    files = [path for path in files if not names or path.stem[:2] in names]
    if part == "chapters" and not names:
        files.append(folder / "troubleshooting.ipynb")
    groups = [[path] for path in files] if one_by_one else [files]
    for group in groups:
        label = f"{part} {group[0].stem[:2]}" if one_by_one else part
        command = [sys.executable, "tools/run.py", "--folder", str(folder)]
        command += ["--build", str(out / label), *(path.stem for path in group)]
        yield label, command, {"PYTHONSTARTUP": str(HERE / "parities.py")}


def _failures(part, text):
    if part == "tests":
        return re.findall(r"^(?:FAILED|ERROR) (.+)$", text, re.MULTILINE)
    return re.findall(r"^(\w+ +[\d.]+ +\d+  (?!ok).+)$", text, re.MULTILINE)[:-1]


def tables():
    """Return the tables of all that has been run: failures, memory, parities."""
    lines = ["what failed"]
    peaks, seen = {}, defaultdict(dict)
    for name, condition in conditions().items():
        if not (path := OUT / name / "result.json").exists():
            reason = why_not(name, condition)
            lines.append(f"  {name:<11} not run{': ' * bool(reason)}{reason}")
            continue
        result = json.loads(path.read_text())
        took = ", ".join(f"{part} {seconds} s" for part, seconds in result["seconds"].items())
        lines.append(f"  {name:<11} {'ok' if not result['failures'] else 'FAILED'} ({took})")
        lines += [f"      {part}: {text}" for part, text in result["failures"]]
        peaks = result["peaks"] if condition.one_by_one else peaks
        for file in sorted((OUT / name).glob("*.jsonl")):
            for line in file.read_text().splitlines():
                _keep_worst(seen[file.stem], json.loads(line), name)
    if peaks:
        lines.append(f"peak of memory with all children, one at a time, of {LIMIT / 1e9:g} GB")
        lines += [f"  {label:<14} {peak / 1e9:5.2f} GB" for label, peak in peaks.items()]
    for part, rows in seen.items():
        lines.append(f"parities in {part}: the largest difference, its bound, their ratio, where")
        for key, (difference, bound, name) in sorted(rows.items()):
            ratio = difference / bound if bound else float("inf")
            numbers = f"{difference:7.1e} {bound:7.1e} {ratio:7.1e}"
            lines.append(f"  {numbers} {name:<10} {' '.join(key.split())[:120]}")
    return "\n".join(lines)


def _keep_worst(rows, entry, name):
    """Keep of each comparison the one that is nearest to its bound."""
    difference, bound = entry["difference"], entry["bound"]
    before = rows.get(entry["key"])
    if before is None or difference * before[1] > before[0] * bound:
        rows[entry["key"]] = difference, bound, name


def main(arguments=None):
    """Run what the command line names; return 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("conditions", nargs="*", metavar="condition", help="all if none is named")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--names", nargs="+", default=(), metavar="NN", help="of chapters")
    parser.add_argument("--table", action="store_true", help="print the tables only")
    options = parser.parse_args(arguments)
    known = conditions()
    if unknown := {*options.conditions} - {*known}:
        parser.error(f"no condition {min(unknown)!r}; there are: {', '.join(known)}")
    failures = 0
    for name in () if options.table else options.conditions or known:
        if reason := why_not(name, known[name]):
            print(f"{name}: not run: {reason}", flush=True)
            continue
        failures += run(name, known[name], options.parts, options.names)
    print(tables())
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
