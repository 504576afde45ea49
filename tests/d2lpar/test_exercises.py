"""The exercises: a solution gets all points, a stub none, a wrong answer what it should."""

import ast
import dis
import gc
import importlib
import inspect
import itertools
import re
import warnings
from pathlib import Path

import nbformat
import numpy
import pytest
import torch
from exercises import NOTEBOOKS, read, run_cells
from kernels import execute
from run import own_settings

import d2lpar
from d2lpar.exercises import Marks, at_most, expect, marks

pytestmark = pytest.mark.usefixtures("one_thread")

EXERCISES = [exercise for path in NOTEBOOKS for exercise in read(path)]
FOLDER = Path(marks.__file__).parent
NAMES = {path.stem[3:] for path in NOTEBOOKS}
MODULES = [path for path in FOLDER.glob("*.py") if path.stem in NAMES]


def grade(exercise, answers):
    """Return the points that answers to an exercise get, and what the check printed."""
    names = {"__name__": "__main__"}
    marks.wrong_tries.clear()
    try:
        _, printed = run_cells([*exercise.setup, *exercise.given], names)
        assert "Error" not in printed, printed
        _, printed = run_cells(answers, names)
        value, message = run_cells([exercise.check], names)
    finally:
        # A result of an autograd.Function made here would live for ever: it holds its class, that
        # the names, and they the result. Python does not see the first of it.
        for name in [name for name in names if not name.startswith("__")]:
            del names[name]
    return value, printed + message


def stored(cells):
    steps = [step for cell in cells for step in dis.get_instructions(compile(cell, "", "exec"))]
    return {step.argval for step in steps if step.opname == "STORE_NAME"}


def every_reference():
    """Yield answers that hand in what a check compares with: it, a function around it, its value.

    An exercise whose answer is several names gets the same for all of them.
    """
    ways = {
        "it": "{} = {}",
        "wrapper": "def {}(*args, **kwargs):\n    return {}(*args, **kwargs)",
        "value": "{} = {}()",
    }
    for exercise in EXERCISES:
        own = stored(exercise.stub)
        tree = ast.parse("\n".join(exercise.stub))
        functions = own & {getattr(node, "name", None) for node in tree.body}
        imports = [
            (node.module, alias.name)
            for node in ast.walk(ast.parse(exercise.check))
            if getattr(node, "module", "").startswith("d2lpar.exercises.")
            for alias in node.names
        ]
        for (module, reference), (way, form) in itertools.product(imports, ways.items()):
            if chosen := sorted(own - functions if way == "value" else functions):
                answer = [form.format(name, reference) for name in chosen]
                answer = "\n".join([f"from {module} import {reference}", *answer])
                yield pytest.param(exercise, answer, id=f"{exercise.label}-{reference}-{way}")


@pytest.fixture(autouse=True)
def devices_as_before():
    """Leave two virtual GPUs by the wall clock behind, and no memory in use."""
    yield
    devices = d2lpar.virtual_gpus(2)
    if any(map(torch.vgpu.memory_allocated, devices)):
        torch.compiler.reset()  # what is compiled may hold tensors
        gc.collect()
    assert [torch.vgpu.memory_allocated(device) for device in devices] == [0, 0]


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.label)
def test_the_solution_gets_all_points(exercise):
    points, printed = grade(exercise, exercise.answers)
    assert points == exercise.points, printed
    assert "wrong" not in printed and "open" not in printed


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.label)
@pytest.mark.slow
def test_the_stub_gets_none(exercise):
    assert exercise.stub != exercise.answers
    points, printed = grade(exercise, exercise.stub)
    assert not points, printed


@pytest.mark.parametrize(
    "exercise, name",
    [
        pytest.param(exercise, name, id=f"{exercise.label}-{name}".replace(" ", "_"))
        for exercise in EXERCISES
        for name in exercise.wrong
    ],
)
@pytest.mark.slow
def test_wrong_answers_are_told_apart(exercise, name):
    _, points, message = exercise.wrong[name]
    assert points < exercise.points
    got, printed = grade(exercise, [exercise.wrong_answer(name)])
    assert (got or 0, message in printed) == (points, True), printed


@pytest.mark.parametrize("exercise, answer", list(every_reference()))
@pytest.mark.slow
def test_what_a_check_compares_with_cannot_be_handed_in(exercise, answer):
    points, printed = grade(exercise, [*exercise.stub, answer])
    assert not points and "belongs to the check: write your own" in printed, printed


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_what_a_check_compares_with_answers_that_check_only(path):
    module = importlib.import_module(f"d2lpar.exercises.{path.stem}")
    functions = inspect.getmembers(module, inspect.isfunction)
    for name, function in functions:
        if function.__module__ == module.__name__ and not name.startswith("_"):
            with pytest.raises(AssertionError, match=f"`{name}` belongs to the check"):
                function()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_nothing_but_an_answer_changes_what_it_says(path):
    """A check that is run again finds the answers as they were."""
    given = [cell for one in read(path) for cell in (*one.setup, *one.given, one.check)]
    answers = [cell for one in read(path) for cell in one.stub]
    assert not stored(answers) & stored(given)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_four_to_eight_exercises_with_three_wrong_answers_each(path):
    assert 4 <= len(read(path)) <= 8
    assert all(len(exercise.wrong) >= 3 for exercise in read(path))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_each_exercise_begins_a_cell(path):
    """A page of feedback takes its title from there, and the grader looks for answers behind it."""
    texts = [
        cell.source
        for cell in nbformat.read(path, as_version=4).cells
        if cell.cell_type == "markdown"
    ]
    headings = [text for text in texts if re.search("^## ", text, re.MULTILINE)]
    assert len(headings) == len(read(path))
    assert all(text.startswith("## ") for text in headings)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_an_exercise_says_that_it_needs_what_goes_deeper(path):
    """Its table names for each exercise a section of a lesson, or of a page that goes deeper."""
    table = nbformat.read(path, as_version=4).cells[0].source
    rows = re.findall(
        r"\| ([^|]*)\[[^]]+\]\(\.\./([^)#]+)#cell-id=([\w-]+)\) \|$", table, re.MULTILINE
    )
    assert len(rows) == len(read(path))
    for said, chapter, section in rows:
        cells = nbformat.read(path.parents[1] / chapter, as_version=4).cells
        assert section in [cell.id for cell in cells]
        assert ("Going deeper" in said) == chapter.startswith("deeper/"), section


# What checks are made of.

ONES, NAN = torch.ones(9), torch.full((9,), float("nan"))
NINE = "a tensor of shape (9,)"


@pytest.mark.parametrize("got, want, tolerance, message", [
    (3, 4, None, "x: expected 4, got 3"),
    (1_000_000, 4, None, "x: expected 4, got 1,000,000"),
    (151_008.0, 4, None, "x: expected 4, got 151,008"),
    (4.5, 4, 0.1, "x: expected 4, got 4.5"),
    ("a", "b", None, "x: expected 'b', got 'a'"),
    ([1, 2], [1, 2, 3], None, "x: expected [1, 2, 3], got [1, 2]"),
    ({"a": 1}, {"a": 2}, None, "x: expected {'a': 2}, got {'a': 1}"),
    ({"a": 1}, {"b": 1}, None, "x: expected {'b': 1}, got {'a': 1}"),
    (torch.ones(2), torch.zeros(2), None, "x: expected [0, 0], got [1, 1]"),
    (torch.ones(1), torch.ones(2), None, "x: expected [1, 1], got [1]"),
    (NAN[:2], ONES[:2], 0.1, "x: expected [1, 1], got [nan, nan]"),
    (NAN, ONES, 0.1, f"x: expected {NINE}, got a tensor with NaN in 9 of 9 places"),
    ([1] * 7 + [0] + [1] * 92, [1] * 100, None, "x, number 7 of the list: expected 1, got 0"),
    (list(range(90)), list(range(91)), None, "x: expected 91 in the list, got 90"),
    (1.0, -0.0, None, "x: expected 0, got 1"),
    (3 * ONES, ONES, 0.1, f"x: expected {NINE}, got a tensor that differs by up to 2"),
    (ONES[:, None], ONES, 0.1, f"x: expected {NINE}, got a tensor of shape (9, 1)"),
])  # fmt: skip
def test_expect_names_what_it_expected_and_what_it_got(got, want, tolerance, message):
    with pytest.raises(AssertionError) as caught:
        expect("x", got, want, tolerance=tolerance)
    assert str(caught.value) == message


@pytest.mark.parametrize("got, want, message", [
    (None, 1.0, "a number was expected, got None"),
    ("4", 4, "a number was expected, got a string"),
    (4, "4", "a string was expected, got a number"),
    (torch.ones(3), [1.0, 1.0, 1.0], "a list of numbers was expected, got a tensor of shape"),
    ([1.0], torch.ones(1), "a tensor of shape (1,) was expected, got a list of numbers"),
    ([torch.ones(2)], [1.0], "a list of numbers was expected, got a list of tensors"),
    (([1], None), [1, 2], "a list of numbers was expected, got a tuple of None and lists of"),
    (range(2), [0, 1], "a list of numbers was expected, got a range"),
    ([("a", 1)], {"a": 1}, "a dict was expected, got a list of tuples of numbers and strings"),
    (torch.ones(2), torch.nn.Linear(1, 1), "a Linear was expected, got a tensor of shape (2,)"),
])  # fmt: skip
def test_expect_compares_types_before_values(got, want, message):
    with pytest.raises(AssertionError) as caught:
        expect("x", got, want, hint="Never seen.")
    assert str(caught.value).startswith(f"x: {message}")


@pytest.mark.parametrize("got, want, tolerance", [
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
    ([], [], None),
    (None, None, None),
])  # fmt: skip
def test_expect_accepts(got, want, tolerance):
    expect("x", got, want, tolerance=tolerance)


def test_expect_does_not_take_a_tensor_on_a_device_for_a_number():
    with pytest.raises(AssertionError, match="a number was expected, got a tensor of shape .* on"):
        expect("x", torch.tensor(4.0, device=d2lpar.virtual_gpus(2)[0]), 4.0)


def test_expect_compares_tensors_wherever_they_are():
    device = d2lpar.virtual_gpus(2)[0]
    expect("x", torch.ones(9, device=device), torch.ones(9))
    with pytest.raises(AssertionError, match="shape .9,., got a tensor that differs by up to 2"):
        expect("x", torch.full((9,), 3.0, device=device), torch.ones(9))


def test_the_hint_for_a_known_wrong_value_comes_before_the_general_one():
    hints = [(6, "Six."), (lambda got: got > 100, "Large.")]
    for got, hint in ((6, "Six."), (101, "Large."), (7, "General.")):
        with pytest.raises(AssertionError) as caught:
            expect("x", got, 5, hints=hints, hint="General.")
        assert str(caught.value) == f"{hint}\nx: expected 5, got {got}"


def test_at_most_names_the_limit():
    at_most("x", 3, 3)
    for got, shown in ((4, "4"), (3.141, "3.14"), (float("nan"), "nan")):
        with pytest.raises(AssertionError) as caught:
            at_most("x", got, 3, "Less.")
        assert str(caught.value) == f"Less.\nx: expected at most 3, got {shown}"


def test_marks_add_up_the_parts_that_pass(capsys):
    marks = Marks(9)
    with marks.part(1, "good"):
        pass
    with marks.part(2, "wrong"):
        expect("x", 1, 2, hint="Add\none.")
    with marks.part(3, "broken"):
        raise ZeroDivisionError("division\nby zero")
    with marks.part(1, "unknown"):
        raise NotImplementedError("aten::nothing")  # torch's, of an operator that is not there
    with marks.part(1, "to do"):
        raise NotImplementedError
    with marks.part(1, "behind it"):
        raise AssertionError("the part before is not right yet")
    assert marks.total() == 1
    assert capsys.readouterr().out.splitlines() == [
        "ok    1 of 1  good",
        "wrong 0 of 2  wrong: Add",
        "              one. x: expected 2, got 1",
        "wrong 0 of 3  broken: the check cannot use this answer: ZeroDivisionError: division by "
        "zero",
        "wrong 0 of 1  unknown: the check cannot use this answer: NotImplementedError: "
        "aten::nothing",
        "open  0 of 1  to do: not answered yet",
        "open  0 of 1  behind it: not answered yet",
        "1 of 9 points",
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


# A check and what a student does before it, in this process and in a kernel.

SETUP = "import numpy, torch\nfrom d2lpar.exercises import Marks, expect"
CHECK = """
from d2lpar.exercises.automatic_parallelism import fastest

marks = Marks(1)
mine = marks.answer("devices", like=0{})
with marks.part(1, "devices"):
    expect("devices for 20 and 8 µs", mine(20, 8, 9), fastest(20, 8, 9), hint="Round up.")
marks.total()
"""
PREDICTION = """
marks = Marks(1)
with marks.part(1, "a time"):
    marks.prediction("t", 20, hints=[(14, "One waits for the other.")])
marks.total()
"""
ONE_WAITS = "wrong 0 of 1  a time: One waits for the other.\n              t: 14 is not right"
PREDICTIONS = """
marks = Marks(2)
for part, name in (("another", "u"), ("a time", "t")):
    with marks.part(1, part):
        marks.prediction(name, 20)
marks.total()
"""
RIGHT = "def devices(t_comp, t_launch, available):\n    return 3"
LIKE = CHECK.format("")
WITHOUT = CHECK.format(', without=("torch", "numpy")')
NO_TORCH = "your answer calls torch, which the task rules out"
BORROWED = "from d2lpar.exercises.automatic_parallelism import fastest\n"
WHOLE = LIKE.replace("like=0", "like=[0]")
FIRST = WHOLE.replace("9)", "9)[0]", 1)
TOO_LATE = """
import d2lpar

gpus = d2lpar.virtual_gpus(2)


def devices(*times):
    for gpu in gpus:
        torch.zeros(3, device=gpu)[torch.full((1,), 7, device=gpu)]
    return 2
"""
STORIES = {  # cells, and the line that the last of them prints first
    "right": ([RIGHT, LIKE], "ok    1 of 1  devices"),
    "wrong": (
        ["def devices(*times):\n    return 2", LIKE],
        "devices: Round up.\n              devices for 20 and 8 µs: expected 3, got 2",
    ),
    "not run": ([LIKE], "there is no `devices`: run the answer cell first"),
    "a stub": (["def devices(*times):\n    raise NotImplementedError()", LIKE], "not answered yet"),
    "no def of a stub": (["devices = None\nraise NotImplementedError()", LIKE], "not answered yet"),
    "a slip": (
        ["def devices(*times)\n    return 3", LIKE],
        "your answer cell ended in an error: SyntaxError: expected ':'",
    ),
    "a slip in what was right": (
        [RIGHT, "def devices(*times)\n    return 3", LIKE],
        "your answer cell ended in an error: SyntaxError: expected ':'",
    ),
    "an error before the function": (
        [RIGHT, "unknown\ndef devices(*times):\n    return 3", LIKE],
        "your answer cell ended in an error: NameError: name 'unknown' is not defined",
    ),
    "an error behind the function": ([RIGHT + "\n\nunknown", LIKE], "ok    1 of 1  devices"),
    "an error in another cell": ([RIGHT, "unknown", LIKE], "ok    1 of 1  devices"),
    "no function": (["devices = 3", LIKE], "devices: a function was expected, got a number"),
    "no return": (
        ["def devices(*times):\n    print(3)", LIKE],
        "3\nwrong 0 of 1  devices: the function returned None: is `return` missing?",
    ),
    "another type": (
        ["def devices(*times):\n    return torch.ones(2)", LIKE],
        "devices: a number was expected, got a tensor of shape (2,)",
    ),
    "an error in the function": (
        ["def devices(a, b, c):\n    zero = b - 8\n    return a / zero", LIKE],
        "line 3 of your answer: `return a / zero`: ZeroDivisionError: division by zero",
    ),
    "an error in what the function calls": (
        ["def devices(*times):\n    return torch.ones(2).mm(3)", LIKE],
        "line 2 of your answer: `return torch.ones(2).mm(3)`: TypeError: mm()",
    ),
    "an assertion of the student": (
        ["def devices(a, b, c):\n    assert a < b\n    return 3", LIKE],
        "line 2 of your answer: `assert a < b`: AssertionError",
    ),
    "too few arguments": (
        ["def devices(a, b):\n    return 3", LIKE],
        "TypeError: devices() takes 2 positional arguments but 3 were given",
    ),
    "a function around it": (
        [BORROWED + "def devices(*times):\n    return fastest(*times)", LIKE],
        "`fastest` belongs to the check: write your own",
    ),
    "its number": (
        [LIKE, "t = fastest(20, 8, 9)", PREDICTION],
        "your answer cell ended in an error: AssertionError: `fastest` belongs to the check",
    ),
    "a tensor": (["def devices(*times):\n    return len(torch.ones(3))", WITHOUT], NO_TORCH),
    "a method": (["x = torch.eye(3)\ndevices = lambda *_: int(x.sum())", WITHOUT], NO_TORCH),
    "an array": (
        ["def devices(*times):\n    return len(numpy.array_split(range(5), 3))", WITHOUT],
        "your answer calls numpy, which the task rules out",
    ),
    "neither": ([RIGHT, WITHOUT], "ok    1 of 1  devices"),
    "an error in a function that was given": (
        ["def given(*times):\n    return 1 / 0\n\n\ndevices = given", LIKE],
        "devices: ZeroDivisionError: division by zero",
    ),
    "a name that a module has not": (
        ["def devices(*times):\n    from d2lpar.exercises.scaling import unknown", LIKE],
        "cannot import name 'unknown' from 'd2lpar.exercises.scaling'\n",
    ),
    "a name that a module in a folder with a space has not": (
        [
            "def devices(*times):\n    raise ImportError('no x in y (/a b.py)', path='/a b.py')",
            LIKE,
        ],
        "ImportError: no x in y\n",
    ),
    "too short a list": (
        ["def devices(*times):\n    return []", FIRST],
        "devices: the check cannot use this answer: IndexError: list index out of range",
    ),
    "no whole numbers": (
        ["def devices(*times):\n    return [2.5, 1]", WHOLE],
        "devices: whole numbers were expected, got [2.5, 1]",
    ),
    "right behind late errors of two devices": (
        [TOO_LATE, LIKE, "def devices(*times):\n    d2lpar.synchronize()\n    return 3", LIKE],
        "ok    1 of 1  devices",
    ),
    "a prediction to make": (["t = None\nraise NotImplementedError()", PREDICTION], "not answered"),
    "a wrong prediction": (["t = 14", PREDICTION], ONE_WAITS),
    "the same once more": (["t = 14", PREDICTION] * 2, ONE_WAITS),
    "another wrong prediction": (
        ["t = 14", PREDICTION, "t = 15", PREDICTION],
        "wrong 0 of 1  a time: That is too small.\n              t: expected 20, got 15",
    ),
    "wrong behind a right one": (
        ["t = 14", PREDICTION, "t = 20", PREDICTION, "t = 21", PREDICTION],
        "wrong 0 of 1  a time: That is too large.\n              t: 21 is not right",
    ),
    "a right prediction": (["t = 14", PREDICTION, "t = 20", PREDICTION], "ok    1 of 1  a time"),
    "an error in a prediction that was there": (
        ["t = 14", PREDICTION, "t, u = 20,", PREDICTION],
        "your answer cell ended in an error: ValueError: not enough values to unpack",
    ),
    "an error in its second line": (
        ["t = 14", PREDICTION, "t = (\n    20 / 0\n)", PREDICTION],
        "your answer cell ended in an error: ZeroDivisionError: division by zero",
    ),
    "an error behind a prediction": (["t = 20\nunknown", PREDICTION], "ok    1 of 1  a time"),
    "a prediction of another type": (
        ["t = '20'", PREDICTION],
        "wrong 0 of 1  a time: t: a number was expected, got a string",
    ),
    "a wrong prediction beside one to make": (
        ["t = 14\nu = None\nraise NotImplementedError()", PREDICTIONS],
        "open  0 of 1  another: not answered yet\nwrong 0 of 1  a time: That is too small.",
    ),
}


@pytest.mark.parametrize("cells, line", STORIES.values(), ids=STORIES)
def test_what_a_student_is_told(cells, line):
    marks.wrong_tries.clear()
    names = {"__name__": "__main__"}
    run_cells([SETUP, *cells[:-1]], names)
    points, printed = run_cells(cells[-1:], names)
    assert line in printed
    assert points == line.startswith("ok")
    assert len(printed.splitlines()) <= 4


@pytest.mark.slow
def test_what_a_student_is_told_in_a_kernel():
    """The stories of errors and slips, whose exceptions IPython remembers, in one kernel."""
    stories = [story for name, story in STORIES.items() if "error" in name or "slip" in name]
    forget = "%reset -f\nfrom d2lpar.exercises import marks as d\nd.wrong_tries.clear()\ndel d"
    cells = [[forget, SETUP, *cells] for cells, _ in stories]
    with own_settings():
        executed, _ = execute(*itertools.chain(*cells), allow_errors=True)
    ran = iter(executed)
    for story, (_, line) in zip(cells, stories, strict=True):
        *_, last = (next(ran) for _ in story)
        printed = "".join(one.text for one in last.outputs if one.output_type == "stream")
        assert line in printed
        assert not [one for one in last.outputs if one.get("name") == "stderr"]
