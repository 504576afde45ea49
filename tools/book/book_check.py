"""Check a built book; each problem names the page."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from hygiene import path_pattern

LOADED = {  # attributes with URLs that a page loads
    "audio": ("src",), "embed": ("src",), "iframe": ("src",), "image": ("href", "xlink:href"),
    "img": ("src", "srcset"), "input": ("src",), "link": ("href",), "object": ("data",),
    "script": ("src",), "source": ("src", "srcset"), "track": ("src",), "use": ("href",),
    "video": ("src", "poster"),
}  # fmt: skip
SOLUTIONS = ("BEGIN SOLUTION", "END SOLUTION", "BEGIN HIDDEN TESTS", "END HIDDEN TESTS")

_IN_CSS = re.compile(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)")
_IN_SCRIPT = re.compile(r"\b(?:import|fetch|importScripts)\s*\(?\s*['\"`](https?:[^'\"`]+)")
_FORMULA = re.compile(
    r"(?s)\$\$.*?\$\$|(?<![\w\\$])\$(?=\S)[^$\n]{0,200}?[\\_^=][^$\n]{0,200}?(?<=\S)\$(?!\d)"
)
_NO_TEXT = ("code", "pre", "script", "style", "math")


class Page(HTMLParser):
    """The data of a page for the checks: anchors, links, loaded URLs and texts."""

    def __init__(self, text):
        super().__init__()
        self.anchors, self.links, self.loads = {""}, [], []
        self.styles, self.scripts, self.texts, self.formulas = [], [], [], []
        self.open = []  # open elements of `_NO_TEXT`
        self.without_description = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        """Process the start of an element."""
        given = dict(attrs)
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag in ("a", "area", "form"):
            self.links += [given[name] for name in ("href", "action") if given.get(name)]
        self.loads += [given[name] for name in LOADED.get(tag, ()) if given.get(name)]
        if given.get("style"):
            self.styles.append(given["style"])
        if tag == "img" and not (given.get("alt") or "").strip():
            self.without_description.append(given.get("src", "")[:60])
        if tag == "code" and "formula" in (given.get("class") or ""):
            self.formulas.append("code")
        if tag in _NO_TEXT:
            self.open.append(tag)

    def handle_endtag(self, tag):
        """Process the end of an element."""
        if tag in self.open:
            while self.open.pop() != tag:
                pass

    def handle_data(self, data):
        """Process a piece of text."""
        if "style" in self.open:
            self.styles.append(data)
        elif "script" in self.open:
            self.scripts.append(data)
        elif "math" in self.open:
            self.formulas.append(data)
        elif not self.open:
            self.texts.append(data)


def problems(folder):
    """List the problems of a built book, as lines `page: problem`.

    Args:
        folder: the folder of the pages.
    """
    folder = Path(folder).resolve()
    files = [path for path in folder.rglob("*.html") if "_static" not in path.parts]
    pages = {path: Page(path.read_text("utf-8")) for path in sorted(files)}
    if folder / "index.html" not in pages:
        return [f"no index.html among the {len(pages)} pages"]
    found = []
    for path, page in pages.items():
        for check in (_links, _loads, _formulas, _images):
            found += [(path, line) for line in check(path, page, pages, folder)]
        found += [(path, line) for line in _secrets(path)]
    for path in sorted(folder.rglob("*.css")):
        found += [(path, line) for line in _external(_addresses_in_css(path.read_text("utf-8")))]
    for path in sorted(folder.rglob("searchindex.js")):
        found += [(path, line) for line in _secrets(path)]
    return [f"{path.relative_to(folder).as_posix()}: {line}" for path, line in found]


def _links(path, page, pages, folder):
    """Yield links within the book that have no target page or no anchor."""
    for link in page.links:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            if parts.scheme not in ("http", "https", "mailto"):
                yield f"a link of an unknown kind: {link[:80]}"
            continue
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        if target.is_dir():
            target = target / "index.html"
        if not target.is_file() or not target.is_relative_to(folder):
            yield f"a link to nowhere: {link}"
        elif target in pages and unquote(parts.fragment) not in pages[target].anchors:
            yield f"a link to no anchor: {link}"


def _loads(path, page, pages, folder):
    """Yield external sources, and missing files, that a page loads."""
    css = [address for style in page.styles for address in _addresses_in_css(style)]
    addresses = [*page.loads, *css]
    yield from _external([*addresses, *(a for s in page.scripts for a in _IN_SCRIPT.findall(s))])
    for address in addresses:
        parts = urlsplit(address)
        if not (parts.scheme or parts.netloc) and parts.path:
            if not (path.parent / unquote(parts.path)).is_file():
                yield f"what it loads is not there: {address}"


def _external(addresses):
    for address in addresses:
        parts = urlsplit(address.strip())
        if parts.netloc or parts.scheme not in ("", "data"):
            yield f"an external source: {address[:100]}"


def _addresses_in_css(text):
    return [one or other for one, other in _IN_CSS.findall(text)]


def _formulas(path, page, pages, folder):
    """Yield formulas that are not MathML or contain unknown commands."""
    for text in page.formulas:
        if text == "code" or "\\" in text:
            yield f"a formula that is shown as code: {text}"
    for text in page.texts:
        for formula in _FORMULA.findall(text):
            yield f"a formula that was not recognized: {formula}"


def _images(path, page, pages, folder):
    """Yield images without a description."""
    for source in page.without_description:
        yield f"an image without a description: {source}"


def _secrets(path):
    """Yield parts of solutions and paths of the machine."""
    text = path.read_text("utf-8")
    yield from (f"a part of a solution: {mark}" for mark in SOLUTIONS if mark in text)
    yield from (f"a path of the machine: {m[0]}" for m in path_pattern().finditer(text))
