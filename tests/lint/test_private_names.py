"""Private names of torch, and patches of it, stay in `vgpu/private/`.

Elsewhere in `vgpu/` and in `d2lpar/` these are faults:

- an import from torch, or an attribute of what was imported from it, whose name begins with `_`,
  and a text that names one, "torch.distributed.tensor._api";
- an attribute `x._name` of anything, `getattr` included, where no class or module of ours
  defines `_name`;
- an assignment to an attribute of what was imported from torch, of a name that stands for it (the
  variable of a loop over classes of torch, say), or of a parameter called `module`: functions that
  change a module of torch once it is imported have one.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRIVATE = ROOT / "vgpu" / "private"
# torch's documentation describes subclasses of its elastic agent ("Extending the Agent"); what they
# override and use has names with `_`.
AGENT = ROOT / "vgpu" / "processes" / "agent.py"
PACKAGES = (ROOT / "d2lpar", ROOT / "vgpu")
OURS = {path for package in PACKAGES for path in package.rglob("*.py")}
SOURCES = sorted(OURS - set(PRIVATE.rglob("*.py")) - {AGENT})
IN_TEXT = re.compile(r"torch(\.\w+)*\._[a-zA-Z]\w*(\.\w+)*")


def is_private(name):
    return name.startswith("_") and not name.endswith("__")


def definitions(tree):
    """Return the private names that a file gives to functions, classes, variables, attributes."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store):
            names.add(node.attr if isinstance(node, ast.Attribute) else node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__":
            constants = [one for one in ast.walk(node.value) if isinstance(one, ast.Constant)]
            names |= {constant.value for constant in constants}
    return {name for name in names if isinstance(name, str) and is_private(name)}


def stand_ins(tree, imported):
    """Return the names in a file that stand for something of torch without being imported.

    They are variables, loop variables and functions: `layer` is one in
    `for layer in (nn.RNN, nn.GRU)`. What a call of torch's returns is none.

    Args:
        tree: the file.
        imported: name -> whether it comes from torch.
    """
    values = []  # (names, an expression whose value, or an item of it, they get)
    for node in ast.walk(tree):
        if isinstance(node, (ast.For, ast.comprehension)):
            values.append((names_in(node.target), node.iter))
        elif isinstance(node, ast.Assign):
            values += [(names_in(target), node.value) for target in node.targets]
        elif isinstance(node, (ast.NamedExpr, ast.AnnAssign)) and node.value:
            values.append((names_in(node.target), node.value))
        elif isinstance(node, ast.FunctionDef):
            returned = [each.value for each in ast.walk(node) if isinstance(each, ast.Return)]
            values += [({node.name}, value) for value in returned if value]
    of_torch = {name for name in imported if imported[name]}
    found = set()
    while True:
        more = {
            name for names, value in values if stands_for(value, of_torch, found) for name in names
        }
        if more <= found:
            return found
        found |= more


def names_in(target):
    """Return the variables that an assignment to `target` sets."""
    names = [each for each in ast.walk(target) if isinstance(each, ast.Name)]
    return {each.id for each in names if isinstance(each.ctx, ast.Store)}


PASS_ON = {"dict", "enumerate", "iter", "list", "reversed", "set", "sorted", "tuple", "zip"}


def stands_for(value, of_torch, found):
    """Return whether an expression is something of torch, or holds such things.

    Args:
        value: the expression.
        of_torch: names imported from torch.
        found: other names that stand for something of torch.
    """
    if isinstance(value, ast.Name):
        return value.id in of_torch or value.id in found
    if isinstance(value, ast.Call):
        if ast.unparse(value.func) in PASS_ON:
            return any(stands_for(each, of_torch, found) for each in value.args)
        return stands_for(value.func, set(), found)
    if isinstance(value, (ast.Lambda, ast.Compare, ast.Constant, ast.JoinedStr)):
        return False
    if isinstance(value, (ast.ListComp, ast.SetComp, ast.GeneratorExp)):
        return stands_for(value.elt, of_torch, found)
    if isinstance(value, ast.DictComp):
        return any(stands_for(each, of_torch, found) for each in (value.key, value.value))
    if isinstance(value, ast.Subscript):
        return stands_for(value.value, of_torch, found)
    return any(stands_for(each, of_torch, found) for each in ast.iter_child_nodes(value))


def faults(source, ours):
    """Yield a line number and a text for each fault in the source of a module.

    Args:
        source: the text.
        ours: private names that d2lpar defines.
    """
    tree = ast.parse(source)
    imported = {}  # name -> whether it comes from torch
    texts = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                imported[alias.asname or top] = top == "torch"
                if top == "torch" and any(map(is_private, alias.name.split("."))):
                    yield node.lineno, f"import {alias.name}"
        elif isinstance(node, ast.ImportFrom):
            top = "" if node.level else node.module.partition(".")[0]
            for alias in node.names:
                imported[alias.asname or alias.name] = top == "torch"
                path = f"{node.module}.{alias.name}"
                if top == "torch" and any(map(is_private, path.split("."))):
                    yield node.lineno, f"import {path}"
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            texts.add(node.value)
    imported["module"] = True
    patched = {name for name in imported if imported[name]} | stand_ins(tree, imported)

    def root(node):
        while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
            node = node.func if isinstance(node, ast.Call) else node.value
        return node.id if isinstance(node, ast.Name) else None

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            of_torch = imported.get(root(node))
            if is_private(node.attr) and (of_torch or of_torch is None and node.attr not in ours):
                yield node.lineno, ast.unparse(node)
            elif root(node) in patched and not isinstance(node.ctx, ast.Load):
                yield node.lineno, f"{ast.unparse(node)} = ..."
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
            if root(node.args[0]) in patched:
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            of_torch = imported.get(root(node.args[0]))
            if is_private(name) and (of_torch or of_torch is None and name not in ours):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in texts:
            if IN_TEXT.fullmatch(node.value):
                yield node.lineno, repr(node.value)


EXAMPLES = """
import os, sys
import torch
import torch.distributed as dist
import torch._dynamo                                                    # fault
from torch import nn
from torch.utils._pytree import tree_map                                # fault
from torch._C import Generator                                          # fault
from .private.operators import function_of
from .private import virtual_tables as _tables

class Mine(nn.Module):
    __slots__ = ("_slot",)
    _field = 1

    def _method(self):
        self._own = os._exit, sys._getframe()
        return self._field, self._slot, self.other._method(), self.__dict__, _tables._own

LAYERS = {layer: layer.forward for layer in (nn.RNN, nn.GRU)}

def forwards():
    return LAYERS

def patch_layers(x):
    for layer, forward in forwards().items():
        layer.forward = patch                                           # fault
    for i, layer in enumerate([nn.RNN, *LAYERS]):
        setattr(layer, "forward", patch)                                # fault
    [setattr(each, "forward", i) for each in LAYERS]                    # fault
    tensor_class = torch.Tensor if x else Mine
    tensor_class.data = patch                                           # fault
    for tensor in torch.ones(3), torch.empty(3, dtype=torch.half):
        tensor.data = x
    found = isinstance(x, torch.Tensor), find(torch.Tensor)
    found.data = [each for each in x if each is torch.half]

def patch(module, x):
    x._mark = torch.__version__
    module.load = patch                                                 # fault
    torch.compile = patch                                               # fault
    setattr(torch.cuda, "x", 1)                                         # fault
    del dist.all_reduce                                                 # fault
    nn.Module.forward = patch                                           # fault
    setattr(x, "y", 1)
    getattr(x, "_mark"), hasattr(x, "_version"), getattr(nn, "_mark")   # fault fault
    return x._mark, x._backward_hooks, torch.utils._pytree, x.y()._op   # fault fault fault
    "the text torch._C.x in a sentence", "torch.distributed._tensor"    # fault
    "torch.distributed.tensor"
"""


def test_the_check_finds_faults_and_only_these():
    found = [line for line, _ in faults(EXAMPLES, definitions(ast.parse(EXAMPLES)))]
    lines = EXAMPLES.splitlines()
    expected = [i for i, line in enumerate(lines, 1) for _ in range(line.count("fault"))]
    assert sorted(found) == expected


def test_no_private_name_outside_private():
    ours = {name for path in SOURCES for name in definitions(ast.parse(path.read_text("utf-8")))}
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in SOURCES
        for line, text in faults(path.read_text("utf-8"), ours)
    ]
    assert len(SOURCES) > 50 and not found, "\n" + "\n".join(found)
