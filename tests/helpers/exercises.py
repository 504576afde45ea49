"""Runs exercise notebooks cell by cell in this process, without a kernel; reads wrong answers.

The wrong answers to the exercises of a notebook are a text, `wrong_answers/wrong_NN.py`:

    ## an exercise
    # what is wrong (points): a part of the message
    - what is replaced in the solution
    + what replaces it
    # another mistake (points): a part of the message
    = what is wrong
    - what is replaced in that wrong answer instead
    + what replaces it
    # a third one (points): a part of the message
    a program of its own

What is replaced must occur once: one or more lines, the first and the last of which may be parts of
a line. Where nothing replaces it before the next "-", a lone "+" separates the two.
"""

import ast
import contextlib
import functools
import io
import linecache
import re
import runpy
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import nbformat
from nbformat.v4 import new_code_cell

FOLDER = Path(__file__).resolve().parents[2] / "notebooks" / "exercises"
NOTEBOOKS = sorted(FOLDER.glob("[0-9][0-9]_*.ipynb"))

WRONG = Path(__file__).resolve().parents[1] / "wrong_answers"

SOLUTION = re.compile(r"^( *)### BEGIN SOLUTION\n.*?^ *### END SOLUTION", re.DOTALL | re.MULTILINE)


@dataclass
class Exercise:
    """One exercise of a notebook: sources of cells, and wrong answers as in `read_answers`."""

    label: str  # number of the notebook, and name
    name: str
    points: float
    setup: list
    given: list
    answers: list  # with the solution
    check: str
    wrong: dict

    @property
    def stub(self):
        return [SOLUTION.sub(r"\1raise NotImplementedError()", cell) for cell in self.answers]

    @property
    def solution(self):
        return re.sub(r"^ *### (BEGIN|END) SOLUTION\n?", "", "\n".join(self.answers), flags=re.M)

    def wrong_answer(self, name):
        """Return the text of a wrong answer."""
        text, (change, _, _) = self.solution, self.wrong[name]
        if change.startswith("= "):
            other, _, change = change[2:].partition("\n")
            text = self.wrong_answer(other)
        if not change.startswith("- "):
            return change
        for parts in re.findall(r"((?:^-.*\n)+)((?:^\+.*\n)*)", change, re.MULTILINE):
            old, new = ("\n".join(line[2:] for line in part.splitlines()) for part in parts)
            assert text.count(old) == 1, f"{old!r} must occur once, not {text.count(old)} times"
            text = text.replace(old, new)
        return text


@functools.cache
def read(path):
    number = path.stem[:2]
    wrong = read_answers(runpy.run_path(str(WRONG / f"wrong_{number}.py"))["WRONG"])
    exercises, setup, given, answers = [], [], [], []
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type != "code":
            continue
        marked = cell.metadata.get("nbgrader")
        if marked is None:
            assert cell.metadata.tags in (["setup"], ["given"]), f"an untagged cell: {cell.source}"
            (setup if "setup" in cell.metadata.tags else given).append(cell.source)
        elif marked.solution:
            answers.append(cell.source)
        else:
            name = marked.grade_id.removesuffix("-check")
            cells = setup, given, answers, cell.source
            exercises.append(
                Exercise(f"{number}-{name}", name, marked.points, *cells, wrong.pop(name))
            )
            given, answers = [], []
    assert not wrong, f"wrong answers to exercises that {path.name} has not: {[*wrong]}"
    return exercises


def read_answers(text):
    """Return the answers in a text: {exercise: {what is wrong: (text, points, message)}}."""
    _, *sections = re.split(r"^## (.+)\n", text, flags=re.MULTILINE)
    found = {}
    for exercise, section in zip(sections[::2], sections[1::2], strict=True):
        _, *parts = re.split(r"^# (.+) \((\d)\): ?(.*)\n", section, flags=re.MULTILINE)
        names, points, messages, answers = (parts[i::4] for i in range(4))
        answers = zip(answers, map(int, points), messages, strict=True)
        found[exercise] = dict(zip(names, answers, strict=True))
        assert len(found[exercise]) == len(names), f"{exercise}: two mistakes of one name"
    return found


def marked(source, name, **marks):
    """Return a cell that nbgrader knows by a name; all its marks are False but those given."""
    kind = {"grade": False, "locked": False, "solution": False, "task": False}
    kind = {**kind, "schema_version": 3, "grade_id": name, **marks}
    return new_code_cell(source, id=name, metadata={"nbgrader": kind})


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
