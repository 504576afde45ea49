"""Every benchmark can be started: what it imports is there."""

from pathlib import Path

import fresh
import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("bench_*.py")))
def test_what_a_benchmark_imports_is_there(name):
    done = fresh.run(f"import sys; sys.path.insert(0, {str(FOLDER)!r}); import {name}", fresh.SET_UP)
    assert done.returncode == 0, done.stderr
