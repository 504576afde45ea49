"""What all tests share, and how they are dealt to the two processes of `make test`."""

import gc

import pytest
from xdist.scheduler import LoadScopeScheduling


@pytest.fixture(autouse=True)
def no_windows(monkeypatch):
    """Draw figures without a display, whatever the user's settings are."""
    monkeypatch.setenv("MPLBACKEND", "Agg")


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
