"""Compare answers with expected values: first types, then values."""

import numbers

import torch

LONGEST = 160  # maximum length of a line of a message


def expect(what, got, want, *, tolerance=None, hints=(), hint=""):
    """Compare the value of an answer with the expected value.

    Args:
        what: the name of the value, for the message.
        got: the value: a number, string or tensor, or a list, tuple or dict of those.
        want: the expected value. Lists equal tuples, and numbers equal one-element CPU tensors.
        tolerance: the largest relative difference of numbers and tensors; None requires equality.
        hints: pairs of a wrong value, or a predicate of wrong values, and a sentence that explains
            the mistake.
        hint: the sentence for all other wrong values.

    Raises:
        AssertionError: with both types if they differ, otherwise with the hint and both values.
    """
    if want is not None:
        expect_type(what, got, want)
    if agree(got, want, tolerance):
        return
    hint = matching_hint(got, tolerance, hints, hint)
    raise AssertionError(f"{hint}\n{_comparison(what, got, want, tolerance)}".lstrip())


def at_most(what, got, limit, hint=""):
    """Compare a number with an upper limit.

    Raises:
        AssertionError: with the hint and both numbers.
    """
    if not got <= limit:
        got = f"{got:.2f}" if isinstance(got, float) else show(got)
        raise AssertionError(f"{hint}\n{what}: expected at most {show(limit)}, got {got}".lstrip())


def expect_type(what, got, like):
    """Compare the type of a value with that of an example.

    Raises:
        AssertionError: with both types, if they are incompatible.
    """
    if not _fits(got, like):
        raise AssertionError(f"{what}: {describe(like)} was expected, got {describe(got)}")


def agree(got, want, tolerance):
    """Return whether two values are equal within a relative tolerance."""
    if isinstance(want, (list, tuple)):
        return (
            isinstance(got, (list, tuple))
            and len(got) == len(want)
            and all(agree(*pair, tolerance) for pair in zip(got, want, strict=True))
        )
    if isinstance(want, dict):
        return (
            isinstance(got, dict)
            and got.keys() == want.keys()
            and all(agree(got[key], want[key], tolerance) for key in want)
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


def matching_hint(got, tolerance, hints, hint):
    """Return the first of `hints` that matches a wrong value, see `expect`, otherwise `hint`."""
    for wrong, sentence in hints:
        if wrong(got) if callable(wrong) else agree(got, wrong, tolerance):
            return sentence
    return hint


def show(value):
    """Format a value for a message."""
    if isinstance(value, torch.Tensor):
        if value.numel() > 8:
            return describe(value)
        value = value.tolist()
    if isinstance(value, float):
        return f"{value + 0.0:,.6g}"  # no sign for -0.0
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, (list, tuple)):
        return short("[" + ", ".join(show(one) for one in value) + "]")
    return short(repr(value))


def short(text):
    """Return a text on one line, truncated if long."""
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else text[: LONGEST - 4] + " ..."


def describe(value):
    """Return the type of a value in words, for example "a list of numbers"."""
    if isinstance(value, torch.Tensor):
        where = "" if value.device.type == "cpu" else f" on {value.device}"
        return f"a tensor of shape {tuple(value.shape)}{where}"
    return "None" if value is None else f"a {_noun(value)}"


def _noun(value, plural=""):
    if isinstance(value, (list, tuple)):
        inside = sorted({_noun(one, plural="s") for one in value})
        noun = f"{'list' if isinstance(value, list) else 'tuple'}{plural}"
        return f"{noun} of {' and '.join(inside)}" if inside else noun
    if value is None:
        return "None"
    known = {torch.Tensor: "tensor", numbers.Real: "number", str: "string"}
    noun = next((noun for kind, noun in known.items() if isinstance(value, kind)), None)
    return (noun or type(value).__name__) + plural


def _fits(got, like):
    """Return whether the type of a value is compatible with that of an example."""
    if isinstance(like, (list, tuple)):
        return isinstance(got, (list, tuple)) and (
            not like or all(any(_fits(one, other) for other in like) for one in got)
        )
    if isinstance(like, numbers.Real):
        if isinstance(got, torch.Tensor):
            return got.device.type == "cpu" and got.dim() == 0
        return isinstance(got, numbers.Real)
    if isinstance(like, (torch.Tensor, str, dict)):
        kind = torch.Tensor if isinstance(like, torch.Tensor) else type(like)
        return isinstance(got, kind)
    return like is None or isinstance(got, type(like))


def _comparison(what, got, want, tolerance):
    """Return a line with the expected and the actual value; the first difference of long lists."""
    shown, wanted = show(got), show(want)
    tensors = isinstance(got, torch.Tensor) and isinstance(want, torch.Tensor)
    if tensors and got.shape == want.shape and shown in (describe(got), wanted):
        shown = f"a tensor that differs by up to {_largest_difference(got, want):.2g}"
        if got.isnan().any():
            shown = f"a tensor with NaN in {int(got.isnan().sum()):,} of {got.numel():,} places"
    elif shown == wanted and isinstance(got, torch.Tensor):
        shown = f"a tensor on {got.device}"
    line = f"{what}: expected {wanted}, got {shown}"
    lists = isinstance(got, (list, tuple)) and isinstance(want, (list, tuple))
    if len(line) <= LONGEST or not lists:
        return line
    if len(got) != len(want):
        return f"{what}: expected {len(want):,} in the list, got {len(got):,}"
    pairs = enumerate(zip(got, want, strict=True))
    i, pair = next((i, pair) for i, pair in pairs if not agree(*pair, tolerance))
    return _comparison(f"{what}, number {i} of the list", *pair, tolerance)


def _largest_difference(a, b):
    """Return the largest absolute difference between two tensors of one shape."""
    difference = a.detach().cpu().double() - b.detach().cpu().double()
    return difference.abs().max().item() if difference.numel() else 0.0
