"""The README is short and leads to every chapter and page, and every chapter to the next."""

import itertools
import re
from pathlib import Path

import pytest
from contents import markdown

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
CHAPTERS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
PAGES = sorted((ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_the_table_leads_to_the_chapter_and_says_how_long_it_takes(chapter):
    (row,) = (line for line in README.splitlines() if f"](notebooks/{chapter.name}) |" in line)
    assert row.startswith(f"| [{chapter.name[:2]} ") and re.search(r"\| [1-9][0-9]* s \|", row)


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
