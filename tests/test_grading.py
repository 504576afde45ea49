"""`make assignments` and `make grade`: points, and submissions that would do harm.

All that would do harm runs in one call of the grader, with honest students between, whose points
must not change. It gets small limits.
"""

import csv
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import assignments
import grade
import nbformat
import pytest
import sandbox
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

TOOLS = Path(grade.__file__).parent
NAME = "03_small"
SECRET = "written by the teacher alone"
POINTS = {"one": 1, "two": 2, "three": 3}


def marked(source, name, **metadata):
    """Return a cell for nbgrader."""
    kind = {"grade": False, "locked": False, "solution": False, "task": False}
    kind = {**kind, "schema_version": 3, "grade_id": name, **metadata}
    return new_code_cell(source, metadata={"nbgrader": kind})


def exercises():
    """Return exercises with three functions to write; the points are what they return."""
    cells = [
        new_markdown_cell("# Small\n\nFor [the chapter](../03_small.ipynb)."),
        new_code_cell("import os\nbase = 0", metadata={"tags": ["setup"]}),
    ]
    for name, points in POINTS.items():
        answer = (
            f"### BEGIN SOLUTION\n    text = {SECRET!r}\n    return {points}\n    ### END SOLUTION"
        )
        check = f"got = {name}()\nprint('expected {points}, got', got)\nbase + got"
        cells += [
            new_markdown_cell(f"## {name} ({points} points)"),
            marked(f"def {name}():\n    {answer}", f"{name}-answer", solution=True),
            marked(check, f"{name}-check", grade=True, locked=True, points=points),
        ]
    spec = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return new_notebook(cells=cells, metadata={"kernelspec": spec})


def answered(**answers):
    """Return exercises with right answers, or those that are given."""
    notebook = assignments.release(exercises())
    for cell in notebook.cells:
        name = grade.grade_id(cell).removesuffix("-answer")
        if name in POINTS:
            right = f"def {name}():\n    return {POINTS[name]}"
            cell.source = answers.get(name, right)
    return notebook


def body(*lines):
    """Return an answer to the second exercise."""
    return "import os, signal, sys, threading, time\n\ndef two():\n" + "\n".join(
        f"    {line}" for text in lines for line in text.split("\n")
    )


def write(notebook, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(nbformat.writes(notebook), encoding="utf-8")


def course(folder):
    """Write the exercises and their chapter."""
    write(new_notebook(), folder / "source" / f"{NAME}.ipynb")
    write(exercises(), folder / "source" / "exercises" / f"{NAME}.ipynb")
    return folder / "source" / "exercises"


# What code of the second exercise does: (answer, its points, the word of the remark).
# Before it does what would harm everybody, it makes sure that there is nobody else.
ALONE = "assert sum(name.isdecimal() for name in os.listdir('/proc')) < 9"
LOOK = f"""
found = 0
for folder, folders, names in os.walk('/'):
    found += sum({NAME!r} in name for name in names)
    if folder in ('/proc', '/sys', '/usr', sys.prefix, sys.base_prefix):
        folders.clear()
import ctypes, re
marker = re.compile(b{SECRET[:9]!r} + b'(?=' + b{SECRET[9:]!r} + b')')
for line in open('/proc/self/maps'):
    start, end = (int(one, 16) for one in line.split()[0].split('-'))
    if line.split()[1][:2] == 'rw' and 'v' not in line.split()[-1][:2]:
        found += bool(marker.search(ctypes.string_at(start, end - start)))
return 2 - min(found, 2)
"""
ATTACKS = {
    "endless loop": (body("while True: pass"), 0, "time"),
    "deaf loop": (
        body(
            "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))",
            "signal.signal(signal.SIGINT, signal.SIG_IGN)",
            "while True: pass",
        ),
        0,
        "time",
    ),
    "loop in C": (body("return sum(iter(int, 1))"), 0, "time"),
    "busy threads": (
        body(
            "def work():\n    while True: pass",
            "for _ in range(3): threading.Thread(target=work).start()",
            "return 2",
        ),
        2,
        "",
    ),
    "leaves": (body("os._exit(0)"), 0, "killed"),
    "kills itself": (body("os.kill(os.getpid(), 9)"), 0, "killed"),
    "kills its parent": (body(ALONE, "os.kill(os.getppid(), 9)", "time.sleep(5)"), 0, "killed"),
    "kills everybody": (body(ALONE, "os.kill(-1, 9)", "os._exit(1)"), 0, "killed"),
    "kills one by one": (
        body(
            ALONE,
            "for pid in range(1, 40_000):",
            "    for number in 9, 15, 19, 2:",
            "        try: os.kill(pid, number) if pid != os.getpid() else None",
            "        except OSError: pass",
            "time.sleep(5)",
        ),
        0,
        "killed",
    ),
    "exits": (body("sys.exit()"), 0, "stderr"),
    "fork bomb": (
        body(ALONE, "while True:\n    try: os.fork()\n    except OSError: pass"),
        0,
        "processes",
    ),
    "one large block": (body("return len(bytearray(10 * 2**30))"), 0, ""),
    "large processes": (
        body(
            "for _ in range(4):\n    if not os.fork():\n        x = bytearray(b'1') * 2**29",
            "        time.sleep(9)",
            "time.sleep(9)",
        ),
        0,
        "memory",
    ),
    "memory of files": (body("os.write(os.memfd_create('x'), b'1')", "return 2"), 0, ""),
    "much output": (
        body("while True:\n    print('x' * 9999, flush=True)\n    time.sleep(0.001)"),
        0,
        "output",
    ),
    "a large line": (body("print('x' * 2**24)", "return 2"), 0, "output"),
    "full disk": (
        body("with open('/tmp/x', 'wb') as file:\n    while True: file.write(bytes(2**20))"),
        0,
        "",
    ),
    "deletes": (
        body(
            "import shutil",
            "for folder in PLACES:",
            "    assert not os.path.exists(folder)",
            "    shutil.rmtree(folder, ignore_errors=True)",
            "shutil.rmtree('/tmp/work')",
            "return 2",
        ),
        2,
        "",
    ),
    "overwrites the package": (
        body("import d2lpar", "open(d2lpar.__file__, 'a')", "return 2"),
        0,
        "",
    ),
    "network": (
        body("import socket", "socket.create_connection(('127.0.0.1', PORT), 2)", "return 2"),
        0,
        "",
    ),
    "looks for solutions": (body(LOOK), 2, ""),
    "its own namespaces": (
        body(
            "import ctypes",
            "pid = os.fork()",  # a process with one thread
            "if not pid: os._exit(ctypes.CDLL(None).unshare(0x10000000) != 0)",
            "return 2 * (os.waitpid(pid, 0)[1] == 0)",
        ),
        0,
        "",
    ),
    "a warning": (body("import warnings; warnings.warn('careful')", "return 2"), 0, "stderr"),
    "too many points": (body("return 100"), 0, ""),
    "not a number": (body("return float('nan')"), 0, ""),
}

FAULTY = {  # what else is handed in: (what makes it, the word of the remark)
    "no JSON": (lambda path: path.write_bytes(b"\\xff\\x00{"), "not a notebook"),
    "a list": (lambda path: path.write_text("[1, 2]"), "not a notebook"),
    "deep": (lambda path: path.write_text("[" * 100_000), "not a notebook"),
    "odd cells": (lambda path: path.write_text('{"cells": [{"source": 3}]}'), "not a notebook"),
    "too large": (lambda path: path.write_text(" " * (grade.FILE_BYTES + 1)), "too large"),
    "link": (lambda path: path.symlink_to("../../source/exercises/03_small.ipynb"), "not a file"),
    "pipe": (lambda path: os.mkfifo(path), "not a file"),
    "folder": (lambda path: path.mkdir(), "not a file"),
    "the chapter": (lambda path: write(new_notebook(), path), "no answers"),
    "nothing": (lambda path: None, "missing"),
}

GRADER = """
import sys
sys.path.insert(0, {tools!r})
import grade, kernel_server, sandbox, execution
grade.CELL_SECONDS, execution.GRACE = 2.0, 1.0
sandbox.MEMORY = 3 * 2**29
grade.capacity = lambda: 2
kernel_server.IMPORTS = ("ipykernel.kernelapp",)
sys.exit(grade.main(sys.argv[1:]))
"""


def refused():
    """Say why this system has no sandbox, if so."""
    try:
        sandbox.Sandbox(lambda channel: None).end()
    except sandbox.NoSandbox as error:
        return str(error)
    return ""


needs_sandbox = pytest.mark.skipif(bool(refused()), reason=f"no sandbox: {refused()}")


class Graded:
    """What `make grade` printed and wrote."""

    def __init__(self, folder, source, submitted):
        self.build = folder / "grades"
        command = [sys.executable, "-c", GRADER.format(tools=str(TOOLS)), str(submitted)]
        command += ["--folder", str(source), "--build", str(self.build)]
        environment = {**os.environ, "TMPDIR": str(folder / "tmp")}
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
        assert done.returncode == 0, done.stderr
        self.printed, self.told = done.stdout, done.stderr
        self.points, self.remarks = {}, {}
        with open(self.build / "grades.csv", encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                self.points.setdefault(row["student"], []).append(float(row["points"]))
                if row["remark"]:
                    self.remarks.setdefault(row["student"], []).append(row["remark"])

    def page(self, student):
        """Return the text of a page of feedback."""
        return (self.build / "feedback" / student / f"{NAME}.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """Grade all that would do harm, and honest students."""
    folder = tmp_path_factory.mktemp("course")
    source, submitted = course(folder), folder / "submitted"
    home = folder / "home"
    home.mkdir()
    (folder / "tmp").mkdir()
    server = socket.create_server(("127.0.0.1", 0))
    server.setblocking(False)
    places = [source, submitted, folder / "grades", home, TOOLS, assignments.NOTEBOOKS]
    names = f"PLACES = {[str(place) for place in places]}\nPORT = {server.getsockname()[1]}\n"
    for student in ("Anna", "Mia", "zoe", "\u00c5sa \u6797"):
        write(answered(), submitted / student / f"{NAME}.ipynb")
    for student, (answer, _, _) in ATTACKS.items():
        write(answered(two=names + answer), submitted / student / f"{NAME}.ipynb")
    for student, (make, _) in FAULTY.items():
        (submitted / student).mkdir()
        make(submitted / student / f"{NAME}.ipynb")
    write(answered(), submitted / "another name" / "small.ipynb")
    write(answered(), submitted / "nbgrader" / "ps1" / f"{NAME}.ipynb")
    before = snapshot(folder)
    result = Graded(folder, source, submitted)
    result.changed = {path for path, seen in snapshot(folder).items() if before.get(path) != seen}
    with server, pytest.raises(BlockingIOError):
        server.accept()
    return result


def snapshot(folder):
    """Return all that the folder holds, apart from grades."""
    return {
        path: path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
        if "grades" not in path.parts
    }


@needs_sandbox
@pytest.mark.parametrize("student", ATTACKS)
def test_harm_costs_its_own_points(graded, student):
    _, points, word = ATTACKS[student]
    assert graded.points[student] == [1, points, 3]
    assert graded.remarks.get(student, []) == ([word] if word else [])
    if word:
        assert f"2: {word}" in graded.printed
        assert grade.FAULTS[word] in graded.page(student)


@needs_sandbox
@pytest.mark.parametrize("student", FAULTY)
def test_what_is_no_submission_is_named(graded, student):
    word = FAULTY[student][1]
    assert graded.points[student] == [0, 0, 0]
    assert graded.remarks[student] == [word] * 3
    assert grade.FAULTS[word] in graded.page(student)


@needs_sandbox
@pytest.mark.parametrize("student", ["Anna", "Mia", "zoe", "\u00c5sa \u6797", "nbgrader"])
def test_honest_students_get_their_points(graded, student):
    assert graded.points[student] == [1, 2, 3]
    assert student not in graded.remarks
    assert "expected 2, got 2" in graded.page(student)


@needs_sandbox
def test_nothing_outside_has_changed(graded):
    assert not graded.changed
    assert not list((graded.build.parent / "tmp").iterdir())


@needs_sandbox
def test_table(graded):
    assert re.search(r"^03_small +1 +2 +3 +sum\npoints +1 +2 +3 +6$", graded.printed, re.M)
    assert re.search(r"^Anna +1 +2 +3 +6$", graded.printed, re.M)
    assert re.search(r"^no JSON +0 +0 +0 +0 +not a notebook$", graded.printed, re.M)
    assert re.search(r"^another name +small.ipynb: wrong name$", graded.printed, re.M)


def merged(change):
    """Return what is executed of a submission that `change` was done to."""
    notebook = answered()
    change(notebook.cells)
    cells = json.loads(json.dumps(notebook))["cells"]
    source = assignments.without_solutions(exercises())
    return grade.merge(source, [grade._read_cell(cell) for cell in cells])


def drop_checks(cells):
    cells[:] = [cell for cell in cells if not grade.grade_id(cell).endswith("-check")]


def change_checks(cells):
    for cell in cells:
        if grade.grade_id(cell).endswith("-check"):
            cell.source = "100"
            cell.metadata.nbgrader.update(points=100, locked=False, solution=True, grade=False)


def drop_setup(cells):
    del cells[:2]


def double(cells):
    cells.insert(0, cells[3])
    cells += cells[2:5]


def turn_round(cells):
    cells.reverse()


def lose_ids(cells):
    for cell in cells:
        cell.id = "x"


@pytest.mark.parametrize(
    "change", [drop_checks, change_checks, drop_setup, double, turn_round, lose_ids]
)
def test_checks_and_setup_are_those_of_the_source(change):
    cells = merged(change)
    names = [grade.grade_id(cell) for cell in cells if cell.metadata.get("nbgrader")]
    whole = [f"{name}-{kind}" for name in POINTS for kind in ("answer", "check")]
    assert list(dict.fromkeys(names)) == whole
    assert [cell.source for cell in cells if grade.is_grade(cell)] == [
        cell.source for cell in exercises().cells if grade.is_grade(cell)
    ]
    places = {cell.source: place for place, cell in enumerate(cells)}
    assert places["import os\nbase = 0"] < places["def one():\n    return 1"]
    assert len({cell.id for cell in cells}) == len(cells)


def test_what_a_student_adds_stays_where_it_was():
    helper, remark = new_code_cell("def helper(): pass"), new_markdown_cell("<b>Help</b>")

    def add(cells):
        cells[3:3] = [helper, remark]

    cells = merged(add)
    place = [cell.source for cell in cells].index("def helper(): pass")
    assert cells[place - 1].source.startswith("## one")
    assert cells[place + 1].source == "    <b>Help</b>"
    assert grade.grade_id(cells[place + 2]) == "one-answer"


def test_release_has_no_solution():
    text = nbformat.writes(assignments.release(exercises()))
    assert SECRET not in text and "SOLUTION" not in text
    assert text.count("raise NotImplementedError()") == 3


def test_a_solution_that_is_left_is_named():
    notebook = exercises()
    notebook.cells[0].source += f"\n\ntext = {SECRET!r}\n    return 1"
    with pytest.raises(ValueError, match="one-answer: the solution stands in another cell"):
        assignments.release(notebook)


def test_assignments_and_their_links(tmp_path):
    source = course(tmp_path)
    build = tmp_path / "build"
    command = ["--folder", str(source), "--build", str(build)]
    assert assignments.main(command) == 0
    released = nbformat.read(build / "exercises" / f"{NAME}.ipynb", as_version=4)
    nbformat.validate(released)
    assert (build / f"{NAME}.ipynb").exists()
    (source.parent / f"{NAME}.ipynb").unlink()
    assert assignments.main(command) == 1  # a link that leads nowhere


def test_without_a_sandbox_nothing_runs(tmp_path, monkeypatch, capsys):
    write(answered(), tmp_path / "submitted" / "Anna" / f"{NAME}.ipynb")
    source = course(tmp_path)
    monkeypatch.setattr(sandbox.sys, "platform", "darwin")
    with pytest.raises(SystemExit):
        grade.main([str(tmp_path / "submitted"), "--folder", str(source)])
    assert "sandbox" in capsys.readouterr().err


def test_nothing_of_a_submission_acts_in_its_page(tmp_path):
    evil = "<script>alert(1)</script>"
    cells = answered().cells
    html = {"text/html": evil, "text/plain": evil, "image/png": '"><script>'}
    outputs = [
        nbformat.v4.new_output("display_data", data=data)
        for data in (html, {"text/html": evil, "text/plain": evil})
    ]
    cells[3].outputs = [*outputs, nbformat.v4.new_output("stream", text=evil)]
    cells[3].source = evil
    one = grade.Submission(evil.replace("/", ""), tmp_path, tmp_path / f"{NAME}.ipynb")
    grade.feedback.write(one, cells, grade.FAULTS, tmp_path)
    page = (tmp_path / f"{NAME}.html").read_text()
    assert "<script" not in page
    assert not re.search(r"(src|href)=.https?:", page)
