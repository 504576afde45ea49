"""Which lessons there are and which pages go deeper; what the core of a lesson is.

A lesson is `notebooks/NN_topic.ipynb`; its pages are `notebooks/deeper/NN_topic.ipynb`, among them
`NN_answers.ipynb`. A lesson that was written before there were pages has a part "Going deeper".
"""

import re
from pathlib import Path

import nbformat

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
ANSWERS = "_answers"  # how the name of a page of answers ends

_AFTER_CORE = re.compile(r"^## (?:Going deeper|Exercises)[ \t]*$", re.MULTILINE)


def find_chapters(folder, names=(), pages=False):
    """List notebooks by their names.

    Args:
        folder: the folder that holds them, as `NN_topic.ipynb`.
        names: numbers (`03`), names or paths of notebooks; none of them means all. The name of
            another notebook of the folder is taken, too.
        pages: whether to list the pages of each lesson behind it. Then `03` means the lesson and
            its pages, and the name of a page means this page.

    Returns:
        A list of paths, in the order of the chapters.

    Raises:
        ValueError: a name fits no notebook.
    """
    chapters = sorted(Path(folder).glob("[0-9][0-9]_*.ipynb"))
    if pages:
        chapters = [path for chapter in chapters for path in (chapter, *pages_of(chapter))]
    wanted = {Path(name).name.removesuffix(".ipynb") for name in names}
    found = [path for path in chapters if {path.stem, path.stem[:2]} & wanted]
    others = sorted({*Path(folder).glob("*.ipynb")} - {*chapters})
    found += [path for path in others if path.stem in wanted]
    for name in wanted - {key for path in found for key in (path.stem, path.stem[:2])}:
        known = ", ".join(path.stem for path in chapters) or "none"
        raise ValueError(f"no chapter {name!r}; there are: {known}")
    return found if names else chapters


def pages_of(chapter):
    """List the pages that go deeper than a lesson, its answers last."""
    pages = (chapter.parent / "deeper").glob(f"{chapter.name[:2]}_*.ipynb")
    return sorted(pages, key=lambda path: (path.stem.endswith(ANSWERS), path))


def is_page(path):
    """Tell whether the path of a notebook is that of a page."""
    return path.parent.name == "deeper"


def goes_deeper(notebook):
    """Tell whether a lesson has a part "Going deeper", as those have that were not rewritten."""
    return any("## Going deeper" in cell.source.splitlines() for cell in notebook.cells)


def read_chapter(path, core=False):
    """Return the notebook of a chapter, or its core: what comes before the exercises, and before
    "Going deeper" where that is a part of the lesson."""
    notebook = nbformat.read(path, as_version=4)
    for place, cell in enumerate(notebook.cells if core else ()):
        found = cell.cell_type == "markdown" and _AFTER_CORE.search(cell.source)
        if found:
            cell.source = cell.source[: found.start()].rstrip()
            del notebook.cells[place + bool(cell.source) :]
            break
    return notebook
