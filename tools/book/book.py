"""Build the book, offline HTML pages, from the committed notebooks.

python tools/book/book.py                 into build/book
python tools/book/book.py --build FOLDER  into another folder

The sources are collected in a separate folder: the README as the first page, the pages it links to,
the chapters with answers folded below each *Predict* box, their deeper pages, the exercises without
solutions, the teacher's pages, and a reference. Nothing is executed.
"""

import argparse
import base64
import os
import re
import shutil
import sys
import time
from pathlib import Path

sys.path.extend(str(Path(__file__).parents[1] / name) for name in ("", "notebooks", "grading"))

import nbformat
from address import SERVICES, link, repository
from assignments import release
from book_check import problems
from book_reference import reference
from contents import DRAWING, find_chapters, pages_of
from hygiene import FENCED
from nbformat.v4 import new_markdown_cell
from sphinx.cmd.build import build_main

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = ROOT / "book"

_LINK = re.compile(r"\[([^\]]*)\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")
_ANCHOR = re.compile(r"\[([^\]]*)\]\((?![a-z]+:)([^)#\s]*)#([^)\s]+)\)")
# Fenced code, a *Predict* box, or a heading.
_FOLD_ENDS = re.compile(rf"(?m){FENCED.pattern}|(?P<box>^> \*\*Predict.*(?:\n>.*)*)|^#+ .*")
_NO_SLUG = re.compile(r"[^\w-]")
_FOLD = '<details class="answer"><summary>Your answer first. Then open what follows.</summary>'


class Sources:
    """The source folder of Sphinx, emptied; its paths are those in the repository, `root`."""

    def __init__(self, folder, root=ROOT):
        self.folder, self.root, self.repository = folder, root, repository(root)
        shutil.rmtree(folder, ignore_errors=True)
        self.chapters = find_chapters(root / "notebooks")
        self.deeper = {chapter: pages_of(chapter) for chapter in self.chapters}
        self.exercises = find_chapters(root / "notebooks" / "exercises")
        self.teaching = sorted((root / "teaching").glob("*.md"), key=lambda p: (p.stem[0] < "a", p))
        self.others = [root / "notebooks" / n for n in ("troubleshooting.ipynb", "notation.md")]
        self.readme = root / "README.md"
        named = re.findall(r"\]\((docs/\w+\.md)\)", self.readme.read_text("utf-8"))
        self.docs = [root / name for name in dict.fromkeys(named)]
        self.pages = [*self.docs, *self.chapters, *self.exercises, *self.teaching, *self.others]
        self.pages += [page for pages in self.deeper.values() for page in pages]

    def write(self):
        """Write all pages."""
        for path in self.chapters:
            note = self.how_to_run(path.name)
            if path.parent / "exercises" / path.name in self.exercises:
                note += f" Its exercises check themselves: [do them](exercises/{path.name})."
            self.write_notebook(path, f"# {path.name[:2]} ", note, self.deeper[path])
            for page in self.deeper[path]:
                self.write_notebook(page, "# ", self.how_to_run(f"deeper/{page.name}"))
        for path in self.exercises:
            self.write_notebook(path, f"# {path.name[:2]} ", _how_to_do(path.name))
        for path in [*self.docs, *self.teaching, *self.others]:
            if path.suffix == ".ipynb":
                self.write_notebook(path, "# ", self.how_to_run(path.name))
            else:
                self.write_text(path.relative_to(self.root), path.read_text("utf-8"))
        references = reference()
        for name, text in references.items():
            self.write_text(f"reference/{name}.md", text)
        text = self.readme.read_text("utf-8")
        self.write_text("index.md", f"{text}\n{self.contents(references)}\n")

    def write_text(self, name, text):
        """Write a text page."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.with_links(text, self.root / name), "utf-8")

    def write_notebook(self, path, heading, note, below=()):
        """Write a notebook, with another `heading` than "# " and a note below its title.

        `below`: the notebooks below it in tables of contents.
        """
        notebook = nbformat.read(path, as_version=4)
        if path in self.exercises:
            notebook = release(notebook)
        for cell, after in zip(notebook.cells, [*notebook.cells[1:], None], strict=True):
            if cell.cell_type == "markdown":
                cell.source = self.with_links(self.with_drawings(cell.source), path)
            else:
                cell.metadata["mystnb"] = {"image": {"alt": _description(after)}}
        fold_answers(notebook.cells)
        first = notebook.cells[0]
        first.source = re.sub(
            r"^# (.*)$", rf"{heading}\1\n\n{note}", first.source, count=1, flags=re.M
        )
        if below:
            notebook.cells.append(new_markdown_cell(_table_of_contents(below, path.parent)))
        target = self.folder / path.relative_to(self.root)
        target.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, target)

    def with_drawings(self, text):
        """Write the drawings of a text to files; return the text with their paths."""

        def write(found):
            svg = base64.b64decode(found[3])
            path = self.folder / "drawings" / f"{found[1]}.svg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(svg)
            return f"[{found[1]}]: /drawings/{path.name}"

        return DRAWING.sub(write, text)

    def with_links(self, text, path):
        """Return a text with links that work in the book.

        Links to files that the book lacks point to the repository or, if it has no address, become
        plain text. Links to headings, in JupyterLab `#Why-in-pairs?` within a notebook and
        `#cell-id=...` with the heading as their text into another one, become `#why-in-pairs`.
        """

        def resolve(found):
            target = Path(os.path.normpath(path.parent / found[2]))
            if target == self.readme:
                up = "../" * (len(path.relative_to(self.root).parts) - 1)
                return f"[{found[1]}]({up}index.md{found[3] or ''})"
            if target in self.pages or not target.exists():  # Sphinx reports missing files
                return found[0]
            name = target.relative_to(self.root)
            if name.parts[:2] == ("notebooks", "figures"):
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(target, self.folder / name)
                return found[0]
            if not self.repository:
                return found[1]
            address = f"https://github.com/{self.repository}/blob/main/{name.as_posix()}"
            return f"[{found[1]}]({address}{found[3] or ''})"

        def slug(found):
            heading = found[1].replace(" ", "-") if found[3].startswith("cell-id=") else found[3]
            return f"[{found[1]}]({found[2]}#{_NO_SLUG.sub('', heading.lower())})"

        text = _ANCHOR.sub(slug, text)
        return _LINK.sub(resolve, text)

    def how_to_run(self, name):
        """Return the line "Run it" of a notebook, given its path in the folder of the chapters."""
        up = "../" * name.count("/")
        lab = f"[`make lab`](../{up}index.md#run-it)"
        run = f"in JupyterLab on your machine ({lab}, then `{name}`)"
        for service in SERVICES if self.repository else ():
            run += f", in [{service}]({link(service, self.repository, name)})"
        return f"{{.run}}\nRun it: {run}."

    def contents(self, references):
        """Return the tables of contents for the first page."""
        tables = {
            "Chapters": self.chapters,
            "Exercises": self.exercises,
            "Guides": self.docs,
            "For teachers": self.teaching,
            "Help": self.others,
            "Reference": [self.root / "reference" / name for name in references],
        }
        return "\n\n".join(
            _table_of_contents(paths, self.root, f":caption: {caption}")
            for caption, paths in tables.items()
            if paths
        )


def _table_of_contents(paths, folder, *options):
    """Return a hidden table of contents of pages, for a page in `folder`."""
    names = [path.relative_to(folder).with_suffix("").as_posix() for path in paths]
    return "\n".join(["```{toctree}", ":hidden:", *options, "", *names, "```"])


def fold_answers(cells):
    """Fold, in place, the text after each *Predict* box up to the next box or heading.

    A fold is a `details` element, which needs no script. It contains no heading, so it stays within
    one section of the page.
    """
    is_open = False

    def fold(found):
        nonlocal is_open
        if found[1]:  # code
            return found[0]
        end, is_open = "\n</details>\n\n" * is_open, bool(found["box"])
        return f"{end}{found[0]}" + f"\n\n{_FOLD}\n" * is_open

    texts = [cell for cell in cells if cell.cell_type == "markdown"]
    for cell in texts:
        cell.source = _FOLD_ENDS.sub(fold, cell.source)
    if is_open:
        texts[-1].source += "\n\n</details>"


def _how_to_do(name):
    return f"""{{.run}}
Do it: `make lab` has this notebook for you, as you see it here. The one in the repository,
`notebooks/exercises/{name}`, holds the solutions too."""


def _description(cell):
    """Return the first sentence of the text after a figure."""
    text = cell.source if cell is not None and cell.cell_type == "markdown" else ""
    text = " ".join(line for line in text.splitlines() if not line.startswith("#")).strip()
    sentence = re.match(r".*?[.!?](?=\s|$)", text)
    return re.sub(r"[*_`$\\]", "", sentence[0]) if sentence else "A figure; the text describes it."


def build(folder, root=ROOT):
    """Build the book, with its pages in `folder / "html"`; return problems that are not printed."""
    Sources(folder / "source", root).write()
    html = folder / "html"
    shutil.rmtree(html, ignore_errors=True)
    options = ["-W", "--keep-going", "-q", "-j", "auto", "-d", f"{folder / 'doctrees'}"]
    status = build_main([*options, "-c", f"{SETTINGS}", f"{folder / 'source'}", f"{html}"])
    return ["Sphinx warns, see above"] * bool(status) + problems(html)


def main(arguments=None):
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="where notebooks and teaching are")
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "book", help="where to")
    options = parser.parse_args(arguments)
    start = time.perf_counter()
    found = build(options.build, options.root)
    pages = len(list((options.build / "html").rglob("*.html")))
    for line in found:
        print(line)
    index = os.path.relpath(options.build / "html" / "index.html")
    seconds = time.perf_counter() - start
    print(f"{index}: {pages} pages in {seconds:.0f} s, {len(found) or 'no'} problems")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
