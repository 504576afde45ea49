"""Record the differences that assertions compare with bounds.

`matrix.py` runs this file in each kernel by PYTHONSTARTUP, and loads it into pytest as a plug-in.
It appends a line of JSON for each comparison to the file in the variable `D2LPAR_PARITIES`.

In notebooks it records assertions such as `assert x < 1e-5`, if the bound contains a number below
`SMALL`, and calls of `torch.testing.assert_close` and `expect`; in tests
`torch.testing.assert_close`.
"""

import ast
import json
import os
import sys
from pathlib import Path

FILE = "D2LPAR_PARITIES"
SMALL = 0.01
CALLS = ("assert_close", "expect")


class Recorded(ast.NodeTransformer):
    """Records the comparisons of a cell of an IPython `shell`, and does not change what it does."""

    def __init__(self, shell):
        self.shell = shell
        self.assertion = ""  # the key of the one that is visited

    def visit_Assert(self, node):
        self.assertion = self._key(node)
        node.test = self.visit(node.test)
        self.assertion = ""
        return node

    def visit_Compare(self, node):
        """Rewrite `left < right` in an assertion, if the right side contains a small number."""
        self.generic_visit(node)
        if not self.assertion or len(node.ops) > 1 or not isinstance(node.ops[0], ast.Lt | ast.LtE):
            return node
        numbers = [n.value for n in ast.walk(node.comparators[0]) if isinstance(n, ast.Constant)]
        if not any(isinstance(n, float) and 0 < n < SMALL for n in numbers):
            return node
        strict = ast.Constant(isinstance(node.ops[0], ast.Lt))
        arguments = [ast.Constant(self.assertion), node.left, node.comparators[0], strict]
        return ast.Call(func=_attribute("less"), args=arguments, keywords=[])

    def visit_Call(self, node):
        """Rewrite `expect(...)` and `assert_close(...)`."""
        key, name = self._key(node), ast.unparse(node.func).rpartition(".")[2]
        self.generic_visit(node)
        if name not in CALLS:
            return node
        node.args = [ast.Constant(key), node.func, *node.args]
        node.func = _attribute(name)
        return node

    def _key(self, node):
        name = Path(os.environ.get("JPY_SESSION_NAME", "")).stem
        chapter = name if Path.cwd().name == "deeper" else name[:2]
        number = self.shell.execution_count - 1  # incremented before a cell runs
        return f"{chapter} cell {number:<3} {ast.unparse(node)}"


def _attribute(name):
    return ast.Attribute(value=ast.Name("__parities__", ast.Load()), attr=name, ctx=ast.Load())


def note(key, difference, bound):
    """Write a line with the key of a comparison, the difference and the bound."""
    if path := os.environ.get(FILE):
        line = json.dumps({"key": key, "difference": _number(difference), "bound": _number(bound)})
        with open(path, "a", encoding="utf-8") as file:
            file.write(line + "\n")


def _number(x):
    """Return a number, or the maximum of a tensor, as a float."""
    return float(x.detach().max() if hasattr(x, "detach") else x)


def less(key, left, right, strict):
    """Return `left < right` or `left <= right`, and record both."""
    note(key, left, right)
    return left < right if strict else left <= right


def assert_close(key, function, actual, expected, *args, **options):
    """Call `torch.testing.assert_close`, and record the entry nearest to its bound."""
    from torch.testing._comparison import get_tolerances

    function(actual, expected, *args, **options)
    given = {name: options.get(name) for name in ("rtol", "atol")}
    for pair in _pairs(actual, expected):
        rtol, atol = get_tolerances(*pair, **given)
        a, e = (x.detach().cpu().double().flatten() for x in pair)
        difference, bound = (a - e).abs().nan_to_num(), atol + rtol * e.abs().nan_to_num(posinf=0)
        if len(e) and bound.max() > 0:
            i = (difference / bound.clamp(min=1e-300)).argmax()
            note(key, difference[i], bound[i])


def expect(key, function, what, got, want, **options):
    """Call `d2lpar.exercises.expect`, and record the largest relative difference."""
    function(what, got, want, **options)
    if tolerance := options.get("tolerance"):
        for a, e in _pairs(got, want):
            scale = e.detach().abs().max().item() if e.numel() else 0
            difference = (a.detach().cpu().double() - e.detach().cpu().double()).abs()
            if scale:
                note(key, difference.max() / scale, tolerance)


def _pairs(actual, expected):
    """Yield pairs of tensors from numbers, tensors, and lists and dicts of these."""
    import torch

    if isinstance(expected, dict):
        for name in expected:
            yield from _pairs(actual[name], expected[name])
    elif isinstance(expected, (list, tuple)):
        for pair in zip(actual, expected, strict=True):
            yield from _pairs(*pair)
    elif isinstance(expected, (torch.Tensor, int, float)):
        a, e = (torch.as_tensor(x) for x in (actual, expected))
        if (a.is_floating_point() or e.is_floating_point()) and a.layout is torch.strided:
            yield a, e


def pytest_configure(config):
    """Record the calls of `torch.testing.assert_close` in tests, by file and line."""
    import torch

    function = torch.testing.assert_close

    def recorded(actual, expected, *args, **options):
        frame = sys._getframe(1)
        key = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        assert_close(key, function, actual, expected, *args, **options)

    recorded.function = function
    torch.testing.assert_close = recorded


if __name__ == "__main__" and "get_ipython" in globals():
    import parities

    __parities__ = parities
    get_ipython().ast_transformers.append(parities.Recorded(get_ipython()))  # noqa: F821
    del parities
