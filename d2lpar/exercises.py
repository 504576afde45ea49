"""Checks of the exercise notebooks: the expected value, the given one, and the points for it."""

import contextlib
import numbers
import warnings

import torch


def expect(what, got, want, *, tolerance=None, hints=(), hint=""):
    """Compare the value that an answer gave with the expected one.

    Args:
        what: what is compared, in words, for the message.
        got: the value that the answer gave: a number, a string, a tensor, or a list, tuple or dict
            of these.
        want: the expected value. Lists and tuples count as the same, and so do numbers and tensors
            of one number on the CPU.
        tolerance: the largest relative difference of numbers and tensors; None means equal.
        hints: pairs of a wrong value, or a function that tells whether a value is wrong in this
            way, and a sentence that says what went wrong.
        hint: a sentence for every other wrong value.

    Raises:
        AssertionError: with both values and the hint.
        NotImplementedError: the answer is None, as in a stub.
    """
    if _agree(got, want, tolerance):
        return
    if got is None:
        raise NotImplementedError
    for wrong, sentence in hints:
        if wrong(got) if callable(wrong) else _agree(got, wrong, tolerance):
            hint = sentence
            break
    shown = _show(got)
    if shown == _show(want) and isinstance(got, torch.Tensor):
        shown = f"a tensor on {got.device}"
        if isinstance(want, torch.Tensor):
            shown = f"a tensor that differs by up to {_largest_difference(got, want):.2g}"
    raise AssertionError(f"{what}: expected {_show(want)}, got {shown}. {hint}".rstrip())


class Marks:
    """The points of one exercise, part by part; all parts together are worth `points`."""

    def __init__(self, points):
        self.points, self.given, self.reached = points, 0, 0

    @contextlib.contextmanager
    def part(self, points, name):
        """Give `points` if the block passes, and print which; an exception in it is caught.

        Warnings are not shown: nbgrader gives no points for a check that writes to stderr.
        """
        self.given += points
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        except AssertionError as error:
            print(f"wrong 0 of {points}  {name}: {error}")
        except Exception as error:
            if isinstance(error, NotImplementedError) and not error.args:  # as in a stub
                print(f"open  0 of {points}  {name}: not answered yet")
            else:
                print(f"wrong 0 of {points}  {name}: {type(error).__name__}: {_short(str(error))}")
        else:
            self.reached += points
            print(f"ok    {points} of {points}  {name}")

    def total(self):
        """Return the points reached, the last value of a check cell, which nbgrader reads."""
        assert self.given == self.points, f"the parts give {self.given} points, not {self.points}"
        print(f"{self.reached} of {self.points} points")
        return self.reached


def _agree(got, want, tolerance):
    if isinstance(want, (list, tuple)):
        return (
            isinstance(got, (list, tuple))
            and len(got) == len(want)
            and all(_agree(*pair, tolerance) for pair in zip(got, want, strict=True))
        )
    if isinstance(want, dict):
        return (
            isinstance(got, dict)
            and got.keys() == want.keys()
            and all(_agree(got[key], want[key], tolerance) for key in want)
        )
    if isinstance(want, torch.Tensor):
        if not isinstance(got, torch.Tensor) or got.shape != want.shape:
            return False
        scale = want.detach().cpu().double().abs().max().item() if want.numel() else 0.0
        return _largest_difference(got, want) <= (tolerance or 0) * scale
    if isinstance(got, torch.Tensor):
        if got.device.type != "cpu" or got.dim() > 0:
            return False
        got = got.item()
    if tolerance is not None and isinstance(got, numbers.Real):
        return bool(abs(got - want) <= tolerance * abs(want))
    return bool(got == want)


def _largest_difference(a, b):
    """Return the largest difference between two tensors of one shape."""
    difference = a.detach().cpu().double() - b.detach().cpu().double()
    return difference.abs().max().item() if difference.numel() else 0.0


def _show(value):
    """Return a value as a message shows it."""
    if isinstance(value, torch.Tensor):
        if value.numel() > 8:
            return f"a tensor of shape {tuple(value.shape)}"
        value = value.tolist()
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, (list, tuple)):
        return _short("[" + ", ".join(_show(one) for one in value) + "]")
    return _short(repr(value))


def _short(text, length=160):
    """Return a text on one line, shortened if it is long."""
    text = " ".join(text.split())
    return text if len(text) <= length else text[: length - 4] + " ..."
