"""What the first cell of a chapter tells of its minutes is what `make lessons` counts."""

from pathlib import Path

import lessons
import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

CHAPTERS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("[0-9][0-9]_*.ipynb"))
each_chapter = pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
HEADER = "The core takes 15 minutes to read and to run, *Going deeper* another 40."  # 14


@each_chapter
def test_the_first_cell_tells_the_minutes_that_are_counted(chapter):
    assert lessons.told(chapter) == lessons.to_tell(chapter), "make lessons WRITE=1 mends it"


@each_chapter
def test_a_core_is_one_lesson(chapter):
    core, _ = lessons.parts(chapter)
    assert core.minutes <= lessons.LIMIT


# What stands in a cell, and the words, lines and predictions that a reader counts in it.
CELLS = [
    ("# A title of five words\n\nTwo words.", (2, 0, 0)),
    ("## One\n\n- and **two**, - `three four()` + five\n\n1. six", (8, 0, 0)),  # "1." is one
    ("A [link](https://a.b/c d) to <https://a.b>, x<br>y, 1 < 2 > 0.", (8, 0, 0)),
    ("| a | b |\n| --- | ---: |\n| 1 | |", (3, 0, 0)),
    ("For $k = 3$ and `$HOME`:\n\n$$a\n= b$$\n\nIt cost \\$2 or \\$3.", (3 + 3 + 15 + 5, 0, 0)),
    ("See:\n\n![a b c][d]\n\n[d]: data:image/svg+xml;base64,AAAA", (1, 0, 0)),
    ("Run:\n\n```python\n# no title\n\nx = 1\n```\n\nDone.", (2, 2, 0)),
    (
        "Why?\n\n<details><summary>A</summary>\n\nNo.\n\n```\nx\n```\n\n</details>\n\nYes.",
        (2, 0, 0),
    ),
    ("> **Predict.** How many?\n\n> **On your machine.** Ten.\n\n**Predict** it.", (9, 0, 1)),
    ("> **Before you read on.** A guess?", (6, 0, 1)),
    ("A word.\n\n## Exercises\n\nNone counts.", (2, 0, 0)),
]


@pytest.mark.parametrize(("text", "expected"), CELLS)
def test_what_a_reader_reads_is_counted(text, expected):
    part = lessons.count([new_markdown_cell(text)])
    assert (part.words, part.lines, part.predictions) == expected


def test_code_is_counted_without_blank_lines_and_nothing_after_the_exercises():
    code = new_code_cell("import torch\n\n# a comment\nx = 1\n")
    part = lessons.count([code, new_markdown_cell("## References\n\nA book."), code])
    assert (part.words, part.lines) == (0, 3)


@pytest.mark.parametrize(
    ("counts", "minutes"),
    [((165, 0, 0, 0), 1), ((166, 0, 0, 0), 2), ((55, 4, 1, 20), 2), ((330, 12, 3, 90), 8)],
)
def test_minutes_are_the_sum_of_the_four_rounded_up(counts, minutes):
    assert lessons.Part(*counts).minutes == minutes


@pytest.fixture
def chapter(tmp_path):
    """Write a chapter whose core takes 6 minutes, and its deeper part 2, beside a README."""
    cells = [
        new_markdown_cell(f"# Title\n\n**What it needs.** {HEADER}"),  # 3 + 14 words
        new_markdown_cell("> **Predict.** How?\n\n" + "word " * (330 - 3 - 14 - 2)),
        new_code_cell("x = 1\n" * 18),
        new_markdown_cell("## Going deeper\n\n" + "word " * 164),
        new_markdown_cell("## Exercises\n\n" + "word " * 1000),
    ]
    path = tmp_path / "notebooks" / "01_x.ipynb"
    path.parent.mkdir()
    nbformat.write(new_notebook(cells=cells), path)
    (tmp_path / "README.md").write_text("| [01 X](notebooks/01_x.ipynb) | Why? | 60 s |\n")
    return path


def test_the_table_has_a_row_for_each_chapter_and_marks_long_cores(chapter, monkeypatch):
    row = ["01_x", "330", "18", "1", "60", "6", "2"]
    monkeypatch.setattr(lessons, "LIMIT", 6)
    assert lessons.table([chapter]).splitlines()[1].split() == row
    monkeypatch.setattr(lessons, "LIMIT", 5)
    assert lessons.table([chapter]).splitlines()[1].split() == [*row, "over", "5"]


def test_writing_changes_the_two_numbers_and_nothing_else(chapter, capsys):
    before = chapter.read_text()
    assert lessons.main(["--folder", str(chapter.parent)]) == 0
    assert chapter.read_text() == before
    assert lessons.main(["--folder", str(chapter.parent), "--write"]) == 0
    assert chapter.read_text() == before.replace("takes 15 ", "takes 10 ").replace("r 40.", "r 5.")
    assert capsys.readouterr().out.count("01_x.ipynb: its first cell has new minutes") == 1
    assert not lessons.write(chapter)


def test_a_chapter_that_tells_no_minutes_is_named(chapter, capsys):
    chapter.write_text(chapter.read_text().replace("minutes to read", "hours to read"))
    with pytest.raises(SystemExit):
        lessons.main(["--folder", str(chapter.parent), "--write"])
    assert "01_x.ipynb: its first cell must say once: The core takes" in capsys.readouterr().err
