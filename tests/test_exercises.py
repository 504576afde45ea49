"""The exercises: a solution gets all points, a stub none, a wrong answer what it should."""

import functools
import gc
import importlib.util
import warnings
from pathlib import Path

import numpy
import pytest
import torch
from exercises import NOTEBOOKS, read, run_cells

import d2lpar
from d2lpar.exercises import Marks, expect

WRONG = Path(__file__).with_name("wrong_answers")


@functools.cache
def wrong_answers(path):
    """Return the wrong answers to the exercises of a notebook."""
    number = path.stem[:2]
    spec = importlib.util.spec_from_file_location(f"wrong_{number}", WRONG / f"wrong_{number}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.WRONG


def grade(path, exercise, answers):
    """Return the points that answers to an exercise get, and what the check printed."""
    setup, _ = read(path)
    names = {"__name__": "__main__"}
    try:
        _, printed = run_cells([*setup, *exercise.given], names)
        assert "Error" not in printed, printed
        _, printed = run_cells(answers, names)
        value, message = run_cells([exercise.check], names)
    finally:
        # A result of an autograd.Function made here would live for ever: it holds its class, that
        # the names, and they the result. Python does not see the first of it.
        for name in [name for name in names if not name.startswith("__")]:
            del names[name]
    return value, printed + message


def every_exercise():
    """Yield each exercise as a pair (notebook, exercise), with an id."""
    for path in NOTEBOOKS:
        for exercise in read(path)[1]:
            yield pytest.param(path, exercise, id=f"{path.stem[:2]}-{exercise.name}")


def every_wrong_answer():
    """Yield each wrong answer, with an id."""
    for path in NOTEBOOKS:
        for exercise in read(path)[1]:
            for name, answer in wrong_answers(path)[exercise.name].items():
                label = f"{path.stem[:2]}-{exercise.name}-{name}".replace(" ", "_")
                yield pytest.param(path, exercise, *answer, id=label)


@pytest.fixture(autouse=True)
def devices_as_before():
    """Leave two virtual GPUs by the wall clock behind, and no memory in use."""
    yield
    devices = d2lpar.virtual_gpus(2)
    if any(map(torch.vgpu.memory_allocated, devices)):
        torch.compiler.reset()  # what is compiled may hold tensors
        gc.collect()
    assert [torch.vgpu.memory_allocated(device) for device in devices] == [0, 0]


@pytest.mark.parametrize("path, exercise", list(every_exercise()))
def test_the_solution_gets_all_points(path, exercise):
    points, printed = grade(path, exercise, exercise.answers)
    assert points == exercise.points, printed
    assert "wrong" not in printed and "open" not in printed


@pytest.mark.parametrize("path, exercise", list(every_exercise()))
def test_the_stub_gets_none(path, exercise):
    assert exercise.stub != exercise.answers
    points, printed = grade(path, exercise, exercise.stub)
    assert not points, printed


@pytest.mark.parametrize("path, exercise, answer, points, message", list(every_wrong_answer()))
def test_wrong_answers_are_told_apart(path, exercise, answer, points, message):
    assert points < exercise.points
    got, printed = grade(path, exercise, [answer])
    assert (got or 0, message in printed) == (points, True), printed


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_four_to_eight_exercises_with_three_wrong_answers_each(path):
    exercises = read(path)[1]
    assert 4 <= len(exercises) <= 8
    assert {exercise.name: True for exercise in exercises} == {
        name: len(answers) >= 3 for name, answers in wrong_answers(path).items()
    }


# What checks are made of.


@pytest.mark.parametrize(
    "got, want, tolerance, message",
    [
        (3, 4, None, "x: expected 4, got 3."),
        (1_000_000, 4, None, "x: expected 4, got 1,000,000."),
        (4.5, 4, 0.1, "x: expected 4, got 4.5."),
        ("a", "b", None, "x: expected 'b', got 'a'."),
        ([1, 2], [1, 2, 3], None, "x: expected [1, 2, 3], got [1, 2]."),
        ({"a": 1}, {"a": 2}, None, "x: expected {'a': 2}, got {'a': 1}."),
        ({"a": 1}, {"b": 1}, None, "x: expected {'b': 1}, got {'a': 1}."),
        (torch.ones(2), torch.zeros(2), None, "x: expected [0, 0], got [1, 1]."),
        (torch.ones(1), torch.ones(2), None, "x: expected [1, 1], got [1]."),
        (torch.ones(2), 1, None, "x: expected 1, got [1, 1]."),
        (torch.full((2,), float("nan")), torch.ones(2), 0.1, "x: expected [1, 1], got [nan, nan]."),
        (torch.ones(9), torch.zeros(9), 0.1, "x: expected a tensor of shape (9,), got a tensor"),
    ],
)
def test_expect_names_what_it_expected_and_what_it_got(got, want, tolerance, message):
    with pytest.raises(AssertionError) as caught:
        expect("x", got, want, tolerance=tolerance)
    assert str(caught.value).startswith(message)


def test_expect_tells_how_far_a_large_tensor_is_off():
    with pytest.raises(AssertionError, match=r"got a tensor that differs by up to 2\."):
        expect("x", torch.full((9,), 3.0), torch.ones(9))
    with pytest.raises(AssertionError, match=r"got a tensor of shape \(9, 1\)\."):
        expect("x", torch.ones(9, 1), torch.ones(9))


@pytest.mark.parametrize(
    "got, want, tolerance",
    [
        (4, 4, None),
        (4.3, 4, 0.1),
        ((1, 2), [1, 2], None),
        ([1.05, 2], (1, 2), 0.1),
        ({"a": [1.05]}, {"a": [1]}, 0.1),
        (torch.tensor([1.0, 9.5]), torch.tensor([1.5, 10]), 0.1),
        (torch.zeros(0), torch.zeros(0), None),
        (torch.tensor(4), 4, None),
        (torch.tensor(4.3), 4, 0.1),
        (numpy.float32(4.3), 4, 0.1),
    ],
)
def test_expect_accepts(got, want, tolerance):
    expect("x", got, want, tolerance=tolerance)


def test_expect_does_not_take_a_tensor_on_a_device_for_a_number():
    with pytest.raises(AssertionError):
        expect("x", torch.tensor(4.0, device=d2lpar.virtual_gpus(2)[0]), 4.0)


def test_the_hint_for_a_known_wrong_value_comes_before_the_general_one():
    hints = [(6, "Six."), (lambda got: got > 100, "Large.")]
    for got, hint in ((6, "Six."), (101, "Large."), (7, "General.")):
        with pytest.raises(AssertionError, match=f"got {got}. {hint}"):
            expect("x", got, 5, hints=hints, hint="General.")


def test_marks_add_up_the_parts_that_pass(capsys):
    marks = Marks(8)
    with marks.part(1, "good"):
        pass
    with marks.part(2, "wrong"):
        expect("x", 1, 2)
    with marks.part(3, "broken"):
        raise ZeroDivisionError("division\nby zero")
    with marks.part(1, "unknown"):
        raise NotImplementedError("aten::nothing")  # torch's, of an operator that is not there
    with marks.part(1, "to do"):
        expect("x", None, 2)
    assert marks.total() == 1
    assert capsys.readouterr().out.splitlines() == [
        "ok    1 of 1  good",
        "wrong 0 of 2  wrong: x: expected 2, got 1.",
        "wrong 0 of 3  broken: ZeroDivisionError: division by zero",
        "wrong 0 of 1  unknown: NotImplementedError: aten::nothing",
        "open  0 of 1  to do: not answered yet",
        "1 of 8 points",
    ]


def test_a_warning_in_a_part_costs_nothing(recwarn):
    marks = Marks(1)
    with marks.part(1, "noisy"):
        warnings.warn("Noise.", stacklevel=1)
    assert marks.total() == 1 and not recwarn


def test_marks_refuse_parts_that_do_not_add_up():
    marks = Marks(3)
    with marks.part(1, "one"):
        pass
    with pytest.raises(AssertionError, match="1 points, not 3"):
        marks.total()


def test_an_interrupt_passes_through_marks():
    with pytest.raises(KeyboardInterrupt), Marks(1).part(1, "endless"):
        raise KeyboardInterrupt
