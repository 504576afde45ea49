"""Execute lessons and deeper pages, with a progress bar and a table of results.

python tools/notebooks/run.py             all, two at a time; executed notebooks are written to
                                          build/
python tools/notebooks/run.py 03          one lesson and its pages
python tools/notebooks/run.py 03_threads  one lesson or page, alone
python tools/notebooks/run.py --core      lessons only, each up to its exercises
python tools/notebooks/run.py --in-place  write the executed notebooks back, cleaned, if they
                                          agree with headlines.toml; one at a time, on an idle
                                          machine
"""

import os
import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Nothing to clean up until `run`.
    signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))

import concurrent.futures
import contextlib
import ctypes
import getpass
import json
import re
import subprocess
import sys
import tempfile
import time
import unittest.mock
from dataclasses import dataclass
from pathlib import Path

import headlines
import idle
import nbformat
import psutil
from contents import FOLDER, ChapterParser, read_chapter, replace_file
from hygiene import machine_paths
from tqdm import tqdm
from tqdm.utils import ObjectWrapper

WORKER = Path(__file__).with_name("worker.py")
CELL_SECONDS = 300
INTERRUPTED = "interrupted"
AT_A_TIME = 2  # number of notebooks; a single one uses two cores for a third of its time
POLL = 0.1  # seconds between looks for Ctrl-C
TRIES = 3  # maximum number of executions until a chapter agrees with headlines.toml
BUSY = "not executed: other programs keep this machine busy"
KEPT_CELL_METADATA = ("tags", "nbgrader", "jupyter", "slideshow", "printed")
KERNEL = {"display_name": "Python 3", "name": "python3"}
METADATA = {"kernelspec": KERNEL, "language_info": {"name": "python"}}

_PR_SET_CHILD_SUBREAPER = 36
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@dataclass
class Result:
    """The result of a chapter: its time, and its failure, if any."""

    path: Path
    seconds: float = 0.0
    failure: str = ""  # one line for the table
    details: str = ""  # the failing cell and its traceback


class Lines(ObjectWrapper):
    """A stream for a progress bar without terminal: each state is a line."""

    def write(self, text):
        if text := text.strip():
            print(text, file=self._wrapped)


@dataclass
class Runner:
    """Executes notebooks, each in a process of its own, and counts their cells."""

    num_cells: dict  # of notebooks, code cells only
    build: Path  # the folder for the executed notebooks
    bar: tqdm  # counts code cells
    cell_seconds: float  # time limit of a cell
    core: bool  # whether to execute the cores only
    stopped: bool = False  # whether no further notebook is to be executed

    def execute(self, path):
        """Execute one chapter in a new kernel, and write the executed notebook to `build`.

        The failure of its `Result` is `INTERRUPTED` if it was killed after `stopped` was set.
        """
        num_done, last, target = 0, {}, self.build / path.name
        self.bar.set_description(path.stem, refresh=False)
        start = time.perf_counter()
        with subprocess.Popen(
            [sys.executable, WORKER, path, target, f"{self.cell_seconds}", f"{self.core:d}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            process_group=0,  # Ctrl-C in a terminal reaches this process only
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
        ) as process:
            for line in process.stdout:
                if not line.endswith("\n"):  # killed while it wrote
                    break
                last = json.loads(line)
                if "done" in last:
                    num_done += 1
                    self.bar.update()
                elif "cell" in last:
                    description = f"{path.stem} cell {last['cell']}/{self.num_cells[path]}"
                    refresh = last["cell"] == 1 or sys.stderr.isatty()
                    self.bar.set_description(description, refresh=refresh)
        seconds = time.perf_counter() - start
        self.bar.update(self.num_cells[path] - num_done)
        if "failure" not in last:
            died = f"failed: its process ended with the status {process.returncode}"
            last = {"failure": INTERRUPTED if self.stopped else died}
        return Result(path, seconds, **last)

    def execute_until_it_shows(self, path):
        """Execute a chapter on an idle machine, up to `TRIES` times, until headlines.toml is met.

        The `Result` is a failure if the machine does not become idle, or if no try agrees; its
        details then list the contradictions of each.
        """
        tables = headlines.declared(path)
        if tables is None:
            return self.execute(path)
        before, tries = self.bar.n, []
        for number in range(1, TRIES + 1):
            disturbed = idle.wait(self.say, lambda: self.stopped)
            if self.stopped:
                return Result(path, failure=INTERRUPTED)
            if disturbed:
                self.stopped = True
                return Result(path, failure=BUSY, details=disturbed)
            self.bar.n = before
            result = self.execute(path)
            if result.failure:
                return result
            notebook = nbformat.read(self.build / path.name, as_version=4)
            if not (found := headlines.contradictions(notebook, tables)):
                return result
            tries.append("\n  ".join([f"try {number} of {TRIES}:", *found]))
            self.say(f"{path.stem}: {tries[-1]}")
        result.failure = f"not written: it does not show what it declares in {TRIES} tries"
        result.details = "\n".join(tries)
        return result

    def say(self, text):
        """Print a text above the bar."""
        self.bar.write(text, file=sys.stdout)


def clean(notebook):
    """Remove widget state, timestamps and view settings, in place; make cell ids unique."""
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    taken = set()
    for number, cell in enumerate(notebook.cells, start=1):
        kept = {key: cell.metadata[key] for key in KEPT_CELL_METADATA if key in cell.metadata}
        cell.metadata = nbformat.from_dict(kept)
        if cell.get("id") is None or cell.id in taken:
            cell.id = f"cell-{number:02d}"
        taken.add(cell.id)
        for output in cell.get("outputs", []):
            output.pop("transient", None)


def write_in_place(result, executed):
    """Write the notebook at `executed` back, cleaned, unless it failed or shows a path."""
    if result.failure:
        return
    notebook = nbformat.read(executed, as_version=4)
    clean(notebook)
    if found := machine_paths(notebook):
        result.failure = f"not written: {found[0][0]} shows a path of this machine"
        result.details = "\n".join(f"{where}: {path}" for where, path in found)
        return
    replace_file(result.path, f"{nbformat.writes(notebook)}\n".encode())


def table(results):
    """Return the table of a run: chapter, seconds, result."""
    width = max([len("chapter"), *(len(result.path.stem) for result in results)])
    rows = [(each.path.stem, each.seconds, each.failure or "ok") for each in results]
    total = sum(result.seconds for result in results)
    failed = sum(bool(result.failure) for result in results)
    verdict = f"{failed} of {len(results)} failed" if failed else f"all {len(results)} ok"
    rows.append(("total", total, verdict))
    lines = [f"{name:<{width}}  {seconds:7.1f}  {what}" for name, seconds, what in rows]
    return "\n".join([f"{'chapter':<{width}}  seconds  result", *lines])


@contextlib.contextmanager
def own_settings():
    """Isolate the run from the user's settings; of temporary files keep torch's compiled code."""
    # Errors: without `no_orphans` a process may still write.
    with tempfile.TemporaryDirectory(prefix="d2lpar-", ignore_cleanup_errors=True) as folder:
        settings = {
            "TMPDIR": f"{folder}/tmp",
            "IPYTHONDIR": f"{folder}/ipython",
            "JUPYTER_CONFIG_DIR": f"{folder}/config",
            "JUPYTER_DATA_DIR": f"{folder}/data",
            "JUPYTER_PATH": "",  # the kernel python3 is that of this Python
            "JUPYTER_RUNTIME_DIR": f"{folder}/runtime",
            "MPLBACKEND": "module://matplotlib_inline.backend_inline",
            "PYDEVD_DISABLE_FILE_VALIDATION": "1",
            "PYTHONHASHSEED": "0",
        }
        if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
            with contextlib.suppress(ImportError, KeyError, OSError):  # no user name
                compiled = f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"
                settings["TORCHINDUCTOR_CACHE_DIR"] = compiled  # torch's default
        for name in ("JUPYTER_RUNTIME_DIR", "TMPDIR"):
            os.mkdir(settings[name], mode=0o700)
        with unittest.mock.patch.dict(os.environ, settings):
            yield


@contextlib.contextmanager
def no_orphans():
    """Yield a function that kills all processes started in the block; on Linux it ends with that.

    There, what a dead process leaves becomes a child of this one. Processes of Ray have their own
    process groups, which do not end with a kernel.
    """
    this = psutil.Process()
    before = this.children()

    def kill():
        children = [child for child in this.children() if child not in before]
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in (child, *child.children(recursive=True)):
                    process.kill()
        return children

    if sys.platform != "linux":
        yield kill
        return
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield kill
    finally:
        while left := kill():
            psutil.wait_procs(left)
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@contextlib.contextmanager
def noted_ctrl_c():
    """Yield a list that gets an item on Ctrl-C, unless it is ignored, as in a background job.

    No exception is raised, so that cleaning up and writing files are not interrupted.
    """
    noted, before = [], signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda *_: noted.append(True))
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


def run(chapters, build, in_place, cell_seconds, core):
    """Execute chapters, print tracebacks and the table, and write the executed notebooks.

    `in_place`: whether to run one at a time, and to write it back if it agrees with headlines.toml;
    `build`, `cell_seconds`, `core`: see `Runner`. Returns the exit status: 0 for success, 1 if a
    chapter failed, 130 after Ctrl-C.
    """
    terminal = sys.stderr.isatty()
    num_cells = {
        path: sum(cell.cell_type == "code" for cell in read_chapter(path, core).cells)
        for path in chapters
    }
    bar = tqdm(
        desc=chapters[0].stem,
        total=sum(num_cells.values()),
        unit="cell",
        file=sys.stderr if terminal else Lines(sys.stderr),
        mininterval=0.1 if terminal else 10,
        miniters=1,
    )
    runner = Runner(num_cells, build, bar, cell_seconds, core)
    build.mkdir(parents=True, exist_ok=True)
    for earlier in build.glob("*.ipynb"):
        earlier.unlink()

    def execute(path):
        if runner.stopped:
            return None
        if in_place:
            result = runner.execute_until_it_shows(path)
            write_in_place(result, build / path.name)
        else:
            result = runner.execute(path)
        if result.details:
            details = result.details if terminal else _ANSI.sub("", result.details)
            runner.say(f"\n{path.name}: {result.failure}\n{details}\n")
        return result

    pool = concurrent.futures.ThreadPoolExecutor(1 if in_place else AT_A_TIME)
    with noted_ctrl_c() as interrupts:
        with own_settings(), no_orphans() as kill, bar, pool:
            futures = [pool.submit(execute, path) for path in chapters]
            while concurrent.futures.wait(futures, POLL).not_done:
                if interrupts:
                    runner.stopped = True
                    kill()
        results = [result for future in futures if (result := future.result())]
        print(table(results) if results else INTERRUPTED)
        if not in_place and len(chapters) > 1:
            print(f"{AT_A_TIME} at a time shared the cores, and take longer than one alone")
        print(f"executed chapters: {os.path.relpath(build)}", flush=True)
    if interrupts:
        return 128 + signal.SIGINT
    return 1 if any(result.failure for result in results) else 0


def main(arguments=None):
    """Run the command line; return the exit status."""
    parser = ChapterParser(__doc__)
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--core", action="store_true", help="lessons only, up to their exercises")
    parts.add_argument("--in-place", action="store_true", help="write the chapters back, cleaned")
    parser.add_argument("--build", type=Path, default=FOLDER.parent / "build", help="where to")
    parser.add_argument("--timeout", type=float, default=CELL_SECONDS, help="seconds for a cell")
    options = parser.parse_args(arguments)
    chapters = parser.chapters(options, pages=not options.core)
    return run(chapters, options.build, options.in_place, options.timeout, options.core)


if __name__ == "__main__":
    sys.exit(main())
