"""The decks that `make slides` writes for the cores of all chapters."""

import base64
import re

import nbformat
import pytest
import slides
from contents import FOLDER, find_chapters, read_chapter
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

pytestmark = pytest.mark.slow

CHAPTERS = find_chapters(FOLDER)
LONG = "This is a sentence of some length, which a longer paragraph would not show. " * 6
FIRST = LONG[: LONG.index(".") + 1]
all_chapters = pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)


def code(source, text="", figure=False, name="stdout"):
    """Make a cell with outputs."""
    outputs = [new_output("stream", name=name, text=text)] if text else []
    outputs += [new_output("display_data", {"image/png": "AA=="})] if figure else []
    return new_code_cell(source, outputs=outputs)


def split(cells):
    """Return the slides: whether one is on the path, its headings, its notes, its pieces."""
    found = []
    for cell in cells:
        begin = cell.metadata.get("slideshow", {})
        if begin.get("slide_type") in ("slide", "subslide"):
            beyond = {"slide_type": "subslide", "data": {"visibility": "uncounted"}}
            assert begin in ({"slide_type": "slide"}, beyond)
            headings = re.findall(r"^#+ (.+)$", cell.source, re.MULTILINE)
            found.append([begin != beyond, headings, "", []])
        elif begin.get("slide_type") == "notes":
            found[-1][2] = cell.source
        else:
            found[-1][3].append(cell)
    return found


def sources(*cells):
    """Return the sources on each slide of a chapter with these cells, after its title."""
    cells = [new_markdown_cell(cell) if isinstance(cell, str) else cell for cell in cells]
    notebook = new_notebook(cells=[new_markdown_cell("# A title"), *cells])
    found = split(slides.slides(notebook).cells)[1:]
    return [[piece.source for piece in pieces] for *_, pieces in found]


def test_a_small_chapter(tmp_path):
    formula = "This formula is\n\n$$a^2$$\n\nIt holds."
    cells = [
        new_markdown_cell("# A title\n\n**The question.** Why?\n\n**It needs** this.\n\n> A box."),
        code("import torch\nfrom d2lpar import (\n    Benchmark,\n)\n"),
        new_markdown_cell(f"## One\n\n{LONG}\n\n{formula}"),
        code("x = 1\nprint(x)", "one\n", figure=True),
        new_markdown_cell("It rises.\n\n### Two\n\n> **Predict.** How many?\n\nFour."),
        new_markdown_cell("## Exercises\n\nToo deep."),
    ]
    nbformat.write(new_notebook(cells=cells), tmp_path / "01_small.ipynb")
    found = split(slides.slides(read_chapter(tmp_path / "01_small.ipynb", core=True)).cells)
    assert [([piece.source for piece in pieces], headings) for _, headings, _, pieces in found] == [
        (["# A title", "**The question.** Why?"], ["A title"]),
        ([FIRST, formula, "x = 1\nprint(x)", "It rises."], ["One"]),
        (["> **Predict.** How many?"], ["One", "Two"]),
        (["Four."], ["One", "Two"]),
    ]  # fmt: skip
    assert "**It needs** this.\n\n> A box." in found[0][2] and "import torch" in found[1][2]
    assert LONG.strip() in found[1][2] and LONG.strip() not in found[2][2]
    page = slides.write_deck(tmp_path / "01_small.ipynb", tmp_path).read_text()
    assert "<msup>" in page and "Too deep" not in page and "<title>A title</title>" in page
    kinds = re.findall(r'<div class="(text|code|printed fragment|fragment)"', page)
    assert kinds == [*["text"] * 3, "code", *["printed fragment"] * 2, "fragment", *["text"] * 2]


@pytest.mark.parametrize(("cells", "expected"), [
    ((code("a", "1"), "One.\n\nTwo.\n\n> Why?"), [["a", "One."], ["Two.", "> Why?"]]),
    ((code("a", "1"), "One.", code("b")), [["a"], ["One.", "b"]]),
    ((code("a", "1"), "One.\n\nTwo.", code("b")), [["a", "One."], ["Two.", "b"]]),
    ((code("a", "1", figure=True), "One.", code("b")), [["a", "One."], ["b"]]),
    ((code("a", "1"), "So:\n\n- b", code("c")), [["a"], ["So:\n\n- b", "c"]]),
    ((code("a"), "One."), [["a"], ["One."]]),
    ((f"{LONG}\n\n> Why?", "Because."), [[LONG.strip(), "> Why?"], ["Because."]]),
    (("One.\n\n<details>\n\nTwo.\n\n</details>\n\n| a |\n|---|",), [["One.", "| a |\n|---|"]]),
    (("![a][b]\n\n[b]: data:image/svg+xml;base64,A\n\nOne.",),
     [["![a](data:image/svg+xml;base64,A)", "One."]]),
])  # fmt: skip
def test_where_slides_begin(cells, expected):
    assert sources(*cells) == expected


@pytest.mark.parametrize(("kind", "expected"), [
    ("slide", [["One."], ["Two."]]), ("notes", [["One."]]), ("skip", [["One."]]),
    ("-", [["One.", "Two."]]),
])  # fmt: skip
def test_slide_types_of_jupyterlab(kind, expected):
    marked = new_markdown_cell("Two.", metadata={"slideshow": {"slide_type": kind}})
    assert sources("One.", marked) == expected
    notebook = new_notebook(cells=[new_markdown_cell("# A"), new_markdown_cell("One."), marked])
    (*_, (_, _, notes, _)) = split(slides.slides(notebook).cells)
    assert ("Two." in notes) == (kind != "skip")


def test_progress_bars_are_not_shown():
    cells = [new_markdown_cell("# A"), code("x", "rounds: 100%", name="stderr")]
    assert slides.slides(new_notebook(cells=cells)).cells[-1].outputs == []


@pytest.mark.parametrize(("paragraph", "shown"), [
    ("It is `a. B` (so. So), e.g. Ada, and all of the values of $x. Y$ are there. " + LONG,
     "It is `a. B` (so. So), e.g. Ada, and all of the values of $x. Y$ are there."),
    (f"**A label.** One, see [a. B](x.ipynb). {LONG}", "**A label.** One, see [a. B](x.ipynb)."),
    (f"{LONG}Is it? It **is.** {LONG}This is", f"{FIRST}\n\nIs it?\n\nIt **is.**\n\nThis is"),
    ("Short. And whole.", "Short. And whole."),
])  # fmt: skip
def test_what_is_shown_of_a_paragraph(paragraph, shown):
    assert slides.points(paragraph) == shown


@pytest.mark.parametrize(("source", "expected"), [
    ("From $a$. (And $b$.)",
     r'whole"><math.*<mi>a</mi>.*</math>\.</span>.*whole"><math.*<mi>b</mi>.*</math>\.\)</span>'),
    ("> **x**\n>\n> | a |\n> |---|\n> | b |", r"(?s)<blockquote>.*<table>.*<td>b</td>"),
    ("[a](03_b.ipynb) [d2l](https://d2l.ai)", r'<p>a <a href="https://d2l\.ai">d2l</a></p>'),
    ("![a](data:image/svg+xml;base64,A)", r'<img src="data:image/svg\+xml;base64,A" alt="a"'),
])  # fmt: skip
def test_text_in_html(source, expected):
    assert re.search(expected, slides.to_html(source))


def test_code_that_is_too_long_for_a_slide_is_cut_between_statements():
    function = "def f{}(x):\n" + "\n".join(f"    x += {i}" for i in range(17)) + "\n    return x"
    source = "\n\n\n".join(function.format(i) for i in range(3))
    assert slides.code_parts(source) == source.split("\n\n\n")
    assert slides.code_parts("x = 1") == ["x = 1"]
    assert "\n".join(slides.code_parts("\n".join(["(", *50 * ["    1,"], ")"]))).count("1") == 50


def test_slides_of_sections_that_are_not_planned_are_beyond_the_path():
    texts = "# A title", "## A\n\nOne.", "### B\n\nTwo.", "## C\n\nThree.", "### D\n\nFour."
    notebook = new_notebook(cells=list(map(new_markdown_cell, texts)))
    found = split(slides.slides(notebook, {"A", "D"}).cells)
    assert [tuple(slide[:2]) for slide in found] == [
        (True, ["A title"]),
        (True, ["A"]),
        (False, ["A", "B"]),
        (False, ["C"]),
        (True, ["C", "D"]),
    ]
    assert all(on_path for on_path, *_ in split(slides.slides(notebook).cells))


def test_the_plan_of_a_lesson_is_the_teachers(tmp_path):
    (tmp_path / "teaching").mkdir()
    page = tmp_path / "teaching" / "01_small.md"
    chapter = tmp_path / "notebooks" / "01_small.ipynb"
    assert slides.lesson(chapter) is None
    page.write_text(
        "# A page\n\n## A lesson of 45 minutes\n\n| minutes | section | what |\n"
        "| 5 | *A*, *B* | See *D*. |\n"
        "| 40 | *`c`* | As above. |\n\n## A lesson of 90 minutes\n\n| 90 | *E* | All of it. |\n"
    )
    assert slides.lesson(chapter) == {"A", "B", "`c`"}


# All chapters.


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slides")
    assert slides.main(["--build", str(folder)]) == 0
    return folder


def substance(cells):
    """Return the predictions, titles of drawings, code and outputs of cells."""
    parts = []
    for cell in cells:
        if cell.cell_type == "code":
            shown = (output for output in cell.outputs if output.get("name") != "stderr")
            parts += [cell.source, *map(str, shown)]
        else:
            parts += re.findall(r"^(?:> \*\*.*|!\[.*?\](?=[\[(]))", cell.source, re.MULTILINE)
    return re.sub(r"\n+", "\n", "\n".join(parts))  # code loses blank lines where it is cut


@all_chapters
def test_everything_is_there_in_order_and_the_path_is_the_plan(path):
    core, plan = read_chapter(path, core=True), slides.lesson(path)
    deck = split(slides.slides(core, plan).cells)
    expected = [
        cell
        for cell in core.cells[1:]
        if not slides.mostly_imports(cell.source) and "notes" not in str(cell.metadata)
    ]
    assert substance(piece for *_, pieces in deck for piece in pieces) == substance(expected)
    for *_, pieces in deck:
        if any(piece.source.startswith("> **") for piece in pieces):
            assert all(piece.cell_type == "markdown" for piece in pieces)
    assert {heading for on_path, of, *_ in deck if on_path for heading in of} >= plan
    assert {of[-1] for on_path, of, *_ in deck if not on_path}.isdisjoint(plan)
    said = "".join(notes for _, _, notes, _ in deck)
    texts = "\n".join(cell.source for cell in core.cells if cell.cell_type == "markdown")
    for paragraph in re.findall(r"^[A-Z].{300,}$", texts, re.MULTILINE):
        assert paragraph in said


@all_chapters
def test_nothing_beyond_the_core_and_nothing_from_the_network(path, build):
    page = (build / f"{path.stem}.html").read_text()
    whole = "\n".join(cell.source for cell in read_chapter(path).cells)
    beyond = re.split(r"^## Exercises$", whole, flags=re.MULTILINE)[1]
    for heading in ["Exercises", *re.findall(r"^#+ ([^`$\n]+)$", beyond, re.MULTILINE)]:
        assert not re.search(rf"<h\d[^>]*>{re.escape(heading)}</h\d>", page)
    markup = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert "<script src" not in page
    assert re.findall(r"<(?:script|link|iframe|object)\b", markup) == []
    assert re.findall(r'src="(?!data:)[^"]*', markup) == []
    assert re.findall(r"@import|url\((?!['\"]?data:)[^)]*", markup) == []


# In a browser, which scales slides and parts them.

LOOK = """
const faults = [];
for (const slide of document.querySelectorAll(".slides section section")) {
    const place = Reveal.getIndices(slide);
    Reveal.slide(place.h, place.v, 99);
    for (const part of slide.querySelectorAll(":not(aside, aside *)")) {
        const box = part.getBoundingClientRect(), style = getComputedStyle(part);
        const name = `${place.h}/${place.v} ${part.className || part.tagName}`;
        if (box.right > innerWidth + 1 || box.bottom > innerHeight + 1 || box.left < 0)
            faults.push(`${name}: beyond the slide`);
        if (part.closest("math")) continue;
        if (style.display != "inline" && part.scrollWidth > part.clientWidth + 1)
            faults.push(`${name}: cut`);
        const letters = [...part.childNodes].some(node => node.nodeType == 3 && node.data.trim());
        if (letters && parseFloat(style.fontSize) < 18) faults.push(`${name}: too small`);
        if (part.tagName == "IMG" && style.display == "none") faults.push(`${name}: hidden`);
    }
}
const count = selector => document.querySelectorAll(`.slides ${selector}`).length;
return [faults, count("section section:not([data-visibility])"),
        ...["code", "printed", "text"].map(kind => count(`.${kind}`))];
"""


@pytest.fixture(scope="module")
def tab():
    browser = pytest.importorskip(
        "browser", reason="selenium is not installed (pip install selenium)"
    )
    found, reason = browser.find_browser()
    if found is None:
        pytest.skip(reason)
    lab = browser.Lab(*found)
    size = {"width": 1280, "height": 720, "deviceScaleFactor": 1, "mobile": False}
    lab.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    yield lab.driver
    lab.close()


@all_chapters
def test_nothing_is_cut_or_lost_in_a_browser(path, build, tab):
    deck = build / f"{path.stem}.html"
    tab.get(deck.as_uri())
    faults, on_path, *shown = tab.execute_script(LOOK)
    assert faults == []
    assert 15 <= on_path <= 45  # a minute each
    written = deck.read_text()
    assert shown == [
        len(re.findall(f'class="{k}[" ]', written)) for k in ("code", "printed", "text")
    ]
    loaded = tab.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
    assert [name for name in loaded if not name.startswith("data:")] == []


def test_a_slide_with_too_much_goes_on_to_the_right(tmp_path, tab):
    rows = "\n".join(f"x{i} = {i}" for i in range(20))
    cells = [
        new_markdown_cell("# A title\n\nWhy?"),
        new_markdown_cell("## A\n\n" + "\n\n".join(4 * [FIRST * 4])),
        code(rows, rows),
        new_markdown_cell(f"{FIRST}\n\n## B\n\nShort."),
    ]
    nbformat.write(new_notebook(cells=cells), tmp_path / "01_x.ipynb")
    tab.get(slides.write_deck(tmp_path / "01_x.ipynb", tmp_path).as_uri())
    faults, on_path, *_ = tab.execute_script(LOOK)
    assert faults == [] and on_path == tab.execute_script(
        "return Reveal.getHorizontalSlides().length"
    )
    heads = "return [...document.querySelectorAll('section section')].map(s => s.innerText)"
    found = tab.execute_script(heads)
    assert [text.split("\n")[0] for text in found][1:] == ["A", "A", "A", "B"]


def test_page_down_shows_the_path_alone_and_space_all(build, tab):
    from selenium.webdriver.common.keys import Keys

    deck = build / f"{CHAPTERS[2].stem}.html"
    for key, slides_of_the_deck in ((Keys.PAGE_DOWN, ":not([data-visibility])"), (Keys.SPACE, "")):
        tab.get("about:blank")
        tab.get(deck.as_uri())
        expected = tab.execute_script(
            "return [...document.querySelectorAll(`.slides section section${arguments[0]}`)]"
            ".map(slide => Object.values(Reveal.getIndices(slide)).slice(0, 2))",
            slides_of_the_deck,
        )
        seen = []
        for _ in range(2 * len(expected)):  # a step for what comes later
            place = tab.execute_script("return [Reveal.getIndices().h, Reveal.getIndices().v]")
            seen += [place] if place not in seen else []
            tab.find_element("tag name", "body").send_keys(key)
        assert seen == expected


def test_a_deck_can_be_printed(build, tab):
    from selenium.webdriver.support.ui import WebDriverWait

    deck = build / f"{CHAPTERS[0].stem}.html"
    tab.get(deck.as_uri())
    count = tab.execute_script("return document.querySelectorAll('.slides section section').length")
    tab.get(deck.as_uri() + "?print-pdf")
    wait = "return document.querySelectorAll('.pdf-page').length"
    WebDriverWait(tab, 20).until(lambda tab: tab.execute_script(wait) == count)
    parts = "return [...document.querySelectorAll('.pdf-page section > *')]"
    left = f"{parts}.map(part => part.getBoundingClientRect()).filter(box => box.width)"
    assert min(tab.execute_script(f"{left}.map(box => box.left)")) == 28
    printed = tab.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True})
    data = base64.b64decode(printed["data"])
    assert len(re.findall(rb"/Type\s*/Page\b", data)) == count
