"""Check that the numbers in a chapter's text are those that its cells printed.

python tools/notebooks/printed.py             list marked numbers that no cell prints
python tools/notebooks/printed.py --write 03  and mark new numbers in the texts of chapter 03 and
                                              its pages

A number of two digits or more that occurs in a text and in an output above it, in the same section,
is marked, in the list `printed` of the text cell's metadata. `make check` fails if no output has a
marked number: the chapter was executed again, and its text has the numbers of the previous run.

A text may round: 13 matches a printed 12.6, and 74 % matches 0.742. Numbers in code, formulas,
links and addresses and numbers of chapters do not count. A section without outputs, such as the
takeaways, refers to all outputs of the chapter so far.
"""

import re
import sys
from decimal import Decimal

import nbformat
from contents import ChapterParser, printed_texts, read_chapter
from drawings import DEFINITION
from hygiene import FENCED
from lessons import CODE_OR_FORMULA

_DIGITS = r"(?<![\w.,-])(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?"
_NUMBER = re.compile(_DIGITS + r"(?:e[-+]?\d+)?(?!\w|\.\d)")  # no part of a version 1.0.3
_PERCENT = re.compile(f"({_DIGITS}) ?%")
_NOT_TEXT = re.compile(  # code, formulas, links, tags, numbers of chapters
    CODE_OR_FORMULA.pattern + r"|\[[^\]]*\]\([^)]*\)|<[^>\n]*>"
    r"|\b[Cc]hapters? \d\d(?:(?:, \d\d)*,? (?:and|to) \d\d)?",
    re.DOTALL,
)
_SECTION = re.compile(r"^## ", re.MULTILINE)


def contradictions(notebook):
    """List marked numbers that no output above contains: "cell 9: 1.28 is not printed above"."""
    return [
        f"cell {place}: {number} is not printed above"
        for place, cell, outputs in _texts(notebook)
        for number in cell.metadata.get("printed", [])
        if number in _numbers(cell.source) and not _has(outputs, number)
    ]


def mark(notebook):
    """Mark, in place, the numbers of each text that outputs contain, and no others.

    A marked number that is no longer printed stays marked.
    """
    for _, cell, outputs in _texts(notebook):
        marked = cell.metadata.pop("printed", [])
        numbers = [n for n in _numbers(cell.source) if n in marked or _has(outputs, n)]
        if numbers:
            cell.metadata["printed"] = numbers


def _texts(notebook):
    """Yield the number of each text cell, the cell, and the numbers printed above it."""
    section, chapter = [], []
    for place, cell in enumerate(notebook.cells, start=1):
        if cell.cell_type == "markdown":
            if _SECTION.search(cell.source):
                section = []
            yield place, cell, section or chapter
            continue
        printed = [_value(found) for text in printed_texts(cell) for found in _NUMBER.findall(text)]
        section, chapter = section + printed, chapter + printed


def _numbers(source):
    """List the distinct numbers of a text: `"1,024"`, `"0.86"`, `"74 %"`."""
    text = FENCED.sub(" ", DEFINITION.sub("", source))
    text = _NOT_TEXT.sub(" ", text)
    numbers = [f"{found} %" for found in _PERCENT.findall(text)]
    numbers += _NUMBER.findall(_PERCENT.sub(" ", text))
    return list(dict.fromkeys(number for number in numbers if sum(map(str.isdigit, number)) > 1))


def _value(number):
    return Decimal(number.replace(",", "").rstrip(" %"))


def _has(outputs, number):
    """Return whether a number of a text is a rounded output; 74 % also matches 0.742."""
    value = _value(number)
    half = Decimal(5).scaleb(value.as_tuple().exponent - 1)
    candidates = outputs + [100 * output for output in outputs] * number.endswith("%")
    return any(abs(value - candidate) <= half for candidate in candidates)


def main(arguments=None):
    """Run the command line; return the exit status."""
    parser = ChapterParser(__doc__)
    parser.add_argument("--write", action="store_true", help="mark new numbers")
    options = parser.parse_args(arguments)
    status = 0
    for path in parser.chapters(options, pages=True):
        notebook = read_chapter(path)
        if options.write:
            mark(notebook)
            nbformat.write(notebook, path)
        for line in contradictions(notebook):
            print(f"{path.name}: {line}")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
