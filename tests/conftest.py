"""What all tests share, and how they are dealt to the processes of `make test`."""

import ast
import faulthandler
import gc
import os
import re
import shutil
import signal
import sys
import tempfile
from collections import Counter, defaultdict
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from jupyter_client import KernelManager
from nbformat.v4 import new_code_cell
from nbval.plugin import IPyNbCell, IPyNbFile
from worker import sockets
from xdist.scheduler import LoadScopeScheduling

gc.disable()  # until all tests are collected: what they import and make is no garbage
os.environ["OMP_WAIT_POLICY"] = "passive"  # threads that wait for work leave their core to others


_sockets, _numbers, _init = tempfile.mkdtemp(), count(), KernelManager.__init__


def _with_sockets(self, *args, **kwargs):
    """Make a manager of a kernel with sockets of its own: others could take its ports."""
    _init(self, *args, **sockets(f"{_sockets}/{next(_numbers)}") | kwargs)


KernelManager.__init__ = _with_sockets


@pytest.fixture(autouse=True)
def no_windows(monkeypatch):
    """Draw figures without a display, whatever the user's settings are."""
    monkeypatch.setenv("MPLBACKEND", "Agg")


@pytest.fixture(scope="module", autouse=True)
def wall_clock_and_no_ranks_for_the_next_file():
    """Leave no modelled GPUs behind: `launch` gives its ranks those of this process; no ranks."""
    yield
    if ranks := sys.modules.get("ranks"):
        ranks.end_jobs()
    if setup := sys.modules.get("vgpu.devices.device_setup"):
        setup.virtual_gpus(2)


@pytest.fixture
def devices():
    """Two virtual GPUs; no test may leave an error behind."""
    from vgpu import virtual_gpus

    yield virtual_gpus(2)
    virtual_gpus(2)


@pytest.fixture
def device(devices):
    return devices[1]


@pytest.fixture
def no_garbage():
    """Free what earlier tests left in cycles, before a test that counts bytes in use."""
    gc.collect()


@pytest.fixture(params=["here", "elsewhere"])
def here_and_elsewhere(request, devices):
    """Run a test as usual, and in another thread on side streams: see `gates.elsewhere`."""
    if request.param == "elsewhere":
        from gates import elsewhere

        function = request.node.obj
        request.node.obj = lambda **fixtures: elsewhere(partial(function, **fixtures))


@pytest.fixture(scope="module")
def one_thread():
    """The CPU gets one thread, as a device has: with small tensors more of them only wait."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


HANGS = 300  # seconds that a test, or its tear-down, may take
STACKS = "D2LPAR_TEST_STACKS"  # the folder for the stacks of what took longer, one file a process
_stacks = []  # the file of this process


def pytest_configure(config):
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a job in the background has it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):  # of xdist
        _stacks.append(Path(os.environ[STACKS], str(os.getpid())).open("w"))
    else:
        os.environ[STACKS] = tempfile.mkdtemp()
        with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            _stacks.append(os.fdopen(os.dup(2), "w"))


def pytest_unconfigure(config):
    _stacks.pop().close()
    shutil.rmtree(_sockets)
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop(STACKS))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter):
    """Show where each thread of a process that hung was, its innermost five calls, and what to do
    for tests that were skipped: between pytest's reasons and its last line."""
    result = yield
    for file in Path(os.environ[STACKS]).iterdir():
        for stack in filter(None, file.read_text().split("\n\n")):
            terminalreporter.write_line("\n".join(stack.splitlines()[:6]))
    skipped = terminalreporter.stats.get("skipped", ())
    if advice := how_to_run(report.longrepr[2] for report in skipped):
        terminalreporter.write_line(advice)
    return result


# A test that is skipped for want of a program says so, and names the command that installs it.
_CURE = re.compile(
    r"(?:not installed|on the PATH)\b.*?"
    r"((?:apt-get|pip) install [a-z0-9-]+(?: [a-z0-9-]+)*|make test [A-Z]+=1)",
    re.DOTALL,
)


def how_to_run(reasons):
    """Return a line with the commands that such reasons name, "" if they name none."""
    found = Counter(cure[1] for cure in map(_CURE.search, reasons) if cure)
    commands = [f"{command} ({number})" for command, number in found.most_common()]
    return f"To run what was skipped: {', '.join(commands)}" if commands else ""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Write down the stacks of all threads and end this process, should it stand still for long.

    The option `faulthandler_timeout` of pytest does not watch the tear-down of a test that failed.
    """
    faulthandler.dump_traceback_later(HANGS, exit=True, file=_stacks[0])


pytest_runtest_teardown = pytest_runtest_setup


def pytest_runtest_logfinish():
    faulthandler.cancel_dump_traceback_later()


_FOLD = re.compile(r"<details>.*?</details>", re.DOTALL)
_CODE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


# What chapters repeat, for their readers' medians, and how often tests do.
REPEATED = {r"(seconds_in_turn\(\w+)(?:, rounds=\d+)?\)": r"\1, rounds=1)"}


def less_often(source, repeated=REPEATED):
    """Return the source of cells that repeat things less often."""
    for many, few in repeated.items():
        source = re.sub(many, few, source, flags=re.MULTILINE)
    return source


def pytest_collection_modifyitems(items):
    """Give nbval the code of answers after the last cell of a chapter, and `REPEATED` less often.

    The answers run in the kernel of the chapter. What a cell prints is not compared where it
    repeats less often than when it was stored.
    """
    for chapter in {item.parent: None for item in items if isinstance(item.parent, IPyNbFile)}:
        place = 1 + max(i for i, item in enumerate(items) if item.parent is chapter)
        first = 1 + items[place - 1].cell_num
        texts = (cell.source for cell in chapter.nb.cells if cell.cell_type == "markdown")
        folds = _FOLD.findall("\n".join(texts))
        answers = [block for fold in folds for block in _CODE.findall(fold)]
        items[place:place] = [
            IPyNbCell.from_parent(
                chapter,
                name=f"Answer {number}",
                cell_num=first + number,
                cell=new_code_cell(source),
                options=defaultdict(bool),
            )
            for number, source in enumerate(answers)
        ]
    for item in items:
        if isinstance(item, IPyNbCell):
            source = item.cell.source
            item.cell.source = less_often(source)
            item.options["check"] &= item.cell.source == source
    _long_ones_first(items)


def pytest_ignore_collect(collection_path, config):
    """Import no file whose tests are all slow where those are left out.

    What such files import, torch's tables of operators and Ray, takes seconds in each process.
    """
    if "not slow" in config.option.markexpr and collection_path.suffix == ".py":
        slow = re.search(r"^pytestmark = .*\.slow\b", collection_path.read_text(), re.MULTILINE)
        return True if slow else None


def _long_ones_first(items):
    """Sort the files, notebooks before all, so that no process runs alone at the end.

    Two processes compute chapters. Meanwhile the others wait: files marked `waits`, for time-outs.
    Those with a slow test follow.
    """
    marks = defaultdict(set)
    for item in items:
        marks[item.path].update(mark.name for mark in item.iter_markers())

    def place(item):
        if item.path.suffix == ".ipynb":
            return 0
        return 1 if "waits" in marks[item.path] else 2 if "slow" in marks[item.path] else 3

    items.sort(key=place)


def pytest_collection_finish():
    """Leave out of collections of garbage what the collection of tests has made, the most of it."""
    gc.freeze()
    gc.enable()


class Scheduling(LoadScopeScheduling):
    """Two processes run the chapters, as in `make run`; the others run the files of tests."""

    def _split_scope(self, nodeid):
        path = nodeid.partition("::")[0]
        if not path.endswith(".ipynb"):
            return path
        return "odd chapters" if re.search("[13579]_", path) else "other chapters"


def pytest_xdist_make_scheduler(config, log):
    return Scheduling(config, log)


VIRTUAL = {"virtual_gpus", "equal_ranks"}  # what makes virtual or modelled GPUs


def calls(source):
    """Yield the names of the functions that a cell calls, in the order of its source."""
    tree = ast.parse(re.sub(r"^\s*[%!].*$", "", source, flags=re.MULTILINE))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for node in sorted(found, key=lambda node: (node.lineno, node.col_offset)):
        yield getattr(node.func, "attr", None) or getattr(node.func, "id", None)
