"""Write the feedback page of a graded notebook: points, answers, and messages of the checks.

A page is one file without scripts, loads nothing, and follows the reader's light or dark theme. The
student's text and output are inserted as text or images only, so they cannot act.
"""

import contextlib
import re
from pathlib import Path

from jinja2 import Environment
from markupsafe import Markup
from mathml import markdown_to_html
from nbconvert.filters import strip_ansi
from nbgrader.utils import is_grade, is_solution
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

TEMPLATE = Path(__file__).with_name("feedback.html.j2")
_NUMBER = re.compile(r"\d+(\.\d+)?")


def write(submission, cells, faults, folder):
    """Write the page of a graded `Submission`, given its executed cells and `grade.FAULTS`."""
    parts = [_part(part) for part in _split(cells)]
    exercises = [part for part in parts if "check" in part]
    for number, part in enumerate(exercises, start=1):
        name, (points, most) = [*submission.scores.items()][number - 1]
        part |= {"number": number, "title": part["title"] or name}
        part |= {"points": f"{points:g} of {most:g}", "words": submission.said_of(number)}
    environment = Environment(autoescape=True)
    environment.filters |= {
        # without the heading of an exercise, which the page has already
        "markdown": lambda source: Markup(markdown_to_html(re.sub(r"\A##? .*", "", source))),
        "code": lambda source: Markup(highlight(source, PythonLexer(), HtmlFormatter())),
        "outputs": _outputs,
    }
    page = environment.from_string(TEMPLATE.read_text("utf-8")).render(
        title=heading(cells[0], "# ") or submission.source.stem,
        submission=submission,
        parts=parts,
        faults=faults,
        light=Markup(HtmlFormatter(style="default").get_style_defs(".highlight")),
        dark=Markup(HtmlFormatter(style="github-dark").get_style_defs(".highlight")),
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{submission.source.stem}.html").write_text(page, encoding="utf-8", errors="replace")


def _split(cells):
    """Return lists of cells: one per exercise, and separate ones for other cells."""
    parts, checked = [[]], False
    for cell in cells:
        if heading(cell, "## ") or (checked and (is_solution(cell) or is_grade(cell))):
            parts.append([])
            checked = False
        parts[-1].append(cell)
        checked = checked or is_grade(cell)
    return parts


def _part(cells):
    """Return the template's variables for the cells of an exercise, or for other cells."""
    checks = [cell for cell in cells if is_grade(cell)]
    title = next(filter(None, (heading(cell, "## ") for cell in cells)), "")
    title = re.sub(r" \([\d.]+ points?\)$", "", title)
    if not checks:
        return {"title": title or "Set-up", "task": cells}
    task = [cell for cell in cells if cell.cell_type == "markdown" or "tags" in cell.metadata]
    answer = [cell for cell in cells if cell not in task and cell not in checks]
    return {"title": title, "task": task, "answer": answer, "check": checks[0]}


def heading(cell, marks):
    """Return the text of the heading with which a cell begins, or ""."""
    is_one = cell["cell_type"] == "markdown" and cell["source"].startswith(marks)
    return re.sub(r"[`*$]", "", cell["source"].splitlines()[0][len(marks) :]) if is_one else ""


def _outputs(cell):
    """List the outputs of a cell, without a check's points: (kind, content, folded content)."""
    found = []
    for output in cell.get("outputs", ()):
        with contextlib.suppress(ValueError, KeyError, AttributeError, TypeError):
            if output.output_type == "stream":
                found.append(("text", strip_ansi(output.text), ""))
            elif output.output_type == "error":
                trace = strip_ansi("\n".join(map(str, output.traceback)))
                found.append(("error", f"{output.ename}: {output.evalue}".rstrip(": "), trace))
            elif kinds := [kind for kind in ("image/png", "image/jpeg") if kind in output.data]:
                found.append((kinds[0], output.data[kinds[0]], ""))
            elif not (is_grade(cell) and _NUMBER.fullmatch(output.data["text/plain"])):
                found.append(("text", strip_ansi(output.data["text/plain"]), ""))
    return found
