"""Every benchmark can be started, and published rows are read as they stand."""

import textwrap
from pathlib import Path

import fresh
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_what_benchmarks_import_is_there():
    names = sorted(path.stem for path in FOLDER.glob("bench_*.py"))
    code = f"import sys; sys.path.insert(0, {str(FOLDER)!r}); import {', '.join(names)}"
    assert len(names) > 10 and fresh.printed(code, fresh.SET_UP) == ""


TABLE = """
[[table]]
source = "a page, {where}"
family = "{net}"
machine = "8 A100"
program = "trains"
unit = "examples/s"
batch = 128
optimizer = "sgd"
columns = ["net", "gpus", "value", "alone", "where"]
rows = [["resnet50", 8, 1000, 250, "line 3"], ["resnet18", 1, 512, 0, "line 4"]]
"""


def rows_of(tmp_path, text):
    """Return what `published.read` makes of a file, as plain values, or the error."""
    (tmp_path / "rows.toml").write_text(text)
    code = f"""
    import sys; sys.path.insert(0, {str(FOLDER)!r})
    from published import read, vision
    for row in read({str(tmp_path / "rows.toml")!r}, vision.PROGRAMS):
        figures = row.gpus, row.published, row.alone, row.machine.name
        print(row.family, row.kind, *figures, row.source, sep="; ")
    """
    return fresh.run(textwrap.dedent(code), fresh.SET_UP)


def test_a_published_rate_becomes_the_seconds_of_a_step(tmp_path):
    """By hand: 8 times 128 images at 1000 a second, one GPU's 128 at 250; 128 at 512."""
    done = rows_of(tmp_path, TABLE)
    assert done.stdout.splitlines() == [
        "resnet50; data parallel, one machine; 8; 1.024; 0.512; 8 A100; a page, line 3",
        "resnet18; one GPU; 1; 0.25; None; 8 A100; a page, line 4",
    ], done.stderr


def test_a_field_of_a_row_that_its_program_does_not_take_is_refused(tmp_path):
    done = rows_of(tmp_path, TABLE.replace("optimizer =", "scalded = true\noptimizer ="))
    assert done.returncode and "trains takes no scalded" in done.stderr
