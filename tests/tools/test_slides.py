"""The decks that `make slides` writes for the cores of all chapters."""

import base64
import functools
import re

import nbformat
import pytest
import slides
from contents import FOLDER, find_chapters, read_chapter
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

pytestmark = pytest.mark.slow

CHAPTERS = find_chapters(FOLDER)
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\3\xc0\0\0\0\xf0").decode()
all_chapters = pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """The folder with all decks."""
    folder = tmp_path_factory.mktemp("slides")
    assert slides.main(["--build", str(folder)]) == 0
    return folder


def kinds(cells):
    """Return what the cells are, without headings and notes."""
    found = [cell.metadata.kind for cell in cells]
    return [kind for kind in found if kind not in ("header", "notes")]


def split(cells):
    """Return the slides as lists of their cells."""
    found = []
    for cell in cells:
        if cell.metadata.get("slideshow", {}).get("slide_type") in ("slide", "subslide"):
            found.append([])
        found[-1].append(cell)
    return found


def notes(cells):
    """Return the text of all speaker notes."""
    return "\n\n".join(cell.source for cell in cells if cell.metadata.kind == "notes")


# The rule, on a small chapter.


def small_chapter():
    cells = [
        new_markdown_cell(
            "# A title\n\n**The question.** Why? It matters.\n\nFor one thing, this."
        ),
        new_code_cell("import torch\nimport d2lpar"),
        new_markdown_cell(
            "## The idea\n\nThis first sentence is longer than a line on a slide, so it is enough. "
            + 40 * "Not this one. "
            + "A **word** counts. This formula is\n\n$$a^2$$\n\n> **Predict.** How many?"
        ),
        new_code_cell("x = 1\nprint(x)", outputs=[new_output("stream", text="one\n")]),
        new_markdown_cell("## Going deeper\n\nToo deep."),
    ]
    figure = new_output("display_data", {"image/png": PNG, "text/plain": "<Figure>"})
    cells[3].outputs.append(figure)
    cells.insert(
        4,
        new_markdown_cell(
            "It rises, as the formula says that it does for all of the values of x. Ha."
        ),
    )
    return new_notebook(cells=cells)


def test_the_rule(tmp_path):
    path = tmp_path / "01_small.ipynb"
    nbformat.write(small_chapter(), path)
    found = split(slides.slides(read_chapter(path, core=True)).cells)
    assert [kinds(cells) for cells in found] == [
        ["title", "question"], ["text", "asked"], ["code", "printed", "picture", "caption"],
    ]  # fmt: skip
    title, (*_, text, ask), code = found
    assert "Why?" in title[-1].source and "For one thing, this." in notes(title)
    assert "import torch" in notes(found[1])
    assert "Not this one." not in text.source and "Not this one." in notes(found[1])
    assert "A **word** counts.\n\nThis formula is\n\n$$a^2$$" in text.source
    assert ask.source == "> **Predict.** How many?"
    steps = [cell.metadata.get("slideshow", {}).get("slide_type") for cell in code]
    assert steps == ["slide", "notes", None, "fragment", None, None]
    assert (
        code[-1].source == "It rises, as the formula says that it does for all of the values of x."
    )
    page = slides.write_deck(path, tmp_path).read_text()
    assert "<msup>" in page and "Too deep" not in page and "<title>A title</title>" in page


def slides_of(*texts):
    """Return what the slides of a chapter with these texts are, and their sources."""
    cells = [new_markdown_cell("# A title"), *map(new_markdown_cell, texts)]
    return [
        [(cell.metadata.kind, cell.source) for cell in part if cell.metadata.kind != "notes"]
        for part in split(slides.slides(new_notebook(cells=cells)).cells)[1:]
    ]


def test_a_prediction_stands_between_its_paragraph_and_its_table():
    long = "This is a sentence of some length, which a longer paragraph would not show. " * 6
    ((_, text, ask, table),) = slides_of(f"## A\n\n{long}\n\n> **Predict.** x?\n>\n> | a |\n> |-|")
    assert text == ("text", long.strip()) and ask[0] == "asked" and "|" not in ask[1]
    assert table == ("text", "| a |\n|-|")
    before, ask, after = slides_of(f"## A\n\n{2 * long}\n\n{2 * long}", "> **x?**", "An answer.")
    assert ("few" in dict(before)) != ("text" in dict(before))  # there was no room below it
    assert ask[1:] == [("ask", "> **x?**")] and after[1:] == [("few", "An answer.")]


def test_the_height_of_a_table_counts_the_lines_of_its_cells():
    few, more = ("| a | b |\n| --- | --- |\n" + "| c | " + "word " * n + "|" for n in (3, 150))
    assert slides.table_high(few) == slides.table_high("| a | b |\n| - | - |\n| - |")
    rows = (slides.table_high(more) - slides.table_high(few)) / (26 * slides.LINE)
    assert 7 <= rows + 1 <= 10  # 750 letters, 91 to 107 in a line
    assert slides.table_high(more, 20) < slides.table_high(more)
    assert slides.table_high(r"| a \| b |" + "\n| - |") > 0


def test_the_table_of_a_box_is_written_so_small_that_it_fits():
    table = "> **Box.**\n>\n> | a | b |\n> | - | - |" + ("\n> | c | " + "word " * 40 + "|") * 5
    ((_, ask, _),) = slides_of(f"## A\n\n{table}")
    assert ask == ("asked", "> **Box.**\n>")
    cells = [new_markdown_cell("# A title"), new_markdown_cell(f"## A\n\n{table}")]
    last = slides.slides(new_notebook(cells=cells)).cells[-1]
    assert slides.TABLE[-1] <= last.metadata.size < slides.TABLE[0]


def test_progress_bars_are_not_shown():
    cell = new_code_cell("x = 1")
    bar = new_output("stream", name="stderr", text="rounds: 100%")
    cell.outputs = [bar, new_output("stream", text="one\n")]
    shown = slides.slides(new_notebook(cells=[new_markdown_cell("# A"), cell])).cells
    printed = [output.text for cell in shown for output in cell.get("outputs", [])]
    assert printed == ["one"]


def test_a_short_paragraph_is_whole_and_a_marked_cell_begins_a_slide():
    notebook = new_notebook(cells=[new_markdown_cell(f"# {i}\n\nOne. Two.") for i in range(3)])
    notebook.cells[2].source = "Three. Four."
    assert len(split(slides.slides(notebook).cells)) == 2
    notebook.cells[2].metadata["slideshow"] = {"slide_type": "slide"}
    *_, before, after = split(slides.slides(notebook).cells)
    assert before[-1].source == "One. Two." and after[-1].source == "Three. Four."


def test_cells_marked_as_notes_are_on_no_slide():
    notebook = small_chapter()
    for cell in notebook.cells[3:5]:
        cell.metadata["slideshow"] = {"slide_type": "notes"}
    cells = slides.slides(notebook).cells
    assert "print(x)" in notes(cells) and "code" not in kinds(cells)


@pytest.mark.parametrize(("paragraph", "expected"), [
    ("It is `a. B`. And $x. Y$ (so. So), e.g. Ada.", 2),
    ("**A label.** One sentence. *Two*. \"Three.\"", 3),
    ("See [a. B](x.ipynb). No?", 2),
])  # fmt: skip
def test_sentences(paragraph, expected):
    found = slides.sentences(paragraph)
    assert len(found) == expected
    assert " ".join(found) == paragraph


def test_a_full_stop_stays_with_the_formula_before_it():
    html = slides.Exporter().markdown2html({}, "From $a$ to $b$. (And $c$.)")
    kept = re.findall(
        r'<span class="whole"><math[^>]*><mrow><mi>(.)</mi></mrow></math>(.+?)</span>', html
    )
    assert kept == [("b", "."), ("c", ".)")]


def test_letters_of_code_are_from_26_down_to_18_pixels():
    assert slides.code_size(["x = 1"], slides.HIGH) == 26
    assert slides.code_size(["x" * 100], slides.HIGH) == 20
    assert slides.code_size(["x\n" * 29 + "x"], slides.HIGH) == 18
    assert slides.code_size(["x\n" * 40], slides.HIGH) is None


def path_of(cells):
    """Return for each slide whether it is on the path of a lesson, and its headings."""
    found = []
    for part in split(cells):
        begin = part[0].metadata.slideshow
        beyond = begin == {"slide_type": "subslide", "data": {"visibility": "uncounted"}}
        assert beyond or begin == {"slide_type": "slide"}
        found.append((not beyond, re.findall(r"^#+ (.+)$", part[0].source, re.MULTILINE)))
    return found


def test_slides_of_sections_that_are_not_planned_are_beyond_the_path():
    texts = "# A title", "## A\n\nOne.", "### B\n\nTwo.", "## C\n\nThree.", "### D\n\nFour."
    notebook = new_notebook(cells=list(map(new_markdown_cell, texts)))
    found = path_of(slides.slides(notebook, {"A", "D"}).cells)
    assert found == [
        (True, ["A title"]),
        (True, ["A"]),
        (False, ["A", "B"]),
        (False, ["C"]),
        (True, ["C", "D"]),
    ]
    assert all(on_path for on_path, _ in path_of(slides.slides(notebook).cells))


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


def test_links_lead_to_decks_that_are_there(tmp_path, build):
    for folder in tmp_path, build:
        assert slides.main(["03", "--build", str(folder)]) == 0
        [page] = (path.read_text() for path in folder.glob("03_*.html"))
        links = re.findall(r'href="(\d\d_\w+\.html)"', page)
        assert bool(links) == (folder == build)
        assert [link for link in links if not (folder / link).exists()] == []


# All chapters.


@functools.cache
def core_and_slides(path):
    """Return the core of a chapter and the cells of its slides, which the tests leave alone."""
    core = read_chapter(path, core=True)
    return core, slides.slides(core).cells


def without_blank_lines(source):
    """Return code as it is compared; where it is cut, it may lose a blank line."""
    return re.sub(r"\n{2,}", "\n", source.strip())


@all_chapters
def test_all_figures_drawings_code_and_predictions_are_there_in_order(path):
    core, deck = core_and_slides(path)
    expected, found = [], []
    for cell in core.cells:
        if cell.cell_type == "markdown":
            drawings = dict(slides.DEFINITION.findall(cell.source))
            for line in cell.source.split("\n"):
                if line.startswith("> **"):
                    expected.append(line)
                elif used := re.match(r"!\[.*\]\[(\w+)\]$", line):
                    expected.append(drawings[used[1]])
        elif not slides.mostly_imports(cell.source):
            expected.append(without_blank_lines(cell.source))
            expected += [
                output.data["image/png"]
                for output in cell.outputs
                if "image/png" in output.get("data", {})
            ]
    begun = ""
    for cell in deck:
        if cell.metadata.kind in ("ask", "asked"):
            found.append(cell.source.split("\n")[0])
        elif cell.metadata.kind == "code":
            begun += cell.source + "\n"
            if "goes_on" not in cell.metadata:
                found.append(without_blank_lines(begun))
                begun = ""
        elif cell.metadata.kind == "picture":
            data = re.search(r'src="([^"]+)"', cell.source)
            found.append(data[1] if data else cell.outputs[0].data["image/png"])
    assert found == expected


@all_chapters
def test_no_output_is_beside_a_prediction(path):
    core, deck = core_and_slides(path)
    code, goes_on = "", False
    for cells in split(deck):
        assert kinds(cells) == ["ask"] or "ask" not in kinds(cells)
        if "asked" in kinds(cells):
            assert {*kinds(cells)} <= {"text", "code", "asked"}
            assert kinds(cells)[-2:] in (["asked", "text"], ["text", "asked"], ["code", "asked"])
        for cell in cells:
            if cell.metadata.kind == "code":
                code = f"{code}\n{cell.source}" if goes_on else cell.source
                goes_on = "goes_on" in cell.metadata
            if cell.metadata.kind == "printed":
                shown = without_blank_lines(code)
                of = [c for c in core.cells if without_blank_lines(c.source) == shown]
                first = cell.outputs[0].text.split()[0]
                assert any(first in str(output) for output in of[0].outputs)


@all_chapters
def test_the_path_has_every_section_and_takes_45_minutes(path):
    plan = slides.lesson(path)
    found = path_of(slides.slides(read_chapter(path, core=True), plan).cells)
    assert {heading for on_path, of in found if on_path for heading in of} >= plan
    assert {of[-1] for on_path, of in found if not on_path}.isdisjoint(plan)
    assert 15 <= sum(on_path for on_path, _ in found) <= 45  # a minute each


@all_chapters
def test_whole_paragraphs_are_in_the_notes(path):
    core, deck = core_and_slides(path)
    said = notes(deck)
    for kind, content in slides.blocks(core):
        if kind == "paragraph":
            assert content in said


@all_chapters
def test_nothing_beyond_the_core_and_nothing_from_the_network(path, build):
    page = (build / f"{path.stem}.html").read_text()
    headings = [
        [
            heading
            for cell in notebook.cells
            for heading in re.findall(r"^#+ ([^`$\n]+)$", cell.source, re.MULTILINE)
            if cell.cell_type == "markdown"
        ]
        for notebook in (read_chapter(path), read_chapter(path, core=True))
    ]
    beyond = headings[0][len(headings[1]) :]
    assert "Exercises" in beyond
    for heading in beyond:
        assert not re.search(rf"<h\d>{re.escape(heading)}</h\d>", page)
    markup = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert re.findall(r"<(?:script|link|iframe|object)\b", markup) == []
    assert re.findall(r'src="(?!data:)[^"]*', markup) == []
    assert re.findall(r"@import|url\((?!['\"]?data:)[^)]*", markup) == []


# In a browser.

WITHIN = """
const out = [];
for (const slide of document.querySelectorAll(".slides section section")) {
    const place = Reveal.getIndices(slide);
    Reveal.slide(place.h, place.v, 99);
    for (const part of slide.querySelectorAll("*")) {
        if (part.closest("aside, math")) continue;
        const box = part.getBoundingClientRect();
        const name = `${place.h}/${place.v} ${part.className || part.tagName}`;
        if (box.right > innerWidth + 1 || box.bottom > innerHeight + 1 || box.left < 0)
            out.push(`${name}: beyond the slide`);
        if (getComputedStyle(part).display != "inline" && part.scrollWidth > part.clientWidth + 1)
            out.push(`${name}: cut`);
        if (part.tagName == "PRE" && parseFloat(getComputedStyle(part).fontSize) < 18)
            out.push(`${name}: too small`);
    }
}
return out;
"""


@pytest.fixture(scope="module")
def tab():
    """A tab of 1280 x 720 pixels."""
    selenium = pytest.importorskip(
        "browser", reason="selenium is not installed (pip install selenium)"
    )
    found, reason = selenium.find_browser()
    if found is None:
        pytest.skip(reason)
    browser, driver = found
    options = selenium.webdriver.ChromeOptions()
    options.binary_location = browser
    for option in selenium.QUIET:
        options.add_argument(option)
    tab = selenium.webdriver.Chrome(options=options, service=selenium.Service(driver))
    size = {"width": 1280, "height": 720, "deviceScaleFactor": 1, "mobile": False}
    tab.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    yield tab
    tab.quit()


@all_chapters
def test_nothing_is_cut_in_a_browser(path, build, tab):
    tab.get((build / f"{path.stem}.html").as_uri())
    assert tab.execute_script(WITHIN) == []
    loaded = tab.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
    assert [name for name in loaded if not name.startswith("data:")] == []


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
        steps = tab.execute_script("return document.querySelectorAll('.slides .fragment').length")
        for _ in range(len(expected) + steps):
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


def test_code_that_is_too_long_for_a_slide_is_cut_between_statements():
    function = "def f{}(x):\n" + "\n".join(f"    x += {i}" for i in range(17)) + "\n    return x"
    source = "\n\n\n".join(function.format(i) for i in range(3))
    parts = slides.code_parts(source)
    assert parts == source.split("\n\n\n")
    assert slides.code_parts("x = 1") == ["x = 1"]
    assert "\n".join(slides.code_parts("\n".join(["(", *50 * ["    1,"], ")"]))).count("1") == 50
