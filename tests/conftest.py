"""What all tests share, and how they are dealt to the two processes of `make test`."""

import faulthandler
import gc
import os

import pytest
from xdist.scheduler import LoadScopeScheduling


@pytest.fixture(autouse=True)
def no_windows(monkeypatch):
    """Draw figures without a display, whatever the user's settings are."""
    monkeypatch.setenv("MPLBACKEND", "Agg")


HANGS = 600  # seconds that a test, or its tear-down, may take
_terminal = []  # a file descriptor


def pytest_configure(config):
    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        _terminal.append(os.dup(2))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    _end_what_hangs()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown():
    _end_what_hangs()


def pytest_runtest_logfinish():
    faulthandler.cancel_dump_traceback_later()


def _end_what_hangs():
    """Print the stacks of all threads and end this process, should it stand still for long.

    The option `faulthandler_timeout` of pytest does not watch the tear-down of a test that failed.
    """
    faulthandler.dump_traceback_later(HANGS, exit=True, file=_terminal[0])


def pytest_collection_finish():
    """Leave out of later collections what the collection of tests has made, the largest part."""
    gc.collect()
    gc.freeze()


class Scheduling(LoadScopeScheduling):
    """The chapters run in one process, one after the other; the files of tests in the other.

    Two chapters at a time would get one core each, and measure that.
    """

    def _split_scope(self, nodeid):
        path = nodeid.partition("::")[0]
        return "chapters" if path.endswith(".ipynb") else path


def pytest_xdist_make_scheduler(config, log):
    return Scheduling(config, log)
