"""Points of an exercise, and access of a check to the answers.

A check cell creates `Marks`, which looks answers up in the notebook. Reference solutions are
decorated with `reference`: only the check cell can call them, so students can neither call nor
submit them.
"""

import ast
import contextlib
import functools
import numbers
import re
import sys
import traceback
import types
import warnings

import torch

from d2lpar.devices import num_gpus
from d2lpar.exercises.answers import agree, describe, expect_type, matching_hint, short, show
from vgpu import synchronize

_check = None  # co_filename of the latest check cell
wrong_tries = {}  # (part, name): wrong predictions in this kernel


class Marks:
    """The points of one exercise, which has `points` in all, divided into parts."""

    def __init__(self, points):
        global _check
        cell = sys._getframe(1)
        self._names, _check = cell.f_globals, cell.f_code.co_filename
        self._part, self._open = "", False  # name of the current part; whether an answer is a stub
        self._files = set()  # co_filename of the cells with answers
        self.points, self.given, self.reached = points, 0, 0
        _forget_late_errors()

    @contextlib.contextmanager
    def part(self, points, name):
        """Context manager: give `points` if the block passes, and print the result.

        Exceptions are caught. Warnings are hidden: nbgrader gives no points for output to stderr.
        """
        self.given += points
        self._part = name
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        except Exception as error:
            _forget_late_errors()
            verdict, text = self._explain(error)
            first, *rest = text.splitlines() or [""]
            print(f"{verdict:5} 0 of {points}  {name}: {first}")
            if rest:
                print(" " * len("wrong 0 of 1 "), short(" ".join(rest)))
        else:
            self.reached += points
            print(f"ok    {points} of {points}  {name}")

    def answer(self, name, *, like, without=()):
        """Return the answer, a function or class, for the check to call.

        Args:
            name: its name in the notebook.
            like: an example of the result, which determines its type; None if it may return None.
            without: names of modules whose functions the answer must not call.
        """
        return Answer(self, name, like, without)

    def prediction(self, name, want, *, of=None, tolerance=None, hints=(), hint=""):
        """Compare a predicted value with the expected value.

        The first wrong prediction gets a hint; from the second on the message has the right value.

        Args:
            name: its name in the notebook.
            want: the expected value.
            of: a function that returns the part of the value to compare; None compares all.
            tolerance, hints, hint: as in `expect`; numbers have a default hint.

        Raises:
            AssertionError: with the hint and the predicted value.
            NotImplementedError: the value is None, as in a stub.
        """
        got = self.value(name)
        expect_type(name, got, want)
        got = of(got) if of else got
        tries = wrong_tries.setdefault((self._part, name), [])
        if agree(got, want, tolerance):
            tries.clear()
            return
        if got not in tries:
            tries.append(got)
        if not hint and isinstance(want, numbers.Real):
            hint = "That is too large." if got > want else "That is too small."
        shown = f"{name}: {show(got)} is not right"
        if len(tries) > 1:
            shown = f"{name}: expected {show(want)}, got {show(got)}"
        raise AssertionError(f"{matching_hint(got, tolerance, hints, hint)}\n{shown}".lstrip())

    def value(self, name):
        """Return a value of the notebook.

        Raises:
            AssertionError: the name is undefined, or the answer cell failed before defining it.
            NotImplementedError: the value is None, as in a stub.
        """
        value, error = self._names.get(name), self._error(name, self._names.get(name))
        stub = isinstance(error, NotImplementedError) and not error.args
        if error and not stub:
            raise AssertionError(f"your answer cell ended in an error: {_text(error)}")
        if name not in self._names and not stub:
            raise AssertionError(f"there is no `{name}`: run the answer cell first")
        if value is None:
            raise NotImplementedError
        if getattr(value, "__name__", name) in (name, "<lambda>"):  # the student's own
            self._files |= {_file(value)} - {__file__}
        return value

    def total(self):
        """Print and return the points reached: nbgrader reads the last value of a check cell."""
        assert self.given == self.points, f"the parts give {self.given} points, not {self.points}"
        print(f"{self.reached} of {self.points} points")
        return self.reached

    def _error(self, name, value):
        """Return the error of the cell before the check if that cell should have defined `name`.

        Returns None if a statement before the error has defined it as `value`.
        """
        shell = self._names.get("get_ipython", lambda: None)()
        result = getattr(shell, "last_execution_result", None)
        defines = rf"\b(def|class) {name}\b|\b{name}\b[\w, ]*="
        if not result or not re.search(defines, result.info.raw_cell):
            return None
        error = result.error_before_exec or result.error_in_exec
        if not error or value is None or isinstance(error, SyntaxError):
            return error
        frames = traceback.walk_tb(error.__traceback__)
        line = next((line for frame, line in frames if frame.f_globals is self._names), 0)
        cell = result.info.raw_cell
        with contextlib.suppress(SyntaxError):  # a magic command
            ends = [node.end_lineno for node in ast.parse(cell).body if node.end_lineno < line]
            cell = "\n".join(cell.splitlines()[: max(ends, default=0)])
        return None if re.search(defines, cell) else error

    def _explain(self, error):
        """Return the verdict on an exception, "open" or "wrong", and a message."""
        frames = traceback.extract_tb(error.__traceback__)
        if isinstance(error, NotImplementedError) and not error.args:  # as in a stub
            self._open = True
        elif not (self._open and frames[-1].filename == _check):  # else it depends on a stub
            return "wrong", self._message(error, frames)
        return "open", "not answered yet"

    def _message(self, error, frames):
        """Return a message on an exception, with the line of the answer that raised it."""
        own = [frame for frame in frames if frame.filename in self._files]
        if isinstance(error, AssertionError) and frames[-1] not in own:
            return str(error)
        for note in getattr(error, "__notes__", ()):  # `launch` adds the traceback of a rank
            found = re.findall(r'File "(.+)", line (\d+), in (.+)', note)
            frames = [traceback.FrameSummary(file, int(line), name) for file, line, name in found]
            own += [frame for frame in frames if frame.filename in self._files]
        if own:
            return f"line {own[-1].lineno} of your answer: `{own[-1].line}`: {_text(error)}"
        if frames[-1].filename == _check:
            return f"the check cannot use this answer: {_text(error)}"
        return _text(error)


class Answer:
    """An answer that a check calls: a function or class of the notebook."""

    def __init__(self, marks, name, like, without):
        self._marks, self._name, self._like, self._without = marks, name, like, without

    @property
    def function(self):
        """The function or class itself, for checks that do more than call it."""
        value = self._marks.value(self._name)
        if not callable(value):
            raise AssertionError(f"{self._name}: a function was expected, got {describe(value)}")
        return value

    def __call__(self, *args, **kwargs):
        """Call the answer and return its result.

        Raises:
            AssertionError: it returns None or a value of another type, or calls a module that the
                task rules out.
        """
        function = self.function
        with _refused(self._without):
            result = function(*args, **kwargs)
        if self._like is not None:
            if result is None:
                raise AssertionError("the function returned None: is `return` missing?")
            expect_type(self._name, result, self._like)
            whole = isinstance(self._like, list) and isinstance(self._like[0], int)
            if whole and not all(float(one).is_integer() for one in result):
                raise AssertionError(
                    f"{self._name}: whole numbers were expected, got {show(result)}"
                )
        return result


def reference(function):
    """Decorator of reference solutions: students can neither call nor submit the function."""

    @functools.wraps(function)
    def for_the_check(*args, **kwargs):
        if sys._getframe(1).f_code.co_filename != _check:
            raise AssertionError(f"`{function.__name__}` belongs to the check: write your own")
        return function(*args, **kwargs)

    return for_the_check


def _forget_late_errors():
    """Wait for all GPUs and discard their asynchronous errors.

    Each wait reports the error of one device only; the others would fail the next answer.
    """
    for _ in range(num_gpus()):
        with contextlib.suppress(torch.AcceleratorError):
            synchronize()


@contextlib.contextmanager
def _refused(modules):
    """Raise AssertionError if the block calls a function of one of the modules."""

    def check_call(frame, event, called):
        home = frame.f_globals.get("__name__") if event == "call" else None
        if event == "c_call":
            owner = getattr(called, "__self__", None)
            owner = owner if isinstance(owner, (type, types.ModuleType)) else type(owner)
            home = getattr(called, "__module__", None) or getattr(owner, "__module__", None)
        for name in modules:
            if f"{home}.".startswith(f"{name}."):
                raise AssertionError(f"your answer calls {name}, which the task rules out")

    before = sys.getprofile()
    sys.setprofile(check_call if modules else before)
    try:
        yield
    finally:
        sys.setprofile(before)


def _text(error):
    """Return type and message of an exception, without the name of a file."""
    message = str(getattr(error, "msg", error)).removesuffix(f" ({getattr(error, 'path', None)})")
    return f"{type(error).__name__}: {short(message)}".removesuffix(": ")


def _file(value):
    """Return the file of a function or class, or None for other values."""
    functions = vars(value).values() if isinstance(value, type) else [value]
    return next((f.__code__.co_filename for f in functions if hasattr(f, "__code__")), None)
