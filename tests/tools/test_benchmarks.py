"""Every benchmark can be started: what it imports is there."""

from pathlib import Path

import fresh

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_what_benchmarks_import_is_there():
    names = sorted(path.stem for path in FOLDER.glob("bench_*.py"))
    code = f"import sys; sys.path.insert(0, {str(FOLDER)!r}); import {', '.join(names)}"
    done = fresh.run(code, fresh.SET_UP)
    assert len(names) > 10 and done.returncode == 0, done.stderr
