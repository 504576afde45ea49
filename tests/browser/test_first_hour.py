"""The first hour of a newcomer in JupyterLab, walked by a browser: `make browser`."""

import pytest

browser = pytest.importorskip("browser", reason="selenium is not installed (pip install selenium)")
FOUND, REASON = browser.find_browser()
pytestmark = pytest.mark.skipif(FOUND is None, reason=REASON)

CHAPTER = "03_automatic_parallelism.ipynb"


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    """A tab of the lab, on a working copy of its own."""
    with browser.jupyter_lab(tmp_path_factory.mktemp("work"), VGPU_DEVICES="vgpu:2") as address:
        tab = browser.Lab(*FOUND)
        tab.address = address
        try:
            yield tab
        finally:
            tab.close()


def add_cell_below(tab, number, source):
    tab.select(number)
    tab.command("notebook:insert-cell-below")
    tab.until(lambda: tab.source(number + 1) == "", "an empty cell")
    tab.write(number + 1, source)
    return number + 1


def run_cells(tab, *numbers):
    for number in numbers:
        tab.run(number)
        tab.finished()


def test_open_a_chapter_and_run_all(tab):
    tab.open(tab.address, CHAPTER)
    tab.run_all()
    assert tab.errors() == []
    assert "2 virtual GPUs" in tab.output(tab.number_of("d2lpar.ensure_gpus("))


def test_break_it_read_the_message_and_mend_it(tab):
    number = add_cell_below(
        tab,
        tab.number_of("d2lpar.ensure_gpus("),
        "torch.ones(2, 3, device=devices[0]) @ torch.ones(3, 2, device=devices[1])",
    )
    run_cells(tab, number)
    assert "Expected all tensors to be on the same device" in tab.output(number)
    tab.write(
        number, "(torch.ones(2, 3, device=devices[0]) @ torch.ones(3, 2, device=devices[0])).cpu()"
    )
    run_cells(tab, number)
    assert "3., 3." in tab.output(number)


ANSWERS = {  # of two exercises of chapter 03: part of the stub, a line of it to replace, what by
    "a = b = c = d = e = f = None": "a, b, c, d, e, f = 10, 6, 10, 5, 10, 7",
    "def most_at_once(spans)": (
        "def most_at_once(spans):\n"
        "    return max((sum(a.start <= b.start < a.end for a in spans) for b in spans), default=0)"
    ),
}


@pytest.mark.parametrize("width", [1280, 1024])
def test_a_student_finds_his_work_again(tmp_path, width):
    """From the start page into a chapter, from there to its exercises; a day later once more."""
    tab = browser.Lab(*FOUND, width=width)
    try:
        with browser.jupyter_lab(tmp_path, VGPU_DEVICES="vgpu:2") as address:
            tab.start(address)
            assert "Next: chapter 01, Hybridization." in tab.page()
            tab.follow("03 Automatic parallelism")
            predict_run_and_stop(tab)
            tab.select(tab.number_of("## Where next"))
            tab.follow("Graded exercises")
            answer_two_exercises(tab)
            tab.select(0)
            tab.follow("A clock that stops early")
            section = "return document.querySelector('[data-jupyter-id=A-clock-that-stops-early]')"
            place = section + "?.getBoundingClientRect().top"
            tab.until(
                lambda: 0 < (tab.ask(place) or 0) < 800, "the section that the exercise needs"
            )
        log = (tmp_path / ".lab.log").read_text()
        assert log.startswith("Working copy: ") and log.count("\n") < 5, log
        with browser.jupyter_lab(tmp_path, VGPU_DEVICES="vgpu:2") as address:
            tab.start(address)
            assert "Next: the exercises of chapter 03, Automatic parallelism." in tab.page()
            assert "5 of 21 points" in tab.page()
            tab.follow("the exercises of chapter 03, Automatic parallelism")
            number = tab.number_of("a, b, c, d, e, f = 10, 6")
            assert "2 of 3 points" in tab.output(number + 1)
            tab.select(0)
            tab.follow("A clock that stops early")
            assert tab.path() == CHAPTER
            assert tab.source(tab.number_of("0.113 s, as both work")).startswith("# My answer")
    finally:
        tab.close()


def predict_run_and_stop(tab):
    """Answer the first prediction of chapter 03, run what follows, stop a loop, and go on."""
    assert tab.numbers("cell.model.type == 'code' && cell.model.outputs.length > 0") == []
    box = tab.number_of("The program first times")
    answer = add_cell_below(tab, box, "# My answer: 0.113 s, as both work at the same time")
    both = 'with Benchmark("GPU1 & GPU2")'
    texts = ("import torch\n", "def run(x", 'Benchmark("GPU1 time")', both)
    numbers = [tab.number_of(text) for text in texts]
    run_cells(tab, numbers[0], answer, *numbers[1:])
    assert "GPU1 & GPU2" in tab.output(numbers[-1])
    endless = add_cell_below(tab, numbers[-1], "while True:\n    run(x_gpu1)[-1].sum().item()")
    tab.run(endless)
    tab.until(lambda: tab.status() == "busy", "the loop runs")
    tab.stop()
    tab.finished()
    assert "KeyboardInterrupt" in tab.output(endless)
    tab.write(endless, "len(run(x_gpu1))")
    run_cells(tab, endless)
    assert "5" in tab.output(endless)
    tab.save()


def answer_two_exercises(tab):
    """Answer the first exercise of chapter 03 wrong, in a third, and the second one right."""
    setup = [tab.number_of("from d2lpar.exercises import"), tab.number_of("def program_a(")]
    run_cells(tab, *setup)
    for (stub, answer), points in zip(ANSWERS.items(), ("2 of 3", "3 of 3"), strict=True):
        number = tab.number_of(stub)
        run_cells(tab, number, number + 1)
        assert "0 of 3 points" in tab.output(number + 1)
        tab.write(number, answer)
        run_cells(tab, number, number + 1)
        assert f"{points} points" in tab.output(number + 1)
    tab.save()
