"""Runs exercise notebooks cell by cell in this process, without a kernel."""

import ast
import contextlib
import io
import linecache
import re
from pathlib import Path
from types import SimpleNamespace

import nbformat

FOLDER = Path(__file__).resolve().parents[2] / "notebooks" / "exercises"
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
    """Execute cells one after the other, each under a file name of its own as in a kernel.

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
            value, error = None, None
            file = f"<cell {hash(source)}>"
            linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
            try:
                body = ast.parse(source).body
                last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
                exec(compile(ast.Module(body, []), file, "exec"), names)
                if last is not None:
                    value = eval(compile(ast.Expression(last.value), file, "eval"), names)
            except Exception as raised:
                error = raised
                print(f"{type(error).__name__}: {error}")
            _remember(names, source, error)
    return value, printed.getvalue()


def _remember(names, source, error):
    """Let the cell that comes next know how this one ended, as IPython does."""
    before_exec = error if isinstance(error, SyntaxError) else None
    result = SimpleNamespace(
        info=SimpleNamespace(raw_cell=source),
        error_before_exec=before_exec,
        error_in_exec=None if before_exec else error,
    )
    names["get_ipython"] = lambda: SimpleNamespace(last_execution_result=result)
