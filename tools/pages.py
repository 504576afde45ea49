"""Executed chapters as HTML pages that need no network: figures and formulas are inside."""

import copy
import re
from html import escape

import latex2mathml.converter
from jinja2 import pass_context
from nbconvert import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

# nbconvert's page without the scripts it would load from the network, and with a description of
# each figure.
_TEMPLATE = """
{%- extends 'lab/index.html.j2' -%}
{%- block html_head_js -%}{%- endblock -%}
{%- block html_head_js_mathjax -%}{%- endblock -%}
{%- block html_head_js_mermaidjs -%}{%- endblock -%}
{%- block data_png -%}
{{ super() | replace('<img ', '<img alt="' ~ (output.metadata.alt | escape_html) ~ '" ', 1) }}
{%- endblock -%}
"""

_INDEX = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>d2lpar</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 50rem; margin: 2rem auto }}
table {{ border-collapse: collapse; width: 100% }}
th, td {{ text-align: left; padding: .4rem .8rem .4rem 0; border-bottom: 1px solid #ccc }}
.number {{ text-align: right; font-variant-numeric: tabular-nums }}
.failed {{ color: #b00020; font-weight: 600 }}
</style>
</head>
<body>
<h1>d2lpar: parallel training of neural networks</h1>
<table>
<thead>
<tr><th>Chapter</th><th class="number">Seconds</th><th class="number">Figures</th>
<th>Result</th></tr>
</thead>
<tbody>
{rows}
</tbody>
</table>
</body>
</html>
"""


class Renderer(IPythonRenderer):
    """nbconvert's markdown, with formulas as MathML, which browsers draw without a script."""

    def inline_math(self, body):
        """Return a formula within a line."""
        return _mathml(body, "inline")

    def block_math(self, body):
        """Return a formula on lines of its own."""
        return _mathml(body, "block")


class Exporter(HTMLExporter):
    """nbconvert's HTML, offline, with links between chapters that lead to pages."""

    @pass_context
    def markdown2html(self, context, source):
        """Render the text of a markdown cell."""
        renderer = Renderer(
            escape=False,
            attachments=context.get("cell", {}).get("attachments", {}),
            embed_images=True,
            path=context.get("resources", {}).get("metadata", {}).get("path", ""),
            anchor_link_text=self.anchor_link_text,
        )
        text = MarkdownWithMath(renderer=renderer).render(source)
        return re.sub(r'(href="[\w./-]+)\.ipynb([#"])', r"\1.html\2", text)


def title(notebook, default):
    """Return the text of a notebook's H1, or `default` if there is none."""
    for cell in notebook.cells:
        found = re.search(r"^#\s+(.+)$", cell.source, re.MULTILINE)
        if cell.cell_type == "markdown" and found:
            return found[1].strip()
    return default


def write_page(result, build):
    """Write one executed chapter as a page of its own.

    Args:
        result: a `Result` of `run.execute`, failed or not.
        build: the folder to write to.
    """
    notebook = copy.deepcopy(result.notebook)
    for cell, after in zip(notebook.cells, [*notebook.cells[1:], None], strict=True):
        for output in cell.get("outputs", []):
            output.setdefault("metadata", {})["alt"] = _description(after)
    name = result.path.stem
    resources = {"metadata": {"name": title(notebook, name), "path": str(result.path.parent)}}
    exporter = Exporter(raw_template=_TEMPLATE, embed_images=True)
    page, _ = exporter.from_notebook_node(notebook, resources=resources)
    (build / f"{name}.html").write_text(page, encoding="utf-8")


def write_index(results, build):
    """Write the index of the pages, with how each chapter fared.

    Args:
        results: a list of `Result`.
        build: the folder of the pages.
    """
    rows = "\n".join(
        f'<tr><td><a href="{result.path.stem}.html">'
        f"{escape(title(result.notebook, result.path.stem))}</a></td>"
        f'<td class="number">{result.seconds:.1f}</td><td class="number">{result.figures}</td>'
        f'<td class="{"failed" if result.failure else "ok"}">{escape(result.outcome)}</td></tr>'
        for result in results
    )
    (build / "index.html").write_text(_INDEX.format(rows=rows), encoding="utf-8")


def _mathml(latex, display):
    try:
        return latex2mathml.converter.convert(latex, display=display)
    except Exception:  # a command that it does not know: the formula's source is readable too
        return f"<code>{escape(latex)}</code>"


def _description(cell):
    """Return the first sentence of the text after a figure."""
    text = cell.source if cell is not None and cell.cell_type == "markdown" else ""
    text = " ".join(line for line in text.splitlines() if not line.startswith("#")).strip()
    sentence = re.match(r".*?[.!?](?=\s|$)", text)
    return re.sub(r"[*_`$]", "", sentence[0]) if sentence else "A figure; the text describes it."
