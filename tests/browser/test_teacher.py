"""The teacher's walk: hand out, grade what students made of it, open the feedback.

Part of `make browser`. The exercises are the first three of a chapter, with a small limit of time.
These are the students whose pages differ; points and remarks are in test_grading.py.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import assignments
import grade
import nbformat
import pytest
import sandbox
from nbformat.v4 import new_code_cell, new_markdown_cell

browser = pytest.importorskip("browser", reason="selenium is not installed (pip install selenium)")
FOUND, REASON = browser.find_browser()
if FOUND:
    try:
        sandbox.check()
    except sandbox.NoSandbox as error:
        FOUND, REASON = None, str(error)
pytestmark = pytest.mark.skipif(FOUND is None, reason=REASON)

ROOT = Path(__file__).resolve().parents[2]
NAME = "05_multi_gpu_from_scratch"
GRADER = """
import sys
import grade, execution
grade.CELL_SECONDS, execution.GRACE = 15.0, 1.0
sys.exit(grade.main(sys.argv[1:]))
"""


SOURCE = nbformat.read(ROOT / "notebooks" / "exercises" / f"{NAME}.ipynb", as_version=4)
CHECKS = [number for number, cell in enumerate(SOURCE.cells) if grade.is_grade(cell)]
del SOURCE.cells[CHECKS[2] + 1 :]
CHECKED = [
    grade.grade_id(cell).removesuffix("-check") for cell in SOURCE.cells if grade.is_grade(cell)
]
_, SECOND, THIRD = CHECKED


# What becomes of an exercise notebook with all the right answers.


def answers_to(name, cells):
    """List the answer cells of an exercise: from its heading to its check."""
    check = next(i for i, cell in enumerate(cells) if grade.grade_id(cell) == f"{name}-check")
    before = (i for i, cell in enumerate(cells[:check]) if grade.is_grade(cell))
    return [cell for cell in cells[max(before, default=0) : check] if grade.is_solution(cell)]


def leave_two_open(cells, stubs):
    for name in SECOND, THIRD:
        for cell, stub in zip(answers_to(name, cells), answers_to(name, stubs), strict=True):
            cell.source = stub.source


def lose_everything(cells, stubs):
    for number, cell in enumerate(cells):
        cell.metadata, cell.id = {}, f"new-{number}"


def answer(source):
    """Return what begins the second answer with a line, and leaves the others."""

    def change(cells, stubs):
        answers_to(SECOND, cells)[0].source = source

    return change


def talk(cells, stubs):
    cells.append(new_markdown_cell("Dear teacher, <b>thank you</b> for [this](http://x.invalid)."))
    cells.append(new_code_cell("x" * 300))


CHANGED = {  # what becomes of the notebook
    "right": lambda cells, stubs: None,
    "half": leave_two_open,
    "lost everything": lose_everything,
    "endless loop": answer("while True: pass"),
    "flood": answer("while True: print('x' * 9999)"),
    "no Python": answer("def answer(:"),
    "talks": talk,
}
BROKEN = {  # what makes what else is handed in
    "no JSON": lambda path: path.write_bytes(b"\xff{"),
    "packed": lambda path: zipfile.ZipFile(path.with_suffix(".zip"), "w").close(),
}
STUDENTS = [*CHANGED, *BROKEN]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with what is handed out, and what is handed in."""
    folder = tmp_path_factory.mktemp("teacher")
    source, build = folder / "notebooks" / "exercises", folder / "handed out"
    shutil.copytree(ROOT / "notebooks", source.parent)  # the exercise links to several chapters
    nbformat.write(SOURCE, source / f"{NAME}.ipynb")
    assert assignments.main(["--folder", str(source), "--build", str(build), NAME[:2]]) == 0
    handed_out = nbformat.read(build / "exercises" / f"{NAME}.ipynb", as_version=4)

    for student in STUDENTS:
        path = folder / "submitted" / student / f"{NAME}.ipynb"
        path.parent.mkdir(parents=True)
        if student in BROKEN:
            BROKEN[student](path)
            continue
        notebook = nbformat.from_dict(handed_out)
        for cell, solved in zip(notebook.cells, SOURCE.cells, strict=True):
            if grade.is_solution(cell):
                cell.source = solved.source
        CHANGED[student](notebook.cells, nbformat.from_dict(handed_out).cells)
        path.write_text(nbformat.writes(notebook), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def pages(folder):
    """The folder of the feedback that the grader wrote."""
    command = [sys.executable, "-c", GRADER, folder / "submitted", NAME[:2]]
    command += ["--folder", folder / "notebooks" / "exercises", "--build", folder / "grades"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, cwd=folder, env=environment
    )
    assert done.returncode == 0, done.stderr
    return folder / "grades" / "feedback"


@pytest.fixture(scope="module")
def tab():
    tab = browser.Lab(*FOUND)
    yield tab.driver
    tab.close()


# The pages, in a browser.

LOOK = """
const page = document.documentElement;
const rows = [...document.querySelectorAll("tbody tr")].filter(row => row.closest("#points"));
const anchors = [...document.querySelectorAll("a[href^='#']")].map(a => a.getAttribute("href"));
const out = {
    wide: page.scrollWidth - innerWidth,
    unsaid: rows.filter(row => row.cells[1].innerText.startsWith("0 of")
        && !row.cells[2].innerText && !document.querySelector("body > .said"))
        .map(row => row.innerText),
    rows: rows.length,
    other: [...document.querySelectorAll("a[href]:not([href^='#'])")].map(a => a.href),
    anchors: [...new Set(anchors)],
    high: [...document.querySelectorAll("section[id]")]
        .filter(part => part.getBoundingClientRect().height > innerHeight).map(part => part.id),
    loaded: performance.getEntriesByType("resource").map(entry => entry.name)
        .filter(name => !name.startsWith("data:")),
    scripts: document.scripts.length,
};
return out;
"""
GO = """
location.hash = arguments[0];
const target = document.getElementById(arguments[0].slice(1));
if (!target) return "nowhere";
const top = target.getBoundingClientRect().top;
return top >= -1 && top < innerHeight ? "" : `at ${top}`;
"""


@pytest.mark.parametrize("width", [1280, 1024])
def test_pages_of_feedback(pages, tab, width):
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    tab.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    found = sorted(pages.glob("*/*.html"))
    assert [page.parent.name for page in found] == sorted(STUDENTS)
    for page in found:
        tab.get(page.as_uri())
        seen = tab.execute_script(LOOK)
        assert seen["rows"] == len(CHECKED)
        assert (seen["unsaid"], seen["other"], seen["loaded"]) == ([], [], []), page
        assert (seen["wide"], seen["high"], seen["scripts"]) == (0, [], 0), page
        exercises = {f"#exercise-{number}" for number in range(1, 1 + len(CHECKED))}
        broken = page.parent.name in BROKEN
        assert {*seen["anchors"]} == (set() if broken else {"#points", *exercises})
        for anchor in seen["anchors"]:
            assert tab.execute_script(GO, anchor) == "", (page, anchor)
