"""The working copy of `make lab`: nothing of a reader's is lost, and its page says what is next."""

import errno
import json
import os
import posixpath
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import assignments
import lab
import moved
import nbformat
import pytest
from exercises import marked
from jupyter_client import BlockingKernelClient
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

ROOT = Path(__file__).resolve().parents[2]
CHAPTER, EXERCISES = "01_a.ipynb", "exercises/01_a.ipynb"


def chapter(edition="first"):
    """Make the bytes of a chapter as it is handed out."""
    cells = [
        new_markdown_cell("# A chapter\n\n## Why?", id="one"),
        new_code_cell("import torch", id="two"),
        new_markdown_cell("### How `it` works", id="three"),
        new_code_cell(f"print({edition!r})", id="four"),
        new_markdown_cell("## Exercises", id="five"),
        new_code_cell("deeper", id="six"),
    ]
    return nbformat.writes(new_notebook(cells=cells)).encode()


def exercises():
    """Make the bytes of two exercises, of 2 and 3 points."""
    cells = [
        marked("marks.total()", f"check{points}", grade=True, locked=True, points=points)
        for points in (2, 3)
    ]
    return nbformat.writes(new_notebook(cells=cells)).encode()


def files(edition="first"):
    return {CHAPTER: chapter(edition), EXERCISES: exercises(), "notation.md": edition.encode()}


def change(path, place, **values):
    """Change a cell as a reader does in JupyterLab, which rewrites the metadata."""
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[place].update(values)
    notebook.metadata["language_info"] = {"name": "python", "version": "3.11.9"}
    nbformat.write(notebook, path)


def ran(text=""):
    """Return what changes in a cell that has run, and printed a text."""
    outputs = [new_output("stream", text=text)] if text else []
    return {"execution_count": 1, "outputs": outputs}


@pytest.fixture
def copy(tmp_path):
    folder = tmp_path / "work"
    written, beside = lab.update(folder, files())
    assert sorted(written) == sorted(files()) and beside == {}
    return folder


# What stays, and what is replaced.


def test_a_second_start_writes_nothing(copy):
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*") if path.suffix != ".json"}
    assert lab.update(copy, files()) == ([], {})
    after = {path: path.stat().st_mtime_ns for path in copy.rglob("*") if path.suffix != ".json"}
    assert before == after


def test_what_jupyterlab_alone_has_changed_is_replaced_by_a_new_edition(copy):
    change(copy / CHAPTER, 1)
    written, beside = lab.update(copy, files("second"))
    assert sorted(written) == [CHAPTER, "notation.md"] and beside == {}
    assert (copy / CHAPTER).read_bytes() == chapter("second")


@pytest.mark.parametrize("values", [{"source": "mine"}, ran("42"), {"cell_type": "raw"}])
def test_what_a_reader_has_changed_or_run_stays_and_the_new_edition_lies_beside(copy, values):
    change(copy / CHAPTER, 3, **values)
    mine = (copy / CHAPTER).read_bytes()
    assert lab.update(copy, files("second"))[1] == {CHAPTER: "01_a.new.ipynb"}
    assert (copy / CHAPTER).read_bytes() == mine
    assert (copy / "01_a.new.ipynb").read_bytes() == chapter("second")
    assert "[01_a.new.ipynb](01_a.new.ipynb)" in lab.start_page(copy, ROOT)
    assert lab.update(copy, files("second")) == ([], {})


# Imports of chapters and exercises, as they were handed out before the engine had its own package.
OLD_IMPORTS = """\
from d2lpar.data.workers import worker_context
from d2lpar.graphs.compiling import compile_backend, kernel_text
from d2lpar.graphs.operator_graph import OperatorGraph
from d2lpar.models import resnet_body
from d2lpar.parallel.collectives import CollectiveCounter, allgather
from d2lpar.parallel.costs import allreduce_seconds
from d2lpar.parallel.costs import two_level_seconds
from d2lpar.parallel.gpt import GPT, Split, Sum
from d2lpar.parallel.layouts import Layout, layouts, sweep
from d2lpar.parallel.pipelines import (
    Task,
    gpipe,  # a comment
    pipeline_step,
)
from d2lpar.parallel.sharded_layers import copied, split_cross_entropy, summed
from d2lpar.parallel.side_streams import receive, send
from d2lpar.plotting.charts import plot_curves, plot_layouts, plot_runs
from d2lpar.processes.collective_bytes import CollectiveBytes
from d2lpar.processes.ddp import batch_of_rank, device_of_rank
from d2lpar.servers.ad_clicks import AdClicks
from d2lpar.servers.ray_setup import start_ray
from d2lpar.servers.store import parameter_servers
from d2lpar.timing import seconds_in_turn
from d2lpar.virtual import PRESETS, Link, clock, equal_ranks, host_takes
from d2lpar.virtual.datasheets import GPUS
from d2lpar.virtual.hardware import MACHINES, Machine
from d2lpar.virtual.host import EAGER
"""


def test_imports_of_what_a_reader_has_begun_follow(copy):
    first, last = "answer = 1  # from d2lpar.virtual\n", "os.environ['{}_DEVICES'] = 'vgpu'"
    change(copy / CHAPTER, 3, source=first + OLD_IMPORTS + last.format("D2LPAR"), **ran("42"))
    change(copy / CHAPTER, 0, source=OLD_IMPORTS)  # a text
    os.utime(copy / CHAPTER, ns=(10**18, 10**18))
    lab.update(copy, files("second"))
    assert (copy / CHAPTER).stat().st_mtime_ns == 10**18  # he goes on where he was
    text, _, _, cell, *_ = nbformat.read(copy / CHAPTER, 4).cells
    assert text.source == OLD_IMPORTS
    assert cell.source.startswith(first) and cell.source.endswith(last.format("VGPU"))
    assert cell.outputs[0].text == "42"
    exec(cell.source.replace("os.environ", "{}"), {})


@pytest.mark.parametrize("text, new", [
    ("import d2lpar.virtual as v", "import vgpu as v"),
    ("from d2lpar import Span", "from vgpu import Span"),
    ("from  d2lpar.virtual \\\n    import Link  # me", "from vgpu \\\n    import Link  # me"),
    (
        "from d2lpar.virtual import (\n    Link,  # (bytes/s)\n    Machine,\n)",
        "from vgpu import (\n    Link,  # (bytes/s)\n    Machine,\n)",
    ),
    (
        "%time x = 1\nif True: from d2lpar.models import resnet_body as a, lenet",
        "%time x = 1\nif True: from d2lpar.chapters.fine_tuning import resnet_body as a; "
        "from d2lpar.models import lenet",
    ),
    (
        "def f():\n    from d2lpar.virtual import Link\n\nfrom d2lpar.virtual import Span",
        "def f():\n    from vgpu import Link\n\nfrom vgpu import Span",
    ),
    ("ä = 1; from d2lpar.virtual import Link; b = 2", "ä = 1; from vgpu import Link; b = 2"),
    ("x = split_layers(net, [4], gpus)", "x = split_into_stages(net, [4], gpus)"),
    # What is no import that moved stays.
    ('print("from d2lpar.virtual import Link")', None),
    ("# from d2lpar.virtual import a tensor (see p. 3)", None),
    ("from d2lpar import Timer, compare", None),
    ("from d2lpar.virtual import Link,", None),  # is no Python
    ("import torch\n%timeit from d2lpar.virtual import Link", None),
])  # fmt: skip
def test_an_import_that_moved_keeps_its_form(text, new):
    assert moved.code(text) == (new or text)


@pytest.mark.parametrize("folder", ["", "exercises/"])
def test_what_a_reader_has_begun_under_an_old_number_goes_on_under_the_new_one(tmp_path, folder):
    old, new = f"{folder}11_scaling.ipynb", f"{folder}12_scaling.ipynb"
    lab.update(tmp_path, {old: chapter()})
    change(tmp_path / old, 1, source="import torch  # mine")
    begun = (tmp_path / old).read_bytes()
    assert lab.update(tmp_path, {new: chapter()}) == ([], {})
    assert (tmp_path / new).read_bytes() == begun and not (tmp_path / old).exists()
    beside = new.replace(".ipynb", ".new.ipynb")
    assert lab.update(tmp_path, {new: chapter("second")}) == ([beside], {new: beside})


def test_a_new_edition_that_a_reader_deletes_stays_away(copy):
    change(copy / CHAPTER, 3, source="mine")
    lab.update(copy, files("second"))
    (copy / "01_a.new.ipynb").unlink()
    assert lab.update(copy, files("second")) == ([], {})
    assert lab.update(copy, files("third"))[1] == {CHAPTER: "01_a.new.ipynb"}


def test_whoever_deletes_his_own_gets_the_new_edition(copy):
    change(copy / CHAPTER, 3, source="mine")
    lab.update(copy, files("second"))
    (copy / CHAPTER).unlink()
    assert lab.update(copy, files("second")) == ([CHAPTER], {})
    assert (copy / CHAPTER).read_bytes() == chapter("second")
    assert not (copy / "01_a.new.ipynb").exists()


def test_whoever_renames_the_new_edition_over_his_own_gets_the_next_one(copy):
    change(copy / CHAPTER, 3, source="mine")
    lab.update(copy, files("second"))
    (copy / "01_a.new.ipynb").replace(copy / CHAPTER)
    assert lab.update(copy, files("second")) == ([], {})
    assert lab.update(copy, files("third"))[1] == {}
    assert (copy / CHAPTER).read_bytes() == chapter("third")


def test_a_reader_may_work_in_the_new_edition_too(copy):
    change(copy / CHAPTER, 3, source="mine")
    lab.update(copy, files("second"))
    change(copy / "01_a.new.ipynb", 3, source="mine, too")
    assert lab.update(copy, files("third"))[1] == {CHAPTER: "01_a.new2.ipynb"}
    assert "mine, too" in (copy / "01_a.new.ipynb").read_text()


def test_what_a_reader_has_added_stays(copy):
    (copy / "scratch.ipynb").write_bytes(chapter("mine"))
    lab.update(copy, files("second"))
    assert (copy / "scratch.ipynb").read_bytes() == chapter("mine")


# Accidents.


@pytest.mark.parametrize("record", ["", "{", "[]", '{"01_a.ipynb": 3}', '{"01_a.ipynb": [1]}'])
def test_a_damaged_record_loses_nothing(copy, record):
    change(copy / CHAPTER, 3, source="mine")
    mine = (copy / CHAPTER).read_bytes()
    (copy / lab.RECORD).write_text(record)
    lab.update(copy, files())
    assert (copy / CHAPTER).read_bytes() == mine
    assert (copy / EXERCISES).read_bytes() == exercises()
    assert not (copy / "exercises" / "01_a.new.ipynb").exists()
    assert lab.update(copy, files()) == ([], {})


@pytest.mark.parametrize("calls", [1, 2, 3])
def test_an_interrupted_copy_is_completed(tmp_path, monkeypatch, calls):
    """Ctrl-C comes before the file of this number is in its place, and no record is written."""
    replaced, replace = [], os.replace

    def interrupted(half, path):
        replaced.append(path)
        if len(replaced) >= calls:
            raise KeyboardInterrupt
        replace(half, path)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lab.update(tmp_path, files())
    monkeypatch.undo()
    written, beside = lab.update(tmp_path, files())
    assert beside == {}
    assert {name: (tmp_path / name).read_bytes() for name in files()} == files()
    assert not [path for path in tmp_path.rglob("*") if ".new" in path.name]


def test_a_notebook_that_cannot_be_read_is_the_readers(copy):
    (copy / CHAPTER).write_text("<<<<<<< HEAD")
    (copy / EXERCISES).write_text('{"cells": 3}')
    assert set(lab.update(copy, files("second"))[1]) == {CHAPTER}
    assert "**Next:**" in lab.start_page(copy, ROOT)


def say(monkeypatch, capsys, folder, edition="first"):
    """Return what the command prints, with files of ours to hand out."""
    monkeypatch.setattr(lab, "hand_out", lambda: files(edition))
    status = lab.main(["--copy-only", "--work", str(folder)])
    return status, "".join(capsys.readouterr())


def test_a_file_in_the_place_of_the_folder_is_named(monkeypatch, capsys, tmp_path):
    (tmp_path / "work").write_text("mine")
    status, said = say(monkeypatch, capsys, tmp_path / "work")
    assert status == 1 and str(tmp_path / "work") in said and "--work FOLDER" in said
    assert (tmp_path / "work").read_text() == "mine"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_takes_nothing_is_named(monkeypatch, capsys, copy, number):
    change(copy / CHAPTER, 3, source="mine")
    mine = (copy / CHAPTER).read_bytes()

    def full(path, data):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "write_bytes", full)
    status, said = say(monkeypatch, capsys, copy)
    assert status == 1 and os.strerror(number) in said and "Nothing in it is lost" in said
    assert (copy / CHAPTER).read_bytes() == mine


def test_the_terminal_tells_of_new_editions(monkeypatch, capsys, copy):
    change(copy / CHAPTER, 3, source="mine")
    status, said = say(monkeypatch, capsys, copy, "second")
    assert status == 0
    assert "01_a.ipynb is as you left it; its new edition is 01_a.new.ipynb" in said


# The start page.


@pytest.fixture
def root(tmp_path):
    row = "| [{0} Topic {0}](notebooks/{0}_a.ipynb) | Why {0}? | 9 s |\n"
    (tmp_path / "README.md").write_text(f"# A\n\n{row.format('01')}{row.format('02')}")
    return tmp_path


@pytest.fixture
def two(root):
    """Make a working copy of two chapters and their exercises."""
    both = {name.replace("01", number): d for name, d in files().items() for number in ("01", "02")}
    lab.update(root / "work", both)
    return root / "work"


def next_of(folder, root):
    """Return the line of the start page that says what is next."""
    return re.search(r"\*\*Next:\*\* (.*)", lab.start_page(folder, root))[1]


def later(path, seconds):
    os.utime(path, (time.time() + seconds,) * 2)


def test_the_way_through_two_chapters(two, root):
    assert next_of(two, root) == "[chapter 01, Topic 01](01_a.ipynb)."
    change(two / CHAPTER, 1, **ran())
    where = "(01_a.ipynb#cell-id=four), where you stopped, in *How `it` works*."
    assert next_of(two, root) == f"[chapter 01, Topic 01]{where}"
    change(two / CHAPTER, 3, **ran("first"))
    assert next_of(two, root) == "[the exercises of chapter 01, Topic 01](exercises/01_a.ipynb)."
    change(two / EXERCISES, 0, **ran("ok    2 of 2  it works\n2 of 2 points\n"))
    later(two / EXERCISES, 10)
    assert next_of(two, root) == "[the exercises of chapter 01, Topic 01](exercises/01_a.ipynb)."
    change(two / EXERCISES, 1, **ran("3 of 3 points\n"))
    later(two / EXERCISES, 10)
    assert next_of(two, root) == "[chapter 02, Topic 02](02_a.ipynb)."
    for place in (1, 3):
        change(two / "02_a.ipynb", place, **ran())
    later(two / "02_a.ipynb", 20)
    assert "exercises/02_a.ipynb" in next_of(two, root)
    for place in (0, 1):
        change(two / "exercises/02_a.ipynb", place, **ran("2 of 2 points\n3 of 3 points\n"))
    change(two / "exercises/02_a.ipynb", 0, **ran("2 of 2 points\n"))
    later(two / "exercises/02_a.ipynb", 30)
    assert "the end" in next_of(two, root)


def test_a_reader_goes_on_where_he_was_last(two, root):
    for number, seconds in (("02", 10), ("01", 20)):
        change(two / f"{number}_a.ipynb", 3, source="mine")
        later(two / f"{number}_a.ipynb", seconds)
    assert "(01_a.ipynb#cell-id=two), where you stopped, in *Why?*." in next_of(two, root)
    later(two / "02_a.ipynb", 30)
    assert "(02_a.ipynb" in next_of(two, root)


def test_the_table_says_how_far_one_is(two, root):
    change(two / CHAPTER, 1, **ran())
    change(two / EXERCISES, 0, **ran("1 of 2 points\n2 of 2 points\n"))
    change(two / EXERCISES, 1, **ran("wrong 0 of 1  a: 7 of 9 points\n1 of 3 points\n"))
    page = lab.start_page(two, root)
    assert "| [01 Topic 01](01_a.ipynb) | Why 01? | 1 of 2 cells | [3 of 5 points](" in page
    assert "| [02 Topic 02](02_a.ipynb) | Why 02? |  | [5 points](" in page


# What is handed out, of this repository.


@pytest.fixture(scope="module")
def handed():
    """Return the notebooks that a reader gets, by path, and the texts."""
    return {
        name: nbformat.reads(data.decode(), as_version=4) if name.endswith("ipynb") else data
        for name, data in assignments.hand_out().items()
    }


def test_all_of_it_is_there_without_outputs_and_solutions(handed):
    folder = ROOT / "notebooks"
    paths = [*folder.glob("*.ipynb"), *folder.glob("*/*.ipynb")]
    names = {path.relative_to(folder).as_posix() for path in paths}
    assert len(names) > 26 and {*handed} == names | {"notation.md"}
    for name in names:
        for cell in handed[name].cells:
            if cell.cell_type == "code":
                assert cell.outputs == [] and cell.execution_count is None, name
            assert "SOLUTION" not in cell.source, name


def test_pages_stand_beneath_their_lesson_answers_last(root):
    def page(title):
        return nbformat.writes(new_notebook(cells=[new_markdown_cell(title)])).encode()

    pages = {
        "deeper/01_answers.ipynb": page("# Answers: chapter 01"),
        "deeper/01_rings.ipynb": page("# Rings"),
        "deeper/01_untitled.ipynb": page("Nothing."),
    }
    lab.update(root / "work", files() | pages)
    row = "[Rings](deeper/01_rings.ipynb), [01_untitled](deeper/01_untitled.ipynb), "
    row += "[Answers: chapter 01](deeper/01_answers.ipynb)"
    lines = lab.start_page(root / "work", root).splitlines()
    assert f"| | *deeper:* {row} | | |" in lines[lines.index("| --- | --- | --- | --- |") + 2]
    (root / "work" / "deeper" / "01_rings.ipynb").unlink()
    assert "Rings" not in lab.start_page(root / "work", root)


def test_students_get_no_answers_and_no_links_to_them(tmp_path):
    texts = {
        "01_a": "# A\n\nThe [answers](deeper/01_answers.ipynb), [more](deeper/01_b.ipynb).",
        "deeper/01_b": "# B\n\n[Answers](01_answers.ipynb#cell-id=x), [back](../01_a.ipynb).",
        "deeper/01_answers": "# Answers: chapter 01",
    }
    for folder in ("deeper", "exercises"):
        (tmp_path / folder).mkdir()
    nbformat.write(new_notebook(), tmp_path / "exercises" / "01_a.ipynb")
    for name, text in texts.items():
        cells = [new_markdown_cell(text), new_code_cell("1", execution_count=1)]
        cells[1].outputs = [new_output("stream", text="1")]
        nbformat.write(new_notebook(cells=cells), tmp_path / f"{name}.ipynb")

    def handed_out(**options):
        found = assignments.hand_out(tmp_path, **options)
        return {name: nbformat.reads(data.decode(), 4) for name, data in found.items()}

    all_of_it, students = handed_out(), handed_out(answers=False)
    assert all_of_it.keys() == {f"{name}.ipynb" for name in texts} | {"exercises/01_a.ipynb"}
    assert students.keys() == all_of_it.keys() - {"deeper/01_answers.ipynb"}
    for name, text in texts.items():
        assert all_of_it[f"{name}.ipynb"].cells[0].source == text
        assert all_of_it[f"{name}.ipynb"].cells[1].outputs == []
    assert (
        students["01_a.ipynb"].cells[0].source.endswith("The answers, [more](deeper/01_b.ipynb).")
    )
    assert students["deeper/01_b.ipynb"].cells[0].source.endswith("Answers, [back](../01_a.ipynb).")


def test_the_same_commit_hands_out_the_same_bytes():
    assert assignments.hand_out() == assignments.hand_out()


def test_some_exercises_can_be_handed_out_alone():
    some = assignments.hand_out(names=["03", "11"])
    exercises = {name[10:12] for name in some if name.startswith("exercises/")}
    assert exercises == {"03", "11"} and "05_multi_gpu_from_scratch.ipynb" in some


def headings(notebook):
    return {
        (cell.id, heading)
        for cell in notebook.cells
        for heading in re.findall(r"^#+ (.+)$", cell.source, re.MULTILINE)
        if cell.cell_type == "markdown"
    }


def test_anchors_name_headings(handed):
    """JupyterLab opens a notebook at its top, and says nothing, where an anchor is wrong."""
    count = 0
    for name, notebook in handed.items():
        cells = notebook.cells if name.endswith(".ipynb") else []
        text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
        for words, target, anchor in re.findall(r"\[([^\]]*)\]\(([\w./]*)#([^)\s]+)\)", text):
            there = posixpath.join(posixpath.dirname(name), target)
            target = posixpath.normpath(there) if target else name
            if target == name:
                known = {heading.replace(" ", "-") for _, heading in headings(notebook)}
                assert anchor in known, f"{name}: {anchor}"
            else:
                assert (anchor.removeprefix("cell-id="), words) in headings(handed[target]), name
            count += 1
    assert count > 90


@pytest.mark.parametrize(
    "number", sorted(path.name[:2] for path in ROOT.glob("notebooks/[0-9]*.ipynb"))
)
def test_chapters_and_exercises_lead_to_each_other(handed, number):
    names = sorted(name for name in handed if re.match(r"\d", name))
    (name,) = (name for name in names if name.startswith(number))
    cells = [cell.source for cell in handed[name].cells if cell.cell_type == "markdown"]
    assert f"](exercises/{name})" in "\n".join(cells).partition("\n## Where next\n")[2]
    first = handed[f"exercises/{name}"].cells[0].source
    rows = re.findall(r"^\| \d+\. .*$", first, re.MULTILINE)
    assert len(rows) >= 6 and all(re.search(r"\]\(\.\./\S+\.ipynb#\S+\) \|$", row) for row in rows)


# JupyterLab itself.


@pytest.fixture
def log(tmp_path):
    """Start the lab on a copy; yield the file of what it prints."""
    own = {f"JUPYTER_{name}_DIR": str(tmp_path / name) for name in ("CONFIG", "DATA", "RUNTIME")}
    own["HOME"] = str(tmp_path)  # IPython warns of one that cannot be written
    command = [sys.executable, ROOT / "tools" / "lab.py", "--work", tmp_path / "work"]
    path = tmp_path / "log"
    with path.open("w") as file:
        process = subprocess.Popen(
            [*command, "--no-browser", "--port=0"], env=os.environ | own, stdout=file, stderr=file
        )
    try:
        yield path
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def ask(address, token, data=None):
    """Return the answer of a server, which says its address shortly before it listens there."""
    request = urllib.request.Request(address, data, {"Authorization": f"token {token}"})
    while True:
        try:
            return json.loads(urllib.request.urlopen(request, timeout=60).read())
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ConnectionRefusedError):
                raise
        time.sleep(0.2)


def test_a_start_says_the_address_and_nothing_else(log):
    """JupyterLab serves the copy, at its start page; a kernel starts without a warning."""
    address = re.compile(r"(http://127\.0\.0\.1:\d+)/lab/tree/start\.md\?token=(\w+)")
    while not (found := address.search(log.read_text())):
        time.sleep(0.2)
    server, token = found.groups()
    assert ask(f"{server}/api/contents/start.md", token)["type"] == "file"
    kernel = ask(f"{server}/api/kernels", token, b"{}")["id"]
    client = BlockingKernelClient(connection_file=str(log.parent / f"RUNTIME/kernel-{kernel}.json"))
    client.load_connection_file()
    client.start_channels(hb=False)
    client.wait_for_ready(timeout=60)
    client.stop_channels()
    first, *rest = log.read_text().splitlines()
    assert first.startswith("Working copy: ") and len(rest) < 8, rest
    said = [line for line in rest if line.strip() and "http:" not in line and "file:" not in line]
    assert all(re.match(r"\[C|    (To access|Or copy)", line) for line in said), said
