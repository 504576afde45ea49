"""The numbers that a chapter's text has from its outputs stand in them."""

import nbformat
import printed
import pytest
from contents import FOLDER, find_chapters
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

CHAPTERS = find_chapters(FOLDER, pages=True)
each_chapter = pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)


@each_chapter
def test_what_the_text_tells_is_printed(chapter):
    assert printed.contradictions(nbformat.read(chapter, as_version=4)) == []


@each_chapter
def test_each_number_from_an_output_is_marked(chapter):
    notebook = nbformat.read(chapter, as_version=4)
    before = [cell.metadata.get("printed") for cell in notebook.cells]
    printed.mark(notebook)
    assert [cell.metadata.get("printed") for cell in notebook.cells] == before, (
        f"python tools/notebooks/printed.py --write {chapter.name[:2]} marks them"
    )


def executed(text):
    return new_code_cell("f()", outputs=[new_output("stream", name="stdout", text=text)])


def marked(notebook):
    printed.mark(notebook)
    return [cell.metadata.get("printed", []) for cell in notebook.cells]


@pytest.mark.parametrize(("output", "text", "numbers"), [
    ("12.6 ms", "It takes 13 ms.", ["13"]),
    ("12.4 ms", "It takes 13 ms.", []),
    ("ratio 0.742", "0.74, so 74 %, and not 0.75 or 75 %.", ["74 %", "0.74"]),
    ("0.742", "Within 74 ms.", []),  # no percent
    ("516,272 bytes", "The 516,272 bytes, or 516,273.", ["516,272"]),
    ("1.3e-5 s", "It takes 1.3e-5 s, and 2 runs.", ["1.3e-5"]),
    ("12 and 7", "`12`, $12$, [12](a.ipynb), <b 12>, v12, 7.", []),  # nor a single digit
    ("10 20", "On 10, then 20: more.", ["10", "20"]),
    ("1.0", "In edition 1.0.3.", []),
    ("1.0.3", "The ratio is 1.0.", []),
    ("10 11 12", "After chapters 10 and 11, 12 times.", ["12"]),
])  # fmt: skip
def test_a_number_of_an_output_is_marked_and_nothing_else(output, text, numbers):
    notebook = new_notebook(cells=[executed(output), new_markdown_cell(text)])
    assert marked(notebook) == [[], numbers]


def test_another_run_is_found_and_stays_found_after_marking_again():
    notebook = new_notebook(cells=[executed("1.46"), new_markdown_cell("So 1.46 times faster.")])
    printed.mark(notebook)
    assert printed.contradictions(notebook) == []
    notebook.cells[0] = executed("1.28")
    for _ in range(2):
        assert printed.contradictions(notebook) == ["cell 2: 1.46 is not printed above"]
        printed.mark(notebook)
    notebook.cells[1].source = "So 1.28 times faster."
    assert marked(notebook) == [[], ["1.28"]]
    assert printed.contradictions(notebook) == []


def test_what_another_section_prints_does_not_count():
    cells = [executed("1.46"), new_markdown_cell("## Next\n\nA sum of 1.46."), executed("3.5")]
    cells += [
        new_markdown_cell("3.5, not 1.46."),
        new_markdown_cell("## Takeaways\n\n1.46 and 3.5."),
    ]
    assert marked(new_notebook(cells=cells)) == [[], ["1.46"], [], ["3.5"], ["1.46", "3.5"]]
