"""Run chapters, exercises and quick tests under the conditions of other machines.

python tools/machines/matrix.py                     everything under every condition: some hours
python tools/machines/matrix.py avx2 sse4           under two conditions
python tools/machines/matrix.py c-locale+no-home    under both at once
python tools/machines/matrix.py avx2 --parts chapters --names 03 09     with their pages

Results are stored under build/machines, in a folder for each condition; the tables have all.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import ChainMap, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "machines"
HERE = Path(__file__).resolve().parent
PARTS = ("chapters", "exercises", "tests")
TESTS = "tests/d2lpar tests/vgpu tests/tools"
# Not those that wait for time-outs, which no kernel and no seed changes, and a slow start does.
OPTIONS = "-p parities -m 'not slow and not waits'"


def instruction_set(aten, onednn, mkl):
    """Return environment variables that select older kernels than the processor supports.

    Each has its own cache of compiled code: the key of torch.compile's cache ignores ATen's
    variable, and loops over sixteen numbers would lose half of their results in vectors of eight.
    """
    return {
        "ATEN_CPU_CAPABILITY": aten,
        "ONEDNN_MAX_CPU_ISA": onednn,
        "MKL_ENABLE_INSTRUCTIONS": mkl,
        "TORCHINDUCTOR_CACHE_DIR": str(OUT / f"compiled-{aten}"),
    }


@dataclass
class Condition:
    """A difference between another machine, or its user, and this one.

    With a limit of memory chapters run one by one, and their peaks are recorded.
    """

    variables: dict = field(default_factory=dict)  # of the environment
    prefix: tuple = ()  # a command that runs its arguments under the condition
    needs: str = ""  # a CPU flag; without it this machine itself is such a machine
    seeds: int = 0  # an offset added to each `manual_seed` in notebooks; tests do not run
    folder: str = ""  # the name of the copy of the tree in which to run; "" runs in this tree
    memory: int = 0  # a limit in bytes, 0 for none


# Runs a command beside loops that keep all cores busy, and ends them with it.
BUSY = """trap 'kill $(jobs -p)' EXIT; for i in $(seq $(nproc)); do yes >/dev/null & done; "$@" """
FIRST_CORE = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0

CONDITIONS = {
    "native": Condition(),
    "avx2": Condition(instruction_set("avx2", "AVX2", "AVX2"), needs="avx512f"),
    "sse4": Condition(instruction_set("default", "SSE41", "SSE4_2"), needs="avx2"),
    **{f"seeds-{n}": Condition(seeds=1000 * n, folder="d2lpar") for n in (1, 2, 3)},
    "one-core": Condition(prefix=("taskset", "--cpu-list", str(FIRST_CORE))),
    "one-thread": Condition({"OMP_NUM_THREADS": "1"}),
    "busy": Condition(prefix=("bash", "-c", BUSY, "bash")),
    "8-GB": Condition(memory=8_000_000_000),  # what README promises
    # without the capabilities of root, but with root's files
    "not-root": Condition(
        prefix=("unshare", "--user", "--map-user=1000", "--map-group=1000"), folder="d2lpar"
    ),
    "no-home": Condition({"HOME": "/dev/null/home"}),
    "odd-path": Condition(folder="ein Weg/für alle"),
    "c-locale": Condition({"LC_ALL": "C", "LANG": "C"}),
    "time-zone": Condition({"TZ": "Pacific/Kiritimati"}),
    "no-network": Condition(
        prefix=("unshare", "--map-root-user", "--net", "sh", "-c")
        + ('ip link set lo up && exec "$@"', "sh")
    ),
}


def condition_of(name):
    """Return a condition, or a combination of several with names joined by "+"."""
    parts = name.split("+")
    if unknown := [part for part in parts if part not in CONDITIONS]:
        raise ValueError(f"no condition {unknown[0]!r}: choose from {', '.join(CONDITIONS)}")
    conditions = [CONDITIONS[part] for part in parts]
    variables = dict(ChainMap(*(condition.variables for condition in conditions)))
    prefix = sum((condition.prefix for condition in conditions), ())
    others = {
        name: max(getattr(condition, name) for condition in conditions)
        for name in ("needs", "seeds", "folder", "memory")
    }
    return Condition(variables, prefix, **others)


@contextlib.contextmanager
def limited(num_bytes):
    """Create a control group with a memory limit; yield the prefix of a command to run in it."""
    if not num_bytes:
        yield ()
        return
    scope = ["systemd-run", "--user", "--scope", "--quiet", f"--property=MemoryMax={num_bytes}"]
    scope.append("--property=MemorySwapMax=0")
    tried = shutil.which(scope[0]) and subprocess.run([*scope, "true"], capture_output=True)
    if tried and not tried.returncode:
        yield tuple(scope)
        return
    own = re.search(r":memory:(.*)", Path("/proc/self/cgroup").read_text())
    if not own:
        raise OSError("neither systemd-run --user nor a control group of version 1 limits memory")
    group = Path(f"/sys/fs/cgroup/memory{own[1]}", f"d2lpar-{os.getpid()}")
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(f"{num_bytes}")
        yield "sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"
    finally:
        group.rmdir()


def why_not(condition):
    """Return the reason why a condition cannot be imitated on this machine, or ""."""
    try:
        needs = condition.needs
        if needs and needs not in Path("/proc/cpuinfo").read_text().split():
            return f"this processor has no {needs} itself"
        with limited(condition.memory):
            pass
        if condition.prefix:
            command = [*condition.prefix, "true"]
            subprocess.run(command, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        return f"{condition.prefix[0]}: {error.stderr.strip()}"
    except OSError as error:
        return str(error)
    return ""


@contextlib.contextmanager
def tree(condition):
    """Yield the tree to run in: this one, or a copy with other seeds or another path."""
    if not condition.folder:
        yield ROOT
        return
    with tempfile.TemporaryDirectory(prefix="d2lpar-machines-") as folder:
        copy = Path(folder, condition.folder)
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        names = subprocess.check_output(listed, cwd=ROOT, text=True).split("\0")
        there = [name for name in names if (ROOT / name).is_file()]
        copy.mkdir(parents=True)
        cp = ["cp", "--parents", "--preserve=timestamps"]  # or make would set the environment up
        subprocess.run([*cp, *there, copy], cwd=ROOT, check=True)
        if condition.seeds:
            for path in copy.glob("notebooks/**/*.ipynb"):
                path.write_text(with_seeds(path.read_text("utf-8"), condition.seeds), "utf-8")
        for command in (["init", "--quiet"], ["add", "--all"]):
            subprocess.run(["git", *command], cwd=copy, check=True)
        yield copy


def with_seeds(text, more):
    """Return a program with `more` added to each of its seeds."""
    return re.sub(r"(manual_seed\()(\d+)\)", lambda m: f"{m[1]}{int(m[2]) + more})", text)


def memory_of(pid):
    """Return the sum of the proportional set sizes of a process and all its descendants, bytes."""
    total = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # it has ended
                total += each.memory_full_info().pss
    return total


def run(name, condition, parts, names):
    """Run the parts under one condition, and merge the results into its result.json.

    The file has a dict: "failures", pairs (part, text); "peaks", bytes by chapter; "ran", duration
    and chapters by part. Returns the number of failures.
    """
    out = OUT / name
    out.mkdir(parents=True, exist_ok=True)
    found = {"failures": [], "peaks": {}, "ran": {}}
    if (file := out / "result.json").exists():
        found = json.loads(file.read_text())
        found["failures"] = [each for each in found["failures"] if each[0] not in parts]
    before = len(found["failures"])
    with tree(condition) as root, limited(condition.memory) as limit:
        variables = os.environ | condition.variables
        variables["PYTHONPATH"] = os.pathsep.join([str(root), str(HERE)])
        for part in parts:
            if part == "tests" and condition.seeds:
                continue
            (parities := out / f"{part}.jsonl").unlink(missing_ok=True)
            variables["D2LPAR_PARITIES"] = str(parities)
            start = time.monotonic()
            for label, command in _commands(part, root, out, names, bool(condition.memory)):
                command, log = [*limit, *condition.prefix, *command], out / f"{label}.log"
                status, peak = _run(command, root, variables, log, bool(condition.memory))
                text = log.read_text("utf-8", errors="replace")
                if condition.memory:
                    found["peaks"][label] = peak
                failures = failures_in(part, text) or ([f"exit status {status}"] if status else [])
                found["failures"] += [(part, failure) for failure in failures]
                if failures:
                    print(*text.splitlines()[-100:], sep="\n")
            took = f"{time.monotonic() - start:.0f} s"
            found["ran"][part] = " ".join([*(names if part != "tests" else ()), took])
            file.write_text(json.dumps(found))
            print(f"{name}: {part} took {took}", flush=True)
    return len(found["failures"]) - before


def _run(command, folder, variables, log, measure):
    """Run a command, with its output in a file; return its exit status and peak memory in bytes.

    The peak is 0 unless `measure` is set: sampling takes a tenth of a core.
    """
    streams = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=folder, env=variables, stdout=file, **streams)
        peak = 0
        try:
            while measure and process.poll() is None:
                peak = max(peak, memory_of(process.pid))
                time.sleep(0.25)
        finally:
            process.wait()  # after Ctrl-C, which the command also gets, it cleans up
        return process.returncode, peak


def _commands(part, root, out, names, one_by_one):
    """Yield the name and the command of each run of a part."""
    if part == "tests":
        make = ["make", "--no-print-directory", "test", f"TESTS={TESTS}", f"OPTIONS={OPTIONS}"]
        yield part, [*make, f"VENV={sys.prefix}"]
        return
    folder = root / "notebooks" / ("exercises" if part == "exercises" else "")
    paths = [*sorted(folder.glob("*.ipynb")), *sorted(folder.glob("deeper/*.ipynb"))]
    stems = [path.stem for path in paths if not names or {path.stem, path.stem[:2]} & {*names}]
    for group in [[stem] for stem in stems] if one_by_one else [stems or names]:
        label = f"{part} {group[0]}" if one_by_one else part
        run = [sys.executable, "tools/notebooks/run.py"]
        run += ["--folder", f"{folder}", "--build", f"{out / label}"]
        yield label, ["env", f"PYTHONSTARTUP={HERE / 'parities.py'}", *run, *group]


def failures_in(part, text):
    """Return the lines of a part's output that report failures."""
    if part == "tests":
        return re.findall(r"^(?:FAILED|ERROR) (.+)$", text, re.MULTILINE)
    return re.findall(r"^(\w+ +\d+\.\d  (?!ok).+)$", text, re.MULTILINE)[:-1]


def tables():
    """Return the tables of all results: failures, memory, parities."""
    lines = ["what failed"]
    peaks, seen = {}, defaultdict(dict)
    joined = [folder.name for folder in sorted(OUT.glob("*+*"))]
    for name in [*CONDITIONS, *joined]:
        if not (path := OUT / name / "result.json").exists():
            among = [each for each in joined if name in each.split("+")]
            reason = among[0] if among else why_not(condition_of(name))
            what = "see" if among else "not run" + ":" * bool(reason)
            lines.append(f"  {name:<11} {what} {reason}".rstrip())
            continue
        result = json.loads(path.read_text())
        took = ", ".join(" ".join(pair) for pair in result["ran"].items())
        lines.append(f"  {name:<11} {'ok' if not result['failures'] else 'FAILED'} ({took})")
        lines += [f"      {part}: {text}" for part, text in result["failures"]]
        peaks |= result["peaks"]
        for file in sorted((OUT / name).glob("*.jsonl")):
            for line in file.read_text().splitlines():
                entry = json.loads(line)
                row = entry["difference"], entry["bound"], name
                worst = seen[file.stem].setdefault(entry["key"], row)
                if row[0] * worst[1] > worst[0] * row[1]:  # nearer to its bound
                    seen[file.stem][entry["key"]] = row
    if peaks:
        lines.append("peak of memory, with all children, one at a time")
        lines += [f"  {label:<42} {peak / 1e9:5.2f} GB" for label, peak in peaks.items()]
    for part, rows in seen.items():
        lines.append(f"parities in {part}: the largest difference, its bound, their ratio, where")
        for key, (difference, bound, name) in sorted(rows.items()):
            ratio = difference / bound if bound else float("inf")
            numbers = f"{difference:7.1e} {bound:7.1e} {ratio:7.1e}"
            lines.append(f"  {numbers} {name:<10} {' '.join(key.split())[:120]}")
    return "\n".join(lines)


def main(arguments=None):
    """Run the command line; return 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("conditions", nargs="*", metavar="condition", help="all if none is named")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--names", nargs="+", default=(), metavar="NN", help="of chapters")
    options = parser.parse_args(arguments)
    names = options.conditions or CONDITIONS
    try:
        conditions = {name: condition_of(name) for name in names}
    except ValueError as error:
        parser.error(str(error))
    failures = 0
    for name, condition in conditions.items():
        if reason := why_not(condition):
            print(f"{name}: not run: {reason}", flush=True)
            continue
        failures += run(name, condition, options.parts, options.names)
    print(tables())
    return int(failures > 0)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
