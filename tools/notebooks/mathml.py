"""Text of notebooks as HTML that needs no script, with formulas as MathML."""

import functools
from html import escape

import latex2mathml.converter
from mistune.plugins.table import table_in_quote
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath


@functools.cache
def mathml(latex, display):
    """Return a formula as MathML, or None if it has an unknown command."""
    try:
        found = latex2mathml.converter.convert(latex, display=display)
    except Exception:  # it raises many kinds
        return None
    return None if "\\" in found else found  # a command that it does not know


class Renderer(IPythonRenderer):
    """nbconvert's HTML with formulas as MathML, and links to the web only."""

    def inline_math(self, body, display="inline"):
        """Return an inline formula; its source if it has an unknown command."""
        return mathml(body, display) or f"<code>{escape(body)}</code>"

    def block_math(self, body):
        """Return a displayed formula."""
        return self.inline_math(body, "block")

    def link(self, text, url, title=None):
        """Return a link to the web, or only the text of other links."""
        return super().link(text, url, title) if url.startswith("https://") else text


def markdown_to_html(source):
    """Render the text of a cell."""
    markdown = MarkdownWithMath(Renderer(escape=False, exclude_anchor_links=True))
    table_in_quote(markdown)
    return markdown.render(source)
