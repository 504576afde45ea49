"""Grade a folder of submitted exercises, without a server.

python tools/grade.py SUBMITTED            SUBMITTED/STUDENT/NN_topic.ipynb, or one folder deeper
python tools/grade.py SUBMITTED 03 07      some chapters

Prints a table, and writes grades.csv and a page of feedback for each notebook under build/grades.
Each notebook is executed in a sandbox (sandbox.py); checks are those of the source.
"""

import argparse
import contextlib
import csv
import gc
import importlib.util
import json
import multiprocessing
import os
import shutil
import stat
import sys
import time
import unicodedata
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path

import execution
import feedback
import kernel_server
import nbformat
import sandbox
from assignments import NOTEBOOKS, find_exercises, without_solutions
from nbgrader.utils import determine_grade, is_grade

BUILD = NOTEBOOKS.parent / "build" / "grades"
CELL_SECONDS = 30.0
NOTEBOOK_SECONDS = 300.0
OTHER_SECONDS = 60.0  # to start the sandbox, and to write the page
FILE_BYTES = 20 * 2**20

GB = 2**30
FAULTS = {
    "time": "A cell took longer than its limit, and was interrupted.",
    "memory": f"The code used more than {sandbox.MEMORY // GB} GB of memory, and was ended.",
    "processes": f"The code started more than {sandbox.PROCESSES} processes, and was ended.",
    "killed": "The code ended the kernel.",
    "output": f"The cell showed more than {execution.OUTPUT // 2**20} MB, and was ended.",
    "no answers": "The notebook has no answer cell of these exercises.",
    "not a notebook": "The file cannot be read as a notebook.",
    "too large": f"The file is larger than {FILE_BYTES // 2**20} MB.",
    "not a file": "What was handed in under this name is a link, or no file at all.",
    "missing": "No notebook of this name was handed in.",
    "wrong name": "No exercises have the name of this notebook.",
    "stderr": "The check shows a warning or another text on stderr, for which nbgrader gives 0.",
    "lost": "The notebook could not be graded. Please show it to the maintainers of d2lpar.",
}
NOT_EXECUTED = {
    "output_type": "error",
    "ename": "NotExecuted",
    "evalue": "",
    "traceback": ["This cell was not executed to its end."],
}
NO_SANDBOX = """the code of others runs in a sandbox only, and this system grants none.
It takes Linux 5.14 or newer with user namespaces, or root. In Docker or Podman, and so on macOS and
Windows, start the container with --privileged. On Ubuntu, `sudo make grade` does, too."""
PROTECTION = f"""Each notebook ran in a sandbox: no other process, no file of yours, no network,
{sandbox.TMP // 2**20} MB of disk, {sandbox.MEMORY // GB} GB of memory, {CELL_SECONDS:g} s a cell.
Not protected: its own points. A check runs in the process of the answers, and code can cheat it.
Read the code that got more points than you expect."""


@dataclass
class Submission:
    """A notebook of a student, and what came of it."""

    student: str
    path: Path  # what was handed in, or where it should have been
    source: Path  # the exercises
    fault: str = ""  # a word of `FAULTS` for the notebook as a whole
    scores: dict = field(default_factory=dict)  # name of an exercise: (points, of how many)
    remarks: list = field(default_factory=list)  # (number of the exercise, word of `FAULTS`)
    seconds: float = 0.0

    @property
    def total(self):
        """The sum of its points, and of how many."""
        points, most = zip(*self.scores.values(), strict=True) if self.scores else ((), ())
        return sum(points), sum(most)

    @property
    def told(self):
        """One line about it."""
        points, most = self.total
        words = f"{points:g} of {most:g} points, {self.seconds:.1f} s  {self.remark}".rstrip()
        return f"{shown(self.student)}, {self.source.stem}: {words}"

    @property
    def remark(self):
        """What is to be said about it, in a few words."""
        words = [f"{number}: {word}" for number, word in dict.fromkeys(self.remarks)]
        return ", ".join(([self.fault] if self.fault else []) + words)


def find_submissions(folder, sources):
    """List what was handed in; nothing is read.

    Args:
        folder: the folder with one folder for each student.
        sources: paths of the exercises that are graded.

    Returns:
        A list of `Submission` for each student, one for each of the exercises that anyone handed
        in, and one for each notebook with another name.

    Raises:
        ValueError: if there are no students.
    """
    students = sorted(entry.name for entry in os.scandir(folder) if entry.name[0] != ".")
    students = [name for name in students if (Path(folder) / name).is_dir()]
    if not students:
        raise ValueError(f"no folders of students in {folder}")
    handed_in = {student: _notebooks(Path(folder) / student) for student in students}
    stems = {path.stem for paths in handed_in.values() for path in paths}
    known = {path.stem for path in find_exercises(sources[0].parent)}
    submissions = []
    for student, paths in handed_in.items():
        for source in sources:
            found = [path for path in paths if path.stem == source.stem]
            if found:
                submissions.append(Submission(student, found[0], source))
            elif source.stem in stems or not stems:
                path = Path(folder) / student / source.name
                submissions.append(Submission(student, path, source, "missing"))
        strays = [path for path in paths if path.stem not in known]
        submissions += [Submission(student, path, path, "wrong name") for path in strays]
    return submissions


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
    """Return the cells of a submitted notebook, as far as they can be told.

    Returns:
        A list of dicts of strings: "cell_type", "source", "id", and "grade_id".

    Raises:
        Fault: if it is no notebook.
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
        cells: those of the submission, from `read`.

    Returns:
        A list of cells.

    Raises:
        Fault: if there is no answer.
    """
    by_grade_id = {grade_id(cell): i for i, cell in enumerate(source.cells) if grade_id(cell)}
    by_id = {cell.id: i for i, cell in enumerate(source.cells) if not grade_id(cell)}
    by_text = {cell.source: i for i, cell in enumerate(source.cells) if not grade_id(cell)}
    written = {i: [] for i in range(len(source.cells))}
    added = {i: [] for i in range(-1, len(source.cells))}
    place = -1
    for cell in cells:
        known = (by_grade_id, "grade_id"), (by_id, "id"), (by_text, "source")
        places = [index[cell[key]] for index, key in known if cell[key] in index]
        if places:
            place = places[0]
        if cell["cell_type"] == "code":
            (written if places else added)[place].append(nbformat.v4.new_code_cell(cell["source"]))
        elif not places:  # what a student tells the teacher
            text = "\n".join("    " + line for line in cell["source"].splitlines())
            added[place].append(nbformat.v4.new_markdown_cell(text))
    if not any(written[i] for i in by_grade_id.values() if not is_grade(source.cells[i])):
        raise Fault("no answers")
    merged = list(added[-1])
    for i, cell in enumerate(source.cells):
        mine = [] if cell.cell_type != "code" or is_grade(cell) else written[i]
        for one in mine:
            one.metadata = cell.metadata
        merged += (mine or [cell]) + added[i]
    for number, cell in enumerate(merged):
        cell.id = f"cell-{number}"
    return merged


def grade_id(cell):
    """Return the name that nbgrader has for a cell, or an empty text."""
    return cell.metadata.get("nbgrader", {}).get("grade_id", "")


def execute(submission, box, cells, cell_seconds, notebook_seconds):
    """Execute cells in a sandbox.

    Args:
        submission: gets remarks.
        box: a `Sandbox` that runs `execution.serve`.
        cells: those of a whole notebook; code cells get their outputs.
        cell_seconds: how long a cell may take.
        notebook_seconds: how long all may take.
    """
    code = [cell for cell in cells if cell.cell_type == "code"]
    for cell in code:
        cell.outputs = [nbformat.from_dict(NOT_EXECUTED)]
    numbers, number = [], 1  # of the exercise to which a cell belongs
    for cell in code:
        numbers.append(number)
        number += is_grade(cell)
    asked = [{"source": cell.source, "given": not grade_id(cell)} for cell in code]
    box.channel.write({"cells": asked, "cell_seconds": cell_seconds})
    end = time.monotonic() + notebook_seconds
    try:
        while True:
            box.channel.end.settimeout(max(0.001, end - time.monotonic()))
            told = box.channel.read()
            if told == "done":
                return
            if told is None:
                submission.fault = "lost"
                return
            if told["fault"]:
                submission.remarks.append((numbers[told["cell"]], told["fault"]))
            if "outputs" in told:
                code[told["cell"]].outputs = nbformat.from_dict(told["outputs"])
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


def grade(submission, hidden, package, folder, **limits):
    """Grade a submission, and write its page of feedback.

    Args:
        submission: a `Submission`, which gets its points.
        hidden: folders that its code must not see.
        package: the folder of the package that it imports.
        folder: where the page goes.
        limits: `cell_seconds` and `notebook_seconds`.
    """
    start = time.perf_counter()
    box = None
    if not submission.fault:  # before this process knows any solution
        box = sandbox.Sandbox(execution.serve, hidden, package)
    source = without_solutions(nbformat.read(submission.source, as_version=4))
    cells = source.cells
    for cell in cells:
        if cell.cell_type == "code":
            cell.outputs = [nbformat.from_dict(NOT_EXECUTED)]
    try:
        if box is not None:
            cells = merge(source, read(submission.path))
            execute(submission, box, cells, **limits)
    except Fault as fault:
        submission.fault = str(fault)
    finally:
        if box is not None:
            box.end()
    score(submission, cells)
    submission.seconds = time.perf_counter() - start
    try:
        feedback.write(submission, cells, FAULTS, folder / submission.student)
    except Exception as error:  # a page is not worth the points
        print(f"no page for {submission.told}: {error!r}", file=sys.stderr)


def grade_all(submissions, parallel, **how):
    """Grade submissions, each in a process of its own.

    Args:
        submissions: a list of `Submission`, which get their points.
        parallel: how many at a time.
        how: the other arguments of `grade`.
    """
    fork = multiprocessing.get_context("fork")
    waiting, running, num_done = list(range(len(submissions))), {}, 0
    try:
        while waiting or running:
            while waiting and len(running) < parallel:
                place = waiting.pop(0)
                ours, its = fork.Pipe(duplex=False)
                process = fork.Process(
                    target=_grade_in_process, args=(submissions[place], its, how)
                )
                process.start()
                its.close()
                end = time.monotonic() + how["notebook_seconds"] + OTHER_SECONDS
                running[ours] = place, process, end
            ready = wait(list(running), timeout=1)
            for connection, (place, process, end) in list(running.items()):
                if connection in ready:
                    with contextlib.suppress(EOFError):
                        submissions[place] = connection.recv()
                elif time.monotonic() < end:
                    continue
                if not submissions[place].scores:
                    submissions[place].fault = "lost"
                process.kill()
                process.join()
                del running[connection]
                num_done += 1
                told = f"{num_done} of {len(submissions)}  {submissions[place].told}"
                print(told, file=sys.stderr, flush=True)
    finally:
        for _, process, _ in running.values():
            process.kill()


def grade_fairly(submissions, parallel, **how):
    """Grade submissions, and those that ran out of time once more, each alone on the machine.

    Others that take all cores would cost them points.
    """
    places = [i for i, one in enumerate(submissions) if one.fault != "wrong name"]
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


def _grade_in_process(submission, connection, how):
    grade(submission, **how)
    connection.send(submission)


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
            student, remarks = shown(one.student), dict(one.remarks)
            for number, (name, (points, most)) in enumerate(one.scores.items(), start=1):
                remark = one.fault or remarks.get(number, "")
                writer.writerow(
                    [student, one.source.stem, name, f"{points:g}", f"{most:g}", remark]
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
        sandbox.Sandbox(lambda channel: None).end()
    except (ValueError, OSError) as error:
        parser.error(str(error))
    except sandbox.NoSandbox as error:
        parser.error(f"{NO_SANDBOX} ({error})")
    os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"  # read once, here
    kernel_server.import_ahead()
    feedback.warm_up()
    gc.freeze()
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


CLEAN = {"PATH", "HOME", "TMPDIR", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "OMP_NUM_THREADS"}

if __name__ == "__main__":
    if set(os.environ) - CLEAN - {"LC_CTYPE"}:  # no secret of the environment in any memory
        clean = {name: os.environ[name] for name in CLEAN & set(os.environ)}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], clean)
    sys.exit(main())
