"""Compute the reading time of each lesson and of each deeper page.

python tools/notebooks/lessons.py          a table of all
python tools/notebooks/lessons.py 03 05    a table of some lessons and their pages
python tools/notebooks/lessons.py --write  also write the minutes into the first cells of the
                                           lessons, rounded up to five

What counts:

- **words** of prose, 170 a minute: everything between blanks with a letter or a digit, including
  headings, tables and boxes, but not the title, folded answers, pictures, HTML tags and addresses.
  An inline formula counts as 3 words, a displayed one as 15: the average numbers of symbols in the
  cores when this was written (2.6 and 16).
- **lines** of code that are not blank, 9 a minute, including imports, comments and code in prose.
- **predictions**, two minutes each: boxes that begin with "Predict" or "Before you read on".
- **figures**: cells that show a picture, a minute each; **outputs** of other cells, three a minute;
  **drawings** in the text, a minute each. With these the minutes of lessons 01 to 07 are those that
  three readers of each counted in November 2026, within four; later lessons took them five to ten
  minutes longer.
- **seconds** of running: those in README's table, for lessons only.

A lesson is counted up to its exercises. Minutes are rounded up.
"""

import re
import sys
from dataclasses import dataclass
from fractions import Fraction
from itertools import starmap
from math import ceil

import nbformat
from contents import ChapterParser, pages_of, read_chapter
from drawings import DEFINITION
from hygiene import FENCED

LIMITS = {"words": 2400, "lines": 160, "predictions": 4, "figures": 4, "minutes": 50}  # of a lesson
COLUMNS = ("words", "lines", "predictions", "figures", "drawings", "outputs", "seconds", "minutes")
WORDS, LINES, OUTPUTS = 170, 9, 3  # words, lines and outputs a minute
PREDICTION, PICTURE = 2, 1  # minutes a prediction, minutes a figure or drawing
SYMBOL, FORMULA = 3, 15  # words per inline and per displayed formula
SENTENCE = "The lesson takes {} minutes"

_END = re.compile(r"^## (?:Exercises|References)\s*$", re.MULTILINE)
_FOLDED = re.compile(r"<details\b.*?</details>", re.DOTALL)
_PREDICTION = re.compile(r"^> \*\*(?:Predict|Before you read on)\b", re.MULTILINE)
CODE_OR_FORMULA = re.compile(r"`[^`]*`|(?<!\\)\$\$.*?\$\$|(?<!\\)\$[^$]+\$", re.DOTALL)
_DRAWING = re.compile(r"!\[[^\]]*\](?:\[\w+\]|\([^)]*\))")
_UNREAD = re.compile(  # title, drawing, target of a link, tag or address
    rf"^# .*$|{_DRAWING.pattern}|(?<=\])\([^)]*\)|</?[a-z][^>\n]*>", re.MULTILINE
)
_STATED = re.compile(SENTENCE.format(r"\d+"))
_WORD = re.compile(r"\S*[^\W_]\S*")


@dataclass
class Part:
    """The counts of a lesson or of a page."""

    words: int = 0
    lines: int = 0
    predictions: int = 0
    seconds: int = 0
    figures: int = 0
    drawings: int = 0
    outputs: int = 0

    @property
    def minutes(self):
        """The reading time, rounded up."""
        pairs = (
            (self.words, WORDS),
            (self.lines, LINES),
            (self.outputs, OUTPUTS),
            (self.seconds, 60),
        )
        pictures = PICTURE * (self.figures + self.drawings)
        return ceil(sum(starmap(Fraction, pairs)) + PREDICTION * self.predictions + pictures)

    def over(self):
        """List the counts above the limits of a lesson, as "lines 171 of 160"."""
        counts = [(name, getattr(self, name), limit) for name, limit in LIMITS.items()]
        return [f"{name} {n} of {limit}" for name, n, limit in counts if n > limit]


def count(cells, seconds=0):
    """Return the `Part` of some cells of a notebook, up to the exercises."""
    part = Part(seconds=seconds)
    for cell in cells:
        if cell.cell_type == "code":
            part.lines += _num_lines(cell.source)
            is_figure = any("image/png" in output.get("data", {}) for output in cell.outputs)
            part.figures += is_figure
            part.outputs += bool(cell.outputs) and not is_figure
            continue
        text, *rest = _END.split(cell.source, maxsplit=1)
        text = DEFINITION.sub("", _FOLDED.sub("", text))
        part.lines += sum(_num_lines(found[0]) - 2 for found in FENCED.finditer(text))
        text = FENCED.sub("", text)
        part.predictions += len(_PREDICTION.findall(text))
        text = CODE_OR_FORMULA.sub(_as_words, text)
        part.drawings += len(_DRAWING.findall(text))
        text = _UNREAD.sub(" ", text)
        part.words += len(_WORD.findall(text))
        if rest:
            break
    return part


def _num_lines(source):
    return sum(bool(line.strip()) for line in source.splitlines())


def _as_words(found):
    """Replace a formula by words; keep code."""
    words = " x" * (FORMULA if found[0].startswith("$$") else SYMBOL) + " "
    return found[0] if found[0][0] == "`" else words


def lesson(path):
    """Return the `Part` of the lesson at `path`, with its run time from README's table."""
    readme = (path.parents[1] / "README.md").read_text("utf-8")
    seconds = re.search(rf"\]\(notebooks/{path.name}\) \|.*\| (\d+) s \|$", readme, re.MULTILINE)
    if not seconds:
        raise ValueError(f"README.md: the table of chapters has no run time of {path.name}")
    return count(read_chapter(path, core=True).cells, int(seconds[1]))


def write(path, check=False):
    """Write a lesson's minutes, rounded up to 5, into its first cell; return whether they changed.

    With `check` nothing is written. Raises ValueError unless the cell has `SENTENCE` once.
    """
    notebook = read_chapter(path)
    first, sentence = notebook.cells[0], SENTENCE.format(5 * ceil(lesson(path).minutes / 5))
    stated = _STATED.findall(first.source)
    if len(stated) != 1:
        raise ValueError(f"{path.name}: its first cell must say once: {sentence}")
    first.source = first.source.replace(stated[0], sentence)
    if stated[0] != sentence and not check:
        nbformat.write(notebook, path)
    return stated[0] != sentence


def table(paths):
    """Return a table of lessons, each followed by its pages."""
    width = max(len(other.stem) + 2 for path in paths for other in (path, *pages_of(path)))
    lines = [f"{'lesson':<{width}}  {'  '.join(COLUMNS)}"]

    def add(name, part, remark=""):
        numbers = "  ".join(f"{getattr(part, column):>{len(column)}}" for column in COLUMNS)
        lines.append(f"{name:<{width}}  {numbers}{remark}")

    for path in paths:
        part = lesson(path)
        over = part.over()
        add(path.stem, part, f"  over: {', '.join(over)}" if over else "")
        for page in pages_of(path):
            add(f"  {page.stem}", count(read_chapter(page).cells))
    return "\n".join(lines)


def main(arguments=None):
    """Run the command line; return the exit status."""
    parser = ChapterParser(__doc__)
    parser.add_argument("--write", action="store_true", help="put the minutes into the lessons")
    options = parser.parse_args(arguments)
    paths = parser.chapters(options)
    try:
        print(table(paths))
        for path in paths if options.write else ():
            if write(path):
                print(f"{path.name}: its first cell has new minutes")
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
