"""Animator: d2l's class, one figure that is updated in place."""

import base64
import subprocess
import sys
from types import SimpleNamespace

import pytest
from kernels import execute

from d2lpar import Animator, animator


@pytest.mark.parametrize(("points", "X", "Y"), [
    (
        [(0.5, (2, 0.1, None)), (1, (None, 0.3, 0.25))],
        [[0.5], [0.5, 1], [1]],
        [[2], [0.1, 0.3], [0.25]],
    ),
    ([(1, 3)], [[1]], [[3]]),  # a point of the only curve
    ([([1, 2], [3, 4])], [[1], [2]], [[3], [4]]),  # an x for each curve
])  # fmt: skip
def test_points_are_kept_as_d2l_keeps_them(points, X, Y):
    curves = Animator()
    assert curves.X is None and curves.Y is None
    for point in points:
        curves.add(*point)
    assert (curves.X, curves.Y) == (X, Y)


def test_more_numbers_than_curves_are_refused_and_no_point_is_lost():
    curves = Animator()
    curves.add(1, (2, 3))
    with pytest.raises(ValueError, match="2 at most, the number of curves: got 3 and 3"):
        curves.add(2, (1, 2, 3))
    with pytest.raises(ValueError, match="the number of curves: got 1 and 2"):
        curves.add([2], (1, 2))
    with pytest.raises(ValueError, match="4 at most, the number of fmts: got 5 and 5"):
        Animator().add(0, range(5))
    assert curves.X == [[1], [1]]


def test_the_figure_has_what_the_arguments_say():
    curves = Animator(
        "epoch", "acc", ["a", "b"], [1, 10], [0, 1], "log", fmts=("-", "r:"), figsize=(5, 4)
    )
    curves.add(1, (0.5, 0.25))
    curves.add(2, (0.75, 0.5))
    axes = curves.draw().axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_xscale()) == ("epoch", "acc", "log")
    assert (axes.get_xlim(), axes.get_ylim()) == ((1, 10), (0, 1))
    assert [text.get_text() for text in curves.fig.legends[0].get_texts()] == ["a", "b"]
    assert [[*line.get_ydata()] for line in axes.lines] == [[0.5, 0.75], [0.25, 0.5]]
    assert [line.get_linestyle() for line in axes.lines] == ["-", ":"]
    assert tuple(curves.fig.get_size_inches()) == (5, 4)
    assert len(Animator(nrows=2, ncols=3).axes) == 6


def bar(curves):
    """Return the widths of the two parts of a progress bar, in widths of the axes."""
    return [patch.get_width() for patch in curves.draw().axes[0].patches]


def test_a_bar_shows_how_far_the_newest_point_is_until_it_is_at_the_end():
    curves = Animator(xlim=(1, 5))
    assert bar(curves) == []
    for x, parts in ((0.5, [1, 0]), (2, [1, 0.25]), (4, [1, 0.75]), (5, []), (3, [1, 0.5])):
        curves.add(x, 0.5)
        assert bar(curves) == pytest.approx(parts)
    curves = Animator(xlim=[1, 5])
    curves.add([2, 3, 4], (1, 1, None))
    assert bar(curves) == pytest.approx([1, 0.5])
    curves = Animator(xlim=[1, 100], xscale="log")
    curves.add(10, 1)
    assert bar(curves) == pytest.approx([1, 0.5])
    assert not curves.draw(bar=False).axes[0].patches


@pytest.mark.parametrize("xlim", [None, [5, 1], (None, 5), [0, None], 9, ("a", "b")])
def test_limits_without_an_end_to_reach_are_drawn_without_a_bar(xlim):
    curves = Animator(xlim=xlim)
    curves.add(1.5, 0.5)
    assert bar(curves) == []


def test_in_a_script_nothing_is_drawn_and_matplotlib_is_not_loaded():
    code = """
import sys, d2lpar
curves = d2lpar.Animator("epoch")
for epoch in range(100):
    curves.add(epoch, 1)
assert "matplotlib" not in sys.modules and len(curves.X[0]) == 100
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == done.stderr == ""


def test_a_notebook_has_one_figure_that_shows_the_last_point_without_words():
    add = "for epoch in range(50):\n    curves.add(epoch, (0.5, {}))"
    cells, messages = execute(
        "import d2lpar, io\ncurves = d2lpar.Animator('epoch', legend=['a', 'b'])",
        add.format("epoch"),
        "picture = io.BytesIO()\ncurves.draw().savefig(picture)\n"
        "import base64\nprint(base64.b64encode(picture.getvalue()).decode())",
        add.format("-epoch"),
    )
    first, second, expected, third = cells
    assert first.outputs == [] and len(second.outputs) == 1
    assert second.outputs[0].data["text/plain"] == "<Figure>"
    # after the third cell has added its points to the same figure
    assert third.outputs == []
    assert messages[0] == "display_data"
    assert set(messages[1:]) == {"update_display_data"}
    assert len(messages) < 50  # most points come too early to be drawn
    before = base64.b64decode(expected.outputs[0].text)
    assert base64.b64decode(second.outputs[0].data["image/png"]) != before


def test_the_end_of_a_cell_takes_the_bar_and_draws_what_came_too_early_even_at_an_error():
    count = "print(len(curves.axes[0].patches), end=' ')"
    cells, _ = execute(
        f"import d2lpar\ncurves = d2lpar.Animator(xlim=[0, 10])\ncurves.add(4, 1)\n{count}",
        f"{count}\nd2lpar.animator.SHARE = 1e-9",
        "curves = d2lpar.Animator()\ncurves.add(1, 1)\ncurves.add(2, 2)\n1 / 0",
        "len(curves.fig.axes[0].lines[0].get_xdata())",
        allow_errors=True,
    )
    printed = ["".join(o.get("text", "") for o in cell.outputs) for cell in cells[:2]]
    assert printed == ["2 ", "0 "]
    assert [output.output_type for output in cells[2].outputs] == ["display_data", "error"]
    assert cells[3].outputs[0].data["text/plain"] == "2"


def test_drawing_takes_its_share_of_the_time(monkeypatch):
    now, drawn = 0.0, []

    def draw(figure):
        nonlocal now
        now += 0.5  # a slow drawing
        drawn.append(now)

    waiting = []
    events = SimpleNamespace(
        register=lambda name, function: waiting.append(function),
        unregister=lambda name, function: waiting.remove(function),
    )
    handle = SimpleNamespace(update=draw)
    monkeypatch.setattr(animator, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(animator, "in_notebook", lambda: True)
    monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(events=events))
    monkeypatch.setattr("IPython.display.display", lambda figure, display_id: handle)
    curves = Animator()
    for _ in range(1000):
        now += 0.1  # a step of training
        curves.add(now, 1)
    assert 0.5 * len(drawn) < 0.05 * now
    assert len(drawn) >= 5  # and not less often than that
    assert len(waiting) == 1
    waiting[0](None)
    assert waiting == [] and len(curves.axes[0].lines[0].get_xdata()) == 1000
