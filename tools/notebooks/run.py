"""Execute lessons and deeper pages, with a progress bar and a table of results.

python tools/notebooks/run.py             all, two at a time; executed notebooks are written to
                                          build/
python tools/notebooks/run.py 03          one lesson and its pages
python tools/notebooks/run.py 03_threads  one lesson or page, alone
python tools/notebooks/run.py --core      lessons only, each up to its exercises or "Going deeper"
python tools/notebooks/run.py --in-place  write the executed notebooks back, cleaned, if they
                                          agree with headlines.toml; one at a time, on an idle
                                          machine
"""

import os
import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Nothing to clean up until `run`.
    signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))

import argparse
import asyncio
import atexit
import contextlib
import ctypes
import functools
import getpass
import itertools
import re
import sys
import tempfile
import time
import unittest.mock
from dataclasses import dataclass
from pathlib import Path

import headlines
import nbformat
import psutil
from contents import FOLDER, find_chapters, read_chapter
from hygiene import count_figures, machine_paths
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from tqdm import tqdm
from traitlets import default

TRANSPORT = "ipc" if os.name == "posix" else "tcp"  # of the connection to a kernel
CELL_SECONDS = 300
INTERRUPTED = "interrupted"
AT_A_TIME = 2  # number of notebooks; a single one uses two cores for a third of its time
TRIES = 3  # maximum number of executions until a chapter agrees with headlines.toml
BUSY = "not executed: other programs keep this machine busy"
KEPT_CELL_METADATA = ("tags", "nbgrader", "jupyter", "slideshow", "printed")

_PR_SET_CHILD_SUBREAPER = 36
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_kernels = itertools.count()


@dataclass
class Result:
    """The result of a chapter: its time, number of figures and failure, if any."""

    path: Path
    notebook: nbformat.NotebookNode
    seconds: float
    figures: int = 0
    failure: str = ""  # one line for the table
    details: str = ""  # the failing cell and its traceback


class Kernel(AsyncKernelManager):
    """A kernel of the Python that runs this script, regardless of the installed kernels.

    If possible it uses sockets in the folder of the run, not ports that another run could take.
    """

    @default("transport")
    def _default_transport(self):
        return TRANSPORT

    @default("ip")
    def _default_ip(self):
        folder = os.environ["JUPYTER_RUNTIME_DIR"]
        return str(Path(folder, f"k{next(_kernels)}")) if TRANSPORT == "ipc" else "127.0.0.1"

    @property
    def kernel_spec(self):
        """The command of the kernel."""
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=command, display_name="Python 3")

    async def end(self):
        """Kill the kernel and its process group, if they are still running."""
        if self.has_kernel:
            await self.provisioner.kill()
            await self.provisioner.wait()
        await self.cleanup_resources()


class Client(NotebookClient):
    """An nbclient that cleans up completely when Ctrl-C cancels it.

    nbclient leaks the task that polls the kernel every second, which then fails, and a kernel that
    is starting or ending. The kernel gets the name of its notebook as from Jupyter.
    """

    watch = None

    async def _async_poll_kernel_alive(self):
        self.watch = asyncio.current_task()
        await super()._async_poll_kernel_alive()

    async def run(self):
        """Execute the notebook and end its kernel; on cancellation kill the kernel at once."""
        kernel = self.create_kernel_manager()
        variables = os.environ | {"JPY_SESSION_NAME": self.resources["metadata"]["name"]}
        task = asyncio.create_task(self.async_execute(env=variables))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            self.shutdown_kernel = "immediate"
            tasks = [task, self.watch] if self.watch else [task]
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await kernel.end()
            if self.kc:
                self.kc.stop_channels()
            atexit.unregister(self._cleanup_kernel)
            raise


class Loop(asyncio.SelectorEventLoop):
    """An event loop without signal handlers, which are left to `CtrlC`.

    Otherwise nbclient would handle Ctrl-C, end the kernel, and continue with the next chapter.
    """

    def add_signal_handler(self, *args):
        """Refuse the handler; nbclient continues without it."""
        raise RuntimeError("signal handlers are reserved for CtrlC")


class CtrlC:
    """Handler of Ctrl-C during a run; only the first has an effect.

    It raises no exception, so that cleaning up and writing files are not interrupted.
    """

    def __init__(self):
        self.noted = False
        self._act = None

    def __call__(self, *_):
        first, self.noted = not self.noted, True
        if first and self._act:
            self._act()

    @contextlib.contextmanager
    def taken(self):
        """Install the handler in the block, unless Ctrl-C is ignored, as in a background job."""
        self.noted, before = False, signal.getsignal(signal.SIGINT)
        if before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextlib.contextmanager
    def calls(self, act):
        """Call `act` on Ctrl-C in the block, at once if it was pressed before."""
        self._act = act
        try:
            if self.noted:
                act()
            yield
        finally:
            self._act = None


ctrl_c = CtrlC()


class Lines:
    """A stream for a progress bar without terminal: each state is a line."""

    def __init__(self, stream):
        self.stream = stream

    def write(self, text):
        """Write one state of the bar."""
        if text := text.strip():
            print(text, file=self.stream)

    def flush(self):
        """Flush the stream."""
        self.stream.flush()


async def execute(path, bar, cell_seconds=CELL_SECONDS, core=False, after_cell=lambda: None):
    """Execute one chapter in a new kernel.

    Args:
        path: the path of the notebook, which is only read.
        bar: a tqdm bar that counts code cells.
        cell_seconds: time limit of a cell.
        core: whether to run the core only.
        after_cell: a function to call after each cell.

    Returns:
        A `Result` with the executed notebook; its failure is `INTERRUPTED` if the task was
        cancelled. The kernel has ended.
    """
    notebook = read_chapter(path, core)
    code = [i for i, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
    for i in code:
        notebook.cells[i].update(outputs=[], execution_count=None)
    current, left = 0, len(code)
    bar.set_description(path.stem, refresh=False)

    def started(cell, cell_index):
        nonlocal current
        if cell_index in code:
            current = code.index(cell_index) + 1
            description = f"{path.stem} cell {current}/{len(code)}"
            bar.set_description(description, refresh=current == 1 or sys.stderr.isatty())

    def executed(cell, cell_index, execute_reply):
        nonlocal left
        left -= 1
        bar.update()
        after_cell()

    client = _client(path, notebook, cell_seconds, started, executed)
    result = Result(path, notebook, seconds=0.0)
    start = time.perf_counter()
    try:
        await client.run()
    except asyncio.CancelledError:
        result.failure = INTERRUPTED
    except Exception as error:
        source = notebook.cells[code[current - 1]].source if current else ""
        result.failure, result.details = _failure(error, current, source)
    result.seconds = time.perf_counter() - start
    bar.update(left)
    result.figures = count_figures(notebook.cells)
    return result


def execute_until_it_shows(path, bar, cell_seconds=CELL_SECONDS):
    """Execute a chapter on an idle machine, up to `TRIES` times, until headlines.toml is met.

    Args:
        path: the path of the notebook, which is only read.
        bar: a tqdm bar that counts code cells.
        cell_seconds: time limit of a cell.

    Returns:
        A `Result`; a failure if the machine does not become idle or no try agrees. The details list
        the contradictions and the disturbances of each try.
    """
    tables = headlines.declared(path)
    if tables is None:
        return until_done(execute(path, bar, cell_seconds))
    import idle  # loads torch

    say = functools.partial(bar.write, file=sys.stdout)
    before, tries = bar.n, []
    for number in range(1, TRIES + 1):
        with ctrl_c.calls(_raise_interrupt):
            disturbed = idle.wait(say)
        if disturbed:
            return Result(path, read_chapter(path), 0.0, failure=BUSY, details=disturbed)
        bar.n, watch = before, idle.Watch()
        result = until_done(execute(path, bar, cell_seconds, after_cell=watch.note))
        if result.failure == INTERRUPTED:
            return result
        found = [] if result.failure else headlines.contradictions(result.notebook, tables)
        if not found:
            return result
        tries.append("\n  ".join([f"try {number} of {TRIES}, {watch.verdict()}:", *found]))
        say(f"{path.stem}: {tries[-1]}")
    result.failure = f"not written: it does not show what it declares in {TRIES} tries"
    result.details = "\n".join(tries)
    return result


def until_done(coroutine):
    """Run a coroutine in a new event loop and return its result; Ctrl-C cancels it."""

    async def cancellable():
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        with ctrl_c.calls(lambda: loop.call_soon_threadsafe(task.cancel)):
            return await coroutine

    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(cancellable())


def _raise_interrupt():
    raise KeyboardInterrupt


def _client(path, notebook, cell_seconds, started, executed):
    """Return a client for a chapter, with callbacks `started` and `executed` for each cell."""
    return Client(
        notebook,
        timeout=cell_seconds,
        kernel_name="python3",
        kernel_manager_class=Kernel,
        resources={"metadata": {"path": str(path.parent), "name": path.name}},
        record_timing=False,
        store_widget_state=False,
        coalesce_streams=True,
        on_cell_start=started,
        on_cell_executed=executed,
    )


def _failure(error, cell, source):
    """Return a line with the number of the failed code cell (0: before the first), and details."""
    if isinstance(error, CellExecutionError):
        line = f"failed in cell {cell}: {error.ename}: {error.evalue}".splitlines()[0]
        return line, str(error)
    where = f"in cell {cell}" if cell else "before the first cell"  # a dead kernel, a slow cell
    kind = type(error).__name__
    return f"failed {where}: {kind}", f"{source}\n\n{kind}: {error}"


def clean(notebook):
    """Remove all that depends on the machine from an executed notebook, in place.

    Drops widget state, timestamps and view settings, and makes cell ids unique.
    """
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
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


def write_in_place(result):
    """Write an executed chapter back, cleaned, unless it failed.

    Args:
        result: a `Result`; it becomes a failure if the notebook contains a path of this machine.
    """
    if result.failure:
        return
    clean(result.notebook)
    if found := machine_paths(result.notebook):
        result.failure = f"not written: {found[0][0]} shows a path of this machine"
        result.details = "\n".join(f"{where}: {path}" for where, path in found)
        return
    folder = result.path.parent
    with tempfile.NamedTemporaryFile("w", dir=folder, encoding="utf-8", delete=False) as file:
        nbformat.write(result.notebook, file)
    os.chmod(file.name, result.path.stat().st_mode)
    os.replace(file.name, result.path)


def table(results):
    """Return the table of a run: chapter, seconds, figures, result."""
    width = max([len("chapter"), *(len(result.path.stem) for result in results)])
    lines = [f"{'chapter':<{width}}  seconds  figures  result"]
    lines += [
        f"{each.path.stem:<{width}}  {each.seconds:7.1f}  {each.figures:7d}  {each.failure or 'ok'}"
        for each in results
    ]
    total = sum(result.seconds for result in results)
    figures = sum(result.figures for result in results)
    failed = sum(bool(result.failure) for result in results)
    verdict = f"{failed} of {len(results)} failed" if failed else f"all {len(results)} ok"
    lines.append(f"{'total':<{width}}  {total:7.1f}  {figures:7d}  {verdict}")
    return "\n".join(lines)


@contextlib.contextmanager
def own_settings():
    """Isolate the run from the user's Jupyter and IPython settings.

    The temporary files of chapters are deleted after the run, except for torch's compiled code.
    """
    # Errors: without `no_orphans` a process may still write.
    with tempfile.TemporaryDirectory(prefix="d2lpar-", ignore_cleanup_errors=True) as folder:
        settings = {
            "TMPDIR": f"{folder}/tmp",
            "IPYTHONDIR": f"{folder}/ipython",
            "JUPYTER_CONFIG_DIR": f"{folder}/config",
            "JUPYTER_DATA_DIR": f"{folder}/data",
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
    """On Linux, kill all processes that kernels have left behind, after the block.

    Processes of a dead kernel become children of this process. Those of Ray have their own process
    groups, which do not end with a kernel.
    """
    if sys.platform != "linux":
        yield
        return
    prctl, before = ctypes.CDLL(None).prctl, _children()
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        while left := _children() - before:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _children():
    """Return the pids of the children of this process."""
    return {child.pid for child in psutil.Process().children()}


def run(chapters, build, in_place=False, cell_seconds=CELL_SECONDS, core=False):
    """Execute chapters, print tracebacks and the table, and write the executed notebooks.

    Args:
        chapters: paths of notebooks; two run at a time.
        build: the folder for the executed notebooks.
        in_place: whether to run one at a time and to write it back if it agrees with
            headlines.toml.
        cell_seconds: time limit of a cell.
        core: whether to run the cores only.

    Returns:
        The exit status: 0 for success, 1 if a chapter failed, 130 after Ctrl-C.
    """
    num_cells = sum(
        cell.cell_type == "code" for path in chapters for cell in read_chapter(path, core).cells
    )
    terminal = sys.stderr.isatty()
    bar = tqdm(
        desc=chapters[0].stem,
        total=num_cells,
        unit="cell",
        file=sys.stderr if terminal else Lines(sys.stderr),
        mininterval=0.1 if terminal else 10,
        miniters=1,
    )
    results, waiting = [], iter(chapters)
    build.mkdir(parents=True, exist_ok=True)
    for earlier in build.glob("*.ipynb"):
        earlier.unlink()

    def keep(result):
        results.append(result)
        if result.details:
            details = result.details if terminal else _ANSI.sub("", result.details)
            bar.write(f"\n{result.path.name}: {result.failure}\n{details}\n", file=sys.stdout)
        nbformat.write(result.notebook, build / result.path.name)

    async def one_after_the_other():
        for path in waiting:
            keep(result := await execute(path, bar, cell_seconds, core))
            if result.failure == INTERRUPTED:
                return

    async def at_the_same_time():
        with contextlib.suppress(asyncio.CancelledError):  # by Ctrl-C
            await asyncio.gather(*(one_after_the_other() for _ in range(AT_A_TIME)))

    with ctrl_c.taken():
        with own_settings(), no_orphans(), bar:
            if in_place:
                _write_back(waiting, bar, cell_seconds, keep)
            else:
                until_done(at_the_same_time())
        results.sort(key=lambda result: chapters.index(result.path))
        print(table(results) if results else INTERRUPTED)
        if not in_place and len(chapters) > 1:
            print(f"{AT_A_TIME} at a time shared the cores, and take longer than one alone")
        print(f"executed chapters: {os.path.relpath(build)}", flush=True)
        if ctrl_c.noted:
            return 128 + signal.SIGINT
    return 1 if any(result.failure for result in results) else 0


def _write_back(paths, bar, cell_seconds, keep):
    """Execute chapters one by one, write them back, and call `keep` with each result."""
    for path in paths:
        if ctrl_c.noted:
            return
        try:
            result = execute_until_it_shows(path, bar, cell_seconds)
        except KeyboardInterrupt:  # while waiting for an idle machine
            result = Result(path, nbformat.read(path, as_version=4), 0.0, failure=INTERRUPTED)
        write_in_place(result)
        keep(result)
        if result.failure in (INTERRUPTED, BUSY):
            return


def main(arguments=None):
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="chapter", help="03, or 03_topic; all if none")
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--core", action="store_true", help="lessons only, up to their exercises")
    parts.add_argument("--in-place", action="store_true", help="write the chapters back, cleaned")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the chapters are")
    parser.add_argument("--build", type=Path, default=FOLDER.parent / "build", help="where to")
    parser.add_argument("--timeout", type=float, default=CELL_SECONDS, help="seconds for a cell")
    options = parser.parse_args(arguments)
    try:
        chapters = find_chapters(options.folder, options.names, pages=not options.core)
    except ValueError as error:
        parser.error(str(error))
    if not chapters:
        parser.error(f"no chapter NN_topic.ipynb in {options.folder}")
    return run(chapters, options.build, options.in_place, options.timeout, options.core)


if __name__ == "__main__":
    sys.exit(main())
