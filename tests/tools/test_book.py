"""The book: it builds from what is committed, without a fault and without a solution."""

import ast
import importlib
import re
import shutil
import subprocess
import sys
import warnings
import zlib
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import book_check
import contents
import lessons
import nbformat
import pytest
from exercises import marked
from nbformat.v4 import new_markdown_cell, new_notebook

import book
import d2lpar

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))


@pytest.fixture(scope="session")
def html(tmp_path_factory):
    """Build the book as `make book` does; return the folder of its pages."""
    folder = tmp_path_factory.mktemp("book")
    command = [sys.executable, ROOT / "tools" / "book" / "book.py", "--build", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no problems" in done.stdout and not done.stderr, done.stderr
    return folder / "html"


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
@pytest.mark.slow
def test_chapters_are_whole(html, path):
    page = (html / "notebooks" / f"{path.stem}.html").read_text()
    page = page.partition("<article")[2].partition("</article>")[0]  # without the sidebar
    cells = nbformat.read(path, as_version=4).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    figures = sum("image/png" in output.get("data", {}) for output in outputs)
    drawings = len(re.findall(r"^\[\w+\]: data:", text, re.MULTILINE))
    assert page.count("<details>") == text.count("<details>")
    assert len(re.findall(r"<img [^>]*_images/[0-9a-f]{20}", page)) == figures
    assert len(re.findall(r"<img [^>]*\.svg", page)) == drawings
    predictions = re.findall(r"^> \*\*Predict", text, re.MULTILINE)
    assert page.count('<details class="answer">') == len(predictions) > 1
    formulas = [each for each in lessons.CODE_OR_FORMULA.findall(text) if each[0] == "$"]
    assert page.count("<math") >= len(formulas)
    assert page.count('class="highlight-') >= sum(cell.cell_type == "code" for cell in cells)
    for service in book.SERVICES:
        opened = f'href="{book.link(service, book.repository(), path.name)}"'
        assert (opened in page) == bool(book.repository())


class Folds(HTMLParser):
    """What is inside of folds in a page, and what is not: figures, outputs, headings, boxes."""

    def __init__(self, page):
        super().__init__()
        self.inside, self.outside, self.stack = Counter(), Counter(), []
        self.feed(page)
        assert self.stack == []

    def handle_starttag(self, tag, attrs):
        kind = (dict(attrs).get("class") or "").split()
        if tag in ("details", "section"):
            self.stack.append("fold" if "answer" in kind else tag)
        count = self.inside if "fold" in self.stack else self.outside
        count[tag] += 1
        count["output"] += "cell_output" in kind

    def handle_endtag(self, tag):
        """Note the end of an element: it ends what was opened last."""
        if tag in ("details", "section"):
            assert self.stack.pop() in (tag, "fold" if tag == "details" else tag)


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
@pytest.mark.slow
def test_what_follows_a_prediction_is_folded(html, path):
    """A fold lies within one section, and has neither a heading nor a prediction in it."""
    page = (html / "notebooks" / f"{path.stem}.html").read_text()
    after_box = re.findall(r"</blockquote>\s*<details class=\"answer\">", page)
    assert len(after_box) == page.count('<details class="answer">')
    folds = Folds(page)
    for tag in ("h1", "h2", "h3", "h4"):
        assert folds.inside[tag] == 0
    answers = re.findall(r'<details class="answer">.*?</details>', page, re.DOTALL)
    assert answers and not any("<strong>Predict.</strong>" in answer for answer in answers)
    assert folds.inside["output"] > 0 and folds.outside["output"] > 0


def test_folds_end_at_headings_and_at_boxes():
    texts = [
        "## A\n\nBefore.\n\n> **Predict.** How many?\n> And why?",
        "Three.\n\n```\n# no heading\n```\n\n> **Predict.** And now?\n\nFour.\n\n## B\n\nOpen.",
        "> **Predict.** The last?\n\nFive.",
    ]
    cells = [new_markdown_cell(text) for text in texts]
    book.fold_answers(cells)
    text = "\n".join(cell.source for cell in cells)
    found = re.findall(r"<details.*?</summary>\s*(.*?)\s*</details>", text, re.DOTALL)
    assert found == ["Three.\n\n```\n# no heading\n```", "Four.", "Five."]


@pytest.mark.slow
def test_the_first_page_leads_to_chapters_and_pages(html):
    page = (html / "index.html").read_text()
    for path in [*CHAPTERS, *(ROOT / "docs").glob("*.md")]:
        folder = path.parent.name
        assert f'href="{folder}/{path.stem}.html"' in page
    assert "When do two devices work at the same time" in page
    assert "ARCHITECTURE.md" in page  # which the book lacks: a link where there is an address
    assert ("ARCHITECTURE.md</a>" in page) == bool(book.repository())
    assert (html / "docs" / "modelled_gpus.html").read_text().count("<tr") > 10


@pytest.mark.slow
def test_search_finds_words_of_the_chapters(html):
    index = (html / "searchindex.js").read_text()
    assert "pageabl" in index and "notebooks/04_overlapping_copies" in index


@pytest.mark.slow
def test_reference_has_every_shared_name_and_what_chapters_import(html):
    data = (html / "objects.inv").read_bytes()
    lines = zlib.decompress(data.split(b"\n", 4)[4]).decode().splitlines()
    names = {line.split()[0] for line in lines}
    assert {f"d2lpar.{name}" for name in d2lpar.__all__} <= names
    assert "d2lpar.Timeline.overlap" in names
    missing = set()
    for path in contents.find_chapters(contents.FOLDER, pages=True):
        cells = nbformat.read(path, as_version=4).cells
        for cell in cells:
            if cell.cell_type == "code" and "import" in cell.source:
                missing |= set(imported_names(cell.source)) - names
    assert missing == set()


def imported_names(source):
    """Yield the functions and classes of ours that a cell imports, with their modules."""
    for node in ast.walk(ast.parse(re.sub(r"(?m)^\s*[%!].*$", "", source))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("d2lpar."):
            module = importlib.import_module(node.module)
            for alias in node.names:
                if callable(getattr(module, alias.name, None)):
                    shared = alias.name in d2lpar.__all__
                    yield f"{'d2lpar' if shared else node.module}.{alias.name}"


# Exercises without their solutions, and what Sphinx refuses.

SOLUTION = """\
def ring(parts):
    given = parts
    ### BEGIN SOLUTION
    secret_of_the_ring = sum(parts)
    return secret_of_the_ring
    ### END SOLUTION
"""
CHECK = "assert ring([1, 2]) == 3\n### BEGIN HIDDEN TESTS\nassert hidden_one\n### END HIDDEN TESTS"


def exercise():
    reason = marked("", "reason", solution=True, grade=True, points=1)
    cells = [
        new_markdown_cell("# Rings\n\nWrite one: $x_1$."),
        marked(SOLUTION, "ring-answer", solution=True),
        marked(CHECK, "ring-check", grade=True, locked=True, points=1),
        marked("secret_number = 42", "number-answer", solution=True),
        new_markdown_cell("A secret reason.", metadata=reason.metadata),
    ]
    cells[1].outputs = [nbformat.v4.new_output("stream", text="secret output\n")]
    return new_notebook(cells=cells)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Build a small book with an exercise, pages, an address and two faults, in this process.

    It lacks the reference, which takes as long as all else. Returns its folder, the status of the
    command and what it printed.
    """
    root, folder = tmp_path_factory.mktemp("root"), tmp_path_factory.mktemp("small")
    texts = {
        "README.md": "# A book\n\n## Run it\n\n[This page](docs/page.md).\n",
        "CITATION.cff": "repository-code: https://github.com/ada/course\n",
        "a.py": "",
        "docs/page.md": "# A page\n\n[First](../README.md#run-it)",
        "teaching/course.md": "# The course\n\n[one](../notebooks/01_a.ipynb)",
        "notebooks/01_a.ipynb": (
            "# A title\n\n[no file](02_b.ipynb), [a tool](../a.py) and $\\nosuchcommand$\n\n"
            "[](#no-own) [](deeper/01_rings.ipynb#no-other) ![a picture](no.png)"
        ),
        "notebooks/deeper/01_rings.ipynb": "# Rings\n\n[Back](../01_a.ipynb), [a](../../a.py).",
        "work/01_a.ipynb": "# Mine: secret reason",  # what a reader changes is no source
    }
    for name, text in texts.items():
        (root / name).parent.mkdir(exist_ok=True)
        if name.endswith(".ipynb"):
            text = nbformat.writes(new_notebook(cells=[new_markdown_cell(text)]))
        (root / name).write_text(text)
    (root / "notebooks" / "exercises").mkdir()
    nbformat.write(exercise(), root / "notebooks" / "exercises" / "01_a.ipynb")
    for name in ("notation.md", "troubleshooting.ipynb"):
        shutil.copy(ROOT / "notebooks" / name, root / "notebooks")
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        redirect_stdout(StringIO()) as out,
        redirect_stderr(StringIO()) as err,
        warnings.catch_warnings(action="ignore"),  # of Sphinx's extensions, for their authors
    ):
        monkeypatch.setattr("multiprocessing.cpu_count", lambda: 1)  # Sphinx forks no processes
        monkeypatch.setattr(book, "reference", dict)
        status = book.main(["--build", str(folder), "--root", str(root)])
    return folder, status, out.getvalue(), err.getvalue()


def test_no_solution_gets_into_the_book(small):
    folder, *_ = small
    page = (folder / "html" / "notebooks" / "exercises" / "01_a.html").read_text()
    assert "YOUR CODE HERE" in page and "lab</span>" in page
    assert 'href="exercises/01_a.html"' in (folder / "html" / "notebooks" / "01_a.html").read_text()
    for path in folder.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert b"secret_of_the_ring" not in data and b"hidden_one" not in data, path
            assert b"secret_number" not in data and b"secret reason" not in data, path
            assert b"secret output" not in data, path


def test_a_page_stands_below_its_lesson_and_leads_back(small):
    folder, *_ = small
    page = (folder / "html" / "notebooks" / "deeper" / "01_rings.html").read_text()
    assert 'href="../01_a.html">Back</a>' in page.replace(
        '<span class="std std-doc">Back</span>', "Back"
    )
    assert 'href="https://github.com/ada/course/blob/main/a.py">a</a>' in page
    assert "/notebooks/deeper/01_rings.ipynb" in page  # Colab opens it
    assert 'href="../../index.html#run-it"' in page
    text = (folder / "html" / "notebooks" / "01_a.html").read_text()
    tables = re.findall(r"(?s)<li[^>]*current.*?</li>", text)
    assert any('href="deeper/01_rings.html"' in table for table in tables)


def test_links_lead_to_pages_and_to_files_once_the_repository_has_an_address(small):
    folder, *_ = small
    page = (folder / "html" / "notebooks" / "01_a.html").read_text()
    assert 'href="https://github.com/ada/course/blob/main/a.py">a tool</a>' in page
    assert 'href="https://colab.research.google.com/github/ada/course/' in page
    leads = {"docs/page": "../index.html#run-it", "teaching/course": "../notebooks/01_a.html"}
    for name, link in leads.items():
        assert f'href="{link}"' in (folder / "html" / f"{name}.html").read_text()


@pytest.mark.parametrize("fault", [
    "target not found: '02_b.ipynb'", "target not found: 'no-own'",
    "local id not found in doc 'notebooks/deeper/01_rings': 'no-other'",
    "image file not readable: notebooks/no.png", "unknown formula: \\nosuchcommand",
])  # fmt: skip
def test_a_warning_of_sphinx_fails_the_build(small, fault):
    _, status, out, err = small
    assert status == 1 and fault in err and "Sphinx warns" in out


# The check: it finds each fault in an otherwise good book, and only that one.

INDEX = """<html><head><link rel="stylesheet" href="_static/book.css"><style>a {}</style></head>
<body><h1 id="top">A book</h1> <a href="#top">top</a> <a href="sub/a%20page.html?x=1#here">there</a>
<a href="https://d2l.ai">elsewhere</a> <img src="data:image/png;base64,AA" alt="a figure">
<p>It costs $3 and then $4.</p> <math><mi>x</mi></math> <pre>"$a_1$" # a shell's $PATH=$HOME</pre>
<script src="_static/book.js"></script><script>let a = "https://d2l.ai"</script></body></html>"""
SUB = '<html><body><p id="here">Here.</p><a href="../">back</a></body></html>'


def good_book(folder):
    """Write a small book in which nothing is wrong."""
    for name in ("_static", "sub"):
        (folder / name).mkdir()
    (folder / "index.html").write_text(INDEX)
    (folder / "sub" / "a page.html").write_text(SUB)
    (folder / "_static" / "book.css").write_text("a { background: url(data:image/png;base64,AA) }")
    (folder / "_static" / "book.js").write_text("")
    return folder


def test_a_good_book_passes(tmp_path):
    assert book_check.problems(good_book(tmp_path)) == []


def test_a_folder_without_pages_is_no_book(tmp_path):
    assert book_check.problems(tmp_path) == ["no index.html among the 0 pages"]


@pytest.mark.parametrize(("expected", "text"), [
    ("external", '<script src="https://cdn.x/mathjax.js"></script>'),
    ("external", '<script src="//cdn.x/mathjax.js"></script>'),
    ("external", '<script>import("https://cdn.x/a.js")</script>'),
    ("external", '<link rel="stylesheet" href="http://x/a.css">'),
    ("external", "<style>@font-face { src: url('https://x/a.woff2') }</style>"),
    ("external", '<style>@import "https://x/a.css";</style>'),
    ("external", '<img src="https://x/badge.svg" alt="a badge">'),
    ("external", '<p style="background: url(https://x/a.png)">x</p>'),
    ("external", '<iframe src="https://x/"></iframe>'),
    ("not recognized", "<p>a $x_1$ b</p>"),
    ("not recognized", "<p>$$x$$</p>"),
    ("a solution", "<pre>### BEGIN SOLUTION</pre>"),
    ("a solution", "<pre>### BEGIN HIDDEN TESTS</pre>"),
    ("path of the machine", "<pre>in /home/ada/x.py</pre>"),
    ("without a description", '<img src="../_static/book.js">'),
])  # fmt: skip
def test_check_finds_a_fault(tmp_path, expected, text):
    path = good_book(tmp_path) / "sub" / "a page.html"
    path.write_text(SUB.replace("Here.", f"Here.</p>{text}<p>"))
    found = book_check.problems(tmp_path)
    assert len(found) == 1, found
    assert found[0].startswith("sub/a page.html: ") and expected in found[0], found


def test_check_reads_styles(tmp_path):
    (good_book(tmp_path) / "_static" / "book.css").write_text("@import url(https://x/a.css)")
    [found] = book_check.problems(tmp_path)
    assert found.startswith("_static/book.css: an external source: ") and "https://x/a.css" in found
