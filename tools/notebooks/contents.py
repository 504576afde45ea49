"""Find lessons and their deeper pages, and read the core of a lesson.

A lesson is `notebooks/NN_topic.ipynb`; its pages are `notebooks/deeper/NN_topic.ipynb`, among them
`NN_answers.ipynb`.
"""

import argparse
import re
import shutil
from pathlib import Path

import nbformat

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
# Of an embedded drawing in the text of a cell: its name, its URL, and its bytes in base64.
DRAWING = re.compile(r"^\[(\w+)\]: (data:image/svg\+xml;base64,(\S*))$", re.MULTILINE)
ANSWERS = "_answers"  # suffix of the name of a page of answers

_AFTER_CORE = re.compile(r"^## Exercises[ \t]*$", re.MULTILINE)


def find_chapters(folder, names=(), pages=False):
    """List the paths of notebooks by number or name, in the order of the chapters.

    Args:
        folder: a folder with notebooks `NN_topic.ipynb`.
        names: numbers (`03`), names or paths of notebooks; empty means all. Other notebooks of the
            folder can be given by name.
        pages: whether to include the pages of each lesson, after it.

    Raises:
        ValueError: a name matches no notebook, or the folder has none.
    """
    chapters = sorted(Path(folder).glob("[0-9][0-9]_*.ipynb"))
    if not chapters:
        raise ValueError(f"no notebook NN_topic.ipynb in {folder}")
    if pages:
        chapters = [path for chapter in chapters for path in (chapter, *pages_of(chapter))]
    wanted = {Path(name).name.removesuffix(".ipynb") for name in names}
    found = [path for path in chapters if {path.stem, path.stem[:2]} & wanted]
    others = sorted({*Path(folder).glob("*.ipynb")} - {*chapters})
    found += [path for path in others if path.stem in wanted]
    for name in wanted - {key for path in found for key in (path.stem, path.stem[:2])}:
        known = ", ".join(path.stem for path in chapters)
        raise ValueError(f"no chapter {name!r}: choose from {known}")
    return found if names else chapters


class ChapterParser(argparse.ArgumentParser):
    """The command line of a script for some chapters, given the script's docstring."""

    def __init__(self, docstring):
        super().__init__(description=docstring.splitlines()[0])
        self.add_argument("names", nargs="*", metavar="chapter", help="03, or 03_topic; or all")
        self.add_argument("--folder", type=Path, default=FOLDER, help="where the notebooks are")

    def chapters(self, options, pages=False):
        """Return the paths of the chapters, see `find_chapters`."""
        try:
            return find_chapters(options.folder, options.names, pages)
        except ValueError as error:
            self.error(str(error))


def pages_of(chapter):
    """List the deeper pages of a lesson, its answers last."""
    pages = (chapter.parent / "deeper").glob(f"{chapter.name[:2]}_*.ipynb")
    return sorted(pages, key=lambda path: (path.stem.endswith(ANSWERS), path))


def read_chapter(path, core=False):
    """Return a chapter's notebook, or its core: all before the exercises."""
    notebook = nbformat.read(path, as_version=4)
    for place, cell in enumerate(notebook.cells if core else ()):
        found = cell.cell_type == "markdown" and _AFTER_CORE.search(cell.source)
        if found:
            cell.source = cell.source[: found.start()].rstrip()
            del notebook.cells[place + bool(cell.source) :]
            break
    return notebook


def printed_texts(cell):
    """List the printed lines and the results in the outputs of a cell."""
    outputs = cell.get("outputs", [])
    return [out.get("text") or out.get("data", {}).get("text/plain", "") for out in outputs]


def markdown(path):
    """Return the texts of a notebook, joined."""
    cells = read_chapter(path).cells
    return "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


def replace_file(path, data):
    """Write a file atomically; it keeps its permissions."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f".{path.name}.half")
    half.write_bytes(data)
    if path.exists():
        shutil.copymode(path, half)
    half.replace(path)
