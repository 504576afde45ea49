"""Runs exercise notebooks cell by cell in this process, without a kernel."""

import ast
import contextlib
import io
import re
from pathlib import Path

import nbformat

FOLDER = Path(__file__).resolve().parents[1] / "notebooks" / "exercises"
NOTEBOOKS = sorted(FOLDER.glob("[0-9][0-9]_*.ipynb"))

SOLUTION = re.compile(r"^( *)### BEGIN SOLUTION\n.*?^ *### END SOLUTION", re.DOTALL | re.MULTILINE)


class Exercise:
    """One exercise of a notebook: what is given, the answer with its solution, the check."""

    def __init__(self, name, points):
        self.name, self.points = name, points
        self.given, self.answers, self.check = [], [], None

    @property
    def stub(self):
        """The answer cells as students get them."""
        return [SOLUTION.sub(r"\1raise NotImplementedError()", cell) for cell in self.answers]


def read(path):
    """Return the sources of the set-up cells of a notebook, and its exercises."""
    setup, exercises, waiting, answers = [], [], [], []
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type != "code":
            continue
        marked = cell.metadata.get("nbgrader")
        if marked is None:
            assert cell.metadata.tags in (["setup"], ["given"]), f"an untagged cell: {cell.source}"
            (setup if "setup" in cell.metadata.tags else waiting).append(cell.source)
        elif marked.solution:
            answers.append(cell.source)
        else:
            exercise = Exercise(marked.grade_id.removesuffix("-check"), marked.points)
            exercise.given, exercise.answers, exercise.check = waiting, answers, cell.source
            exercises.append(exercise)
            waiting, answers = [], []
    return setup, exercises


def run_cells(sources, names):
    """Execute cells one after the other.

    Args:
        sources: texts of cells.
        names: the dict of names that they share.

    Returns:
        The value of the last expression of the last cell, and what all cells printed. An exception
        ends the cell that raises it; its name and message are printed.
    """
    value, printed = None, io.StringIO()
    with contextlib.redirect_stdout(printed):
        for source in sources:
            body = ast.parse(source).body
            last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
            value = None
            try:
                exec(compile(ast.Module(body, []), "<cell>", "exec"), names)
                if last is not None:
                    value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
            except Exception as error:
                print(f"{type(error).__name__}: {error}")
    return value, printed.getvalue()
