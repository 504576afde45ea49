"""Write the exercises for students: without solutions, beside the chapters that they link to.

python tools/assignments.py                every exercise notebook, under build/assignments
python tools/assignments.py 03 07          some of them
"""

import argparse
import copy
import logging
import re
import shutil
import sys
from pathlib import Path

import nbformat
from nbgrader.preprocessors import (
    CheckCellMetadata,
    ClearHiddenTests,
    ClearOutput,
    ClearSolutions,
    ComputeChecksums,
    LockCells,
)
from nbgrader.utils import is_solution
from run import find_chapters

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
BUILD = NOTEBOOKS.parent / "build" / "assignments"

_SOLUTION = re.compile(r"BEGIN SOLUTION[^\n]*\n(.*?)\n[^\n]*END SOLUTION", re.DOTALL)
_LINK = re.compile(r"\]\(([\w./-]+)[)#]")
_LOG = logging.getLogger("nbgrader")


def find_exercises(folder, names=()):
    """List exercise notebooks, as `find_chapters` lists chapters.

    Raises:
        ValueError: a name fits none of them, or there are none at all.
    """
    paths = find_chapters(folder, names)
    if not paths:
        raise ValueError(f"no exercises NN_topic.ipynb in {folder}")
    return paths


def without_solutions(notebook):
    """Return a copy of a notebook with nbgrader's stubs for solutions, and without outputs."""
    return _apply(notebook, LockCells, ClearSolutions, ClearOutput)


def release(notebook):
    """Return the version of a notebook that students get: no solutions, no hidden tests.

    Raises:
        ValueError: a solution is left.
    """
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


def write(paths, build):
    """Write release versions of exercises, and the chapters beside them.

    The folder is laid out as the repository's own, so that every link leads somewhere.

    Args:
        paths: exercise notebooks.
        build: the folder to write to; what it holds is deleted.

    Raises:
        ValueError: a solution is left, or a link leads nowhere.
    """
    shutil.rmtree(build, ignore_errors=True)
    chapters = paths[0].parent.parent
    kept = [*chapters.glob("[0-9][0-9]_*.ipynb"), *chapters.glob("*.md")]
    (build / "exercises").mkdir(parents=True)
    for path in kept:
        shutil.copy(path, build)
    if (chapters / "figures").exists():
        shutil.copytree(chapters / "figures", build / "figures")
    for path in paths:
        try:
            notebook = release(nbformat.read(path, as_version=4))
        except ValueError as error:
            raise ValueError(f"{path.name}: {error}") from None
        text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
        for link in _LINK.findall(text):
            if not (build / "exercises" / link).exists():
                raise ValueError(f"{path.name}: {link} leads nowhere")
        nbformat.write(notebook, build / "exercises" / path.name)


def _apply(notebook, *preprocessors):
    notebook, resources = copy.deepcopy(notebook), {}
    for preprocessor in (CheckCellMetadata, *preprocessors):
        notebook, resources = preprocessor(parent=None, log=_LOG).preprocess(notebook, resources)
    return notebook


def main(arguments=None):
    """Write the exercises that the command line names; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="chapter", help="03, or 03_topic; all if none")
    parser.add_argument("--folder", type=Path, default=NOTEBOOKS / "exercises")
    parser.add_argument("--build", type=Path, default=BUILD)
    options = parser.parse_args(arguments)
    try:
        paths = find_exercises(options.folder, options.names)
        write(paths, options.build)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{len(paths)} notebooks without solutions, and the chapters: {options.build}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
