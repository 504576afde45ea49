"""Embed the drawings in the chapters, as SVG in their cells, so that a notebook is self-contained.

python tools/notebooks/drawings.py          write them
python tools/notebooks/drawings.py --check  list the outdated ones; the exit status is 1 if there
                                            are any

A text cell refers to a drawing by `![alternative text][ring]`, and `notebooks/drawings/ring.py`
draws it; see `pen.py` there.
"""

import argparse
import base64
import importlib
import re
import sys
from pathlib import Path

import nbformat
from contents import DRAWING, FOLDER

_USE = re.compile(r"!\[[^\]]+\]\[(\w+)\]")
DEFINITION = re.compile(rf"\n*{DRAWING.pattern}", re.MULTILINE)


def with_drawings(text, folder):
    """Return the text of a cell, followed by the drawings that it uses, from their folder."""
    names = dict.fromkeys(_USE.findall(text))
    text = DEFINITION.sub("", text)
    for name in names:
        if not (folder / f"{name}.py").is_file():
            raise FileNotFoundError(f"no drawing {name}.py in {folder}")
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
        svg = importlib.import_module(name).draw().svg()
        data = base64.b64encode(svg.encode()).decode()
        text += f"\n\n[{name}]: data:image/svg+xml;base64,{data}"
    return text


def update(path, folder, check=False):
    """Embed the drawings in one notebook; return whether any has changed."""
    notebook = nbformat.read(path, as_version=4)
    changed = False
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            text = with_drawings(cell.source, folder)
            changed |= text != cell.source
            cell.source = text
    if changed and not check:
        nbformat.write(notebook, path)
    return changed


def main(arguments=None):
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the chapters are")
    options = parser.parse_args(arguments)
    drawings = options.folder / "drawings"
    chapters = sorted([*options.folder.glob("*.ipynb"), *options.folder.glob("deeper/*.ipynb")])
    changed = [path.name for path in chapters if update(path, drawings, options.check)]
    for name in changed:
        print(f"{name}: its drawings {'are not up to date' if options.check else 'are new'}")
    return int(options.check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
