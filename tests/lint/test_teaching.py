"""The teacher's pages name what is in the chapters, and their minutes add up."""

import re
from pathlib import Path

import pytest
from contents import markdown, pages_of

ROOT = Path(__file__).resolve().parents[2]
TEACHING = ROOT / "teaching"
CHAPTERS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
README = (ROOT / "README.md").read_text()
each_chapter = pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)


def page_of(chapter):
    """Return the page for the person who teaches a chapter, with its paragraphs on one line."""
    return re.sub(r"(?<=\S)\n(?=[^\s|#-])", " ", (TEACHING / f"{chapter.stem}.md").read_text())


def section(page, title):
    """Return the lines of a section."""
    _, _, rest = page.partition(f"\n## {title}\n")
    assert rest, f"no section {title!r}"
    return rest.partition("\n## ")[0].splitlines()


def rows(lines):
    """Return the rows of a table whose first column is a number."""
    return re.findall(r"^\| (\d+) \| (.+?) \|", "\n".join(lines), re.MULTILINE)


@each_chapter
def test_the_minutes_of_a_lesson_add_up(chapter):
    page = page_of(chapter)
    for minutes in (45, 90):
        plan = rows(section(page, f"A lesson of {minutes} minutes"))
        assert sum(int(row[0]) for row in plan) == minutes


@each_chapter
def test_sections_and_drawings_are_those_of_the_chapter_and_its_pages(chapter):
    page, text = page_of(chapter), "\n".join(map(markdown, [chapter, *pages_of(chapter)]))
    headings = set(re.findall(r"^##+ (.+)$", text, re.MULTILINE))
    named = re.findall(r"(?<!\*)\*([^*\n]+)\*(?!\*)", page)
    assert len(named) > 10
    assert [name for name in named if name not in headings] == []
    drawings = re.findall(r"\*\*`(\w+)`\*\*", "\n".join(section(page, "The board")))
    assert drawings
    assert [name for name in drawings if f"\n[{name}]: data:image/svg" not in text] == []


@each_chapter
def test_the_time_of_a_run_is_about_that_of_the_readme(chapter):
    (row,) = (line for line in README.splitlines() if f"](notebooks/{chapter.name}) |" in line)
    assert row.startswith(f"| [{chapter.name[:2]} ")
    seconds = int(re.search(r"\| ([1-9]\d*) s \|", row)[1])
    told = int(re.search(r"about (\d+) s on two cores", page_of(chapter))[1])
    assert seconds / 1.5 <= told <= 1.5 * seconds


@each_chapter
def test_exercises_have_their_numbers_and_titles(chapter):
    listed = rows(section(page_of(chapter), "Exercises"))
    notebook = chapter.parent / "exercises" / chapter.name
    if not listed or not notebook.exists():
        pytest.skip("the page names the chapter's own exercises, or the notebook is not there")
    found = re.findall(r"^## (\d+)\. (.+) \(\d+ points?\)$", markdown(notebook), re.MULTILINE)
    assert [pair for pair in listed if pair not in found] == []


def test_links_of_the_pages_exist():
    pages = [*(TEACHING / f"{chapter.stem}.md" for chapter in CHAPTERS), TEACHING / "course.md"]
    for page in pages:
        links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
        assert links
        assert [link for link in links if not (TEACHING / link).is_file()] == [], page.name


def test_the_course_names_every_page_and_exercises_that_the_pages_list():
    course = (TEACHING / "course.md").read_text()
    for chapter in CHAPTERS:
        assert f"]({chapter.stem}.md)" in course
    weeks = [line for line in course.splitlines() if re.match(r"\| \d+ \| core", line)]
    assert len(weeks) == 6 + 13
    for week in weeks:
        for number, chosen in re.findall(r"(\d\d): ([\d, ]+)", week):
            (chapter,) = (path for path in CHAPTERS if path.name.startswith(number))
            lines = section(page_of(chapter), "Exercises")
            listed = {row[0] for row in rows(lines)}
            for words in re.findall(r"^- Exercises? ([\d and,]+)", "\n".join(lines), re.MULTILINE):
                listed |= set(re.findall(r"\d+", words))
            assert set(re.findall(r"\d+", chosen)) <= listed, week
