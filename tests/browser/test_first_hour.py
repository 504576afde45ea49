"""The first hour of a newcomer in JupyterLab, walked by a browser: `make browser`."""

import os
import shutil
from pathlib import Path

import nbformat
import pytest
from assignments import release

lab = pytest.importorskip("lab", reason="selenium is not installed (pip install selenium)")
FOUND, REASON = lab.find_browser()
pytestmark = pytest.mark.skipif(FOUND is None, reason=REASON)

ROOT = Path(__file__).resolve().parents[2]
CHAPTER = "03_automatic_parallelism.ipynb"
EXERCISES = "07_multi_gpu_from_scratch.ipynb"


@pytest.fixture(scope="module")
def pictures():
    """A folder for pictures of each step, if the variable PICTURES names one."""
    folder = os.environ.get("PICTURES")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
    return folder and Path(folder)


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    """A tab of a JupyterLab that sees a copy of the notebooks, the exercises without solutions."""
    folder = tmp_path_factory.mktemp("notebooks")
    shutil.copy(ROOT / "notebooks" / CHAPTER, folder)
    source = nbformat.read(ROOT / "notebooks" / "exercises" / EXERCISES, as_version=4)
    nbformat.write(release(source), folder / "exercises.ipynb")
    with lab.jupyter_lab(folder, D2LPAR_DEVICES="vgpu:2") as address:
        tab = lab.Lab(*FOUND)
        tab.address = address
        try:
            yield tab
        finally:
            tab.close()


@pytest.fixture(autouse=True)
def a_picture_at_the_end(tab, pictures, request):
    yield
    if pictures:
        tab.picture(pictures / f"{request.node.name}.png")


def add_cell_below(tab, number, source):
    """Insert a code cell below another one; return its number."""
    tab.select(number)
    tab.command("notebook:insert-cell-below")
    tab.until(lambda: tab.source(number + 1) == "", "an empty cell")
    tab.write(number + 1, source)
    return number + 1


def run_cells(tab, *numbers):
    """Run cells one after the other."""
    for number in numbers:
        tab.run(number)
        tab.finished()


def cell_of_devices(tab):
    """Return the number of the cell that describes the devices."""
    return tab.number_of("d2lpar.describe(")


def test_open_a_chapter_and_run_all(tab):
    tab.open(tab.address, CHAPTER)
    tab.run_all()
    assert tab.errors() == []
    assert "2 virtual GPUs" in tab.output(cell_of_devices(tab))


def test_change_a_number_and_run_the_cell(tab):
    place = cell_of_devices(tab)
    number = add_cell_below(tab, place, "torch.ones(3, 3, device=devices[0]).sum().item()")
    run_cells(tab, number)
    assert "9.0" in tab.output(number)
    tab.write(number, "torch.ones(4, 4, device=devices[1]).sum().item()")
    run_cells(tab, number)
    assert "16.0" in tab.output(number)


ENDLESS = {
    "kernels": "while True:\n    torch.ones(300, 300, device=devices[0]).mm(a)",
    "waiting": "while True:\n    (a @ a).sum().item()",
    "training": "while True:\n    b = a.clone().requires_grad_()\n    (b @ b).sum().backward()",
}


@pytest.mark.parametrize("work", ENDLESS)
def test_interrupt_an_endless_loop_and_go_on(tab, work):
    number = add_cell_below(
        tab,
        cell_of_devices(tab),
        f"a = torch.ones(300, 300, device=devices[0])\n{ENDLESS[work]}",
    )
    tab.run(number)
    tab.until(lambda: tab.status() == "busy", "the loop runs")
    tab.stop()
    tab.finished()
    assert "KeyboardInterrupt" in tab.output(number)
    tab.write(number, "a.sum().item()")
    run_cells(tab, number)
    assert "90000.0" in tab.output(number)


def test_break_it_read_the_message_and_mend_it(tab):
    number = add_cell_below(
        tab,
        cell_of_devices(tab),
        "torch.ones(2, 3, device=devices[0]) @ torch.ones(3, 2, device=devices[1])",
    )
    run_cells(tab, number)
    assert "Expected all tensors to be on the same device" in tab.output(number)
    tab.write(
        number, "(torch.ones(2, 3, device=devices[0]) @ torch.ones(3, 2, device=devices[0])).cpu()"
    )
    run_cells(tab, number)
    assert "3., 3." in tab.output(number)


def test_do_an_exercise_and_see_it_graded(tab):
    tab.open(tab.address, "exercises.ipynb")
    numbers = [tab.number_of("import torch\n"), tab.number_of("def ring_allreduce(data)")]
    answer, check = tab.number_of("def part_sizes("), tab.number_of("part_sizes(64, 4)")
    run_cells(tab, *numbers, answer, check)
    assert "not answered yet" in tab.output(check)
    assert "0 of 2 points" in tab.output(check)
    tab.write(answer, "def part_sizes(b, k):\n    return [b // k] * k")
    run_cells(tab, answer, check)
    assert "The parts do not add up to 10" in tab.output(check)
    assert "1 of 2 points" in tab.output(check)
    tab.write(answer, "def part_sizes(b, k):\n    return [(b + k - 1 - i) // k for i in range(k)]")
    run_cells(tab, answer, check)
    assert "2 of 2 points" in tab.output(check)
