"""Check that the headline lines of a chapter show what its text says.

`headlines.toml`, beside the chapters, declares expected ranges, in a table for each line under the
number of its chapter or the name of a page (`[[03_threads]]`):

    [[03]]
    line = "at the same time: maximum"  # text that a printed line contains
    ratio = [0.85, 1.15]                # range of the number after "ratio", in lines of `compare`

    [[03]]
    line = "speed-up of two devices"
    number = [1.6, inf]                 # range of the first number after the text, in other lines
    which = 2                           # the second line with this text; by default all of them
"""

import re
import tomllib

import nbformat
from contents import printed_texts

_NUMBER = r"(-?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?)"
_VALUES = {"ratio": re.compile(f" ratio {_NUMBER}"), "number": re.compile(_NUMBER)}
_NUMBERS_BELOW = re.compile(r"\n *(?=predicted +\S+ (?:measured|modelled) )")
_BUSY = re.compile(r"took \d+ % of the cores while this ran")


def declared(path):
    """Return the declarations for the chapter or page at `path`, a list of dicts.

    None if the chapters have no `headlines.toml`; ValueError if that is not in the form above.
    """
    is_page = path.parent.name == "deeper"
    file = path.parents[is_page] / "headlines.toml"
    if not file.exists():
        return None
    tables = tomllib.loads(file.read_text(encoding="utf-8"))
    for chapter, table in ((name, table) for name in tables for table in tables[name]):
        kinds = table.keys() - {"line", "which"}
        known = "line" in table and kinds in ({"ratio"}, {"number"})
        if not known or len(table[kinds.pop()]) != 2:
            raise ValueError(f"{file.name}: chapter {chapter} declares {table}")
    return tables.get(path.stem if is_page else path.name[:2], [])


def contradictions(notebook, tables):
    """List the outputs of a chapter that contradict its declarations.

    So does a line which reports that other programs took CPU time. A text is such as "cell 18: 'at
    the same time: maximum' has the ratio 1.30, declared 0.85 to 1.15".
    """
    lines = list(_lines(notebook))
    found = [f"cell {cell}: {line}" for cell, line in lines if _BUSY.search(line)]
    for table in tables:
        text, kind = table["line"], "ratio" if "ratio" in table else "number"
        those = [(cell, line.partition(text)[2]) for cell, line in lines if text in line]
        if kind == "ratio":  # skip lines of `Benchmark` with the same text
            those = [(cell, rest) for cell, rest in those if " ratio " in rest]
        if which := table.get("which", 0):
            those = those[which - 1 : which]
        if not those:
            found.append(f"there is no {f'line {which}' if which else 'line'} with {text!r}")
        low, high = table[kind]
        for cell, rest in those:
            value = _VALUES[kind].search(rest)
            if not value or not low <= float(value[1].replace(",", "")) <= high:
                has = f"the {kind} {value[1]}" if value else f"no {kind}"
                found.append(f"cell {cell}: {text!r} has {has}, declared {low} to {high}")
    return found


def _lines(notebook):
    """Yield (cell number, line) for the printed lines and the results of all cells.

    The two lines that `compare` prints for a long name are joined.
    """
    for number, cell in enumerate(notebook.cells, start=1):
        for text in printed_texts(cell):
            for line in _NUMBERS_BELOW.sub("  ", text).splitlines():
                yield number, line


def problems(path):
    """List the contradictions in the stored outputs of the chapter at `path`, with its name."""
    tables = declared(path)
    if tables is None:
        return []
    notebook = nbformat.read(path, as_version=4)
    return [f"{path.name}: {line}" for line in contradictions(notebook, tables)]
