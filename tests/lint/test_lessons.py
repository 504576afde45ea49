"""A lesson keeps its limits, and its first cell tells the minutes that `make lessons` counts."""

import lessons
import nbformat
import pytest
from contents import FOLDER, find_chapters
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

CHAPTERS = find_chapters(FOLDER)
each_chapter = pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
HEADER = "The lesson takes 15 minutes, and follows nothing of d2l's."


@each_chapter
def test_the_first_cell_tells_the_minutes_that_are_counted(chapter):
    assert not lessons.write(chapter, check=True), "make lessons WRITE=1 mends it"


@each_chapter
def test_a_lesson_keeps_its_limits(chapter):
    assert lessons.lesson(chapter).over() == []


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


def test_a_figure_is_a_cell_that_shows_a_picture_and_a_drawing_stands_in_the_text():
    cells = [new_code_cell("f()"), new_code_cell("g()"), new_code_cell("print(1)")]
    cells.append(new_markdown_cell("![a drawing][d] ![another](figures/a.svg)\n\n`x![0]`"))
    picture = new_output("display_data", {"image/png": "", "text/plain": "<Figure>"})
    cells[1].outputs = [picture, picture]
    cells[2].outputs = [new_output("stream", text="1")]
    part = lessons.count(cells)
    assert (part.figures, part.outputs, part.drawings) == (1, 1, 2)


@pytest.mark.parametrize(("counts", "minutes"), [
    ((170, 0, 0, 0), 1),
    ((171, 0, 0, 0), 2),
    ((34, 3, 1, 20), 3),
    ((340, 9, 3, 90), 11),
    ((0, 0, 0, 0, 1, 2, 3), 4),
    ((0, 0, 0, 0, 1, 2, 4), 5),
])  # fmt: skip
def test_minutes_are_the_sum_of_all_rounded_up(counts, minutes):
    assert lessons.Part(*counts).minutes == minutes


@pytest.fixture
def lesson(tmp_path):
    """Write a lesson that takes 7 minutes up to its exercises, beside a README, and has pages: of
    171 words, and one of answers."""
    cells = [
        new_markdown_cell(f"# Title\n\n**What it needs.** {HEADER}"),  # 3 + 14 words
        new_markdown_cell("> **Predict.** How?\n\n" + "word " * (340 - 3 - 14 - 2)),
        new_code_cell("x = 1\n" * 18),
        new_markdown_cell("Word.\n\n## Exercises\n\n" + "word " * 1000),
    ]
    path = tmp_path / "notebooks" / "01_x.ipynb"
    (path.parent / "deeper").mkdir(parents=True)
    nbformat.write(new_notebook(cells=cells), path)
    (tmp_path / "README.md").write_text("| [01 X](notebooks/01_x.ipynb) | Why? | 60 s |\n")
    for name, words in (("01_answers", 3), ("01_more", 171), ("02_other", 1)):
        cells = [new_markdown_cell("# Title\n\n" + "word " * words), new_code_cell("f()")]
        nbformat.write(new_notebook(cells=cells), path.parent / "deeper" / f"{name}.ipynb")
    return path


def rows(path):
    return [line.split() for line in lessons.table([path]).splitlines()[1:]]


def test_a_lesson_is_counted_up_to_its_exercises_and_its_pages_stand_below(lesson, monkeypatch):
    row, *pages = rows(lesson)
    assert row == ["01_x", "337", "18", "1", "0", "0", "0", "60", "7"]
    assert pages == [
        ["01_more", "171", "1", "0", "0", "0", "0", "0", "2"],
        ["01_answers", "3", "1", "0", "0", "0", "0", "0", "1"],
    ]
    monkeypatch.setitem(lessons.LIMITS, "lines", 18)
    monkeypatch.setitem(lessons.LIMITS, "words", 336)
    assert rows(lesson)[0] == [*row, "over:", "words", "337", "of", "336"]


def test_the_minutes_of_a_lesson_are_written_into_its_sentence_and_nothing_else(lesson, capsys):
    before = lesson.read_text()
    assert lessons.write(lesson, check=True)
    assert lessons.main(["--folder", str(lesson.parent)]) == 0
    assert lesson.read_text() == before
    assert lessons.main(["--folder", str(lesson.parent), "--write"]) == 0
    assert lesson.read_text() == before.replace("lesson takes 15 ", "lesson takes 10 ")
    assert capsys.readouterr().out.count("01_x.ipynb: its first cell has new minutes") == 1
    assert not lessons.write(lesson)


def test_a_chapter_that_tells_no_minutes_is_named(lesson, capsys):
    lesson.write_text(lesson.read_text().replace("15 minutes", "15 hours"))
    with pytest.raises(SystemExit):
        lessons.main(["--folder", str(lesson.parent), "--write"])
    assert "01_x.ipynb: its first cell must say once: The lesson takes" in capsys.readouterr().err
