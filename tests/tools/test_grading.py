"""`make assignments` and `make grade`: points, and submissions that would do harm.

All that would do harm runs in one call of the grader, with honest students between, whose points
must not change. It gets small limits. Attacks of a kind share a notebook, one for each exercise, so
that a kernel which survives one is not started again for the next.
"""

import contextlib
import copy
import csv
import ctypes
import faulthandler
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import assignments
import execution
import grade
import nbformat
import pytest
import sandbox
from contents import FOLDER
from exercises import marked, read_answers
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

pytestmark = pytest.mark.waits

TOOLS = Path(grade.__file__).parent
NAME = "03_small"
ATTACKED = "04_attacked"
SECRET = "written by the teacher alone"
POINTS = {"one": 1, "two": 2, "three": 3}
KEY = 0x0D21  # of System V's queues, semaphores and shared memory


def exercises(points_of=POINTS):
    """Return exercises with functions to write; the points are what they return."""
    cells = [
        new_markdown_cell("# Small\n\nFor [the chapter](../03_small.ipynb)."),
        new_code_cell("import os\nbase = 0", metadata={"tags": ["setup"]}),
    ]
    for name, points in points_of.items():
        answer = (
            f"### BEGIN SOLUTION\n    text = {SECRET!r}\n    return {points}\n    ### END SOLUTION"
        )
        check = f"got = {name}()\nprint('expected {points}, got', got)\nbase + got"
        cells += [
            new_markdown_cell(f"## {name} ({points} points)"),
            marked(f"def {name}():\n    {answer}", f"{name}-answer", solution=True),
            marked(check, f"{name}-check", grade=True, locked=True, points=points),
        ]
    for number, cell in enumerate(cells):
        cell.id = f"{len(cells)}-{number}"
    spec = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return new_notebook(cells=cells, metadata={"kernelspec": spec})


def answered(points_of=POINTS, **answers):
    """Return exercises with right answers, or those that are given."""
    notebook = assignments.release(exercises(points_of))
    for cell in notebook.cells:
        name = grade.grade_id(cell).removesuffix("-answer")
        if name in points_of:
            right = f"def {name}():\n    return {points_of[name]}"
            cell.source = answers.get(name, right)
    return notebook


def answer_to(name, cells):
    return next(cell for cell in cells if grade.grade_id(cell) == f"{name}-answer")


def stub_of(name):
    return answer_to(name, assignments.release(exercises()).cells)


def copied(cell, source):
    """As in JupyterLab, the id of the copy is another one."""
    other = copy.deepcopy(cell)
    other.source, other.id = source, f"{cell.id}-copy"
    return other


def leave(cells):
    answer_to("two", cells).source = stub_of("two").source


def write_anew(source):
    """Return what replaces the answer cell by another one."""

    def change(cells):
        cells[cells.index(answer_to("two", cells))] = new_code_cell(source)

    return change


def write_beside(places, source):
    """Return what leaves the answer cell open, and adds another one so many places behind it."""

    def change(cells):
        cells.insert(cells.index(answer_to("two", cells)) + places, new_code_cell(source))
        leave(cells)

    return change


def retype(cells):
    for cell in cells:
        if grade.grade_id(cell) in ("two-answer", "three-check"):
            cell.cell_type = "markdown"
            del cell["outputs"], cell["execution_count"]


def keep_a_stub(cells):
    old, stub = answer_to("two", cells), stub_of("two")
    cells.append(copied(copied(stub, stub.source), stub.source))
    cells.insert(cells.index(old), copied(stub, stub.source))


def answer_twice(cells):
    old = answer_to("two", cells)
    cells.insert(cells.index(old), copied(old, "def two(): return 0"))


def split(cells):
    old = answer_to("two", cells)
    cells.insert(cells.index(old), copied(old, "def help_two():\n    return 2"))
    old.source = "def two():\n    return help_two()"


def move(cells):
    old = answer_to("one", cells)
    cells.remove(old)
    cells.append(old)


def lose_everything(cells):
    for number, cell in enumerate(cells):
        cell.metadata, cell.id = {}, f"x{number}"


def lose_even_checks(cells):
    drop_checks(cells)
    cells[4].source += "\n\nA note of the student's."
    lose_everything(cells)


# What happens to notebooks: (how, the points of two, its remark or those of all)
DAMAGED = {
    "deleted": (lambda cells: cells.remove(answer_to("two", cells)), 0, "cell missing"),
    "emptied": (lambda cells: answer_to("two", cells).update(source=" \n"), 0, "not answered"),
    "left open": (leave, 0, "not answered"),
    "written anew": (write_anew("def two():\n    return 2"), 2, "found by place"),
    "another way": (write_anew("globals()['two'] = lambda: 2"), 2, "found by place"),
    "written above": (write_beside(0, "def two():\n    return 2"), 2, "answered beside"),
    "written below": (write_beside(2, "two = lambda: 2"), 2, "answered beside"),
    "tried below": (write_beside(2, "two()\nx = 2"), 0, "not answered"),
    "retyped": (retype, 2, "cell retyped"),
    "kept a stub": (keep_a_stub, 2, "cell twice"),
    "answered twice": (answer_twice, 2, "cell twice"),
    "split": (split, 2, "cell twice"),
    "moved": (move, 2, ["cell moved", "", ""]),
    "lost metadata": (lambda cells: [c.update(metadata={}) for c in cells], 2, ["no metadata"] * 3),
    "lost everything": (lose_everything, 2, ["found by place"] * 3),
    "lost even checks": (lose_even_checks, 2, ["found by place"] * 3),
    "lost and retyped": (
        lambda cells: (retype(cells), lose_everything(cells)),
        2,
        ["found by place", "found by place, cell retyped", "found by place"],
    ),
}


def write(notebook, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(nbformat.writes(notebook), encoding="utf-8")


def course(folder):
    write(new_notebook(), folder / "source" / f"{NAME}.ipynb")
    write(exercises(), folder / "source" / "exercises" / f"{NAME}.ipynb")
    return folder / "source" / "exercises"


# Stands above each attack; numbers of system calls that Python has no name for.
TOOLS_OF_ATTACKS = f"""
import ctypes, os, platform, re, shutil, signal, socket, struct, sys, threading, time, warnings
KEY, libc, SESSION = {KEY}, ctypes.CDLL(None), -3
numbers = {{
    'x86_64': dict(
        clone=56, add_key=248, request_key=249, keyctl=250, perf_event_open=298, bpf=321,
        userfaultfd=323, io_uring_setup=425, clone3=435,
    ),
    'aarch64': dict(
        clone=220, add_key=217, request_key=218, keyctl=219, perf_event_open=241, bpf=280,
        userfaultfd=282, io_uring_setup=425, clone3=435,
    ),
}}[platform.machine()]
def call(name, *arguments): return libc.syscall(numbers[name], *arguments)
def alone(): return sum(name.isdecimal() for name in os.listdir('/proc')) < 9
class Odd:
    def __init__(self, result): self.result = result
    def __radd__(self, other): return self.result
"""
# Students and their attacks, with points and the word of the remark. "Waits" sorts first: it takes
# longest. Before an attack harms everybody, it makes sure that nobody is there.
ATTACKS = read_answers(r"""
## Waits
# endless loop (0): time
def NAME():
    while True: time.sleep(0.01)
# loop in C (0): time
def NAME(): return sum(iter(int, 1))
# deaf loop (0): time
def NAME():
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True: time.sleep(0.01)
# busy threads (2):
def NAME():
    def work():
        while True: pass
    for _ in range(3): threading.Thread(target=work).start()
    return 2

## ends
# leaves (0): killed
def NAME(): os._exit(0)
# kills itself (0): killed
def NAME(): os.kill(os.getpid(), 9)
# kills its parent (0): killed
def NAME():
    assert alone()
    os.kill(os.getppid(), 9)
    time.sleep(5)
# kills everybody (0): killed
def NAME():
    assert alone()
    os.kill(-1, 9)
    os._exit(1)
# kills one by one (0): killed
def NAME():
    assert alone()
    for pid in range(1, 40_000):
        for number in 9, 15, 19, 2:
            try: os.kill(pid, number) if pid != os.getpid() else None
            except OSError: pass
    time.sleep(5)
# exits (0): stderr
def NAME(): sys.exit()

## takes
# one large block (0): check failed
def NAME(): return len(bytearray(10 * 2**30))
# memory of files (0): check failed
def NAME():
    os.write(os.memfd_create('x'), b'1')
    return 2
# full disk (0): check failed
def NAME():
    with open('/tmp/x', 'wb') as file:
        while True: file.write(bytes(2**20))
# many files (0): memory
def NAME():
    for i in range(10**7): open(f'/tmp/{i}', 'w').close()
# fork bomb (0): processes
def NAME():
    assert alone()
    while True:
        try: os.fork()
        except OSError: pass
# large processes (0): memory
def NAME():
    for _ in range(4):
        if not os.fork():
            x = bytearray(b'1') * 2**28
            time.sleep(9)
    time.sleep(9)
# full sockets (0): memory
def NAME():
    for _ in range(5):
        if not os.fork():
            pairs = [socket.socketpair() for _ in range(400)]
            time.sleep(9)
    time.sleep(9)
# much output (0): output
def NAME():
    while True:
        print('x' * 9999, flush=True)
        time.sleep(0.001)
# a large line (0): output
def NAME():
    print('x' * 2**24)
    return 2

## reaches
# looks for solutions (2):
def NAME():
    found = 0
    for folder, folders, names in os.walk('/'):
        found += sum('03_small' in name for name in names)
        if folder in ('/proc', '/sys', '/usr', sys.prefix, sys.base_prefix):
            folders.clear()
    marker = re.compile(b'written ' + b'(?=by the teacher alone)')  # the secret, not in one piece
    for pid in filter(str.isdecimal, os.listdir('/proc')):
        try: found += bool(marker.search(open('/proc/' + pid + '/environ', 'rb').read()))
        except OSError: pass
    for line in open('/proc/self/maps'):
        start, end = (int(one, 16) for one in line.split()[0].split('-'))
        if line.split()[1][:2] == 'rw' and 'v' not in line.split()[-1][:2]:
            found += bool(marker.search(ctypes.string_at(start, end - start)))
    return 2 - min(found, 2)
# overwrites the package (0): check failed
def NAME():
    import d2lpar
    open(d2lpar.__file__, 'a')
    return 2
# network (0): check failed
def NAME():
    socket.create_connection(('127.0.0.1', PORT), 2)
    return 2
# deletes (2):
def NAME():
    for folder in PLACES:
        assert not os.path.exists(folder)
        shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree('/tmp/work')
    return 2
# a warning (0): stderr
def NAME():
    warnings.warn('careful')
    return 2
# too many points (0): no number
def NAME(): return 100
# not a number (0): no number
def NAME(): return float('nan')

## calls
# its own namespaces (2):
def NAME():
    warnings.simplefilter('ignore')  # from Python 3.12 on, fork warns where there are threads
    pid = os.fork()  # a process with one thread
    if not pid:
        done = 0
        for flag in 0x80, 0x20000, 0x2000000, *(1 << i for i in range(26, 31)):
            for number, *rest in (
                ('clone', (flag & ~0xFF) | 17, 0, 0, 0, 0),  # its lowest bits are a signal
                ('clone3', struct.pack('8Q', flag, 0, 0, 0, 17, 0, 0, 0), 64),
            ):
                child = call(number, *rest) if number == 'clone3' or flag > 0xFF else -1
                if child == 0: os._exit(0)
                done += child > 0
            done += libc.unshare(flag) == 0
        os._exit(done)
    return 2 * (os.waitpid(pid, 0)[1] == 0)
# queues, semaphores, shared memory (2):
def NAME():
    get = libc.msgget(KEY, 0o1666), libc.semget(KEY, 1, 0o1666), libc.shmget(KEY, 4096, 0o1666)
    return 2 * (max(get) < 0)
# finds a key (2):
def NAME():
    found = call('keyctl', 10, SESSION, b'user', b'd2lpar', 0) > 0
    found += call('request_key', b'user', b'd2lpar', 0, 0) > 0
    return 2 - found
# sees a key (2):
def NAME(): return 2 - ('d2lpar' in open('/proc/keys').read())
# leaves for a named keyring (2):
def NAME(): return 2 * (call('keyctl', 1, b'_uid_ses.0') < 0)
# adds a key (2):
def NAME(): return 2 * (call('add_key', b'user', b'x', b'y', 1, SESSION) < 0)
# counters (2):
def NAME():
    of_software = struct.pack('IIQQQQQ80x', 1, 128, 0, 0, 0, 0, 1 << 5)
    return 2 * (call('perf_event_open', of_software, 0, -1, -1, 0) < 0)
# programs for the kernel (2):
def NAME(): return 2 * (call('bpf', 0, struct.pack('IIII112x', 2, 4, 4, 1), 128) < 0)
# rings (2):
def NAME(): return 2 * (call('io_uring_setup', 8, bytes(120)) < 0)
# page faults (2):
def NAME(): return 2 * (call('userfaultfd', 1) < 0)
# the machine below (0): check failed
def NAME():
    socket.socket(40, socket.SOCK_STREAM)
    return 2

## errs
# wrong (0): wrong
def NAME(): return 0
# no Python (0): answer failed
def NAME() return 2
# raises (0): check failed
def NAME(): return 1 / 0
# a text (0): no number
def NAME(): return Odd('a text')
# no result (0): no number
def NAME(): return Odd(None)
# silent (0): silent
print = lambda *_: None
def NAME(): return 0
""")
SLOTS = {"first": 1, **{f"slot{i}": 2 for i in range(max(map(len, ATTACKS.values())))}, "last": 3}


def other_notebook():
    return new_notebook(cells=[new_markdown_cell("# A chapter"), new_code_cell("x = 1")])


FAULTY = {  # what else is handed in: (what makes it, the word of the remark)
    "no JSON": (lambda path: path.write_bytes(b"\\xff\\x00{"), "not a notebook"),
    "a list": (lambda path: path.write_text("[1, 2]"), "not a notebook"),
    "deep": (lambda path: path.write_text("[" * 100_000), "not a notebook"),
    "odd cells": (lambda path: path.write_text('{"cells": [{"source": 3}]}'), "not a notebook"),
    "too large": (lambda path: path.write_text(" " * (grade.FILE_BYTES + 1)), "too large"),
    "link": (lambda path: path.symlink_to("../../source/exercises/03_small.ipynb"), "not a file"),
    "pipe": (lambda path: os.mkfifo(path), "not a file"),
    "folder": (lambda path: path.mkdir(), "not a file"),
    "the chapter": (lambda path: write(other_notebook(), path), "no answers"),
    "nothing": (lambda path: None, "missing"),
}

GRADER = """
import sys
sys.path.insert(0, {tools!r})
import grade, sandbox, execution
grade.CELL_SECONDS, grade.NOTEBOOK_SECONDS, execution.GRACE = 6.0, 120.0, 1.0
sandbox.MEMORY, sandbox.FILES, sandbox.THREADS = 3 * 2**28, 10_000, 100
grade.capacity = lambda: 2
sys.exit(grade.main(sys.argv[1:]))
"""
# Longer than all notebooks that could run out of time, one after the other.
GRADER_SECONDS = 1800


def missing_sandbox():
    try:
        sandbox.check()
    except sandbox.NoSandbox as error:
        return str(error)
    return ""


# In continuous integration they fail instead, with the same reason.
needs_sandbox = pytest.mark.skipif(
    "CI" not in os.environ and bool(missing_sandbox()), reason=missing_sandbox()
)


def in_sandbox(test):
    """Mark a slow test that needs a sandbox."""
    return pytest.mark.slow(needs_sandbox(test))


class Graded:
    """What `make grade` printed and wrote."""

    def __init__(self, folder, source, submitted):
        self.build = folder / "grades" / submitted.name
        command = [sys.executable, "-c", GRADER.format(tools=str(TOOLS)), str(submitted)]
        command += ["--folder", str(source), "--build", str(self.build)]
        environment = {**os.environ, "TMPDIR": str(folder / "tmp"), "SECRET": SECRET}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=GRADER_SECONDS, env=environment
        )
        assert done.returncode == 0, done.stderr
        self.printed = done.stdout
        self.points, self.remarks, self.meanings = {}, {}, {}
        with open(self.build / "grades.csv", encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                if name := row["exercise"]:
                    self.points.setdefault(row["student"], {})[name] = float(row["points"])
                    self.remarks.setdefault(row["student"], {})[name] = row["remark"]
                    self.meanings.setdefault(row["student"], {})[name] = row["meaning"]

    def page(self, student):
        """Return the text of a page of feedback."""
        [path] = (self.build / "feedback" / student).iterdir()
        return path.read_text(encoding="utf-8")


@contextlib.contextmanager
def kernel_objects():
    """Make a queue, semaphores, shared memory and a key, which an attack could find."""
    libc = ctypes.CDLL(None)
    queue, semaphores = libc.msgget(KEY, 0o1666), libc.semget(KEY, 1, 0o1666)
    memory = libc.shmget(KEY, 4096, 0o1666)
    add_key = {"x86_64": 248, "aarch64": 217}[platform.machine()]
    libc.syscall(add_key, b"user", b"d2lpar", SECRET.encode(), len(SECRET), -3)  # of this session
    try:
        yield
    finally:
        libc.msgctl(queue, 0, None), libc.semctl(semaphores, 0, 0), libc.shmctl(memory, 0, None)


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """Grade all that would do harm, and honest students."""
    faulthandler.cancel_dump_traceback_later()  # it may take longer than a test, see conftest.py
    folder = tmp_path_factory.mktemp("course")
    source, submitted = course(folder), folder / "submitted"
    for name in ("home", "tmp"):
        (folder / name).mkdir()
    server = socket.create_server(("127.0.0.1", 0))
    server.setblocking(False)
    places = [folder / name for name in ("attacked", "harm", "grades", "home", "submitted")]
    places += [source, TOOLS, FOLDER]
    names = f"PLACES, PORT = {[str(place) for place in places]}, {server.getsockname()[1]}"
    for student in ("Anna", "zoe", "\u00c5sa \u6797"):
        write(answered(), submitted / student / f"{NAME}.ipynb")
    write(exercises(SLOTS), folder / "attacked" / f"{ATTACKED}.ipynb")
    for student, attacks in ATTACKS.items():
        answers = {
            slot: names + TOOLS_OF_ATTACKS + answer.replace("NAME", slot)
            for slot, (answer, _, _) in zip(list(SLOTS)[1:], attacks.values(), strict=False)
        }
        write(answered(SLOTS, **answers), folder / "harm" / student / f"{ATTACKED}.ipynb")
    write(answered(SLOTS), folder / "harm" / "Anna" / f"{ATTACKED}.ipynb")
    for student, (make, _) in FAULTY.items():
        (submitted / student).mkdir()
        make(submitted / student / f"{NAME}.ipynb")
    write(other_notebook(), submitted / "another name" / "small.ipynb")
    write(answered(), submitted / "downloaded" / f"{NAME} (1).ipynb")
    write(answered(two="def two(): return 0"), submitted / "two copies" / f"{NAME} (1).ipynb")
    write(answered(), submitted / "two copies" / f"{NAME}.ipynb")
    write(assignments.release(exercises()), submitted / "two downloads" / f"{NAME}.ipynb")
    write(answered(), submitted / "two downloads" / f"{NAME} (1).ipynb")
    write(answered(), submitted / "two attempts" / f"{NAME} (1).ipynb")
    (submitted / "two attempts" / f"{NAME}.ipynb").write_text("")
    write(answered(), submitted / "Eve.ipynb")
    (submitted / "packed").mkdir()
    (submitted / "packed" / "answers.zip").write_bytes(b"PK")
    for student, (damage, _, _) in DAMAGED.items():
        notebook = answered()
        damage(notebook.cells)
        write(notebook, submitted / student / f"{NAME}.ipynb")
    write(answered(), submitted / "nbgrader" / "ps1" / f"{NAME}.ipynb")
    before = snapshot(folder)
    with kernel_objects():
        result = Graded(folder, source, submitted)
        result.harm = Graded(folder, folder / "attacked", folder / "harm")
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


@in_sandbox
@pytest.mark.parametrize(
    "student, slot, attack",
    [
        (student, slot, attack)
        for student, attacks in ATTACKS.items()
        for slot, attack in zip(list(SLOTS)[1:], attacks, strict=False)
    ],
)
def test_harm_costs_its_own_points(graded, student, slot, attack):
    _, points, word = ATTACKS[student][attack]
    assert graded.harm.points[student][slot] == points
    assert graded.harm.remarks[student][slot] == word
    if word:
        assert re.search(rf"^{student} .*\b{word}\b", graded.harm.printed, re.M)
        assert grade.FAULTS[word] in graded.harm.page(student)


@in_sandbox
def test_the_package_is_found_wherever_it_lies(tmp_path):
    """Not only where it is installed: otherwise each check fails, and everybody gets nothing."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "__init__.py").write_text("here = 5")
    cells = ["import elsewhere\nelsewhere.here"]
    [(_, _, told)] = execution.execute(cells, [True], 30, 60, [], [str(tmp_path / "elsewhere")])
    assert told["outputs"][0].get("data") == {"text/plain": "5"}


@in_sandbox
def test_solutions_on_virtual_gpus_get_all_points_in_the_sandbox(tmp_path):
    """Virtual GPUs warn, which costs points, where the sandbox keeps them from their patches."""
    name = "07_distributed_data_parallel.ipynb"
    (tmp_path / "submitted" / "Anna").mkdir(parents=True)
    shutil.copy(FOLDER / "exercises" / name, tmp_path / "submitted" / "Anna")
    assert grade.main([str(tmp_path / "submitted"), "07", "--build", str(tmp_path / "grades")]) == 0
    with open(tmp_path / "grades" / "grades.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) > 5
    for row in rows:
        assert (row["points"], row["remark"]) == (row["of"], ""), row


@in_sandbox
@pytest.mark.parametrize("student", [*ATTACKS, "Anna"])
def test_what_stands_beside_harm_keeps_its_points(graded, student):
    num_attacks = len(ATTACKS.get(student, ()))
    others = {slot: SLOTS[slot] for slot in ["first", *list(SLOTS)[1 + num_attacks :]]}
    assert "last" in others
    assert graded.harm.points[student].items() >= others.items()
    assert not any(graded.harm.remarks[student][slot] for slot in others)


@in_sandbox
@pytest.mark.parametrize("student", FAULTY)
def test_what_is_no_submission_is_named(graded, student):
    word = FAULTY[student][1]
    assert graded.points[student] == {"one": 0, "two": 0, "three": 0}
    assert {*graded.remarks[student].values()} == {word}
    assert grade.FAULTS[word] in graded.page(student)


@in_sandbox
@pytest.mark.parametrize("student", ["Anna", "zoe", "\u00c5sa \u6797", "nbgrader"])
def test_honest_students_get_their_points(graded, student):
    assert graded.points[student] == POINTS
    assert not any(graded.remarks[student].values())
    assert "expected 2, got 2" in graded.page(student)


@in_sandbox
def test_nothing_outside_has_changed(graded):
    assert not graded.changed
    assert not list((graded.build.parents[1] / "tmp").iterdir())


@in_sandbox
def test_table(graded):
    assert re.search(r"^03_small +1 +2 +3 +sum\npoints +1 +2 +3 +6$", graded.printed, re.M)
    assert re.search(r"^Anna +1 +2 +3 +6$", graded.printed, re.M)
    assert re.search(r"^no JSON +0 +0 +0 +0 +not a notebook$", graded.printed, re.M)
    assert re.search(r"^another name +small.ipynb: wrong name$", graded.printed, re.M)
    assert re.search(r"^downloaded +1 +2 +3 +6 +renamed$", graded.printed, re.M)
    assert re.search(r"^two copies +1 +2 +3 +6 +several$", graded.printed, re.M)
    assert re.search(r"^two copies +03_small \(1\).ipynb: extra copy$", graded.printed, re.M)
    assert re.search(r"^two downloads +1 +2 +3 +6 +renamed, several$", graded.printed, re.M)
    assert re.search(r"^two attempts +03_small.ipynb: extra copy$", graded.printed, re.M)
    assert re.search(r"^packed +0 +0 +0 +0 +missing$", graded.printed, re.M)
    assert re.search(r"^packed +answers.zip: no notebook$", graded.printed, re.M)
    assert re.search(r"^ +Eve.ipynb: nobody$", graded.printed, re.M)
    assert {*graded.remarks["downloaded"].values()} == {"renamed"}
    assert grade.FAULTS["renamed"] in graded.page("downloaded")
    assert f"as <code>{NAME} (1).ipynb</code>" in graded.page("two downloads")


@in_sandbox
def test_nothing_gets_no_points_without_a_sentence(graded):
    num_zeros = 0
    for run in graded, graded.harm:
        for student, points in run.points.items():
            for exercise in (name for name, got in points.items() if not got):
                num_zeros += 1
                words = run.remarks[student][exercise].split(", ")
                assert all(word in grade.FAULTS for word in words), (student, exercise)
                for word in words:
                    assert grade.FAULTS[word] in run.meanings[student][exercise]
                    assert grade.FAULTS[word] in run.page(student)
                    assert f"\n{word:15} {grade.FAULTS[word]}\n" in run.printed
    assert num_zeros > 50


@in_sandbox
@pytest.mark.parametrize("student", DAMAGED)
def test_damaged_notebooks_are_graded_and_their_teacher_knows(graded, student):
    _, points, words = DAMAGED[student]
    words = words if isinstance(words, list) else ["", words, ""]
    assert graded.points[student] == {**POINTS, "two": points}
    assert list(graded.remarks[student].values()) == words
    for word in {word for several in words for word in several.split(", ") if word}:
        assert re.search(rf"^{student} .*\b{word}\b", graded.printed, re.M)
        assert grade.FAULTS[word] in graded.page(student)


def merged(change):
    """Return what is executed of a submission that `change` was done to."""
    notebook = answered()
    change(notebook.cells)
    cells = json.loads(json.dumps(notebook))["cells"]
    source = assignments.without_solutions(exercises())
    return grade.merge(source, [grade.read_cell(cell) for cell in cells])[0]


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


CHANGES = [drop_checks, change_checks, drop_setup, double, list.reverse]


@pytest.mark.parametrize(
    "change", [*CHANGES, lambda cells: [cell.update(id="x") for cell in cells]]
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
    assert (cells[place + 1].cell_type, cells[place + 1].source) == ("raw", "<b>Help</b>")
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
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit):
        grade.main([str(tmp_path / "submitted"), "--folder", str(source)])
    assert "apt-get install bubblewrap" in capsys.readouterr().err


def page_of(student, submitted, cells, remarks=()):
    """Return the page of feedback on cells that get no points."""
    one = grade.Submission(student, submitted, submitted.with_name(f"{NAME}.ipynb"))
    one.remarks = list(remarks)
    one.scores = {name: (0.0, float(points)) for name, points in POINTS.items()}
    grade.feedback.write(one, cells, grade.FAULTS, submitted.parent)
    return submitted.with_name(f"{NAME}.html").read_text()


def test_a_page_leads_to_each_exercise_and_folds_its_check(tmp_path):
    cells = answered(three="def three(): pass").cells
    *_, heading, answer, check = cells
    heading.source += "\n\nSee [the chapter](../03_small.ipynb) and [d2l](https://d2l.ai)."
    answer.metadata["fault"] = "time"
    check.outputs = [nbformat.v4.new_output("error", ename="Odd", evalue="no", traceback=["line"])]
    page = page_of("Ada", tmp_path / f"{NAME} (1).ipynb", cells, [(0, "renamed"), (3, "time")])
    links = re.findall(r'href="([^"]+)"', page)
    anchors = {f"#{anchor}" for anchor in re.findall(r'id="([^"]+)"', page)}
    assert {link for link in links if link[0] == "#"} == anchors
    assert {link for link in links if link[0] != "#"} == {"https://d2l.ai"}
    assert re.search(r'<a href="#exercise-3">three</a></td>\s*<td>0 of 3</td><td>A cell took', page)
    section = page.partition('id="exercise-3"')[2]
    assert "See the chapter and" in section
    code, _, after = section.partition("pass")
    assert grade.FAULTS["time"] in after.partition("<h3>Check")[0]  # beside its cell
    assert "<summary>Odd: no</summary><pre>line</pre></details>" in after
    folded = after.partition("<summary>The code of the check</summary>")[2]
    assert "expected 3, got" in folded and "expected 3, got" not in section.replace(folded, "")
    assert "as <code>03_small (1).ipynb</code>" in page and grade.FAULTS["renamed"] in page


def test_nothing_of_a_submission_acts_in_its_page(tmp_path):
    evil = "<script>alert(1)</script>"
    cells = answered().cells
    html = {"text/html": evil, "text/plain": evil, "image/png": '"><script>'}
    outputs = [
        nbformat.v4.new_output("display_data", data=data)
        for data in (html, {"text/html": evil, "text/plain": evil})
    ]
    outputs.append(nbformat.v4.new_output("stream", text=evil))
    outputs.append(nbformat.v4.new_output("error", ename=evil, evalue=evil, traceback=[evil]))
    cells[3].outputs = outputs
    cells[3].source = evil
    cells.append(nbformat.v4.new_raw_cell(evil))
    page = page_of(evil.replace("/", ""), tmp_path / "<script>.ipynb", cells)
    assert "<script" not in page
    assert not re.search(r"(src|href)=.https?:", page)


def test_a_sandbox_that_ends_before_it_says_anything():
    """Without the check it reads the end of the file for ever, so the memory is limited."""
    code = f"""
import resource, subprocess, sys
sys.path.insert(0, {str(TOOLS)!r})
import sandbox
resource.setrlimit(resource.RLIMIT_AS, (2**28, 2**28))
sandbox._start = lambda *_: subprocess.Popen(["false"])
try:
    sandbox.Sandbox([], [], [], 0)
except sandbox.NoSandbox as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("bubblewrap ended with code 1"), done.stderr


def test_answers_begun_before_a_name_moved_import_it_from_where_it_is():
    old = {"cell_type": "code", "source": ["from d2lpar.virtual.datasheets import GPUS\n", "GPUS"]}
    assert grade.read_cell(old)["source"] == "from vgpu import GPUS\nGPUS"
