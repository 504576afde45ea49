"""Write a deck of slides from the core of each chapter.

python tools/book/slides.py        every chapter, one file each under build/slides/
python tools/book/slides.py 03 05  some chapters

A deck is one offline file with reveal.js, formulas (MathML) and pictures. The rules for slides:

- Each slide names its section. The slides of sections that the teacher's page plans for 45 minutes
  are counted and placed side by side: Right and PageDown, the keys of a remote control, go through
  them. The others are marked and placed below the previous slide: space goes through all.
- A heading, text below code, and a second piece of code begin a slide; a prediction (any quote)
  ends one. Paragraphs below an output comment on it and stay with it, except one that leads on: to
  a prediction, to code (unless a figure is above it), or without a full stop. Outputs and comments
  come one step later.
- A short paragraph, and one before a prediction, is shown in full; of a longer one the first
  sentence (and the next if it is short), each question, each sentence with bold text, and a last
  sentence without full stop. The speaker notes (key S) have the whole paragraph.
- Imports, folds, and the first cell after its question are in the notes only.
- Output to stderr, such as progress bars, is left out.

The browser does the layout (`book/slides/index.html.j2`): it scales a slide to its area, and parts
one that would become too small.

A slide type in the metadata of a cell, which JupyterLab edits, comes before these rules: "slide"
begins a slide, "notes" go to the speaker notes, and "skip" is left out.
"""

import re
import sys
from dataclasses import dataclass, field
from importlib.resources import files
from math import ceil
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "notebooks"))

from contents import DRAWING, FOLDER, ChapterParser, read_chapter
from mathml import markdown_to_html
from nbconvert import SlidesExporter
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from traitlets.config import Config

ROOT = FOLDER.parent
SHORT = 340  # characters of a paragraph that is shown in full: four lines
BRIEF = 70  # characters of a sentence that is shorter than a line
ROWS = 28  # maximum rows of code on a slide

_BLOCK = re.compile(
    r"<details[\s\S]*?</details>|```[\s\S]*?\n```|\$\$[\s\S]*?\$\$\S*|(?:[^\n]*\S[^\n]*(?:\n|$))+"
)
_KINDS = (  # of blocks, by their start
    ("notes", "<details"),
    ("heading", "#"),
    ("ask", ">"),
    ("whole", ("$$", "|", "```", "![", "- ", "* ", "1. ")),
    ("paragraph", ""),
)
_FULL_STOP = re.compile(r"[.?!)][*\"')]*$")
# A sentence does not end in code, formulas, links or brackets, or after abbreviations.
_SENTENCE = re.compile(
    r"(?:`[^`]*`|\$[^$]*\$|\[[^\]]*\]\([^)]*\)|\((?:[^()]|\([^()]*\))*\)|\b(?:e\.g|i\.e|et al|vs)\."
    r"|[^.?!]|[.?!](?![*\"')]*(?:\s|$)))+(?:[.?!][*\"')]*)?"
)
_MARK = re.compile(r"<math[^>]*>(?:(?!</math>).)*</math>[.,;:?!)]+")  # keeps marks on the line
_STATEMENT = re.compile(r"(?!else|elif|except|finally)[\w@#]")  # unindented


def to_html(source):
    """Render the text of a cell."""
    return _MARK.sub(r'<span class="whole">\g<0></span>', markdown_to_html(source))


@dataclass
class Slide:
    """A slide: its headings, whether it is on the path, and the cells and notes on it."""

    headings: list
    on_path: bool = True
    pieces: list = field(default_factory=list)
    notes: list = field(default_factory=list)
    shows: str = ""  # the last output, "figure" or "printed"; "code" if it has no output

    def add(self, source, kind="text"):
        """Add a text, in one piece with a text before it that leads to it."""
        last = self.pieces[-1] if self.pieces else None
        if last and last.metadata.get("kind") == kind and not _FULL_STOP.search(last.source):
            last.source += f"\n\n{source}"
        else:
            self.pieces.append(new_markdown_cell(source, metadata={"kind": kind}))

    def cells(self):
        """Return the cells of the slide, with nbconvert's slide types in their metadata."""
        beyond = {"slide_type": "subslide", "data": {"visibility": "uncounted"}}
        header = new_markdown_cell("\n\n".join(self.headings), metadata={"kind": "header"})
        header.metadata["slideshow"] = {"slide_type": "slide"} if self.on_path else beyond
        notes = new_markdown_cell("\n\n".join(self.notes), metadata={"kind": "notes"})
        notes.metadata["slideshow"] = {"slide_type": "notes"}
        return [header, notes, *self.pieces]


def blocks(notebook):
    """Yield the blocks of a notebook in order, as pairs (kind, content)."""
    for cell in notebook.cells:
        slide_type = cell.metadata.get("slideshow", {}).get("slide_type")
        if slide_type == "slide":
            yield "break", ""
        if slide_type == "skip":
            continue
        if cell.cell_type == "code":
            aside = slide_type == "notes" or mostly_imports(cell.source)
            yield ("notes", f"```python\n{cell.source}\n```") if aside else ("code", cell)
            continue
        text = DRAWING.sub("", cell.source)
        for name, drawing, _ in DRAWING.findall(cell.source):
            text = text.replace(f"][{name}]", f"]({drawing})")
        for place, block in enumerate(map(str.strip, _BLOCK.findall(text))):
            aside = slide_type == "notes" or (cell is notebook.cells[0] and place > 1)
            kind = next(kind for kind, start in _KINDS if block.startswith(start))
            yield ("notes" if aside else kind), block
        if cell is notebook.cells[0]:
            yield "break", ""


def mostly_imports(source):
    """Return whether more than half of a cell's statements are imports."""
    rows = [row for row in source.split("\n") if _STATEMENT.match(row)]
    return 2 * sum(row.startswith(("import ", "from ")) for row in rows) > len(rows)


def points(paragraph):
    """Return what a slide shows of a paragraph, by the rules above."""
    if len(paragraph) <= SHORT:
        return paragraph
    parts = [part.strip() for part in _SENTENCE.findall(" ".join(paragraph.split()))]
    if len(parts[0]) < BRIEF:
        parts[:2] = [" ".join(parts[:2])]
    return "\n\n".join(
        part
        for part in parts
        if part is parts[0]
        or "**" in part
        or part.endswith("?")
        or (part is parts[-1] and not _FULL_STOP.search(part))
    )


def code_parts(source):
    """Split code that is too long for a slide, if possible before an unindented line."""
    rows, parts = re.sub(r"\n{3,}", "\n\n", source).split("\n"), []
    while len(rows) > ROWS:
        goal = len(rows) / ceil(len(rows) / ROWS)
        starts = [n for n in range(ROWS // 3, ROWS + 1) if _STATEMENT.match(rows[n])]
        cut = min(starts, key=lambda n: abs(n - goal), default=ROWS)
        parts.append("\n".join(rows[:cut]).rstrip())
        rows = rows[cut:]
    return [*parts, "\n".join(rows)]


def slides(notebook, sections=None):
    """Return a notebook of slides, with nbconvert's slide types in the metadata of its cells.

    `notebook`: a core, with outputs; `sections`: the headings of those on the path, None for all.
    """
    (_, title), *found = blocks(notebook)
    deck = [Slide([f"#{title}"])]
    deck[0].add(title, "title")

    def begin():
        if deck[-1].pieces:
            deck.append(Slide(deck[-1].headings, deck[-1].on_path))
        return deck[-1]

    for (kind, content), (follows, _) in zip(found, [*found[1:], ("", "")], strict=True):
        slide = deck[-1]
        if kind == "notes":
            slide.notes.append(content)
        elif kind == "break":
            begin()
        elif kind == "heading":
            above = [] if content.startswith("## ") else slide.headings[:1]
            slide = begin()
            slide.headings = [*above, content]
            slide.on_path = sections is None or content.lstrip("# ") in sections
        elif kind == "code":
            outputs = [output for output in content.outputs if output.get("name") != "stderr"]
            for part in code_parts(content.source):
                if slide.shows:
                    slide = begin()
                slide.pieces.append(new_code_cell(part))
                slide.shows = "code"
            slide.pieces[-1].outputs = outputs
            if outputs:
                slide.shows = "figure" if "image/png" in outputs[-1].get("data", ()) else "printed"
        else:
            paragraph = kind == "paragraph"
            leads = follows == "ask" or (follows == "code" and slide.shows == "printed")
            comments = paragraph and not leads and _FULL_STOP.search(content)
            if slide.shows == "code" or (slide.shows and not comments):
                slide = begin()
            shown = points(content) if paragraph and follows != "ask" else content
            slide.add(shown, "fragment" if slide.shows else "text")
            if paragraph:
                slide.notes.append(content)
                slide.shows = slide.shows and "printed"
            elif kind == "ask":
                begin()
    cells = [cell for slide in deck if slide.pieces for cell in slide.cells()]
    return new_notebook(cells=cells, metadata={"title": title.lstrip("# ")})


def lesson(chapter):
    """Return the headings of a lesson of 45 minutes in the teacher's page of a chapter, or None."""
    page = chapter.parent.parent / "teaching" / f"{chapter.stem}.md"
    if not page.exists():
        return None
    _, _, plan = page.read_text(encoding="utf-8").partition("\n## A lesson of 45 minutes\n")
    rows = re.findall(r"^\| \d+ \| (.+?) \|", plan.partition("\n## ")[0], re.MULTILINE)
    return {title for row in rows for title in re.findall(r"\*([^*]+)\*", row)}


def write_deck(path, folder):
    """Write the deck of a chapter; return its path."""
    exporter = SlidesExporter(
        config=Config({"CSSHTMLHeaderPreprocessor": {"style": "default"}}),
        filters={"markdown2html": to_html},
        template_name="slides",
        extra_template_basedirs=[str(ROOT / "book")],
        extra_template_paths=[str(files("sphinx_revealjs") / "_static" / "revealjs")],
    )
    deck = slides(read_chapter(path, core=True), lesson(path))
    page, _ = exporter.from_notebook_node(deck)
    target = folder / f"{path.stem}.html"
    target.write_text(page, encoding="utf-8")
    return target


def main(arguments=None):
    """Run the command line; return the exit status."""
    parser = ChapterParser(__doc__)
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "slides")
    options = parser.parse_args(arguments)
    options.build.mkdir(parents=True, exist_ok=True)
    for path in parser.chapters(options):
        print(write_deck(path, options.build))
    return 0


if __name__ == "__main__":
    sys.exit(main())
