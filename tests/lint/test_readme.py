"""The README leads to every chapter, and every chapter to the next."""

import re
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
CHAPTERS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
TARGETS = dict(re.findall(r"^\[([a-z0-9-]+)\]: (\S+)$", README, re.MULTILINE))
SERVICES = {
    "Studio Lab": ("studiolab", "https://studiolab.sagemaker.aws/import/github/"),
    "Kaggle": ("kaggle", "https://kaggle.com/kernels/welcome?src=https://github.com/"),
    "Colab": ("colab", "https://colab.research.google.com/github/"),
}


def row(chapter):
    """Return the row of the README's table for a chapter."""
    (found,) = (line for line in README.splitlines() if f"][{chapter.name[:2]}] |" in line)
    return found


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_the_table_leads_to_the_chapter_and_says_how_long_it_takes(chapter):
    assert TARGETS[chapter.name[:2]] == f"notebooks/{chapter.name}"
    assert re.search(r"\| [1-9][0-9]* s \|", row(chapter))


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
@pytest.mark.parametrize("service", SERVICES)
def test_services_open_the_chapter(chapter, service):
    name, address = SERVICES[service]
    key = f"{name}-{chapter.name[:2]}"
    assert f"[{service}][{key}]" in row(chapter)
    assert TARGETS[key] == f"{address}d2lpar/d2lpar/blob/main/notebooks/{chapter.name}"


def test_local_links_of_the_readme_exist():
    links = [*TARGETS.values(), *re.findall(r"\]\(([^)]+)\)", README)]
    local = [link for link in links if not link.startswith("https://")]
    assert len(local) > len(CHAPTERS)
    assert [link for link in local if not (ROOT / link).is_file()] == []


def test_chapters_lead_to_their_neighbours():
    texts = [
        "\n".join(c.source for c in nbformat.read(path, 4).cells if c.cell_type == "markdown")
        for path in CHAPTERS
    ]
    for i, text in enumerate(texts):
        neighbours = CHAPTERS[max(0, i - 1) : i] + CHAPTERS[i + 1 : i + 2]
        for other in neighbours:
            assert f"]({other.name})" in text, f"{CHAPTERS[i].name} does not lead to {other.name}"
