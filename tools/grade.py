"""Grade a folder of submitted exercises, without a server.

python tools/grade.py SUBMITTED            SUBMITTED/STUDENT/NN_topic.ipynb, or one folder deeper
python tools/grade.py SUBMITTED 03 07      some chapters

Prints a table, and writes grades.csv and a page of feedback for each notebook under build/grades.
Each notebook is executed in a sandbox (sandbox.py); the checks come from the source.
"""

import argparse
import contextlib
import csv
import functools
import importlib.util
import json
import os
import shutil
import stat
import sys
import time
import unicodedata
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import accumulate
from pathlib import Path

import execution
import feedback
import nbformat
import sandbox
import session
from assignments import NOTEBOOKS, find_exercises, without_solutions
from nbgrader.utils import determine_grade, is_grade, is_solution

BUILD = NOTEBOOKS.parent / "build" / "grades"
CELL_SECONDS = 30.0
NOTEBOOK_SECONDS = 300.0
FILE_BYTES = 20 * 2**20

GB = 2**30
FAULTS = {
    "time": "A cell took longer than its limit, and was interrupted.",
    "memory": f"The code used more than {sandbox.MEMORY // GB} GB of memory, and was ended.",
    "processes": f"The code started more than {sandbox.PROCESSES} processes, and was ended.",
    "killed": "The code ended the kernel.",
    "output": f"The cell showed more than {session.OUTPUT // 2**20} MB, and was ended.",
    "no answers": "The notebook has no cell of these exercises.",
    "not a notebook": "The file cannot be read as a notebook.",
    "too large": f"The file is larger than {FILE_BYTES // 2**20} MB.",
    "not a file": "What was handed in under this name is a link, or no file at all.",
    "missing": "No notebook of this name was handed in.",
    "wrong name": "No exercises have the name or the cells of this notebook.",
    "renamed": "The notebook has another name than the exercises; its cells tell which they are.",
    "extra copy": "Another notebook of this student for the same exercises was graded.",
    "cell missing": "The answer cell was not found. Code in its place was run.",
    "cell retyped": "The answer cell was no code cell. Its text was run as code.",
    "cell twice": "The answer cell was there more than once. All but untouched copies were run in "
    "their order, so the last one counts.",
    "cell moved": "The answer cell was elsewhere in the notebook. It was run in its place.",
    "no metadata": "The answer cell had lost the metadata of nbgrader. Its id tells which it is.",
    "stderr": "The check shows a warning or another text on stderr, for which nbgrader gives 0.",
    "lost": "The notebook could not be graded. Please show it to the maintainers of d2lpar.",
}
NOT_EXECUTED = {
    "output_type": "error",
    "ename": "NotExecuted",
    "evalue": "",
    "traceback": ["This cell was not executed to its end."],
}
PROTECTION = f"""Each notebook ran in a sandbox: no other process, no file of yours, no network,
{sandbox.TMP // 2**20} MB of disk, {sandbox.MEMORY // GB} GB of memory, {CELL_SECONDS:g} s a cell.
Not protected: its own points. A check runs in the process of the answers, and code can cheat it.
Read the code that got more points than you expect."""


@dataclass
class Submission:
    """A student's notebook, and the result of grading it."""

    student: str
    path: Path  # what was handed in, or where it should have been
    source: Path  # the exercises
    fault: str = ""  # a word of `FAULTS` for the notebook as a whole
    scores: dict = field(default_factory=dict)  # name of an exercise: (points, of how many)
    remarks: list = field(default_factory=list)  # (number of the exercise or 0, word of `FAULTS`)
    seconds: float = 0.0

    @property
    def total(self):
        """The sum of its points, and of how many."""
        points, most = zip(*self.scores.values(), strict=True) if self.scores else ((), ())
        return sum(points), sum(most)

    @property
    def summary(self):
        """One line about it."""
        points, most = self.total
        words = f"{points:g} of {most:g} points, {self.seconds:.1f} s  {self.remark}".rstrip()
        return f"{shown(self.student)}, {self.source.stem}: {words}"

    @property
    def remark(self):
        """The remarks about it, in a few words."""
        numbers = {}
        for number, word in dict.fromkeys(self.remarks):
            numbers.setdefault(word, []).append(str(number))
        words = [
            word if which == ["0"] else f"{' '.join(which)}: {word}"
            for word, which in numbers.items()
        ]
        return ", ".join(([self.fault] if self.fault else []) + words)

    def said_of(self, number):
        """List the words about an exercise; number 0 is the notebook as a whole."""
        return list(dict.fromkeys(word for place, word in self.remarks if place == number))


def find_submissions(folder, sources):
    """List what was handed in.

    A notebook belongs to the exercises that it shares most cells with and, if it shares none, to
    the exercises with its name.

    Args:
        folder: the folder with one folder for each student.
        sources: paths of the exercises that are graded.

    Returns:
        A list of `Submission` for each student: one for each of the exercises that anyone handed
        in, and one for each further copy and each notebook that belongs to no exercises.

    Raises:
        ValueError: if there are no students.
    """
    students = sorted(entry.name for entry in os.scandir(folder) if entry.name[0] != ".")
    students = [name for name in students if (Path(folder) / name).is_dir()]
    if not students:
        raise ValueError(f"no folders of students in {folder}")
    known = {path.stem: path for path in find_exercises(sources[0].parent)}
    handed_in, others = {}, []
    for student in students:
        by_source = handed_in[student] = {}
        for path in _notebooks(Path(folder) / student):
            source = _recognised(path, known.values())
            if named := source or known.get(path.stem):
                # The right cells count more than the right name, and both more than the order.
                rank = source is None, path.stem != named.stem
                by_source.setdefault(named, []).append((rank, path))
            else:
                others.append(Submission(student, path, path, "wrong name"))
        for source, found in by_source.items():
            found.sort(key=lambda one: one[0])
            if source in sources:
                copies = [path for (unlike, _), path in found[1:] if not unlike]
                others += [Submission(student, path, path, "extra copy") for path in copies]
    wanted = [one for one in sources if any(one in found for found in handed_in.values())]
    submissions = []
    for student, by_source in handed_in.items():
        for source in wanted or sources:
            if source in by_source:
                submissions.append(Submission(student, by_source[source][0][1], source))
            else:
                path = Path(folder) / student / source.name
                submissions.append(Submission(student, path, source, "missing"))
        submissions += [one for one in others if one.student == student]
    return submissions


def _recognised(path, sources):
    """Return the exercises that a notebook shares most cells with; None if it shares none."""
    with contextlib.suppress(Fault):
        marks = {cell[key] for cell in read(path) for key in ("grade_id", "id", "source")}
        num_shared = {source: len(marks & _marks(source)) for source in sources}
        best = max(num_shared, key=num_shared.get)
        return best if num_shared[best] else None
    return None


@functools.cache
def _marks(source):
    """Return what identifies the cells of these exercises: their ids, and the texts of checks."""
    cells = nbformat.read(source, as_version=4).cells
    texts = {cell.source for cell in cells if is_grade(cell)}
    return {cell.id for cell in cells} | {grade_id(cell) for cell in cells} | texts - {""}


def _notebooks(folder, depth=0):
    """List the notebooks in a folder and the folders in it, those in `exercises` first."""
    found, below = [], []
    if not folder.is_symlink():
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            if entry.name.endswith(".ipynb"):
                found.append(Path(entry.path))
            elif entry.is_dir(follow_symlinks=False) and depth < 2 and entry.name[0] != ".":
                below += _notebooks(Path(entry.path), depth + 1)
    return sorted(found + below, key=lambda path: path.parent.name != "exercises")


class Fault(Exception):
    """A submission cannot be graded; the text is a word of `FAULTS`."""


def read(path):
    """Return the cells of a submitted notebook, reduced to the fields that grading needs.

    Returns:
        A list of dicts of strings: "cell_type", "source", "id", and "grade_id".

    Raises:
        Fault: the file is not a notebook.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise Fault("not a file")
            text = file.read(FILE_BYTES + 1)
    except OSError:
        raise Fault("not a file") from None
    if len(text) > FILE_BYTES:
        raise Fault("too large")
    try:
        return [_read_cell(cell) for cell in json.loads(text)["cells"]]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise Fault("not a notebook") from None


def _read_cell(cell):
    source = "".join(cell["source"])  # a string, or a list of lines
    metadata = cell.get("metadata", {}).get("nbgrader", {})
    return {
        "cell_type": "code" if cell["cell_type"] == "code" else "markdown",
        "source": source.encode(errors="replace").decode(),
        "id": str(cell.get("id", "")),
        "grade_id": str(metadata.get("grade_id", "")),
    }


def merge(source, cells):
    """Put what a student has written into the exercises.

    All cells come from the source, in its order, apart from answers and from other code that is not
    locked, such as the set-up. Cells that the student has added follow those that they followed.

    Args:
        source: the exercises without solutions, a notebook.
        cells: the cells of the submission, from `read`.

    Returns:
        A list of cells, and a list of remarks as in a `Submission`.

    Raises:
        Fault: no cell belongs to these exercises.
    """
    graded = {grade_id(cell): i for i, cell in enumerate(source.cells) if grade_id(cell)}
    answers = [i for i in graded.values() if is_solution(source.cells[i])]
    texts = {cell.source: i for i, cell in enumerate(source.cells) if i not in answers}
    ids = {cell.id: i for i, cell in enumerate(source.cells)}
    written = {i: [] for i in range(len(source.cells))}
    added = {i: [] for i in range(-1, len(source.cells))}
    order = []  # of the answers, as they come
    place = -1
    for cell in cells:
        known = (graded, "grade_id"), (ids, "id"), (texts, "source")
        places = [index[cell[key]] for index, key in known if cell[key] in index]
        if places:
            place = places[0]
            written[place].append(cell)
            order += [place] if place in answers and place not in order else []
        elif cell["cell_type"] == "code":
            added[place].append(nbformat.v4.new_code_cell(cell["source"]))
        else:  # what a student tells the teacher
            text = "\n".join("    " + line for line in cell["source"].splitlines())
            added[place].append(nbformat.v4.new_markdown_cell(text))
    if not any(written[i] for i in graded.values()):
        raise Fault("no answers")
    remarks = _mend(source, answers, order, written)
    merged, before = [], added[-1]
    for i, cell in enumerate(source.cells):
        changeable = cell.cell_type == "code" and not is_grade(cell)
        mine = [
            nbformat.v4.new_code_cell(one["source"], metadata=cell.metadata)
            for one in written[i]
            if changeable and one["cell_type"] == "code"
        ]
        # Where an answer is missing, the cells before it may be the answer: they follow the stub.
        missing = i in answers and not written[i]
        merged += [cell, *before] if missing else [*before, *(mine or [cell])]
        before = added[i]
    merged += before
    for number, cell in enumerate(merged):
        cell.id = f"cell-{number}"
    return merged, remarks


def _mend(source, answers, order, written):
    """Choose the cells that count as each answer, text as code if need be; return remarks.

    Args:
        source: the exercises without solutions, a notebook.
        answers: places of the answers in it, in order.
        order: the same as the submission has them, without what is missing.
        written: for each place its cells in the submission; only the ones that count are kept.
    """
    blocks = SequenceMatcher(None, sorted(order), order, autojunk=False).get_matching_blocks()
    in_order = [place for block in blocks for place in order[block.b : block.b + block.size]]
    remarks = []
    for i in answers:
        number = 1 + sum(is_grade(cell) for cell in source.cells[:i])
        mine = written[i]
        words = {
            "cell missing": not mine,
            "cell twice": len(mine) > 1,
            "cell moved": mine and i not in in_order,
            "no metadata": mine and not any(cell["grade_id"] for cell in mine),
        }
        changed = [cell for cell in mine if cell["source"] != source.cells[i].source]
        mine = changed or mine[:1]
        if mine and not any(cell["cell_type"] == "code" for cell in mine):
            words["cell retyped"] = True
            for cell in mine:
                cell["cell_type"] = "code"
        written[i] = mine
        remarks += [(number, word) for word, applies in words.items() if applies]
    return remarks


def grade_id(cell):
    """Return the name that nbgrader has for a cell, or an empty string."""
    return cell.metadata.get("nbgrader", {}).get("grade_id", "")


def execute(submission, cells, **how):
    """Execute cells in a sandbox.

    Args:
        submission: gets remarks.
        cells: the cells of a whole notebook; code cells get their outputs.
        how: the other arguments of `execution.execute`.
    """
    code = [cell for cell in cells if cell.cell_type == "code"]
    checks = [0, *accumulate(map(is_grade, code))]  # how many stand before each cell
    given = [not grade_id(cell) for cell in code]
    try:
        for i, fault, told in execution.execute([cell.source for cell in code], given, **how):
            if fault:
                submission.remarks.append((1 + checks[i], fault))
            if told:
                code[i].outputs = nbformat.from_dict(told["outputs"])
    except TimeoutError:
        submission.fault = "time"


def score(submission, cells):
    """Give points by nbgrader's rules, to the checks in the cells of a notebook.

    A check gives the number that is its result, and nothing for an error or text on stderr.
    """
    checks = [cell for cell in cells if is_grade(cell)]
    for number, cell in enumerate(checks, start=1):
        points, most = 0.0, float(cell.metadata.nbgrader.points)
        with contextlib.suppress(ValueError, KeyError, AttributeError, TypeError):
            results = [out for out in cell.outputs if out.output_type == "execute_result"]
            shown = [float(out.data["text/plain"]) for out in results]  # else no points
            points = determine_grade(cell)[0] if all(0 <= one <= most for one in shown) else 0.0
        if any(out.get("name") == "stderr" for out in cell.outputs):
            submission.remarks.append((number, "stderr"))
        name = grade_id(cell).removesuffix("-check")
        submission.scores[name] = (points, most)


def grade(submission, **how):
    """Grade a submission.

    Args:
        submission: a `Submission`, which gets its points.
        how: the arguments of `execution.execute` beside the cells.

    Returns:
        The cells as they were executed.
    """
    start = time.perf_counter()
    source = without_solutions(nbformat.read(submission.source, as_version=4))
    cells = source.cells
    try:
        if not submission.fault:
            cells, submission.remarks = merge(source, read(submission.path))
            if submission.path.stem != submission.source.stem:
                submission.remarks.insert(0, (0, "renamed"))
    except Fault as fault:
        submission.fault = str(fault)
    for cell in cells:
        if cell.cell_type == "code":
            cell.outputs = [nbformat.from_dict(NOT_EXECUTED)]
    if not submission.fault:
        execute(submission, cells, **how)
    score(submission, cells)
    submission.seconds = time.perf_counter() - start
    return cells


def grade_all(submissions, parallel, folder, **how):
    """Grade submissions, and write their pages of feedback.

    Args:
        submissions: a list of `Submission`, which get their points.
        parallel: how many to execute at a time.
        folder: where the pages go.
        how: the other arguments of `grade`.
    """
    pool = ThreadPoolExecutor(parallel)
    running = {pool.submit(grade, one, **how): one for one in submissions}
    try:
        for number, done in enumerate(as_completed(running), start=1):
            one = running[done]
            try:
                feedback.write(one, done.result(), FAULTS, folder / one.student)
            except Exception as error:
                one.fault = one.fault if one.scores else "lost"  # a page is not worth the points
                print(f"{one.summary}: {error!r}", file=sys.stderr)
            print(f"{number} of {len(running)}  {one.summary}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        os._exit(130)  # and with this process the sandboxes end


def grade_fairly(submissions, parallel, **how):
    """Grade submissions, and those that ran out of time once more, each alone on the machine.

    Others that take all cores would cost them points.
    """
    places = [i for i, one in enumerate(submissions) if one.path != one.source]
    graded = [submissions[i] for i in places]
    grade_all(graded, parallel, **how)
    slow = [i for i, one in enumerate(graded) if "time" in one.remark]
    if parallel > 1 and len(graded) > 1 and slow:
        print(f"{len(slow)} of them ran out of time, and run again, alone", file=sys.stderr)
        again = [Submission(graded[i].student, graded[i].path, graded[i].source) for i in slow]
        grade_all(again, 1, **how)
        for i, one in zip(slow, again, strict=True):
            graded[i] = one
    for place, one in zip(places, graded, strict=True):
        submissions[place] = one


def table(submissions):
    """Return the table of some submissions: for each notebook, students and their points."""
    blocks = []
    graded = [one for one in submissions if one.scores]
    for stem in dict.fromkeys(one.source.stem for one in graded):
        chosen = [one for one in graded if one.source.stem == stem]
        most = [f"{most:g}" for _, most in chosen[0].scores.values()]
        rows = [[stem, *(str(i) for i in range(1, len(most) + 1)), "sum", ""]]
        rows += [["points", *most, f"{sum(float(points) for points in most):g}", ""]]
        for one in chosen:
            points = [f"{points:g}" for points, _ in one.scores.values()]
            rows += [[shown(one.student), *points, f"{one.total[0]:g}", one.remark]]
        blocks.append(rows)
    notebooks = dict.fromkeys(one.source.stem for one in graded)
    if len(notebooks) > 1:
        rows = [["all notebooks", *(stem[:2] for stem in notebooks), "sum", ""]]
        for student in dict.fromkeys(one.student for one in graded):
            totals = {one.source.stem: one.total[0] for one in graded if one.student == student}
            points = [f"{totals[stem]:g}" for stem in notebooks]
            rows += [[shown(student), *points, f"{sum(totals.values()):g}", ""]]
        blocks.append(rows)
    if strays := [one for one in submissions if not one.scores]:
        rows = [["other files", ""]]
        blocks.append(
            rows + [[shown(one.student), f"{shown(one.path.name)}: {one.fault}"] for one in strays]
        )
    width = max(_width(row[0]) for rows in blocks for row in rows)
    return "\n\n".join("\n".join(_line(row, width) for row in rows) for rows in blocks)


def _line(row, width):
    name, *numbers, remark = row
    name += " " * (width - _width(name))
    return f"{name}  {' '.join(f'{number:>4}' for number in numbers)}  {remark}".rstrip()


def _width(text):
    """Return how many columns a text takes in a terminal."""
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)
    return len(text) + wide - sum(map(bool, map(unicodedata.combining, text)))


def shown(name):
    """Return the name of a file as one line of text."""
    return "".join(letter if letter.isprintable() else "?" for letter in name)


def write_csv(submissions, path):
    """Write a line for each exercise of each submission."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["student", "notebook", "exercise", "points", "of", "remark"])
        for one in submissions:
            student = shown(one.student)
            for number, (name, (points, most)) in enumerate(one.scores.items(), start=1):
                words = [one.fault] if one.fault else one.said_of(0) + one.said_of(number)
                writer.writerow(
                    [student, one.source.stem, name, f"{points:g}", f"{most:g}", ", ".join(words)]
                )
            if not one.scores:
                writer.writerow([student, shown(one.path.stem), "", "0", "0", one.fault])


def capacity():
    """Return how many notebooks may run at a time: the cores, or as many as memory allows."""
    from d2lpar.virtual import cores_of_this_process, memory_of_this_process

    each = sandbox.MEMORY + sum(sandbox.WRITABLE.values())
    return max(1, min(cores_of_this_process(), memory_of_this_process() // each))


def main(arguments=None):
    """Grade the submissions that the command line names; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("submitted", type=Path, help="the folder with a folder for each student")
    parser.add_argument("names", nargs="*", metavar="chapter", help="03, or 03_topic; all if none")
    parser.add_argument("--folder", type=Path, default=NOTEBOOKS / "exercises", help="the source")
    parser.add_argument("--build", type=Path, default=BUILD, help="grades and feedback")
    options = parser.parse_args(arguments)
    start = time.perf_counter()
    try:
        sources = find_exercises(options.folder, options.names)
        submissions = find_submissions(options.submitted, sources)
        sandbox.check()
    except (ValueError, OSError, sandbox.NoSandbox) as error:
        parser.error(str(error))
    parallel = capacity()
    shutil.rmtree(options.build, ignore_errors=True)
    (options.build / "feedback").mkdir(parents=True)
    how = {
        "hidden": [
            str(path.resolve()) for path in (options.folder, options.submitted, options.build)
        ],
        "package": importlib.util.find_spec("d2lpar").submodule_search_locations[0],
        "folder": options.build / "feedback",
        "cell_seconds": CELL_SECONDS,
        "notebook_seconds": NOTEBOOK_SECONDS,
    }
    grade_fairly(submissions, parallel, **how)
    write_csv(submissions, options.build / "grades.csv")
    print(table(submissions))
    students = len({one.student for one in submissions})
    seconds = time.perf_counter() - start
    told = f"{len(submissions)} notebooks of {students} students in {seconds:.0f} s"
    print(f"\n{told}, {parallel} at a time")
    print(f"grades: {options.build / 'grades.csv'}, feedback: {options.build / 'feedback'}")
    print(PROTECTION)
    return 0


if __name__ == "__main__":
    sys.exit(main())
