"""Write the feedback page of a graded notebook: points, answers, and messages of the checks.

A page is one file without scripts, loads nothing, and follows the reader's light or dark theme. The
student's text and output are inserted as text or images only, so they cannot act.
"""

import base64
import contextlib
import functools
import re
from html import escape

import latex2mathml.converter
from jinja2 import Environment
from markupsafe import Markup
from nbconvert.filters import strip_ansi
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from nbgrader.utils import is_grade, is_solution
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

IMAGES = ("image/png", "image/jpeg")
_NUMBER = re.compile(r"\d+(\.\d+)?")

_LIGHT, _DARK = (
    HtmlFormatter(style=style).get_style_defs(".highlight") for style in ("default", "github-dark")
)
_STYLE = f"""
{_LIGHT}
:root {{ color-scheme: light; --text: #1b1b1b; --page: #fff; --soft: #f9fafc; --line: #b9c9da;
  --link: #12457b; --warn: #6b3f00; --warning: #fff3d9 }}
@media (prefers-color-scheme: dark) {{
{_DARK}
:root {{ color-scheme: dark; --text: #e4e6ea; --page: #15181d; --soft: #20252c; --line: #43566b;
  --link: #8fc3ff; --warn: #ffd48a; --warning: #352a17 }}
}}
body {{ max-width: 1000px; margin: 0 auto; padding: 16px 24px; background: var(--page);
  color: var(--text); font: 16px/1.4 system-ui, "Liberation Sans", Arial, sans-serif;
  overflow-wrap: anywhere }}
h1 {{ font-size: 26px; margin: 0 0 8px }}
h2 {{ font-size: 20px; margin: 0; display: flex; gap: 16px; align-items: baseline }}
h2 span {{ margin-left: auto; white-space: nowrap }}
h2 a {{ font-size: 14px; font-weight: normal }}
h3 {{ font-size: 14px; margin: 8px 0 2px }}
p, ul, ol {{ margin: 6px 0 }}
a, summary {{ color: var(--link) }}
summary {{ cursor: pointer }}
table {{ border-collapse: collapse; margin: 10px 0 }}
th, td {{ text-align: left; vertical-align: top; padding: 3px 18px 3px 0;
  border-bottom: 1px solid var(--line) }}
th, td:nth-child(2) {{ white-space: nowrap }}
section {{ margin-top: 28px; padding-top: 10px; border-top: 3px solid var(--line) }}
.said {{ background: var(--warning); color: var(--warn); padding: 2px 8px; border-radius: 4px }}
pre {{ font: 13.5px/1.35 "DejaVu Sans Mono", Menlo, Consolas, monospace; margin: 4px 0;
  padding: 6px 8px; white-space: pre-wrap; border-radius: 4px }}
.highlight, .highlight pre {{ background: var(--soft); border-radius: 4px }}
.shown pre {{ border-left: 4px solid var(--line) }}
.answer {{ max-height: 400px; overflow-y: auto }}
.check {{ max-height: 230px; overflow-y: auto }}
img {{ max-width: 100%; background: #fff }}
@media print {{ .answer, .check {{ max-height: none }} }}
"""

_TEMPLATE = """
{%- macro shown(cells, with_code=true) -%}
{%- for cell in cells -%}
{%- if cell.cell_type == "markdown" -%}{{ cell.source | markdown }}
{%- elif cell.cell_type == "raw" -%}<pre>{{ cell.source }}</pre>
{%- else -%}
{%- if with_code -%}{{ cell.source | code }}{%- endif -%}
{%- if cell.metadata.fault -%}<p class="said">{{ faults[cell.metadata.fault] }}</p>{%- endif -%}
<div class="shown">
{%- for kind, content, rest in cell | outputs -%}
{%- if kind == "error" -%}
<details><summary>{{ content }}</summary><pre>{{ rest }}</pre></details>
{%- elif kind == "text" -%}<pre>{{ content }}</pre>
{%- else -%}<img alt="an output" src="data:{{ kind }};base64,{{ content }}">
{%- endif -%}
{%- endfor -%}
</div>
{%- endif -%}
{%- endfor -%}
{%- endmacro -%}
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>{{ style }}</style>
</head>
<body>
<h1>{{ title }}: {{ points }} of {{ most }} points</h1>
<p>Handed in by {{ student }}{% if name %} as <code>{{ name }}</code>{% endif %}.</p>
{%- for sentence in said %}<p class="said">{{ sentence }}</p>{% endfor %}
<table id="points">
<thead><tr><th>exercise</th><th>points</th><th>what the grader noticed</th></tr></thead>
<tbody>
{%- for one in parts if one.number %}
<tr><td>{% if executed %}<a href="#exercise-{{ one.number }}">{{ one.title }}</a>
{%- else %}{{ one.title }}{% endif %}</td>
<td>{{ one.points }} of {{ one.most }}</td><td>{{ one.said | join(" ") }}</td></tr>
{%- endfor %}
</tbody>
</table>
{%- for one in parts if executed -%}
<section{% if one.number %} id="exercise-{{ one.number }}"{% endif %}>
{%- if one.number -%}
<h2>{{ one.title }} <span>{{ one.points }} of {{ one.most }} points</span>
<a href="#points">all points</a></h2>
{%- for sentence in one.said %}<p class="said">{{ sentence }}</p>{% endfor %}
{%- endif -%}
<details{{ " open" if one.task | any_trouble }}>
<summary>{{ "The task" if one.number else one.title }}</summary>{{ shown(one.task) }}</details>
{%- if one.number -%}
<h3>Answer</h3>
<div class="answer">{{ shown(one.answer) }}</div>
<h3>Check</h3>
<div class="check">{{ shown([one.check], with_code=false) }}</div>
<details><summary>The code of the check</summary>{{ one.check.source | code }}</details>
{%- endif -%}
</section>
{%- endfor -%}
</body>
</html>
"""


def _mathml(_, latex, display):
    try:
        return latex2mathml.converter.convert(latex, display=display)
    except Exception:  # an unknown command: show the source of the formula
        return f"<code>{escape(latex)}</code>"


class Renderer(IPythonRenderer):
    """nbconvert's markdown with formulas as MathML, and links to the web only."""

    inline_math = functools.partialmethod(_mathml, display="inline")
    block_math = functools.partialmethod(_mathml, display="block")

    def heading(self, text, level, **attributes):
        """Return a heading, or "" for headings of exercises, which the page has already."""
        return f"<h{level}>{text}</h{level}>" if level > 2 else ""

    def link(self, text, url, title=None):
        """Return a link to the web, or only the text of other links."""
        return f'<a href="{escape(url)}">{text}</a>' if url.startswith("https://") else text


def write(submission, cells, faults, folder):
    """Write the page of a graded notebook.

    Args:
        submission: a graded `Submission`.
        cells: the executed cells.
        faults: a dict from keys of remarks to sentences.
        folder: the folder in which to write `NN_topic.html`.
    """
    said = [submission.fault] if submission.fault else submission.said_of(0)
    scores = iter(submission.scores.items())
    parts, number = [], 0
    for part in map(_part, _split(cells)):
        if "check" in part:
            name, (points, most) = next(scores)
            number += 1
            part |= {"number": number, "points": f"{points:g}", "most": f"{most:g}"}
            part["title"] = part["title"] or name
            part["said"] = [faults[word] for word in submission.said_of(number)]
        part["title"] = part["title"] or "Set-up"
        parts.append(part)
    points, most = submission.total
    page = (
        _environment()
        .from_string(_TEMPLATE)
        .render(
            title=_heading(cells[0], "# ") or submission.source.stem,
            student=submission.student,
            name="" if submission.fault == "missing" else submission.path.name,
            points=f"{points:g}",
            most=f"{most:g}",
            said=[faults[word] for word in said],
            parts=parts,
            executed=not submission.fault,
            faults=faults,
            style=Markup(_STYLE),
        )
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{submission.source.stem}.html").write_text(page, encoding="utf-8", errors="replace")


def _split(cells):
    """Return lists of cells: one per exercise, and separate ones for other cells."""
    parts, checked = [[]], False
    for cell in cells:
        if _heading(cell, "## ") or (checked and (is_solution(cell) or is_grade(cell))):
            parts.append([])
            checked = False
        parts[-1].append(cell)
        checked = checked or is_grade(cell)
    return parts


def _part(cells):
    """Return the template's variables for the cells of an exercise."""
    checks = [cell for cell in cells if is_grade(cell)]
    title = next(filter(None, (_heading(cell, "## ") for cell in cells)), "")
    part = {"title": re.sub(r" \([\d.]+ points?\)$", "", title), "task": cells}
    if checks:
        task = [cell for cell in cells if cell.cell_type == "markdown" or "tags" in cell.metadata]
        answer = [cell for cell in cells if cell not in task and cell not in checks]
        part |= {"task": task, "answer": answer, "check": checks[0]}
    return part


def _heading(cell, marks):
    """Return the text of the heading with which a cell begins, or ""."""
    is_one = cell.cell_type == "markdown" and cell.source.startswith(marks)
    return re.sub(r"[`*$]", "", cell.source.splitlines()[0][len(marks) :]) if is_one else ""


def _environment():
    environment = Environment(autoescape=True)
    render = MarkdownWithMath(renderer=Renderer(escape=False)).render
    environment.filters |= {
        "markdown": lambda source: Markup(render(source)),
        "code": lambda source: Markup(highlight(source, PythonLexer(), HtmlFormatter())),
        "outputs": _outputs,
        "any_trouble": _any_trouble,
    }
    return environment


def _any_trouble(cells):
    """Return whether a cell ended in an error or was not executed to its end."""
    return any(kind == "error" for cell in cells for kind, *_ in _outputs(cell))


def _outputs(cell):
    """List the outputs of a cell as triples (kind, content, folded content).

    Consecutive printed texts are joined. The points that end a check are left out: the page has
    them already.
    """
    found, printed = [], None
    for output in cell.get("outputs", ()):
        with contextlib.suppress(ValueError, KeyError, AttributeError, TypeError):
            if output.output_type == "stream":
                text = strip_ansi(output.text)
                if found and found[-1] is printed:
                    text = found.pop()[1] + text
                printed = ("text", text, "")
                found.append(printed)
            elif output.output_type == "error":
                trace = strip_ansi("\n".join(map(str, output.traceback)))
                found.append(("error", f"{output.ename}: {output.evalue}".rstrip(": "), trace))
            elif not (is_grade(cell) and _NUMBER.fullmatch(output.data.get("text/plain", ""))):
                found.append(_data(output.data))
    return found


def _data(data):
    for kind in IMAGES:
        if kind in data:
            return kind, base64.b64encode(base64.b64decode(data[kind])).decode(), ""
    return "text", strip_ansi(str(data["text/plain"])), ""
