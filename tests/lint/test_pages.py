"""The pages that go deeper: each is led to from its lesson, and leads back."""

import re

import pytest
from contents import ANSWERS, FOLDER, find_chapters, markdown, pages_of, read_chapter

LESSON = {page: chapter for chapter in find_chapters(FOLDER) for page in pages_of(chapter)}
each_page = pytest.mark.parametrize("page", LESSON, ids=lambda path: path.stem)


def test_every_notebook_in_the_folder_belongs_to_a_lesson():
    assert {*(FOLDER / "deeper").glob("*.ipynb")} == LESSON.keys()


@each_page
def test_a_page_and_its_lesson_lead_to_each_other(page):
    lesson = LESSON[page]
    assert f"](deeper/{page.name}" in markdown(lesson)
    first, *_, last = [c.source for c in read_chapter(page).cells if c.cell_type == "markdown"]
    assert f"](../{lesson.name}" in first and f"](../{lesson.name}" in last


@each_page
def test_answers_are_named_as_such(page):
    title = re.match("# (.+)", markdown(page))[1]
    assert page.stem.endswith(ANSWERS) == (title == f"Answers: chapter {page.name[:2]}")
