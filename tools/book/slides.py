"""Write a deck of slides from the core of each chapter.

python tools/book/slides.py        every chapter, one file each under build/slides/
python tools/book/slides.py 03 05  some chapters

A deck is one offline file with reveal.js, formulas (MathML) and pictures. The rules for slides:

- Each slide names its section. The slides of sections that the teacher's page plans for 45 minutes
  are counted and placed side by side: Right and PageDown, the keys of a remote control, go through
  them. The others are marked and placed below the previous slide: space goes through all.
- A prediction (any quote) is placed below the text before it, or below code without output, if
  there is room; a drawing below its text, and a figure below its code, if that leaves most of its
  full height. The caption of a drawing or figure is the first sentence of the text after it.
- A short paragraph, and one before a prediction, is shown in full. Of a longer one the slide shows
  the first sentence (and the next if it is short), each question, each sentence with bold text, and
  a last sentence without full stop, which introduces what follows. The speaker notes (key S) have
  the whole paragraph.
- Lists, formulas and tables are shown in full. A slide with little text has a larger font.
- The table of a prediction or a box has a smaller font if it would not fit.
- Code is placed below its text, and its printed output below the code, one step later. What does
  not fit goes to the next slide. Long code has a smaller font: 26 to 18 pixels of 720.
- Progress bars and other output to stderr are left out.
- Imports, folds, and the paragraphs of the first cell after its question are in the notes only.

A cell with `"slideshow": {"slide_type": "notes"}` in its metadata goes to the notes, too. One with
`"slide"` starts a new slide: for a text that introduces the next code, not the figure before it.
"""

import argparse
import ast
import base64
import re
import struct
import sys
from html import escape
from importlib.resources import files
from itertools import zip_longest
from math import ceil
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "notebooks"))

import latex2mathml.converter
from contents import FOLDER, find_chapters, read_chapter
from jinja2 import pass_context
from nbconvert import SlidesExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from pygments.formatters import HtmlFormatter

# Sizes in pixels; WIDE and HIGH are the area below the heading.
WIDTH, HEIGHT = 1280, 720
WIDE, HIGH = 1224, 644
TEXT_HIGH = 600  # maximum height of text on a slide without anything else
TEXT, ASK, CAPTION, FORMULA, CODE, SMALL = 30, 38, 28, 36, 26, 18  # font sizes
TABLE = (26, 24, 22, 20)  # font sizes of a table
CELL_GAP = 16  # right of a cell
FORMULA_HIGH = 110  # height of a displayed formula, with margins
LINE, CODE_LINE = 1.3, 1.17  # line height / font size
GAP, PAD, ABOVE = 18, 8, 6  # below a piece; beside code; above and below code
ADVANCE = 0.603  # width of a character of code / font size: 0.602 in DejaVu Sans Mono and Menlo
BRIEF = 70  # a sentence of fewer characters is shorter than a line
FEW = 4  # maximum lines of a paragraph that is shown in full
TEXT_SHARE = 0.45  # maximum share of text above code
ENOUGH = 0.7  # minimum share of its full height that a picture gets below text or code
MINUTES = 45  # length of the lesson whose path is marked

_STYLE = f"""
html, body, main {{ height: 100%; margin: 0; background: #fff }}
.reveal {{ font: {TEXT}px/{LINE} "Liberation Sans", Arial, Helvetica, sans-serif; color: #1b1b1b }}
.reveal .slides section {{ box-sizing: border-box; width: {WIDTH}px; height: {HEIGHT}px;
  padding: 14px 28px; text-align: left }}
.reveal .slides section.stack {{ padding: 0 }}
html.reveal-print .reveal .slides .pdf-page section {{ padding: 14px 28px !important }}
.reveal h1 {{ font-size: 60px; line-height: 1.15; margin: 110px 0 48px; color: #12355b }}
.reveal .header {{ font-size: 22px; line-height: 30px; height: 32px; margin: 0 0 14px;
  padding-right: 90px; border-bottom: 2px solid #8fb8de; color: #12355b;
  white-space: nowrap; overflow: hidden }}
.reveal .header h2, .reveal .header h3 {{ display: inline; font-size: 22px; margin: 0 }}
.reveal .header h3 {{ font-weight: normal }}
.reveal [data-visibility] .header::after {{ content: "beyond {MINUTES} minutes"; float: right;
  color: #8a4b00 }}
.reveal .header h3::before {{ content: " \\00b7  " }}
.reveal p, .reveal ul, .reveal ol, .reveal table {{ margin: 0 0 {GAP}px }}
.reveal ul, .reveal ol {{ display: block; padding-left: 36px }}
.reveal li + li {{ margin-top: {GAP}px }}
.reveal li::marker {{ color: #12355b }}
.reveal a {{ color: #12355b }}
.reveal code, .reveal pre {{ font-family: "DejaVu Sans Mono", Menlo, Consolas, monospace }}
.reveal p code, .reveal li code, .reveal td code, .reveal th code {{ font-size: 0.85em }}
.reveal pre {{ margin: 0 0 {GAP}px; padding: {ABOVE}px {PAD}px; line-height: {CODE_LINE};
  white-space: pre-wrap; overflow-wrap: anywhere; box-sizing: border-box; width: {WIDE}px }}
.reveal .code pre {{ background: #f3f5f8 }}
.reveal .text pre {{ background: #f3f5f8; font-size: 24px }}
.reveal .printed pre {{ border-left: 6px solid #8fb8de }}
.reveal .ask {{ display: flex; min-height: {HIGH - 40}px; align-items: center }}
.reveal blockquote {{ margin: 0; padding: 32px 40px; font-size: {ASK}px; background: #fff6e3;
  border-left: 12px solid #edae49; width: 100%; box-sizing: border-box }}
.reveal blockquote p {{ margin: 0 }}
.reveal .asked + .text {{ margin-top: {GAP}px }}
.reveal .question, .reveal .few {{ font-size: {ASK}px }}
.reveal .picture img {{ display: block; width: {WIDE}px; object-fit: contain }}
.reveal .caption {{ font-size: {CAPTION}px; text-align: center }}
.reveal table {{ border-collapse: collapse; font-size: var(--letters, {TABLE[0]}px) }}
.reveal th, .reveal td {{ padding: 4px {CELL_GAP}px 4px 0; border-bottom: 1px solid #bbb;
  text-align: left; vertical-align: top }}
.reveal .whole {{ white-space: nowrap }}
.reveal .formula {{ margin: 20px 0 26px }}
.reveal .slide-number {{ top: 14px; right: 28px; bottom: auto; background: none;
  font: 20px sans-serif }}
.reveal .slide-number a {{ color: #6b6b6b; text-decoration: none }}
"""

_TEMPLATE = """
{%- extends 'reveal/index.html.j2' -%}
{%- block header -%}
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ resources.metadata.name | escape_html }}</title>
<style>{{ resources.deck.style }}</style>
</head>
{%- endblock -%}
{%- block markdowncell -%}
<div class="{{ cell.metadata.kind }}"
{%- if cell.metadata.size %} style="--letters: {{ cell.metadata.size }}px"{% endif -%}
>{{ cell.source | markdown2html }}</div>
{%- endblock -%}
{%- block codecell -%}
{%- if cell.source -%}
<div class="code" style="font-size: {{ cell.metadata.size }}px">
{{ cell.source | highlight_code(metadata=cell.metadata) }}</div>
{%- endif -%}
{%- for output in cell.outputs -%}
{%- if output.output_type == "stream" -%}
<div class="printed" style="font-size: {{ cell.metadata.size }}px">
<pre>{{ output.text | ansi2html }}</pre></div>
{%- else -%}
<div class="picture"><img alt="{{ output.metadata.alt | escape_html }}"
style="height: {{ cell.metadata.pixels }}px"
src="data:image/png;base64,{{ output.data['image/png'] | replace('\\n', '') }}"></div>
{%- endif -%}
{%- endfor -%}
{%- endblock -%}
{%- block footer_js -%}
<script>{{ resources.deck.script }}</script>
<script>
Reveal.initialize({
  width: {{ resources.deck.width }}, height: {{ resources.deck.height }},
  margin: 0, center: false, hash: true, transition: "none",
  slideNumber: "c/t", keyboard: {33: "left", 34: "right"}, controls: false,
  pdfSeparateFragments: false, plugins: [RevealNotes],
});
</script>
{%- endblock -%}
"""

_STATEMENT = re.compile(r"(?!else|elif|except|finally)[\w@#]")  # unindented
_BLOCK = re.compile(
    r"<details[\s\S]*?</details>|```[\s\S]*?\n```|\$\$[\s\S]*?\$\$\S*|(?:[^\n]*\S[^\n]*(?:\n|$))+"
)
_MARK = re.compile(r"<math[^>]*>(?:(?!</math>).)*</math>[.,;:?!)]+")  # keeps marks on the line
_CELL_END = re.compile(r"(?<!\\)\|")
_ITEM = re.compile(r"^(?:[-*]|\d+\.) ", re.MULTILINE)
_DRAWING = re.compile(r"!\[([^\]]+)\]\[(\w+)\]")
DEFINITION = re.compile(r"^\[(\w+)\]: (data:image/svg\+xml;base64,\S*)$", re.MULTILINE)
_LABEL = re.compile(r"\*\*[^*]+[.?]\*\*\s")
# Sentences do not end in code, formulas, links or brackets, or after abbreviations.
_WHOLE = re.compile(
    r"`[^`]*`|\$[^$]*\$|\[[^\]]*\]\([^)]*\)|"
    r"\([^()]*(?:\([^()]*\)[^()]*)*\)|\b(?:e\.g|i\.e|et al|vs)\."
)


class Renderer(IPythonRenderer):
    """Markdown renderer with formulas as MathML, and links to decks and the web only."""

    def inline_math(self, body):
        """Return an inline formula."""
        return latex2mathml.converter.convert(body, display="inline")

    def block_math(self, body):
        """Return a displayed formula, scaled to fit the slide."""
        size = FORMULA * min(1, 54 / len(re.sub(r"\\[a-zA-Z]+|[\\{}^_\s]", "", body)))
        formula = latex2mathml.converter.convert(body, display="block")
        return f'<div class="formula" style="font-size: {size:.0f}px">{formula}</div>'

    def heading(self, text, level, **attributes):
        """Return a heading without a link to itself."""
        return f"<h{level}>{text}</h{level}>"

    def link(self, text, url, title=None):
        """Return a link to another deck or the web, or only the text of other links."""
        found = re.match(r"(\d\d_\w+)\.ipynb", url)
        if found and found[1] in self.decks:
            return f'<a href="{found[1]}.html">{text}</a>'
        return f'<a href="{escape(url)}">{text}</a>' if url.startswith("http") else text


class Exporter(SlidesExporter):
    """nbconvert's slides exporter, with all resources in one file."""

    decks = ()  # chapters with a deck in the same folder

    @pass_context
    def markdown2html(self, context, source):
        """Render the text of a cell."""
        renderer = Renderer(escape=False)
        renderer.decks = self.decks
        html = MarkdownWithMath(renderer=renderer).render(source)
        return _MARK.sub(r'<span class="whole">\g<0></span>', html)


def blocks(notebook):
    """Yield the blocks of a notebook in order, as pairs (kind, content)."""
    for number, cell in enumerate(notebook.cells):
        slide_type = cell.metadata.get("slideshow", {}).get("slide_type")
        aside = slide_type in ("notes", "skip")
        if slide_type == "slide":
            yield "break", ""
        if cell.cell_type == "markdown":
            for kind, content in _text_blocks(cell.source):
                first = number == 0 and kind == "paragraph" and not _is_label(content)
                if first and "question" in content[:20]:
                    kind = "question"
                yield ("notes" if aside or (first and kind != "question") else kind), content
        elif cell.cell_type == "code":
            if aside or mostly_imports(cell.source):
                yield "imports", cell.source
                continue
            yield "code", re.sub(r"\n{3,}", "\n\n", cell.source)
            yield from _output_blocks(cell.outputs)


def _text_blocks(source):
    drawings = dict(DEFINITION.findall(source))
    for block in _BLOCK.findall(DEFINITION.sub("", source)):
        block = block.strip()
        if block.startswith("#"):
            yield "heading", block
        elif block.startswith(">"):
            yield "ask", block
        elif block.startswith("$$"):
            yield "formula", block
        elif found := _DRAWING.fullmatch(block):
            yield "drawing", (found[1], drawings[found[2]])
        elif block.startswith("<details"):
            yield "notes", block
        elif block.startswith(("```", "|")):
            yield "table", block
        elif _ITEM.match(block):
            starts = [found.start() for found in _ITEM.finditer(block)]
            for start, end in zip(starts, [*starts[1:], None], strict=True):
                yield "item", block[start:end].strip()
        else:
            yield "paragraph", block


def _output_blocks(outputs):
    printed = [
        output.get("text") or output.data.get("text/plain", "")
        for output in outputs
        if output.output_type in ("stream", "execute_result", "display_data")
        and "image/png" not in output.get("data", {})
        and output.get("name") != "stderr"
    ]
    printed += ["\n".join(output.traceback) for output in outputs if output.output_type == "error"]
    if text := "\n".join(part.strip("\n") for part in printed if part.strip()):
        yield "printed", text
    for output in outputs:
        if "image/png" in output.get("data", {}):
            yield "figure", output.data["image/png"]


def _is_label(paragraph):
    return bool(re.fullmatch(r"\*\*[^*]+\*\*:?", paragraph))


def mostly_imports(source):
    """Return whether more than half of a cell's statements are imports."""
    try:
        statements = ast.parse(source).body
    except SyntaxError:  # a magic
        return False
    imports = [part for part in statements if isinstance(part, ast.Import | ast.ImportFrom)]
    return len(imports) > len(statements) / 2


def sentences(paragraph):
    """Split a paragraph into its sentences."""
    kept = []

    def keep(found):
        kept.append(found[0])
        return f"\0{len(kept) - 1}\0"

    text = _WHOLE.sub(keep, " ".join(paragraph.split()))
    label = _LABEL.match(text)
    start = label.end() if label else 0
    parts = re.split(r"(?<=[.?!])\s+|(?<=[.?!]\*\*)\s+|(?<=[.?!]\*)\s+", text[start:])
    parts[0] = text[:start] + parts[0]
    return [re.sub(r"\0(\d+)\0", lambda found: kept[int(found[1])], part) for part in parts]


def points(paragraph, few=FEW):
    """Return the sentences of a paragraph to show on a slide, by the rules above.

    Args:
        paragraph: a text.
        few: maximum number of lines of a paragraph that is shown in full.
    """
    if lines(paragraph, TEXT) <= few:
        return [paragraph]
    parts = sentences(paragraph)
    while len(parts) > 1 and len(parts[0]) < BRIEF:
        parts[:2] = [" ".join(parts[:2])]
    return [
        part
        for place, part in enumerate(parts)
        if place == 0
        or "**" in part
        or part.endswith("?")
        or (place == len(parts) - 1 and not re.search(r"[.!)]\W*$", part))
    ]


def lines(text, size, width=WIDE - 36):
    """Return the number of lines of a text at a font size."""
    return ceil(len(_plain(text)) * size * 0.48 / width)


def _plain(text):
    """Return a text without markup except table bars; a TeX command becomes a letter."""
    text = re.sub(r"\]\([^)]*\)|\\[a-zA-Z]+", "x", text)
    return re.sub(r"[*`${}\[]|\\(?!\|)", "", text)


def text_high(text):
    """Return the height of a paragraph or list item."""
    return lines(text, TEXT) * TEXT * LINE + GAP


def table_high(table, size=TABLE[0]):
    """Return the height of a table at a font size, or of fenced code.

    Columns share the width as in a browser: none is narrower than its longest word, and the rest is
    divided in proportion to the missing width.
    """
    head, *rows = table.split("\n")
    if not head.startswith("|"):
        return 40 * (1 + len(rows))

    def wide(text):
        return len(text) * size * 0.55 + CELL_GAP

    rows = [_CELL_END.split(_plain(row).strip()[1:-1]) for row in (head, *rows[1:])]
    columns = [[cell.strip() for cell in column] for column in zip_longest(*rows, fillvalue="")]
    most = [max(map(wide, column)) for column in columns]
    least = [max(wide(word) for cell in column for word in cell.split(" ")) for column in columns]
    share = min(1, (WIDE - sum(least)) / (sum(most) - sum(least) or 1))
    room = [low + share * (high - low) for low, high in zip(least, most, strict=True)]
    wraps = (
        max(ceil(wide(cell) / have - 1e-9) for cell, have in zip(row, room, strict=True))
        for row in zip(*columns, strict=True)
    )
    return sum(wrap * size * LINE + 9 for wrap in wraps) + GAP


def code_rows(texts, size):
    """Return the number of rows of each line of texts at a font size."""
    columns = int((WIDE - 2 * PAD) / (size * ADVANCE))
    return [ceil(max(1, len(row)) / columns) for text in texts for row in text.split("\n")]


def code_high(texts, size):
    """Return the height of texts in one box each."""
    boxes = len(texts) * 2 * ABOVE + (len(texts) - 1) * GAP
    return sum(code_rows(texts, size)) * size * CODE_LINE + boxes


def code_size(texts, room, least=SMALL):
    """Return the font size at which code and output fit into a height, or None."""
    for size in range(CODE, least - 1, -1):
        whole = max(code_rows(texts, size)) == 1 or size == SMALL
        if whole and code_high(texts, size) <= room:
            return size
    return None


def code_parts(source):
    """Split code that is too long for a slide, if possible before an unindented line."""
    rows, parts = source.split("\n"), []
    while code_size(["\n".join(rows)], HIGH) is None:
        fits = next(n for n in range(len(rows), 0, -1) if code_size(["\n".join(rows[:n])], HIGH))
        starts = [n for n in range(fits // 3, fits + 1) if _STATEMENT.match(rows[n])]
        cut = max(starts, default=fits)
        parts.append("\n".join(rows[:cut]).rstrip())
        rows = rows[cut:]
    return [*parts, "\n".join(rows)]


def good_size(texts):
    """Return the minimum font size of code that shares a slide."""
    widest = max(len(row) for text in texts for row in text.split("\n"))
    return max(SMALL, min(20, int((WIDE - 2 * PAD) / (widest * ADVANCE))))


class Deck:
    """Builder of slides from blocks; `cells` has a cell for each piece of a slide."""

    def __init__(self, title):
        self.cells, self.headings, self.on_path = [], [f"## {title}"], True
        self.begin()

    def begin(self):
        """Start an empty slide."""
        self.pieces, self.notes, self.used = [], [], 0

    @property
    def only_text(self):
        """Whether the slide contains only text."""
        return all(piece.metadata.kind == "text" for piece in self.pieces)

    def close(self):
        """End the slide unless it is empty."""
        if not self.pieces:
            return
        if self.only_text and self.used < HIGH / 2:
            self.pieces[0].metadata.kind = "few"
        if self.pieces[0].metadata.kind != "title":
            heading = new_markdown_cell("\n\n".join(self.headings), metadata={"kind": "header"})
            self.pieces.insert(0, heading)
        self.pieces[0].metadata["slideshow"] = (
            {"slide_type": "slide"}
            if self.on_path
            else {"slide_type": "subslide", "data": {"visibility": "uncounted"}}
        )
        if self.notes:  # before any fragment, otherwise they would belong to it
            notes = new_markdown_cell("\n\n".join(self.notes), metadata={"kind": "notes"})
            notes.metadata["slideshow"] = {"slide_type": "notes"}
            self.pieces.insert(1, notes)
        self.cells += self.pieces
        self.begin()

    def add(self, cell, kind, high, **metadata):
        """Add a piece to the slide."""
        cell.metadata.update(kind=kind, **metadata)
        self.pieces.append(cell)
        self.used += high

    def leave_outputs(self):
        """End the slide if it shows an output, before a prediction or the text of the next code."""
        if not all(piece.metadata.kind in ("text", "code") for piece in self.pieces):
            self.close()

    def text(self, source, high, beside=0):
        """Add text to the slide, or to a new one if it and `beside` do not fit."""
        if self.pieces and self.used + high + beside > (TEXT_HIGH if self.only_text else HIGH):
            self.close()
        last = self.pieces[-1] if self.pieces else None
        if last and last.metadata.kind == "text":
            items = _ITEM.match(source) and _ITEM.match(last.source.split("\n\n")[-1])
            last.source += ("\n" if items else "\n\n") + source
            self.used += high
        else:
            self.add(new_markdown_cell(source), "text", high)

    def points(self, parts, follows):
        """Add sentences to the slide, together with a following formula."""
        if parts:
            beside = FORMULA_HIGH if follows == "formula" else 0
            self.text("\n\n".join(parts), sum(map(text_high, parts)), beside)

    def ask(self, source):
        """Add a prediction below the text of the slide, or to a new one, and its table."""
        rows = source.split("\n")
        table = [row[2:] for row in rows if row.startswith("> |")]
        quote = "\n".join(row for row in rows if not row.startswith("> |"))
        high = lines(quote, ASK, WIDE - 92) * ASK * LINE + 64 + GAP
        table = "\n".join(table)
        self.leave_outputs()
        if self.used + high + (table_high(table) if table else 0) > HIGH:
            self.close()
        self.add(new_markdown_cell(quote), "asked" if self.pieces or table else "ask", high)
        if table:
            fits = (size for size in TABLE if table_high(table, size) <= HIGH - self.used)
            self.add(new_markdown_cell(table), "text", 0, size=next(fits, TABLE[-1]))
        self.used = HIGH  # the answer must be on another slide

    def picture(self, kind, content, caption):
        """Add a drawing or a figure and its caption, below other pieces or to a new slide."""
        words = lines(caption, CAPTION) * CAPTION * LINE + GAP if caption else 0
        width, high = _svg_size(content[1]) if kind == "drawing" else _png_size(content)
        alone = int(min(HIGH - GAP - words, WIDE / width * high))
        high = int(min(HIGH - GAP - words - self.used, alone))
        last = self.pieces[-1].metadata.kind if self.pieces else ""
        follows = self.only_text or (kind == "figure" and last in ("code", "printed"))
        below = last and follows and high >= ENOUGH * alone
        if not below:
            self.close()
            high = alone
        if kind == "drawing":
            source = f'<img alt="{escape(content[0])}" style="height: {high}px" src="{content[1]}">'
            cell = new_markdown_cell(source)
        else:
            alt = re.sub(r"[*_`$]", "", caption) or "A figure; the text describes it."
            cell = new_code_cell("")
            cell.outputs = [new_output("display_data", {"image/png": content})]
            cell.outputs[0].metadata["alt"] = alt
        if below and last == "code":
            cell.metadata["slideshow"] = {"slide_type": "fragment"}
        self.add(cell, "picture", high + GAP, pixels=high)
        if caption:
            self.add(new_markdown_cell(caption), "caption", words)

    def code(self, source, printed):
        """Add code below the text of the slide, and its printed output below the code."""
        *before, source = code_parts(source)
        for part in before:
            self.close()
            size = code_size([part], HIGH)
            high = code_high([part], size) + GAP
            self.add(new_code_cell(part), "code", high, size=size, goes_on=True)
            self.close()
        if self.used > HIGH * TEXT_SHARE:
            self.close()
        both = [source, printed] if printed else [source]
        for texts, room in ((both, HIGH - self.used), ([source], HIGH - self.used), (both, HIGH)):
            if size := code_size(texts, room, good_size(texts)):
                break
        else:
            texts, room, size = [source], HIGH, code_size([source], HIGH)
        if room == HIGH:
            self.close()
        self.add(new_code_cell(source), "code", code_high([source], size) + GAP, size=size)
        if printed:
            output = new_code_cell("")
            output.outputs = [new_output("stream", text=printed)]
            if texts is both:
                output.metadata["slideshow"] = {"slide_type": "fragment"}
            else:
                self.close()
                size = code_size([printed], HIGH) or SMALL
            self.add(output, "printed", code_high([printed], size) + GAP, size=size)


def slides(notebook, sections=None):
    """Return a notebook of slides, with nbconvert's slide types in the metadata of its cells.

    Args:
        notebook: a core, with outputs.
        sections: the headings of the sections on the path of a lesson; None for all.
    """
    queue = list(blocks(notebook))
    title = queue.pop(0)[1].lstrip("# ")
    deck = Deck(title)
    deck.add(new_markdown_cell(f"# {title}"), "title", 300)
    while queue:
        kind, content = queue.pop(0)
        follows, after = queue[0] if queue else ("", "")
        if kind == "heading":
            on_path = sections is None or content.lstrip("# ") in sections
            below = not content.startswith("## ")
            if not (below and deck.only_text and deck.used < HIGH / 4 and on_path == deck.on_path):
                deck.close()
            deck.on_path = on_path
            deck.headings = deck.headings[:below] + [content]
        elif kind == "question":
            deck.add(new_markdown_cell("\n\n".join(points(content))), "question", HIGH)
            deck.notes.append(content)
        elif kind == "paragraph":
            text, code = _up_to_code([(kind, content), *queue])
            share = code and text <= HIGH * TEXT_SHARE and text + code <= HIGH
            if follows == "ask" or share or (code and deck.used + text > HIGH):
                deck.leave_outputs()
            deck.points([content] if follows == "ask" else points(content), follows)
            deck.notes.append(content)
        elif kind == "points":
            deck.points(content, follows)
        elif kind == "item":
            deck.text(content, text_high(content))
        elif kind == "formula":
            deck.text(content, FORMULA_HIGH)
        elif kind == "table":
            deck.text(content, table_high(content))
        elif kind == "imports":
            deck.close()
            deck.notes.append(f"```python\n{content}\n```")
        elif kind == "notes":
            deck.notes.append(content)
        elif kind == "ask":
            deck.ask(content)
        elif kind == "break":
            deck.close()
        elif kind in ("drawing", "figure"):
            caption = ""
            if follows == "paragraph" and (kind == "figure" or queue[1][0] != "code"):
                caption, *rest = points(after, few=0)
                queue[0] = ("points", rest)
            deck.picture(kind, content, caption)
            if caption:
                deck.notes.append(after)
        else:  # code
            deck.code(content, queue.pop(0)[1] if follows == "printed" else "")
    deck.close()
    return new_notebook(cells=deck.cells)


def lesson(chapter):
    """Return the sections of a lesson of 45 minutes, as planned in the teacher's page.

    Args:
        chapter: the path of a chapter.

    Returns:
        A set of headings, or None if the chapter has no teacher's page.
    """
    page = chapter.parent.parent / "teaching" / f"{chapter.stem}.md"
    if not page.exists():
        return None
    _, _, plan = page.read_text(encoding="utf-8").partition(f"\n## A lesson of {MINUTES} minutes\n")
    rows = re.findall(r"^\| \d+ \| (.+?) \|", plan.partition("\n## ")[0], re.MULTILINE)
    return {title for row in rows for title in re.findall(r"\*([^*]+)\*", row)}


def _up_to_code(queue):
    """Return the heights of the text before the next code, and of the code with its output.

    Both are 0 if anything else comes before the code.
    """
    high = 0
    for place, (kind, content) in enumerate(queue):
        if kind == "code":
            after = queue[place + 1 : place + 2]
            texts = [content, *(text for kind, text in after if kind == "printed")]
            return high, code_high(texts, good_size(texts))
        if kind not in ("paragraph", "item", "formula", "table", "notes"):
            break
        if kind in ("paragraph", "item"):
            high += sum(map(text_high, points(content)))
        elif kind == "formula":
            high += FORMULA_HIGH
        elif kind == "table":
            high += table_high(content)
    return 0, 0


def _png_size(data):
    return struct.unpack(">II", base64.b64decode(data)[16:24])


def _svg_size(source):
    text = base64.b64decode(source.split(",")[1]).decode()
    return [float(side) for side in re.search(r'viewBox="\S+ \S+ (\S+) (\S+)"', text).groups()]


def reveal():
    """Return the style and the scripts of reveal.js."""
    folder = files("sphinx_revealjs") / "_static" / "revealjs"
    style, *scripts = (
        (folder / name).read_text(encoding="utf-8")
        for name in ("dist/reveal.css", "dist/reveal.js", "plugin/notes/notes.js")
    )
    return style, "\n".join(scripts)


def write_deck(path, folder, decks=()):
    """Write the deck of a chapter, with links to other `decks`; return its path."""
    core = read_chapter(path, core=True)
    style, script = reveal()
    colours = HtmlFormatter(style="default").get_style_defs(".highlight")
    resources = {
        "metadata": {"name": next(blocks(core))[1].lstrip("# ")},
        "deck": {
            "style": style + colours + _STYLE,
            "script": script,
            "width": WIDTH,
            "height": HEIGHT,
        },
    }
    exporter = Exporter(raw_template=_TEMPLATE)
    exporter.decks = decks
    page, _ = exporter.from_notebook_node(slides(core, lesson(path)), resources=resources)
    deck = folder / f"{path.stem}.html"
    deck.write_text(page, encoding="utf-8")
    return deck


def main(arguments=None):
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="chapter", help="03, or 03_topic; all if none")
    parser.add_argument("--build", type=Path, default=FOLDER.parent / "build" / "slides")
    options = parser.parse_args(arguments)
    try:
        chapters = find_chapters(FOLDER, options.names)
    except ValueError as error:
        parser.error(str(error))
    options.build.mkdir(parents=True, exist_ok=True)
    decks = {path.stem for path in (*chapters, *options.build.glob("*.html"))}
    for path in chapters:
        print(write_deck(path, options.build, decks))
    return 0


if __name__ == "__main__":
    sys.exit(main())
