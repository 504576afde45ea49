"""Settings of Sphinx for the book; tools/book/book.py gathers its sources and calls Sphinx."""

import re

from address import repository
from docutils.nodes import SkipNode
from mathml import mathml
from sphinx.util import logging

project = "d2lpar"
author = "The d2lpar authors"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_enable_extensions = ["attrs_block", "dollarmath"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # the notebooks are committed executed
nb_merge_streams = True
nb_render_markdown_format = "myst"  # tables and formulas in outputs

default_role = "py:obj"  # `names` in docstrings, which lead to what they name
add_module_names = False
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True

smartquotes_action = "D"  # dashes, and quotes as they are

html_theme = "sphinx_book_theme"
html_theme_options = {
    "navbar_persistent": [],
    "use_download_button": False,
    "show_toc_level": 2,
}
if repository():
    html_theme_options["repository_url"] = f"https://github.com/{repository()}"
    html_theme_options["use_repository_button"] = True
html_title = "d2lpar"
html_static_path = ["static"]
html_css_files = ["book.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
html_use_index = False
html_math_renderer = "mathml"


def visit_math(writer, node):
    """Write a formula of a page."""
    display = "block" if node.tagname == "math_block" else "inline"
    if (found := mathml(node.astext(), display)) is None:
        logger = logging.getLogger(__name__)
        logger.warning("unknown formula: %s", node.astext(), location=node)
        found = "<code class='formula'></code>"
    if display == "block":
        found = f'<div class="formula">{found}</div>'
    writer.body.append(found)
    raise SkipNode


def to_rst(app, what, name, obj, options, lines):
    """Turn what our docstrings have of plain text into Sphinx's markup, in place."""
    text = "\n".join(lines)
    text = re.sub(r"(?<!\w)`(\.\w[^`\n]*)`", r"``\1``", text)  # `.item()`, which is no name of ours
    text = re.sub(r"`([^`\n]+)`(?=\w)", r"`\1`\\ ", text)  # `Task`s
    text = re.sub(r"(?<=\n)Returns:\n( +)", r"Returns:\n\1: ", text)  # no type before a colon
    sections = r"^((?:Args|Attributes|Returns|Raises):)$"
    before, *after = re.split(sections, text, maxsplit=1, flags=re.MULTILINE)
    before = re.sub(r"(?<=\n\n)(?=    \S)", "::\n\n", before, count=1)  # an example of code
    lines[:] = "".join([before, *after]).split("\n")


def no_fields(app, what, name, obj, skip, options):
    """Leave out the fields of named tuples, which have no docstrings of their own."""
    return True if (getattr(obj, "__doc__", None) or "").startswith("Alias for field") else None


def plain_defaults(app, what, name, obj, options, signature, returned):
    """Show a default that only says "not given" as dots."""
    return signature and re.sub(r"=<[^>]*>", "=...", signature), returned


def setup(app):
    """Let Sphinx write formulas as MathML and read our docstrings."""
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math, None))
    app.connect("autodoc-process-docstring", to_rst, priority=400)  # before napoleon
    app.connect("autodoc-skip-member", no_fields)
    app.connect("autodoc-process-signature", plain_defaults)
