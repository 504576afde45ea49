"""The gate for headline lines: what it reads, and what it finds."""

import tomllib
from pathlib import Path

import headlines
import hygiene
import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"

# Chapter 03 as it was stored once: two devices took 1.30 times the maximum; below, as two should.
STORED = """\
one after the other: sum         predicted    0.7098  measured    0.4867 s      ratio 0.69
at the same time: maximum        predicted    0.3742  measured    0.4867 s      ratio 1.30
speed-up 1.46
"""
BELOW = """\
one after the other: sum  predicted 0.9170 measured 0.4659 s  ratio 0.51
at the same time: maximum (8 x V100-SXM2-16GB in dgx1)
                          predicted 0.4660 modelled 0.4659 s  ratio 1.00
speed-up 1,970.5 of 8
"""
MAXIMUM = {"line": "at the same time: maximum", "ratio": [0.85, 1.15]}


def chapter(*texts):
    """Return a notebook whose cells 2, 4, ... print some texts."""
    cells = []
    for text in texts:
        cells += [new_markdown_cell("A sentence."), new_code_cell("work()")]
        cells[-1].outputs = [new_output("stream", name="stdout", text=text)]
    return new_notebook(cells=cells)


def found(table, *texts):
    return headlines.contradictions(chapter(*texts), [table])


def test_the_line_that_was_stored_contradicts_the_text():
    assert found(MAXIMUM, STORED, BELOW) == [
        "cell 2: 'at the same time: maximum' has the ratio 1.30, declared 0.85 to 1.15"
    ]


def test_every_line_has_to_hold_or_one_of_them():
    assert len(found(MAXIMUM, BELOW, STORED, STORED)) == 2
    assert found(MAXIMUM | {"which": 1}, BELOW, STORED) == []
    assert found(MAXIMUM | {"which": 2}, BELOW, STORED)[0].startswith("cell 4: ")
    assert found(MAXIMUM | {"which": 3}, BELOW, STORED) == [
        "there is no line 3 with 'at the same time: maximum'"
    ]


def test_a_line_that_is_not_there_contradicts():
    expected = ["there is no line with 'at the same time: maximum'"]
    assert found(MAXIMUM, "nothing") == found(MAXIMUM) == expected
    assert found(MAXIMUM, "at the same time: maximum: 0.3742 sec") == expected  # of a Benchmark


@pytest.mark.parametrize(("text", "number", "holds"), [
    ("speed-up ", [1.46, 1.46], True),
    ("speed-up ", [1.47, float("inf")], False),
    ("speed-up ", [float("-inf"), 1.45], False),
    ("gain: ", [1970.5, 1970.5], True),
    ("loss ", [-0.0025, -0.0025], True),
    ("of ", [8, 8], True),
    ("nothing", [0, 1], False),
])  # fmt: skip
def test_the_first_number_behind_a_text(text, number, holds):
    lines = "speed-up 1.46 of 8 devices\ngain: 1,970.5 times\nloss is -2.5e-3\nnothing else\n"
    assert (found({"line": text, "number": number}, lines) == []) is holds


def test_a_value_of_a_cell_counts_as_a_line():
    notebook = chapter("")
    data = {"text/plain": "overlap 0.75", "text/html": "<b>overlap 0.1</b>"}
    notebook.cells[1].outputs = [new_output("execute_result", data)]
    assert headlines.contradictions(notebook, [{"line": "overlap", "number": [0.7, 0.8]}]) == []


def test_no_ratio_is_no_proof():
    line = "at the same time: maximum predicted      0 measured 0.1497 s  ratio -"
    assert found(MAXIMUM, line) == [
        "cell 2: 'at the same time: maximum' has no ratio, declared 0.85 to 1.15"
    ]


def test_a_run_on_a_busy_machine_contradicts():
    line = "other programs took 60 % of the cores while this ran"
    assert headlines.contradictions(chapter(BELOW + line), []) == [f"cell 2: {line}"]


@pytest.mark.parametrize(
    "text", ['line = "a"', "ratio = [0, 1]", 'line = "a"\nratio = [0, 1]\nnumber = [0, 1]',
             'line = "a"\nratio = [0, 1]\nwich = 2', 'line = "a"\nratio = [1]']
)  # fmt: skip
def test_a_table_in_another_form_is_refused(text, tmp_path):
    (tmp_path / "headlines.toml").write_text(f"[[03]]\n{text}")
    with pytest.raises(ValueError, match="headlines.toml: chapter 03 declares"):
        headlines.declared(tmp_path / "04_other.ipynb")


def test_hygiene_refuses_a_chapter_that_contradicts(tmp_path, capsys):
    path = tmp_path / "03_automatic.ipynb"
    nbformat.write(chapter(STORED), path)
    hygiene.main([path])
    assert "1.30" not in capsys.readouterr().out
    (tmp_path / "headlines.toml").write_text(
        '[[03]]\nline = "at the same time: maximum"\nratio = [0.85, 1.15]'
    )
    assert hygiene.main([path]) == 1
    assert "03_automatic.ipynb: cell 2: 'at the same time: maximum' has the ratio 1.30" in (
        capsys.readouterr().out
    )


def test_what_is_declared_belongs_to_a_chapter():
    numbers = {path.name[:2] for path in FOLDER.glob("[0-9]*.ipynb")}
    numbers |= {path.stem for path in FOLDER.glob("deeper/*.ipynb")}
    declared = tomllib.loads((FOLDER / "headlines.toml").read_text())
    assert declared and set(declared) <= numbers
