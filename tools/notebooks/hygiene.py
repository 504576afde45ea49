"""Check chapters before a commit; each problem names the file and the cell.

python tools/notebooks/hygiene.py CHAPTER.ipynb ...    also checks headline lines (headlines.py)
"""

import json
import re
import sys
import tempfile
import warnings
from pathlib import Path

import headlines
import nbformat
from nbformat.v4.rwbase import rejoin_lines

MAX_LINES = 46  # of at most 80 characters, see notebooks/ruff.toml
MAX_BYTES = 1_500_000
WIDGET_TYPES = ("application/vnd.jupyter.widget-view+json", "application/vnd.jupyter.widget-state")

FENCED = re.compile(r"^(```|~~~)(?s:.*?)^\1[^\n]*$", re.MULTILINE)
_HEADING = re.compile(r"^(#{1,6})\s+\S", re.MULTILINE)
_SENTENCE = re.compile(r"^(?!#).*\w", re.MULTILINE)


def machine_paths(notebook):
    """List the paths of this machine in a notebook: pairs ("cell 3" or "metadata", path)."""
    texts = [("metadata", json.dumps(notebook.metadata))]
    for number, cell in enumerate(notebook.cells, start=1):
        where = f"cell {number}"
        texts += [(where, cell.source), (where, json.dumps(cell.metadata))]
        texts += [(where, text) for output in cell.get("outputs", []) for text in _texts(output)]
    pattern = path_pattern()
    return [(where, found[0]) for where, text in texts for found in pattern.finditer(text)]


def check_form(notebook):
    """The notebook must be valid, with unique cell ids and machine-independent metadata."""
    try:
        with warnings.catch_warnings(action="error"):  # of ids that are missing or taken
            nbformat.validate(notebook)
    except (nbformat.ValidationError, Warning) as error:
        yield f"not a valid notebook: {str(error).splitlines()[0]}"
    if (kernel := notebook.metadata.get("kernelspec", {}).get("name")) != "python3":
        yield f"metadata: the kernel is {kernel!r}, not 'python3'"


def check_executed(notebook):
    """The notebook must have run once from top to bottom: execution counts are 1, 2, 3, ..."""
    for expected, (number, cell) in enumerate(_code(notebook), start=1):
        if cell.execution_count != expected:
            yield f"cell {number}: execution count {cell.execution_count}, not {expected}"


def check_errors(notebook):
    """No cell may show an error, except cells tagged `raises-exception`."""
    for number, cell in _code(notebook):
        if "raises-exception" in cell.metadata.get("tags", []):
            continue
        for output in cell.outputs:
            if output.output_type == "error":
                yield f"cell {number}: {output.ename}: {output.evalue}"
            elif any("Traceback" in text for text in _texts(output)):
                yield f"cell {number}: the output shows a traceback"


def check_widgets(notebook):
    """The notebook must not contain widgets, which a page without a kernel cannot show."""
    if "widgets" in notebook.metadata:
        yield "metadata: widget state"
    for number, cell in _code(notebook):
        for output in cell.outputs:
            if any(kind.startswith(WIDGET_TYPES) for kind in output.get("data", {})):
                yield f"cell {number}: a widget as output"


def check_paths(notebook):
    """The notebook must not contain paths of this machine."""
    for where, path in machine_paths(notebook):
        yield f"{where}: path of the machine: {path}"


def check_headings(notebook):
    """The chapter must begin with its only H1, and no heading may skip a level."""
    texts = _prose(notebook)
    headings = [(number, len(marks)) for number, text in texts for marks in _HEADING.findall(text)]
    titles = [number for number, level in headings if level == 1]
    if len(titles) != 1:
        yield f"{len(titles)} headings of level 1 (cells {titles}), not one"
    if headings and headings[0] != (1, 1):
        yield f"cell {headings[0][0]}: the first heading is no H1 in cell 1"
    for (_, before), (number, level) in zip(headings, headings[1:], strict=False):
        if level > before + 1:
            yield f"cell {number}: a heading of level {level} after one of level {before}"


def check_prose(notebook):
    """Every code cell must follow a sentence, and every figure must be followed by one.

    Given cells, answers and checks of exercises need no sentence before them.
    """
    sentences = {number for number, text in _prose(notebook) if _SENTENCE.search(text)}
    for number, cell in _code(notebook):
        if number - 1 not in sentences and not _of_exercise(cell):
            yield f"cell {number}: no prose before it"
        kinds = [kind for output in cell.outputs for kind in output.get("data", {})]
        if any(kind.startswith("image/") for kind in kinds) and number + 1 not in sentences:
            yield f"cell {number}: no prose after its figure"


def check_length(notebook):
    """No code cell may be empty or, except in exercises, too long."""
    for number, cell in _code(notebook):
        count = len(cell.source.strip().splitlines())
        if not _of_exercise(cell) and not 0 < count <= MAX_LINES:
            yield f"cell {number}: {count} lines, not 1 to {MAX_LINES}"


def check_folded(notebook):
    """Every check of an exercise must be folded."""
    for number, cell in _code(notebook):
        is_check = cell.metadata.get("nbgrader", {}).get("grade")
        if is_check and not cell.metadata.get("jupyter", {}).get("source_hidden"):
            yield f"cell {number}: a check that is not folded"


def check_size(notebook):
    """The file must be small enough to clone and to read on a web page."""
    num_bytes = len(json.dumps(notebook, indent=1, ensure_ascii=False).encode())
    if num_bytes > MAX_BYTES:
        yield f"{num_bytes:,} bytes, more than {MAX_BYTES:,}"


CHECKS = {
    name.removeprefix("check_"): function
    for name, function in [*globals().items()]
    if name.startswith("check_")
}


def problems(path, checks=CHECKS):
    """List what the named checks find in the notebook at `path`, as lines `file: cell: problem`."""
    # Not nbformat.read, which repairs problems that check_form reports.
    notebook = rejoin_lines(nbformat.from_dict(json.loads(Path(path).read_bytes())))
    return [f"{Path(path).name}: {line}" for name in checks for line in CHECKS[name](notebook)]


def _of_exercise(cell):
    """Return whether a cell belongs to an exercise."""
    return "nbgrader" in cell.metadata or "given" in cell.metadata.get("tags", [])


def _code(notebook, kind="code"):
    """Return the cells of a kind, with their numbers."""
    return [(i, cell) for i, cell in enumerate(notebook.cells, 1) if cell.cell_type == kind]


def _prose(notebook):
    """Return the numbers and the texts, without fenced code, of the markdown cells."""
    return [(i, FENCED.sub("", cell.source)) for i, cell in _code(notebook, "markdown")]


def _texts(output):
    """Return the texts of an output, without images in base64."""
    texts = [output.get("text", ""), *output.get("traceback", []), output.get("evalue", "")]
    for kind, value in output.get("data", {}).items():
        if kind == "image/svg+xml" or not kind.startswith("image/"):
            texts.append(value if isinstance(value, str) else json.dumps(value))
    return texts


def path_pattern():
    repository = Path(__file__).resolve().parents[2]
    folders = {"/root", "/home", "/Users", "/tmp", tempfile.gettempdir(), str(Path.home())}
    folders |= {str(repository), str(repository.parent)}
    here = "|".join(map(re.escape, sorted(folders - {"/"}, key=len, reverse=True)))
    rest = r"[^\s\"'<>,;:)]*"
    return re.compile(
        rf"(?<![\w.~])(?:{here})(?:/{rest}|(?![\w-]))"
        rf"|(?<![\w.~])/{rest}/(?:site|dist)-packages\b{rest}"
        r"|\b[A-Z]:\\+Users\\+\w+"
    )


def main(paths):
    """Print the problems of the notebooks at `paths`; return the exit status."""
    found = [line for path in paths for line in problems(path) + headlines.problems(Path(path))]
    print("\n".join(found) if found else f"hygiene: {len(paths)} notebooks, nothing wrong")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
