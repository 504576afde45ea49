"""Grade a folder of submitted exercises, without a server.

python tools/grading/grade.py SUBMITTED        SUBMITTED/STUDENT/NN_topic.ipynb, or one folder
                                               deeper
python tools/grading/grade.py SUBMITTED 03 05  some chapters only

Prints a table, and writes grades.csv and a feedback page for each notebook under build/grades. Each
notebook is executed in a sandbox (sandbox.py), with the checks of the source.
"""

import argparse
import contextlib
import csv
import functools
import importlib.util
import json
import os
import re
import shutil
import stat
import symtable
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import accumulate
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "notebooks"))

import execution
import feedback
import moved
import nbformat
import sandbox
import session
from assignments import release, without_solutions
from contents import FOLDER, find_chapters
from nbgrader.utils import determine_grade, is_grade, is_solution
from wcwidth import wcswidth

BUILD = FOLDER.parent / "build" / "grades"
CELL_SECONDS = 30.0
NOTEBOOK_SECONDS = 300.0
FILE_BYTES = 20 * 2**20
DEEP = 5  # maximum depth of the search in a student's folder
PACKAGES = ("d2lpar", "vgpu")  # our packages that exercises import
FEW = 5  # maximum number of files to name if a student handed in no notebook

GB = 2**30
FAULTS = {
    "time": "A cell took longer than its limit, and was interrupted.",
    "out of time": "The notebook took longer than its limit. What had not run by then gives no "
    "points.",
    "memory": f"The code used more than {sandbox.MEMORY // GB} GB of memory, and was ended.",
    "processes": f"The code started more than {sandbox.PROCESSES} processes, and was ended.",
    "killed": "The code ended the kernel.",
    "output": f"The cell showed more than {session.OUTPUT // 2**20} MB, and was ended.",
    "no answers": "The notebook has no cell of these exercises.",
    "not a notebook": "The file cannot be read as a notebook.",
    "too large": f"The file is larger than {FILE_BYTES // 2**20} MB.",
    "not a file": "What was handed in under this name is a link, or no file at all.",
    "missing": "No notebook for these exercises was handed in.",
    "no notebook": "Among what this student handed in is no notebook; this is one of the files.",
    "nobody": "The notebook lies in no student's folder, so it was not graded.",
    "wrong name": "No exercises have the name or the cells of this notebook.",
    "renamed": "The notebook has another name than the exercises; its cells tell which they are.",
    "several": "Several notebooks were handed in for these exercises. This one counts: of those "
    "with answers, the one with the right name, or else the first.",
    "extra copy": "Another notebook of this student for the same exercises was graded.",
    "cell missing": "The answer cell was not found, and no code in its place.",
    "found by place": "No cell has the metadata or the id of the answer cell. What stands in its "
    "place was run as the answer.",
    "cell retyped": "The answer cell was no code cell. Its text was run as code.",
    "cell twice": "The answer cell was there more than once. All but untouched copies were run in "
    "their order, so the last one counts.",
    "cell moved": "The answer cell was elsewhere in the notebook. It was run in its place.",
    "no metadata": "The answer cell had lost the metadata of nbgrader. Its id tells which it is.",
    "not answered": "The answer cell is empty, or as it was handed out.",
    "answered beside": "The answer cell is empty, or as it was handed out. Another cell beside it, "
    "which defines what it should, was run as the answer.",
    "answer failed": "The answer cell ended in an error, which stands below it.",
    "check failed": "The check ended in an error, which stands below it, so it gives no points.",
    "no number": "The check did not end with a number of points, so it gives none.",
    "stderr": "The check shows a warning or another text on stderr, for which nbgrader gives 0.",
    "silent": "The check gave no points and printed nothing.",
    "wrong": "The check gave no points. It says why.",
    "lost": "The notebook could not be graded. Please show it to the maintainers of d2lpar.",
}
# Each of these explains 0 points.
REASONS = {
    *("time", "memory", "processes", "killed", "output", "cell missing", "not answered"),
    *("answer failed", "check failed", "no number", "stderr", "silent", "wrong"),
}
NOT_EXECUTED = nbformat.v4.new_output(
    "error", ename="NotExecuted", evalue="this cell was not run to its end", traceback=[]
)
PROTECTION = f"""Each notebook ran in a sandbox: no other process, no file of yours, no network,
{sandbox.TMP // 2**20} MB of disk, {sandbox.MEMORY // GB} GB of memory, {CELL_SECONDS:g} s a cell.
Not protected: its own points. A check runs in the process of the answers, and code can cheat it.
Read the code that got more points than you expect."""


@dataclass
class Submission:
    """A notebook of a student, and its result."""

    student: str
    path: Path  # the notebook, or its expected path
    source: Path  # the exercises
    fault: str = ""  # a key of `FAULTS`: the reason why it cannot be graded
    words: tuple = ()  # further keys, known before the execution
    scores: dict = field(default_factory=dict)  # name of an exercise: (points, maximum)
    remarks: list = field(default_factory=list)  # (number of the exercise or 0, key of `FAULTS`)
    seconds: float = 0.0

    @property
    def total(self):
        """The sum of the points, and their maximum."""
        points, most = zip(*self.scores.values(), strict=True) if self.scores else ((), ())
        return sum(points), sum(most)

    @property
    def summary(self):
        """A line with student, points, seconds and remarks."""
        points, most = self.total
        words = f"{points:g} of {most:g} points, {self.seconds:.1f} s  {self.remark}".rstrip()
        return f"{shown(self.student)}, {self.source.stem}: {words}"

    @property
    def remark(self):
        """The fault and the remarks, in a few words."""
        numbers = {}
        for number, word in dict.fromkeys(self.remarks):
            numbers.setdefault(word, []).append(str(number))
        words = [
            word if which == ["0"] else f"{' '.join(which)}: {word}"
            for word, which in numbers.items()
        ]
        return ", ".join(([self.fault] if self.fault else []) + words)

    def said_of(self, number):
        """List the remarks on an exercise; number 0 is the whole notebook."""
        return list(dict.fromkeys(word for place, word in self.remarks if place == number))


def find_submissions(folder, sources):
    """List the submissions in a folder that has a folder for each student.

    A notebook is assigned to the exercises with which it shares most cells or, if none, to those
    of its name. Of several notebooks for the same exercises the first with answers counts, one
    with the right name if possible. Returned are, for each student, a `Submission` per exercise
    notebook in `sources` that anyone handed in, and one per file that is not graded but may be
    meant to be: a further copy, a notebook of no exercises or no student, or other files if there
    is no notebook. Raises ValueError if there are no students.
    """
    entries = sorted(Path(folder).iterdir())
    students = [entry for entry in entries if entry.is_dir() and entry.name[0] != "."]
    if not students:
        raise ValueError(f"no folders of students in {folder}")
    known = {path.stem: path for path in find_chapters(sources[0].parent)}
    loose = [path for path in entries if path.suffix == ".ipynb" and not path.is_dir()]
    submissions = [Submission("", path, path, "nobody") for path in loose]
    handed_in = {}
    for student in students:
        by_source, others = {}, []
        handed_in[student] = by_source, others
        files = [] if student.is_symlink() else _files(student)
        notebooks = [path for path in files if path.suffix == ".ipynb"]
        for path in notebooks:
            source, rank = _recognised(path, known.values())
            if named := source or known.get(path.stem):
                by_source.setdefault(named, []).append(((rank, path.stem != named.stem), path))
            else:
                others.append((path, "wrong name"))
        if not notebooks:
            others += [(path, "no notebook") for path in files[:FEW]]
        for source, found in by_source.items():
            found.sort(key=lambda one: one[0])
            found[1:] = [one for one in found[1:] if one[0][0] != UNLIKE]
            others += [(path, "extra copy") for _, path in found[1:] if source in sources]
    wanted = [one for one in sources if any(one in found for found, _ in handed_in.values())]
    for student, (by_source, others) in handed_in.items():
        for source in wanted or sources:
            if source in by_source:
                (_, path), *copies = by_source[source]
                words = ("renamed",) * (path.stem != source.stem) + ("several",) * bool(copies)
                submissions.append(Submission(student.name, path, source, words=words))
            else:
                path = student / source.name
                submissions.append(Submission(student.name, path, source, "missing"))
        submissions += [Submission(student.name, path, path, word) for path, word in others]
    return submissions


# Ranks of the notebooks of a student for the same exercises, the preferred first.
ANSWERED, UNTOUCHED, UNREADABLE, UNLIKE = range(4)


def _recognised(path, sources):
    """Return the exercises with which a notebook shares most cells, or None, and its rank."""
    try:
        cells = read(path)
    except Fault:
        return None, UNREADABLE
    marks = {cell[key] for cell in cells for key in ("grade_id", "id", "source", "heading")}
    best = max(sources, key=lambda source: len(marks & _marks(source)))
    if not marks & _marks(best):
        return None, UNLIKE
    handed_out = {tuple(cell.source.split()) for cell in _released(best)}
    touched = any(tuple(cell["source"].split()) not in handed_out for cell in cells)
    return best, ANSWERED if touched else UNTOUCHED


@functools.cache
def _released(source):
    """Return the cells of exercises as handed out."""
    return release(nbformat.read(source, as_version=4)).cells


@functools.cache
def _marks(source):
    """Return what identifies cells of these exercises: ids, headings, sources of checks."""
    texts = {cell.source for cell in _released(source) if is_grade(cell)}
    cells = map(read_cell, _released(source))
    return texts | {cell[key] for cell in cells for key in ("grade_id", "id", "heading")} - {""}


def _files(folder):
    """List the files below a folder, those in `exercises` first; all that is named *.ipynb."""
    found = []
    for parent, folders, names in os.walk(folder):
        paths = [Path(parent, name) for name in sorted(names + folders)]
        paths = [path for path in paths if path.name[0] != "." or path.name.endswith(".ipynb")]
        below = {path for path in paths if path.is_dir() and not path.is_symlink()}
        below -= {path for path in paths if path.name.endswith(".ipynb")}
        found += [path for path in paths if path not in below]
        is_last = len(Path(parent).relative_to(folder).parts) == DEEP
        folders[:] = [] if is_last else sorted(path.name for path in below)
    return sorted(found, key=lambda path: path.parent.name != "exercises")


class Fault(Exception):
    """A submission cannot be graded; the text is a key of `FAULTS`."""


def read(path):
    """Return the cells of a submitted notebook, see `read_cell`; raise `Fault` if it is none."""
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
        return [read_cell(cell) for cell in json.loads(text)["cells"]]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise Fault("not a notebook") from None


def read_cell(cell):
    """Return a dict of strings: "cell_type", "source", "heading", "id" and "grade_id"."""
    source = "".join(cell["source"])  # a string, or a list of lines
    source = source.encode(errors="replace").decode()
    kind = "code" if cell["cell_type"] == "code" else "markdown"
    if kind == "code":  # begun in an older edition
        source = moved.code(source)
    metadata = cell.get("metadata", {}).get("nbgrader", {})
    return {
        "cell_type": kind,
        "source": source,
        "heading": feedback.heading({"cell_type": kind, "source": source}, "## ").strip(),
        "id": str(cell.get("id", "")),
        "grade_id": str(metadata.get("grade_id", "")),
    }


def merge(source, cells):
    """Insert a student's answers into the exercises; return cells, and remarks of a `Submission`.

    All cells come from `source`, the exercises without solutions, in its order, except answers and
    other code that is not locked, such as the set-up. Cells that the student has added keep their
    predecessor; added text becomes a raw cell. Raises `Fault` if no cell belongs to the exercises.
    """
    answers = [i for i, cell in enumerate(source.cells) if is_solution(cell)]
    known = {"grade_id": {}, "id": {}, "source": {}, "heading": {}}  # places of cells
    for i, cell in enumerate(map(read_cell, source.cells)):
        for key, index in known.items():
            if cell[key] and (key != "source" or i not in answers):
                index[cell[key]] = i
    written = {i: [] for i in range(len(source.cells))}
    added = {i: [] for i in range(-1, len(source.cells))}
    order = []  # places of the answers, in the order of the submission
    place = -1
    for cell in cells:
        places = [index[cell[key]] for key, index in known.items() if cell[key] in index]
        if places:
            place = places[0]
            written[place].append(cell)
            order += [place] if place in answers and place not in order else []
        else:
            added[place].append(cell)
    exercises = *known["grade_id"].values(), *known["heading"].values()
    if not any(written[i] for i in exercises):
        raise Fault("no answers")
    remarks = _select_answers(source, answers, order, written, added)
    merged = [_added(cell) for cell in added[-1]]
    for i, cell in enumerate(source.cells):
        changeable = cell.cell_type == "code" and not is_grade(cell)
        mine = [
            nbformat.v4.new_code_cell(one["source"], metadata={**cell.metadata})
            for one in written[i]
            if changeable and one["cell_type"] == "code"
        ]
        merged += [*(mine or [cell]), *map(_added, added[i])]
    for number, cell in enumerate(merged):
        cell.id = f"cell-{number}"
    return merged, remarks


def _added(cell):
    """Return a cell that a student has added; text becomes a raw cell, for the teacher."""
    new = nbformat.v4.new_code_cell if cell["cell_type"] == "code" else nbformat.v4.new_raw_cell
    return new(cell["source"])


def _select_answers(source, answers, order, written, added):
    """Select the cells that count as answers, and repair them if possible; return remarks.

    `answers`: places of the answers in `source`; `order`: the same in the order of the submission;
    `written`, `added`: for each place its cells in the submission and those added after it, of
    which only those that count, and those that are no answer, are left.
    """
    blocks = SequenceMatcher(None, sorted(order), order, autojunk=False).get_matching_blocks()
    in_order = [place for block in blocks for place in order[block.b : block.b + block.size]]
    checks = [-1, *(i for i, cell in enumerate(source.cells) if is_grade(cell))]
    remarks = []
    for i in answers:
        number = sum(check < i for check in checks)
        mine, stub = written[i], source.cells[i].source
        words = {
            "cell twice": len(mine) > 1,
            "cell moved": mine and i not in in_order,
            "no metadata": mine and not any(cell["grade_id"] for cell in mine),
        }
        changed = [cell for cell in mine if cell["source"].split() not in ([], stub.split())]
        if not changed:
            changed = _pop_nearby_answer(source, i, added, anything=not mine)
            words["answered beside"] = mine and changed
            words["not answered"] = mine and not changed
            words["found by place"] = not mine and changed
            words["cell missing"] = not mine and not changed
        if changed and not any(cell["cell_type"] == "code" for cell in changed):
            words["cell retyped"] = True
            for cell in changed:
                cell["cell_type"] = "code"
        written[i] = changed or mine[:1]
        remarks += [(number, word) for word, applies in words.items() if applies]
    return remarks


def _pop_nearby_answer(source, i, added, anything):
    """Remove from the added cells those that answer cell `i` instead, and return them.

    `anything`: accept any code between heading and check if none defines the names of the cell.
    """
    checks = [place for place, cell in enumerate(source.cells) if is_grade(cell)]
    headings = [j for j, cell in enumerate(source.cells) if feedback.heading(cell, "## ")]
    before = max((place for place in checks if place < i), default=-1)
    check = min((place for place in checks if place > i), default=i)
    heading = max((place for place in headings if place < i), default=before)
    names = _names(source.cells[i].source)
    beside = [(place, cell) for place in range(before, check + 1) for cell in added[place]]
    found = [pair for pair in beside if names & _names(pair[1]["source"])]
    code = [pair for pair in beside if pair[1]["cell_type"] == "code"]
    found = [pair for pair in code if pair in found] or found
    if anything and not found:
        found = [(place, cell) for place, cell in code if heading <= place < check]
    for place, cell in found:
        added[place].remove(cell)
    return [cell for _, cell in found]


def _names(source):
    """Return the names that code defines outside of functions and classes."""
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        code = re.sub(r"^[%!].*$", "", source, flags=re.MULTILINE)  # without magics
        table = symtable.symtable(code, "cell", "exec")
        return {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned()}
    return set()


def grade_id(cell):
    """Return nbgrader's name of a cell, or ""."""
    return cell.metadata.get("nbgrader", {}).get("grade_id", "")


def execute(submission, cells, **how):
    """Execute cells in a sandbox, see `execution.execute`; store outputs, faults and remarks."""
    code = [cell for cell in cells if cell.cell_type == "code"]
    checks = [0, *accumulate(map(is_grade, code))]  # number of checks before each cell
    given = [not grade_id(cell) for cell in code]
    try:
        for i, fault, report in execution.execute([cell.source for cell in code], given, **how):
            if fault:
                submission.remarks.append((1 + checks[i], fault))
                code[i].metadata["fault"] = fault
            if report:
                code[i].outputs = nbformat.from_dict(report["outputs"])
    except TimeoutError:
        submission.remarks.append((0, "out of time"))


def score(submission, cells):
    """Set the points of the checks of a notebook by nbgrader's rules, and explain 0 points.

    The points of a check are the number that is its result; without one, after an error or with
    output to stderr they are 0.
    """
    failed = False  # whether the answer to the next check failed
    for cell in cells:
        if is_solution(cell):
            failed = failed or _raised(cell)
        if not is_grade(cell):
            continue
        number = 1 + len(submission.scores)
        points, most, valid = 0.0, float(cell.metadata.nbgrader.points), False
        with contextlib.suppress(ValueError, KeyError, AttributeError, TypeError):
            results = [out for out in cell.outputs if out.output_type == "execute_result"]
            shown = [float(out.data["text/plain"]) for out in results]
            valid = bool(shown) and all(0 <= one <= most for one in shown)
            points = determine_grade(cell)[0] if valid else 0.0
        if any(out.get("name") == "stderr" for out in cell.outputs):
            submission.remarks.append((number, "stderr"))
        known = submission.fault or REASONS & {*submission.said_of(number)}
        if not (points or known or cell.outputs == [NOT_EXECUTED]):
            printed = any(out.output_type == "stream" for out in cell.outputs)
            reasons = {"answer failed": failed, "check failed": _raised(cell)}
            reasons |= {"no number": not valid, "wrong": printed, "silent": True}
            word = next(word for word, applies in reasons.items() if applies)
            submission.remarks.append((number, word))
        submission.scores[grade_id(cell).removesuffix("-check")] = (points, most)
        failed = False


def _raised(cell):
    """Return whether a cell ended in an error."""
    return any(out.output_type == "error" for out in cell.get("outputs", ()))


def grade(submission, **how):
    """Set the points of a submission, and return its cells; `how`: see `execution.execute`."""
    start = time.perf_counter()
    source = without_solutions(nbformat.read(submission.source, as_version=4))
    cells = source.cells
    try:
        if not submission.fault:
            cells, remarks = merge(source, read(submission.path))
            submission.remarks = [(0, word) for word in submission.words] + remarks
    except Fault as fault:
        submission.fault = str(fault)
    for cell in cells:
        if cell.cell_type == "code":
            cell.outputs = [nbformat.from_dict(NOT_EXECUTED)]  # a copy
    if not submission.fault:
        execute(submission, cells, **how)
    score(submission, cells)
    submission.seconds = time.perf_counter() - start
    return cells


def grade_all(submissions, parallel, folder, **how):
    """Grade submissions, some at a time, and write their feedback pages.

    Those that exceed a time limit run again, alone: a busy machine must not cost them points.
    """
    pool = ThreadPoolExecutor(parallel)
    running = {pool.submit(grade, one, **how): one for one in submissions}
    try:
        for number, done in enumerate(as_completed(running), start=1):
            one = running[done]
            try:
                feedback.write(one, done.result(), FAULTS, folder / one.student)
            except Exception as error:
                one.fault = one.fault if one.scores else "lost"  # the points count without a page
                print(f"{one.summary}: {error!r}", file=sys.stderr)
            print(f"{number} of {len(running)}  {one.summary}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        os._exit(130)  # the sandboxes end with this process
    slow = [one for one in submissions if "time" in one.remark]
    if parallel > 1 and len(submissions) > 1 and slow:
        print(f"{len(slow)} of them ran out of time, and run again, alone", file=sys.stderr)
        for one in slow:
            one.scores, one.remarks, one.fault = {}, [], ""
        grade_all(slow, 1, folder, **how)


def table(submissions):
    """Return a table of submissions: for each notebook, students and their points."""
    blocks, by_notebook = [], {}
    graded = [one for one in submissions if one.scores]
    for one in graded:
        by_notebook.setdefault(one.source.stem, []).append(one)
    for stem, chosen in by_notebook.items():
        most = [f"{most:g}" for _, most in chosen[0].scores.values()]
        rows = [["points", *most, f"{chosen[0].total[1]:g}", ""]]
        for one in chosen:
            points = [f"{points:g}" for points, _ in one.scores.values()]
            rows += [[shown(one.student), *points, f"{one.total[0]:g}", one.remark]]
        blocks.append([[stem, *map(str, range(1, len(most) + 1)), "sum", ""], *rows])
    if len(by_notebook) > 1:
        rows = [["all notebooks", *(stem[:2] for stem in by_notebook), "sum", ""]]
        for student in dict.fromkeys(one.student for one in graded):
            totals = {one.source.stem: one.total[0] for one in graded if one.student == student}
            points = [f"{totals[stem]:g}" for stem in by_notebook]
            rows += [[shown(student), *points, f"{sum(totals.values()):g}", ""]]
        blocks.append(rows)
    if strays := [one for one in submissions if not one.scores]:
        named = [(shown(one.student), f"{shown(one.path.name)}: {one.fault}") for one in strays]
        blocks.append([("other files", ""), *named])
    width = max(wcswidth(row[0]) for rows in blocks for row in rows)
    return "\n\n".join("\n".join(_line(row, width) for row in rows) for rows in blocks)


def _line(row, width):
    name, *numbers, remark = row
    name += " " * (width - wcswidth(name))
    return f"{name}  {' '.join(f'{number:>4}' for number in numbers)}  {remark}".rstrip()


def shown(name):
    """Return the name of a file as one printable line."""
    return "".join(letter if letter.isprintable() else "?" for letter in name)


def legend(submissions):
    """Return a line that explains each kind of remark on these submissions."""
    words = {word for one in submissions for _, word in [(0, one.fault), *one.remarks]}
    return "\n".join(f"{word:15} {FAULTS[word]}" for word in FAULTS if word in words)


def write_csv(submissions, path):
    """Write a line for each exercise of each submission."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["student", "notebook", "exercise", "points", "of", "remark", "meaning"])
        for one in submissions:
            notebook = one.source.stem if one.scores else shown(one.path.name)
            scores = one.scores or {"": (0, 0)}
            for number, (name, (points, most)) in enumerate(scores.items(), start=1):
                words = [one.fault] if one.fault else one.said_of(0) + one.said_of(number)
                meaning = " ".join(FAULTS[word] for word in words)
                row = [shown(one.student), notebook, name, f"{points:g}", f"{most:g}"]
                writer.writerow([*row, ", ".join(words), meaning])


def capacity():
    """Return the number of notebooks to run at a time: one per core, as far as memory allows."""
    from vgpu import cores_of_this_process, memory_of_this_process

    each = sandbox.MEMORY + sum(sandbox.WRITABLE.values())
    return max(1, min(cores_of_this_process(), memory_of_this_process() // each))


def main(arguments=None):
    """Grade the submissions; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("submitted", type=Path, help="the folder with a folder for each student")
    parser.add_argument("names", nargs="*", metavar="chapter", help="03, or 03_topic; all if none")
    parser.add_argument("--folder", type=Path, default=FOLDER / "exercises", help="the source")
    parser.add_argument("--build", type=Path, default=BUILD, help="grades and feedback")
    options = parser.parse_args(arguments)
    start = time.perf_counter()
    try:
        sources = find_chapters(options.folder, options.names)
        submissions = find_submissions(options.submitted, sources)
        sandbox.check()
    except (ValueError, OSError, sandbox.NoSandbox) as error:
        parser.error(str(error))
    parallel = capacity()
    shutil.rmtree(options.build, ignore_errors=True)
    (options.build / "feedback").mkdir(parents=True)
    folders = options.folder, options.submitted, options.build
    packages = [importlib.util.find_spec(name).submodule_search_locations[0] for name in PACKAGES]
    grade_all(
        [one for one in submissions if one.path != one.source],  # all but strays
        parallel,
        options.build / "feedback",
        hidden=[str(path.resolve()) for path in folders],
        packages=packages,
        cell_seconds=CELL_SECONDS,
        notebook_seconds=NOTEBOOK_SECONDS,
    )
    write_csv(submissions, options.build / "grades.csv")
    print(table(submissions), legend(submissions), sep="\n\n")
    students = len({one.student for one in submissions} - {""})
    seconds = time.perf_counter() - start
    done = f"{len(submissions)} notebooks of {students} students in {seconds:.0f} s"
    print(f"\n{done}, {parallel} at a time")
    print(f"grades: {options.build / 'grades.csv'}, feedback: {options.build / 'feedback'}")
    print(PROTECTION)
    return 0


if __name__ == "__main__":
    sys.exit(main())
