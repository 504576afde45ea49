"""The README leads to every chapter and page; chapters to their neighbours, and to their pages that
go deeper, which lead back."""

import itertools
import re
from pathlib import Path

import pytest
from contents import ANSWERS, FOLDER, find_chapters, markdown, pages_of, read_chapter

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
CHAPTERS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
PAGES = sorted((ROOT / "docs").glob("*.md"))


def test_a_visitor_meets_code_then_commands_then_the_chapters():
    places = [README.index(text) for text in ("```python\n", "## Run it\n", "## Chapters\n")]
    assert places == sorted(places)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_the_readme_leads_to_every_page(page):
    assert f"](docs/{page.name})" in README


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda path: path.stem)
def test_local_links_exist(page):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    local = [link for link in links if not link.startswith("https://")]
    assert local and [link for link in local if not (page.parent / link).is_file()] == []


def test_chapters_lead_to_their_neighbours():
    for one, other in itertools.pairwise(CHAPTERS):
        assert f"]({other.name})" in markdown(one), f"{one.name} does not lead to {other.name}"
        assert f"]({one.name})" in markdown(other), f"{other.name} does not lead to {one.name}"


# Pages that go deeper.

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
