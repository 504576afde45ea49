"""Check a built book for what Sphinx does not report; each problem names the page.

Sphinx itself reports links and images that lead nowhere, and `book/conf.py` unknown formulas.
"""

import re

from hygiene import path_pattern

_CHECKS = {  # what a page must not have
    "an external source": re.compile(
        r"""<(?!a\b)\w[^>]*?\s(?:src|srcset|href|xlink:href|data|poster)=["']\s*(?:[a-z]+:)?//[^"']*"""
        r"""|(?:\burl\(|@?\bimport|\bfetch|\bimportScripts)\s*\(?\s*["'`]?\s*(?:[a-z]+:)?//[^"'`)]*"""
    ),
    "an image without a description": re.compile(r'<img(?![^>]*\salt="\s*[^"\s])[^>]*'),
    "a part of a solution": re.compile(r"(?:BEGIN|END) (?:SOLUTION|HIDDEN TESTS)"),
    "a path of the machine": path_pattern(),
}
_FORMULA = re.compile(
    r"(?s)\$\$.*?\$\$|(?<![\w\\$])\$(?=\S)[^$\n]{0,200}?[\\_^=][^$\n]{0,200}?(?<=\S)\$(?!\d)"
)
_NO_TEXT = re.compile(r"(?s)<(code|pre|script|style|math)\b.*?</\1>")


def problems(folder):
    """List the problems of a built book, as lines `page: problem`."""
    pages = [path for path in folder.rglob("*.html") if "_static" not in path.parts]
    if folder / "index.html" not in pages:
        return [f"no index.html among the {len(pages)} pages"]
    found = []
    for path in sorted([*pages, *folder.rglob("*.css"), *folder.rglob("searchindex.js")]):
        text = path.read_text("utf-8")
        faults = [(name, part[0]) for name, each in _CHECKS.items() for part in each.finditer(text)]
        for node in re.findall(r">([^<]+)", _NO_TEXT.sub("", text)):
            faults += [("a formula that was not recognized", f) for f in _FORMULA.findall(node)]
        page = path.relative_to(folder).as_posix()
        found += [f"{page}: {name}: {part[:100]}" for name, part in faults]
    return found
