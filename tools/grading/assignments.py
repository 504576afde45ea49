"""Write the files for students: exercises without solutions, chapters and pages without outputs.

python tools/grading/assignments.py        every exercise notebook, under build/assignments
python tools/grading/assignments.py 03 05  some of them

`make lab` fills its working copy with the same function, `hand_out`, but with the pages of answers,
which students do not get.
"""

import argparse
import copy
import logging
import posixpath
import re
import shutil
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "notebooks"))

import nbformat
from contents import ANSWERS, FOLDER, find_chapters, replace_file
from nbgrader.preprocessors import (
    CheckCellMetadata,
    ClearHiddenTests,
    ClearOutput,
    ClearSolutions,
    ComputeChecksums,
    LockCells,
)
from nbgrader.utils import is_solution

BUILD = FOLDER.parent / "build" / "assignments"

_SOLUTION = re.compile(r"BEGIN SOLUTION[^\n]*\n(.*?)\n[^\n]*END SOLUTION", re.DOTALL)
_LINK = re.compile(r"\]\((?![a-z]+:)([^)#\s]+)[)#]")
_TO_ANSWERS = re.compile(rf"\[([^\]]*)\]\([^)\s]*{ANSWERS}\.ipynb[^)\s]*\)")
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)
_LOG = logging.getLogger("nbgrader")


def without_solutions(notebook):
    """Return a copy of a notebook with nbgrader's stubs for solutions, and without outputs."""
    return _apply(notebook, LockCells, ClearSolutions, ClearOutput)


def release(notebook):
    """Return a notebook without solutions and hidden tests; raise ValueError if one remains."""
    released = _apply(without_solutions(notebook), ClearHiddenTests, ComputeChecksums)
    text = "\n".join(cell.source for cell in released.cells)
    for source, cell in zip(notebook.cells, released.cells, strict=True):
        if is_solution(cell) and source.source == cell.source:
            raise ValueError(f"{cell.metadata.nbgrader.grade_id}: nothing was cleared")
        for solution in _SOLUTION.findall(source.source):
            if solution.strip() in text:
                name = cell.metadata.get("nbgrader", {}).get("grade_id", cell.id)
                raise ValueError(f"{name}: the solution stands in another cell, too")
    if found := re.search(r"(BEGIN|END) (SOLUTION|HIDDEN TESTS)", text):
        raise ValueError(f"{found[0]} is left")
    return released


def hand_out(notebooks=FOLDER, names=(), answers=True):
    """Return the files for students: a dict to bytes from paths, which are those of the repository.

    Args:
        names: numbers or names of the exercises to include; empty means all.
        answers: whether to include the pages of answers. If not, links to them become plain text.

    Raises:
        ValueError: a solution remains, or a link is broken.
    """
    chapters = [*find_chapters(notebooks, pages=True), *notebooks.glob("troubleshooting.ipynb")]
    exercises = find_chapters(notebooks / "exercises")
    texts = {path.name: path.read_text("utf-8") for path in sorted(notebooks.glob("*.md"))}
    handed = {}
    for path in chapters:
        if answers or not path.stem.endswith(ANSWERS):
            notebook = _apply(nbformat.read(path, as_version=4), ClearOutput)
            for cell in notebook.cells if not answers else ():
                cell.source = _TO_ANSWERS.sub(r"\1", cell.source)
            handed[path.relative_to(notebooks).as_posix()] = notebook
    for path in exercises:
        try:
            handed[f"exercises/{path.name}"] = release(nbformat.read(path, as_version=4))
        except ValueError as error:
            raise ValueError(f"{path.name}: {error}") from None
    for name, notebook in handed.items():
        for link in _links(notebook):
            target = posixpath.normpath(posixpath.join(posixpath.dirname(name), link))
            if target not in handed and target not in texts:
                raise ValueError(f"{name}: {link} leads nowhere")
    for path in {*exercises} - {*find_chapters(notebooks / "exercises", names)}:
        del handed[f"exercises/{path.name}"]
    texts |= {name: f"{nbformat.writes(notebook)}\n" for name, notebook in handed.items()}
    return {name: texts[name].encode() for name in sorted(texts)}


def _links(notebook):
    """Return the relative link targets in the texts of a notebook."""
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    return _LINK.findall(_CODE.sub("", "\n".join(cells)))


def _apply(notebook, *preprocessors):
    notebook, resources = copy.deepcopy(notebook), {}
    for preprocessor in (CheckCellMetadata, *preprocessors):
        notebook, resources = preprocessor(parent=None, log=_LOG).preprocess(notebook, resources)
    return notebook


def main(arguments=None):
    """Write the files for students; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="chapter", help="03, or 03_topic; all if none")
    parser.add_argument("--folder", type=Path, default=FOLDER / "exercises")
    parser.add_argument("--build", type=Path, default=BUILD)
    options = parser.parse_args(arguments)
    try:
        files = hand_out(options.folder.parent, options.names, answers=False)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    shutil.rmtree(options.build, ignore_errors=True)
    for name, content in files.items():
        replace_file(options.build / name, content)
    count = sum(name.startswith("exercises/") for name in files)
    print(f"{count} notebooks without solutions, and the chapters without outputs: {options.build}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
