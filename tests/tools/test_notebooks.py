"""The checks of `make check` on notebooks, and the runner of `make run` and `make notebooks`."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import contents
import drawings
import headlines
import hygiene
import idle
import nbformat
import pytest
import run
from conftest import REPEATED
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from waiting import is_alive, wait_until

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "tools" / "notebooks" / "run.py"
PNG = "iVBORw0KGgo="


def test_what_tests_repeat_less_often_is_in_a_chapter():
    chapters = contents.find_chapters(contents.FOLDER, pages=True)
    cells = [cell for path in chapters for cell in nbformat.read(path, as_version=4).cells]
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    missing = [pattern for pattern in REPEATED if not re.search(pattern, code, re.MULTILINE)]
    assert not missing


# The checks: each finds its fault in an otherwise good chapter, and only that one.


def good_chapter(num_cells=16):
    cells = [new_markdown_cell("# A chapter\n\nIt asks a question.\n\n```\n# no heading\n```")]
    for count in range(1, num_cells + 1):
        cells.append(new_code_cell(f"x = {count}\nx", execution_count=count))
        cells[-1].outputs = [new_output("execute_result", {"text/plain": str(count)})]
        cells[-1].outputs[0].execution_count = count
        cells.append(new_markdown_cell(f"## Step {count}\n\nThen it says something."))
    figure = new_output("display_data", {"image/png": PNG, "text/plain": "<Figure>"})
    cells[1].outputs.append(figure)
    notebook = new_notebook(cells=cells)
    run.clean(notebook)
    return notebook


def output(text):
    return [new_output("stream", name="stdout", text=text)]


def shown(kind, data):
    return [new_output("display_data", {kind: data})]


def error(*traceback):
    return [new_output("error", ename="ValueError", evalue="no", traceback=[*traceback])]


def cell(place, **values):
    return lambda notebook: notebook.cells[place].update(values)


def both(first, second):
    return lambda notebook: (first(notebook), second(notebook))


FAULTS = {  # (the check that finds it, a part of what it says, what makes it)
    "a shared id": ("form", "Non-unique", lambda nb: nb.cells[1].update(id=nb.cells[0].id)),
    "no id": ("form", "missing an id", lambda nb: nb.cells[1].pop("id")),
    "no notebook": ("form", "not a valid", cell(0, extra=3)),
    "another kernel": ("form", "python9", lambda nb: nb.metadata.kernelspec.update(name="python9")),
    "not executed": ("executed", "cell 4", cell(3, execution_count=None)),
    "executed twice": ("executed", "cell 4", cell(3, execution_count=7)),
    "an error": ("errors", "cell 4: ValueError", cell(3, outputs=error())),
    "a printed traceback": (
        "errors", "cell 4", cell(3, outputs=output("Traceback (most recent call last):"))
    ),
    "widget state": ("widgets", "metadata", lambda nb: nb.metadata.update(widgets={"state": {}})),
    "a widget": (
        "widgets", "cell 4", cell(3, outputs=shown(hygiene.WIDGET_TYPES[0], {"model_id": "1"}))
    ),
    "a path in an output": (
        "paths", "/home/ada/d2lpar/x.py", cell(3, outputs=output("in /home/ada/d2lpar/x.py, line"))
    ),
    "a path in a source": ("paths", "cell 4", cell(3, source="open('/tmp/x')")),
    "a path of this repository": ("paths", str(ROOT), cell(3, outputs=output(f"<{ROOT}/d2lpar>"))),
    "a path in the traceback of an error that is wanted": (
        "paths", "cell 4: path of the machine: /home/ada/x.py",
        cell(3, outputs=error("/home/ada/x.py"), metadata={"tags": ["raises-exception"]}),
    ),
    "a path of Debian": (
        "paths", "dist-packages", cell(3, outputs=output("/usr/lib/python3/dist-packages/x.py:3:"))
    ),
    "a path of an installation": (
        "paths", "site-packages", cell(3, outputs=output("/opt/x/lib/site-packages/torch/nn.py:3:"))
    ),
    "a path of Windows": (
        "paths", r"C:\Users\ada", cell(3, outputs=output(r"in C:\Users\ada\x.py, line 3"))
    ),
    "a path in the metadata": (
        "paths", "metadata", lambda nb: nb.metadata.update(ran={"in": "/home/ada/x.ipynb"})
    ),
    "a path in the metadata of a cell": (
        "paths", "cell 4", cell(3, metadata={"ran": "/home/ada/x.ipynb"})
    ),
    "a path in a drawing": (
        "paths", "cell 4", cell(3, outputs=shown("image/svg+xml", "<title>/root/x</title>"))
    ),
    "a path in a table": ("paths", "cell 4", cell(3, outputs=shown("text/html", "<td>/root/x"))),
    "an open check": ("folded", "cell 4", cell(3, metadata={"nbgrader": {"grade": True}})),
    "two titles": ("headings", "2 headings", cell(2, source="# Again\n\nText.")),
    "no title": ("headings", "0 headings", cell(0, source="Text, and no title.")),
    "a skipped level": ("headings", "cell 3", cell(2, source="### Deep\n\nText.")),
    "a late title": (
        "headings", "cell 1",
        both(cell(0, source="## First\n\nText."), cell(2, source="# Second\n\nText.")),
    ),
    "no prose": ("prose", "cell 6", cell(4, source="## A heading only")),
    "no prose after a figure": (
        "prose", "cell 32: no prose after",
        both(cell(31, outputs=shown("image/png", PNG)), lambda nb: nb.cells.pop()),
    ),
    "a long cell": ("length", "cell 4: 47", cell(3, source="x = 1\n" * 47)),
    "an empty cell": ("length", "cell 4: 0", cell(3, source="")),
    "a large file": (
        "size", "bytes", lambda nb: nb.cells[1].outputs[1].data.update({"image/png": "A" * 1500000})
    ),
}  # fmt: skip


ALLOWED = {
    "nothing else": lambda nb: None,
    "a cell at the limit": cell(1, source="x = 1\n" * hygiene.MAX_LINES),
    "a tagged error": cell(3, outputs=error(), metadata={"tags": ["raises-exception"]}),
}


@pytest.mark.parametrize("change", ALLOWED.values(), ids=ALLOWED)
def test_a_good_chapter_passes_all_checks(change, tmp_path):
    notebook = good_chapter()
    change(notebook)
    nbformat.write(notebook, tmp_path / "01_good.ipynb")
    assert hygiene.problems(tmp_path / "01_good.ipynb") == []


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found(fault, tmp_path):
    check, text, spoil = FAULTS[fault]
    notebook = good_chapter()
    spoil(notebook)
    path = tmp_path / "01_bad.ipynb"
    path.write_text(json.dumps(notebook))
    found = hygiene.problems(path, [check])
    assert found and text in found[0]
    assert found[0].startswith("01_bad.ipynb: ")
    others = [name for name in hygiene.CHECKS if name != check]
    assert hygiene.problems(path, others) == []


@pytest.mark.parametrize("text", [
    "GET https://example.org/home/page", "a/tmp/b", "/tmpfile", "~/data", "notebooks/03_x.ipynb",
])  # fmt: skip
def test_what_is_no_path_of_a_machine(text):
    notebook = good_chapter()
    notebook.cells[3].update(outputs=output(text))
    assert hygiene.machine_paths(notebook) == []


def test_hygiene_as_a_script(tmp_path):
    good, bad = good_chapter(), good_chapter()
    bad.cells[3].execution_count = 9
    nbformat.write(good, tmp_path / "01_good.ipynb")
    nbformat.write(bad, tmp_path / "02_bad.ipynb")
    assert hygiene.main([tmp_path / "01_good.ipynb"]) == 0
    assert hygiene.main([tmp_path / "01_good.ipynb", tmp_path / "02_bad.ipynb"]) == 1


# The runner: real kernels, small notebooks.


def write_chapter(path, *sources, text="# Title of it\n\nProse with $a^2$."):
    cells = [new_markdown_cell(text)]
    for source in sources:
        cells += [new_code_cell(source), new_markdown_cell("A sentence. And another.")]
    nbformat.write(new_notebook(cells=cells), path)
    return path


def runner(folder, *arguments):
    """Return what a run returned and printed."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            code = run.main(["--folder", f"{folder}", "--build", f"{folder}/build", *arguments])
        except SystemExit as stop:
            code = stop.code
    return SimpleNamespace(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())


@pytest.fixture(scope="module")
def three_chapters(tmp_path_factory):
    """Run a good, a bad and a good chapter; returns the folder, the process, the bytes before."""
    folder = tmp_path_factory.mktemp("chapters")
    figure = "import matplotlib.pyplot as plt\nplt.plot([1, 2]);"
    paths = [
        write_chapter(folder / "01_first.ipynb", "import sys; sys.executable.count('x')", figure),
        write_chapter(folder / "02_bad.ipynb", "x = 1", "x / 0  # the bad line", "y = 3"),
        write_chapter(folder / "03_last.ipynb", "import os; sorted(os.listdir())[0]"),
    ]
    bad = nbformat.read(paths[1], as_version=4)
    bad.cells[5].update(outputs=output("of an earlier run"), execution_count=3)
    nbformat.write(bad, paths[1])
    before = [path.read_bytes() for path in paths]
    (folder / "build").mkdir()
    (folder / "build" / "09_of_an_earlier_run.ipynb").touch()
    return folder, runner(folder, "--in-place"), before


def test_what_a_run_prints(three_chapters):
    _, done, _ = three_chapters
    assert done.returncode == 1
    assert "x / 0  # the bad line" in done.stdout
    assert "ZeroDivisionError: division by zero" in done.stdout
    assert "Traceback" in done.stdout
    assert "\x1b[" not in done.stdout
    rows = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    assert {row[0]: row[2] for row in rows if len(row) == 3 and row[1][-2:-1] == "."} == {
        "01_first": "ok",
        "02_bad": "failed in cell 2: ZeroDivisionError: division by zero",
        "03_last": "ok",
        "total": "1 of 3 failed",
    }
    for progress in ("01_first cell 1/2", "02_bad cell 1/3", "03_last cell 1/1", "6/6"):
        assert progress in done.stderr
    assert "\r" not in done.stderr  # it is no terminal


def test_executed_chapters_can_be_opened(three_chapters):
    """Those that failed, too: they show the error and nothing of an earlier run."""
    folder, _, _ = three_chapters
    build = folder / "build"
    names = ["01_first.ipynb", "02_bad.ipynb", "03_last.ipynb"]
    assert sorted(path.name for path in build.iterdir()) == names
    first, bad, _ = (nbformat.read(build / name, as_version=4) for name in names)
    assert "image/png" in first.cells[3].outputs[0].data
    assert bad.cells[3].outputs[0].ename == "ZeroDivisionError"
    assert "of an earlier run" not in (build / names[1]).read_text()


def test_only_good_chapters_are_written_back(three_chapters):
    folder, _, before = three_chapters
    first, bad, last = (sorted(folder.glob("*.ipynb"))[i] for i in range(3))
    assert bad.read_bytes() == before[1]
    for path in (first, last):
        notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
        assert list(hygiene.check_executed(notebook)) == []
        assert list(hygiene.check_form(notebook)) == []
    names = {"01_first.ipynb", "02_bad.ipynb", "03_last.ipynb", "build"}
    assert {path.name for path in folder.iterdir()} == names
    last_output = nbformat.read(last, as_version=4).cells[1].outputs[0]
    assert last_output.data["text/plain"] == "'01_first.ipynb'"  # the kernel runs in the folder


@pytest.mark.slow
def test_same_notebook_executed_twice_gives_the_same_file(tmp_path):
    pause = "print('b', flush=True); time.sleep(0.1); print('c')"
    path = write_chapter(tmp_path / "01_same.ipynb", "print(hash('a'))", f"import time; {pause}")
    notebook = nbformat.read(path, as_version=4)
    notebook.metadata.update(widgets={"x": {}}, toc={"base": 1})
    notebook.cells[1].metadata.update(
        collapsed=True, tags=["keep"], execution={"iopub.execute_input": "2026-01-01T00:00:00Z"}
    )
    nbformat.write(notebook, path)
    assert runner(tmp_path, "--in-place").returncode == 0
    first = path.read_bytes()
    assert runner(tmp_path, "--in-place").returncode == 0
    assert path.read_bytes() == first
    cleaned = json.loads(first)
    assert cleaned["cells"][1]["metadata"] == {"tags": ["keep"]}
    assert [output["text"] for output in cleaned["cells"][3]["outputs"]] == [["b\n", "c\n"]]
    assert cleaned["metadata"] == {
        "kernelspec": {"display_name": "Python 3", "name": "python3"},
        "language_info": {"name": "python"},
    }


@pytest.mark.parametrize("mode", [0o644, 0o660])
def test_a_chapter_that_is_written_back_stays_as_readable_as_it_was(tmp_path, mode):
    path = write_chapter(tmp_path / "01_same.ipynb", "1 + 1")
    path.chmod(mode)
    run.write_in_place(run.Result(path), path)
    assert path.stat().st_mode & 0o777 == mode


def test_a_run_leaves_the_environment_as_it_was(monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", "mine")
    monkeypatch.setenv("PYTHONHASHSEED", "3")
    monkeypatch.delenv("JUPYTER_DATA_DIR", raising=False)
    before = dict(os.environ)
    with pytest.raises(KeyboardInterrupt), run.own_settings():
        assert os.environ["IPYTHONDIR"] != "mine" and os.environ["PYTHONHASHSEED"] == "0"
        folder = Path(os.environ["JUPYTER_DATA_DIR"]).parent
        raise KeyboardInterrupt
    assert dict(os.environ) == before and not folder.exists()


def test_clean_gives_unique_ids_and_drops_what_lasts_as_long_as_a_kernel():
    notebook = good_chapter()
    kept = notebook.cells[0].id
    notebook.cells[1].id = kept
    del notebook.cells[2]["id"]
    notebook.cells[1].outputs[0]["transient"] = {"display_id": "x"}
    notebook.cells[1].metadata.update(jupyter={"source_hidden": True}, collapsed=True)
    run.clean(notebook)
    assert "transient" not in notebook.cells[1].outputs[0]
    assert notebook.cells[1].metadata == {"jupyter": {"source_hidden": True}}
    ids = [cell.id for cell in notebook.cells]
    assert ids[:3] == [kept, "cell-02", "cell-03"]
    assert len(set(ids)) == len(ids)


@pytest.mark.slow
def test_chapter_that_shows_a_path_is_not_written(tmp_path):
    path = write_chapter(tmp_path / "01_path.ipynb", "print('see /home/' + 'ada/x')")
    before = path.read_bytes()
    done = runner(tmp_path, "--in-place")
    assert done.returncode == 1
    assert "cell 2: /home/ada/x" in done.stdout
    assert path.read_bytes() == before


@pytest.mark.slow
def test_a_run_alone_takes_this_python_and_changes_no_notebook(tmp_path, monkeypatch):
    """Not the user's kernel of the name python3; and it minds no path of the machine."""
    spec = tmp_path / "data" / "kernels" / "python3"
    spec.mkdir(parents=True)
    (spec / "kernel.json").write_text(json.dumps({"argv": ["/bin/false"], "display_name": "no"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "data"))
    where = f"import sys; assert sys.prefix == {sys.prefix!r}"
    path = write_chapter(tmp_path / "01_who.ipynb", where, "print('see /home/' + 'ada/x')")
    before = path.read_bytes()
    done = runner(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert path.read_bytes() == before


def printed(path):
    cells = nbformat.read(path, as_version=4).cells
    return [cell.outputs[0].text for cell in cells if cell.get("outputs")]


def test_slow_cell_and_dead_kernel_fail_and_the_rest_runs(tmp_path):
    write_chapter(tmp_path / "01_slow.ipynb", "import time; time.sleep(60)")
    write_chapter(tmp_path / "02_dead.ipynb", "import os; os._exit(1)")
    write_chapter(tmp_path / "03_good.ipynb", "1 + 1")
    write_chapter(tmp_path / "04_killed.ipynb", "import os; os.kill(os.getppid(), 9)")
    done = runner(tmp_path, "--timeout", "6")
    assert done.returncode == 1
    assert re.search(r"^01_slow .* failed in cell 1: CellTimeoutError", done.stdout, re.MULTILINE)
    assert re.search(r"^02_dead .* failed in cell 1: DeadKernelError", done.stdout, re.MULTILINE)
    assert re.search(r"^03_good .* ok$", done.stdout, re.MULTILINE)
    assert re.search(r"^04_killed .* failed: its process .* status -9$", done.stdout, re.MULTILINE)
    assert "time.sleep(60)" in done.stdout and "os._exit(1)" in done.stdout


WAIT = """
import os, subprocess, tempfile, time
tempfile.mkdtemp()
child = subprocess.Popen(["sleep", "200"], start_new_session=True)
open("part of {0}", "w").write(f"{{os.getpid()}} {{child.pid}}")
os.rename("part of {0}", "{0}")
time.sleep(200)
"""


def test_interrupt_ends_kernels_and_run(tmp_path):
    """Ctrl-C in a terminal: no further chapter, status 130, the table so far.

    Of two kernels nothing is left: no process of another session, and no temporary file.
    """
    slow = ("02_slow", "03_slow")  # executed at the same time
    write_chapter(tmp_path / "01_first.ipynb", "1 + 1")
    for name in slow:
        write_chapter(tmp_path / f"{name}.ipynb", WAIT.format(name))
    write_chapter(tmp_path / "04_never.ipynb", "open('never', 'w')")
    (tmp_path / "tmp").mkdir()
    process = subprocess.Popen(
        [sys.executable, RUN, "--folder", tmp_path, "--build", tmp_path / "build"],
        env=os.environ | {"TMPDIR": f"{tmp_path}/tmp"}, process_group=0,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        for name in slow:
            wait_until((tmp_path / name).exists, 60)
    finally:
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    traces = (out + err).split("Traceback")[1:]  # only of ipykernel's race at its end (its #1518)
    assert all("/ipykernel/" in trace for trace in traces), out + err
    assert re.search(r"^01_first .* ok$", out, re.MULTILINE)
    for name in slow:
        assert re.search(rf"^{name} .* interrupted$", out, re.MULTILINE)
        assert not any(map(is_alive, (tmp_path / name).read_text().split()))
    assert not (tmp_path / "never").exists()
    assert not [*(tmp_path / "tmp").iterdir()]


@pytest.mark.slow
def test_ctrl_c_twice_tears_nothing_apart(tmp_path):
    """The second one comes from a process of the chapter, while its kernel is being killed."""
    interrupt = f"os.kill({os.getpid()}, signal.SIGINT)"
    write_chapter(tmp_path / "01_first.ipynb", f"import os, signal\nwhile True:\n    {interrupt}")
    done = runner(tmp_path)
    assert done.returncode == 130
    assert re.search(r"^01_first .* interrupted$", done.stdout, re.MULTILINE)


def test_ctrl_c_while_the_run_is_imported(tmp_path):
    interrupt = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)"
    (tmp_path / "nbformat.py").write_text(interrupt)
    done = subprocess.run(
        [sys.executable, RUN], capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_chapters_by_number_name_and_path(tmp_path):
    paths = [tmp_path / name for name in ("01_a.ipynb", "02_b.ipynb", "10_c.ipynb", "notes.ipynb")]
    for path in paths:
        path.touch()
    find = contents.find_chapters
    assert find(tmp_path) == find(tmp_path, pages=True) == paths[:3]
    assert find(tmp_path, ["10_c", "01"]) == [paths[0], paths[2]]
    assert find(tmp_path, ["notebooks/02_b.ipynb"]) == [paths[1]]
    assert find(tmp_path, ["notes"]) == [paths[3]]
    with pytest.raises(ValueError, match="no chapter '07': choose from 01_a, 02_b, 10_c"):
        find(tmp_path, ["01", "07"])


@pytest.fixture
def with_pages(tmp_path):
    """Return the lessons 01 and 02, between them the pages of 01, of which answers are the last."""
    (tmp_path / "deeper").mkdir()
    names = ["01_a", "deeper/01_rings", "deeper/01_answers", "02_b"]
    return [write_chapter(tmp_path / f"{name}.ipynb", "print(1)") for name in names]


def test_pages_stand_behind_their_lesson_and_are_named_with_it_or_alone(with_pages):
    folder = with_pages[0].parent
    assert contents.find_chapters(folder) == [with_pages[0], with_pages[3]]

    def find(*names):
        return contents.find_chapters(folder, names, pages=True)

    assert find() == with_pages
    assert find("01") == with_pages[:3]
    assert find("01_a") == with_pages[:1]
    assert find("02", "deeper/01_rings.ipynb") == [with_pages[1], with_pages[3]]
    with pytest.raises(ValueError, match="no chapter '01_rings'"):
        contents.find_chapters(folder, ["01_rings"])


def test_a_run_executes_pages_in_their_folder_and_a_run_of_cores_does_not(with_pages):
    folder = with_pages[0].parent
    write_chapter(with_pages[1], "import os; print(*os.listdir('..'))")
    assert runner(folder, "--core", "01").returncode == 0
    assert [path.stem for path in (folder / "build").iterdir()] == ["01_a"]
    assert runner(folder, "--in-place", "01").returncode == 0
    built = sorted(path.stem for path in (folder / "build").iterdir())
    assert built == ["01_a", "01_answers", "01_rings"]
    assert "02_b.ipynb" in printed(with_pages[1])[0]
    assert printed(with_pages[2]) == ["1\n"] and printed(with_pages[3]) == []


def test_a_page_declares_its_headline_lines_by_its_name(with_pages):
    folder = with_pages[0].parent
    assert headlines.declared(with_pages[1]) is None
    tables = '[[01]]\nline = "a"\nnumber = [0, 1]\n[[01_rings]]\nline = "b"\nnumber = [0, 1]'
    (folder / "headlines.toml").write_text(tables)
    found = [[table["line"] for table in headlines.declared(path)] for path in with_pages]
    assert found == [["a"], ["b"], [], []]


def test_no_chapter_is_no_success(tmp_path):
    done = runner(tmp_path)
    assert done.returncode != 0
    assert "no notebook NN_topic.ipynb in" in done.stderr


@pytest.mark.slow
def test_the_core_of_a_chapter_ends_before_its_exercises(tmp_path):
    path = write_chapter(tmp_path / "01_a.ipynb", "x = 1", "open('deeper', 'w')")
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[0].source += "\n\nNo ## Exercises yet."
    core = [*(cell.source for cell in notebook.cells[:2]), "A sentence. And another."]
    notebook.cells[2].source += "\n\n## Exercises\n\n1. Why?"
    nbformat.write(notebook, path)
    done = runner(tmp_path, "--core")
    assert done.returncode == 0 and "all 1 ok" in done.stdout
    assert not (tmp_path / "deeper").exists()
    executed = nbformat.read(tmp_path / "build" / "01_a.ipynb", as_version=4)
    assert [cell.source for cell in executed.cells] == core
    assert contents.read_chapter(path).cells == notebook.cells


# The gate: chapters that show what they declare, executed on an idle machine.

COUNT = """
from pathlib import Path
file = Path("count")
count = int(file.read_text()) + 1 if file.exists() else 1
file.write_text(str(count))
print("the ratio:", {1: 1.4, 2: 1.3}.get(count, 1.1))
"""


@pytest.fixture
def gate(tmp_path, monkeypatch):
    """Return a folder of two chapters, on an idle machine.

    The first chapter has to show at most 1.2, and does so at its third run.
    """
    monkeypatch.setattr(idle, "wait", lambda say, stopped: "")
    write_chapter(tmp_path / "03_count.ipynb", COUNT)
    write_chapter(tmp_path / "04_last.ipynb", "open('last', 'w').close()")
    declare(tmp_path, 1.2)
    return tmp_path


def declare(folder, high):
    table = f'[[03]]\nline = "the ratio:"\nnumber = [0.8, {high}]'
    (folder / "headlines.toml").write_text(table)


def test_a_chapter_is_executed_until_it_shows_what_it_declares(gate):
    done = runner(gate, "--in-place")
    assert done.returncode == 0 and (gate / "count").read_text() == "3"
    assert printed(gate / "03_count.ipynb") == ["the ratio: 1.1\n"]
    for number, ratio in ((1, 1.4), (2, 1.3)):
        assert f"03_count: try {number} of 3:" in done.stdout
        assert f"cell 2: 'the ratio:' has the number {ratio}, declared 0.8 to 1.2" in done.stdout
    assert "has the number 1.1" not in done.stdout
    assert (gate / "last").exists()
    bars = [line for line in done.stderr.splitlines() if "cell/s]" in line or "s/cell]" in line]
    assert "2/2" in bars[-1], done.stderr  # the cells of three tries count once


@pytest.mark.slow
def test_a_chapter_that_never_shows_it_is_not_written(gate):
    declare(gate, 1.0)
    before = (gate / "03_count.ipynb").read_bytes()
    done = runner(gate, "--in-place", "03")
    assert done.returncode == 1 and (gate / "count").read_text() == "3"
    assert (gate / "03_count.ipynb").read_bytes() == before
    assert re.search("^03_count .* not written: .* in 3 tries$", done.stdout, re.MULTILINE)
    told = done.stdout.partition("\n03_count.ipynb: not written")[2]
    assert re.findall(r"try (\d) of 3", told) == ["1", "2", "3"]
    assert re.findall(r"the number (\S+), declared 0.8 to 1.0", told) == ["1.4", "1.3", "1.1"]


@pytest.mark.parametrize("options", [(), ("--core",)])
@pytest.mark.slow
def test_a_reader_s_run_passes_the_gate(gate, options, monkeypatch):
    monkeypatch.setattr(idle, "wait", pytest.fail)
    declare(gate, 1.0)
    assert runner(gate, "03", *options).returncode == 0
    assert (gate / "count").read_text() == "1"


@pytest.mark.slow
def test_a_chapter_that_fails_is_not_tried_again(gate):
    write_chapter(gate / "03_count.ipynb", COUNT, "1 / 0")
    done = runner(gate, "--in-place", "03")
    assert "failed in cell 2: ZeroDivisionError" in done.stdout
    assert (gate / "count").read_text() == "1"


def test_nothing_is_executed_on_a_machine_that_stays_busy(gate, monkeypatch):
    waits = []
    monkeypatch.setattr(
        idle, "wait", lambda say, stopped: waits.append(say) or "after 10 minutes: it is"
    )
    before = (gate / "03_count.ipynb").read_bytes()
    done = runner(gate, "--in-place")
    assert done.returncode == 1
    assert "not executed: other programs keep this machine busy\nafter 10 minutes" in done.stdout
    assert not (gate / "count").exists() and not (gate / "last").exists()
    assert len(waits) == 1  # it does not wait once more for the second chapter
    assert (gate / "03_count.ipynb").read_bytes() == before


def test_ctrl_c_while_the_run_waits_for_an_idle_machine(gate, monkeypatch):
    def interrupted(say, stopped):
        signal.raise_signal(signal.SIGINT)
        wait_until(stopped)

    monkeypatch.setattr(idle, "wait", interrupted)
    done = runner(gate, "--in-place")
    assert done.returncode == 130
    assert re.search("^03_count .* interrupted$", done.stdout, re.MULTILINE)
    assert not (gate / "count").exists() and not (gate / "last").exists()


@pytest.mark.slow
def test_ctrl_c_while_a_chapter_is_written_back(gate, monkeypatch):
    writes = nbformat.writes

    def interrupted(notebook):
        signal.raise_signal(signal.SIGINT)
        return writes(notebook)

    monkeypatch.setattr(nbformat, "writes", interrupted)
    declare(gate, 1.4)
    done = runner(gate, "--in-place")
    assert done.returncode == 130
    assert printed(gate / "03_count.ipynb") == ["the ratio: 1.4\n"]
    assert not (gate / "last").exists()
    assert {path.suffix for path in gate.iterdir() if path.is_file()} == {"", ".ipynb", ".toml"}


# The drawings.


def test_a_drawing_is_put_behind_the_text_that_names_it(tmp_path):
    (tmp_path / "drawings").mkdir()
    drawing = tmp_path / "drawings" / "two_boxes.py"
    text = "class Boxes:\n    svg = lambda self: '<svg>{}</svg>'\ndef draw():\n    return Boxes()\n"
    drawing.write_text(text.format(1))
    text_of_it = "# A\n\n![two boxes][two_boxes]\n\nSo."
    path = write_chapter(tmp_path / "01_a.ipynb", text=text_of_it)
    (tmp_path / "deeper").mkdir()
    page = write_chapter(tmp_path / "deeper" / "01_b.ipynb", text=text_of_it)
    found = []
    for options in (["--check"], [], ["--check"], []):
        status = drawings.main(["--folder", f"{tmp_path}", *options])
        found.append((status, nbformat.read(path, as_version=4).cells[0].source))
    assert [status for status, _ in found] == [1, 0, 0, 0]
    assert nbformat.read(page, as_version=4).cells[0].source == found[1][1]
    sources = [source for _, source in found]
    assert "data:" not in sources[0] and len({*sources[1:]}) == 1
    assert sources[1].endswith("So.\n\n[two_boxes]: data:image/svg+xml;base64,PHN2Zz4xPC9zdmc+")
    del sys.modules["two_boxes"]
    drawing.write_text(text.format(20))
    assert drawings.main(["--folder", f"{tmp_path}"]) == 0
    assert nbformat.read(path, as_version=4).cells[0].source.endswith("base64,PHN2Zz4yMDwvc3ZnPg==")
    assert drawings.main(["--folder", f"{tmp_path}", "--check"]) == 0


def test_an_unknown_drawing_is_named(tmp_path):
    write_chapter(tmp_path / "01_a.ipynb", text="# A\n\n![what][nothing]")
    with pytest.raises(FileNotFoundError, match="no drawing nothing.py"):
        drawings.main(["--folder", f"{tmp_path}"])
