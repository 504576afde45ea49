"""A page of feedback for a graded notebook: its points, the answers, and what the checks say."""

import base64
import contextlib
import functools
from html import escape

import latex2mathml.converter
import nbformat
from jinja2 import pass_context
from nbconvert import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

# nbconvert's page without the scripts that it would load from the network.
TEMPLATE = """
{%- extends 'lab/index.html.j2' -%}
{%- block html_head_js -%}{%- endblock -%}
{%- block html_head_js_mathjax -%}{%- endblock -%}
{%- block html_head_js_mermaidjs -%}{%- endblock -%}
"""
IMAGES = ("image/png", "image/jpeg")


class Renderer(IPythonRenderer):
    """nbconvert's markdown, with formulas that a browser draws without a script."""

    def inline_math(self, body):
        """Return a formula within a line."""
        return _mathml(body, "inline")

    def block_math(self, body):
        """Return a formula on lines of its own."""
        return _mathml(body, "block")


class Exporter(HTMLExporter):
    """nbconvert's HTML, offline."""

    @pass_context
    def markdown2html(self, context, source):
        """Render the text of a markdown cell."""
        return MarkdownWithMath(renderer=Renderer(escape=False)).render(source)


def write(submission, cells, faults, folder):
    """Write the page of a graded notebook.

    Nothing that the student wrote or that the code showed can act in the page: it is shown as
    text, or as an image.

    Args:
        submission: a `Submission` with its points.
        cells: the executed cells.
        faults: a sentence for each word of a remark.
        folder: where to write `NN_topic.html`.
    """
    points, most = submission.total
    rows = ["| exercise | | points | |", "| --- | --- | --- | --- |"]
    for number, (name, (got, worth)) in enumerate(submission.scores.items(), start=1):
        said = " ".join(faults[word] for word in submission.said_of(number))
        rows.append(f"| {number} | {name} | {got:g} of {worth:g} | {said} |")
    intro = f"# {submission.source.stem}: {points:g} of {most:g} points\n\n"
    words = [submission.fault] if submission.fault else submission.said_of(0)
    said = " ".join(faults[word] for word in words)
    intro += f"Handed in by {escape(submission.student)}. {said}\n\n"
    shown = [nbformat.v4.new_markdown_cell(intro + "\n".join(rows)), *map(_shown, cells)]
    for number, cell in enumerate(shown):
        cell.id = f"cell-{number}"
    page = _page(nbformat.v4.new_notebook(cells=shown), submission.source.stem)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{submission.source.stem}.html").write_text(page, encoding="utf-8", errors="replace")


@functools.cache
def _exporter():
    return Exporter(raw_template=TEMPLATE)


def _page(notebook, name):
    return _exporter().from_notebook_node(notebook, resources={"metadata": {"name": name}})[0]


def _shown(cell):
    """Return a copy of a cell that holds nothing but what the page shows."""
    if cell.cell_type != "code":
        return nbformat.v4.new_markdown_cell(cell.source)
    outputs = []
    for output in cell.outputs:
        kind = output.output_type
        with contextlib.suppress(ValueError, KeyError, AttributeError, TypeError):
            if kind == "stream":
                outputs.append(nbformat.v4.new_output(kind, name=output.name, text=output.text))
            elif kind == "error":
                trace = [str(line) for line in output.traceback]
                made = nbformat.v4.new_output(kind, ename="", evalue="", traceback=trace)
                outputs.append(made)
            else:
                outputs.append(nbformat.v4.new_output("display_data", data=_data(output.data)))
    return nbformat.v4.new_code_cell(cell.source, outputs=outputs)


def _data(data):
    for kind in IMAGES:
        if kind in data:
            return {kind: base64.b64encode(base64.b64decode(data[kind])).decode()}
    return {"text/plain": str(data["text/plain"])}


def _mathml(latex, display):
    try:
        return latex2mathml.converter.convert(latex, display=display)
    except Exception:  # a command that it does not know: the formula's source is readable, too
        return f"<code>{escape(latex)}</code>"
