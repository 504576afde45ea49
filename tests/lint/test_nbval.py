"""What `pytest --nbval` compares: at least a third of the cells that print."""

import nbformat
import pytest
from contents import FOLDER, find_chapters, pages_of

IGNORED = "nbval-ignore-output"
LESSONS = find_chapters(FOLDER)
CHAPTERS = {path.stem: [path] for path in [*LESSONS, FOLDER / "troubleshooting.ipynb"]}
CHAPTERS |= {f"deeper/{path.stem[:2]}": pages for path in LESSONS if (pages := pages_of(path))}
CHAPTERS |= {f"exercises/{path.stem}": [path] for path in find_chapters(FOLDER / "exercises")}


def code_cells(paths):
    """Return the code cells of some notebooks."""
    cells = [cell for path in paths for cell in nbformat.read(path, as_version=4).cells]
    return [cell for cell in cells if cell.cell_type == "code"]


@pytest.mark.parametrize("name", CHAPTERS)
def test_a_third_of_the_cells_that_print_is_compared(name):
    printing = []  # cells with an output beside pictures, which nbval does not compare
    for cell in code_cells(CHAPTERS[name]):
        if any("image/png" not in output.get("data", {}) for output in cell.outputs):
            printing.append(cell)
    ignored = sum(IGNORED in cell.metadata.get("tags", []) for cell in printing)
    assert printing and ignored <= 2 / 3 * len(printing), f"{ignored} of {len(printing)} ignored"


@pytest.mark.parametrize("name", CHAPTERS)
def test_nothing_is_skipped_and_nothing_is_tagged_that_is_compared_anyway(name):
    tags = [tag for cell in code_cells(CHAPTERS[name]) for tag in cell.metadata.get("tags", [])]
    assert {tag for tag in tags if tag.startswith("nbval")} <= {IGNORED}
