"""How long a reader needs for each chapter: its core, which is one lesson, and *Going deeper*.

python tools/lessons.py              a table of all chapters
python tools/lessons.py 03 05        of some of them
python tools/lessons.py --write      and put the minutes into their first cells, rounded up to five

What counts:

- **words** of prose, 165 a minute: all that has a letter or a digit between blanks, in headings,
  tables and boxes, too. The title, folded answers, pictures, HTML tags and addresses do not count.
  A formula counts as 3 words, one on lines of its own as 15: so many letters, numbers and signs
  they had on average in the cores when this was written (2.6 and 16).
- **lines** of code that are not blank, 12 a minute: imports and comments, too, and code in prose.
- **predictions**, one minute each: boxes that begin with "Predict" or "Before you read on".
- **seconds** of running: those of the whole chapter in README's table; no others are stored. All of
  them count for the core, which adds less than a minute too much; *Going deeper* has none.

What cells print, and looking at figures, has no time of its own. The core is what comes before "##
Going deeper"; neither part has the exercises and references at the end. Minutes are rounded up.
"""

import argparse
import re
import sys
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from pathlib import Path

import nbformat
from drawings import DEFINITION
from hygiene import FENCED
from run import FOLDER, find_chapters, read_chapter

LIMIT = 50  # minutes of a core
WORDS, LINES = 165, 12  # that are read in a minute
SYMBOL, FORMULA = 3, 15  # words that a formula counts as, within a line and on lines of its own
SENTENCE = "The core takes {} minutes to read and to run, *Going deeper* another {}"

_END = re.compile(r"^## (?:Exercises|References)\s*$", re.MULTILINE)
_FOLDED = re.compile(r"<details\b.*?</details>", re.DOTALL)
_PREDICTION = re.compile(r"^> \*\*(?:Predict|Before you read on)\b", re.MULTILINE)
_CODE_OR_FORMULA = re.compile(r"`[^`]*`|(?<!\\)\$\$.*?\$\$|(?<!\\)\$[^$]+\$", re.DOTALL)
_UNREAD = re.compile(  # title, picture, target of a link, tag or address
    r"^# .*$|!\[[^\]]*\](?:\[\w+\]|\([^)]*\))|(?<=\])\([^)]*\)|</?[a-z][^>\n]*>",
    re.MULTILINE,
)
_WORD = re.compile(r"\S*[^\W_]\S*")
_TOLD = re.compile(re.escape(SENTENCE).replace(r"\{\}", r"(\d+)"))


@dataclass
class Part:
    """What a reader does in a part of a chapter."""

    words: int = 0
    lines: int = 0
    predictions: int = 0
    seconds: int = 0

    @property
    def minutes(self):
        """How long it takes, rounded up."""
        reading = Fraction(self.words, WORDS) + Fraction(self.lines, LINES)
        return ceil(reading + self.predictions + Fraction(self.seconds, 60))


def count(cells, seconds=0):
    """Count what is read in some cells of a notebook, up to its exercises; return a `Part`."""
    part = Part(seconds=seconds)
    for cell in cells:
        if cell.cell_type == "code":
            part.lines += _num_lines(cell.source)
            continue
        text, *rest = _END.split(cell.source, maxsplit=1)
        text = DEFINITION.sub("", _FOLDED.sub("", text))
        part.lines += sum(_num_lines(found[0]) - 2 for found in FENCED.finditer(text))
        text = FENCED.sub("", text)
        part.predictions += len(_PREDICTION.findall(text))
        text = _UNREAD.sub(" ", _CODE_OR_FORMULA.sub(_as_words, text))
        part.words += len(_WORD.findall(text))
        if rest:
            break
    return part


def _num_lines(source):
    return sum(bool(line.strip()) for line in source.splitlines())


def _as_words(found):
    """Return words in place of a formula, and code as it is."""
    if found[0][0] == "`":
        return found[0]
    return " x" * (FORMULA if found[0].startswith("$$") else SYMBOL) + " "


def parts(path):
    """Return the `Part`s of the chapter at `path`: its core, and *Going deeper*.

    Raises:
        ValueError: README's table has no run time of the chapter.
    """
    readme = (path.parents[1] / "README.md").read_text("utf-8")
    seconds = re.search(rf"\]\(notebooks/{path.name}\) \|.*\| (\d+) s \|$", readme, re.MULTILINE)
    if not seconds:
        raise ValueError(f"README.md: the table of chapters has no run time of {path.name}")
    core = read_chapter(path, core=True).cells
    deeper = read_chapter(path).cells[len(core) :]
    return count(core, int(seconds[1])), count(deeper)


def told(path):
    """Return the minutes that a chapter's first cell tells, of its core and of *Going deeper*.

    Raises:
        ValueError: it does not tell them once, in the words of `SENTENCE`.
    """
    found = _TOLD.findall(read_chapter(path).cells[0].source)
    if len(found) != 1:
        raise ValueError(f"{path.name}: its first cell must say once: {SENTENCE.format(50, 30)}")
    return tuple(int(minutes) for minutes in found[0])


def to_tell(path):
    """Return the minutes that a chapter's first cell should tell: those of `parts`, up to fives."""
    return tuple(5 * ceil(part.minutes / 5) for part in parts(path))


def write(path):
    """Put the minutes of a chapter into its first cell; return whether they are new."""
    minutes = to_tell(path)
    if told(path) == minutes:
        return False
    notebook = read_chapter(path)
    first = notebook.cells[0]
    first.source = _TOLD.sub(SENTENCE.format(*minutes), first.source)
    nbformat.write(notebook, path)
    return True


def table(paths):
    """Return the table of some chapters."""
    width = max(len(path.stem) for path in paths)
    lines = [f"{'chapter':<{width}}  words  lines  predictions  seconds  core (min)  deeper (min)"]
    for path in paths:
        core, deeper = parts(path)
        row = f"{path.stem:<{width}}  {core.words:5}  {core.lines:5}  {core.predictions:11}"
        row += f"  {core.seconds:7}  {core.minutes:10}  {deeper.minutes:12}"
        lines.append(row + (f"  over {LIMIT}" if core.minutes > LIMIT else ""))
    return "\n".join(lines)


def main(arguments=None):
    """Do what the command line says; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chapters", nargs="*", help="numbers or names; none means all")
    parser.add_argument("--write", action="store_true", help="put the minutes into the chapters")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the chapters are")
    options = parser.parse_args(arguments)
    try:
        paths = find_chapters(options.folder, options.chapters)
        print(table(paths))
        for path in paths if options.write else ():
            if write(path):
                print(f"{path.name}: its first cell has new minutes")
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
