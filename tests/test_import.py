"""What `import d2lpar` loads, and what it leaves alone."""

import ast
import re
from pathlib import Path

import fresh
import pytest

import d2lpar

ROOT = Path(__file__).resolve().parents[1]


def run(code):
    done = fresh.run(code, fresh.TORCH)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


NEW_MODULES = """
import sys, torch
before = set(sys.modules)
{statement}
print(*sorted({{name.split(".")[0] for name in set(sys.modules) - before}}))
"""


def test_import_loads_no_other_module():
    assert run(NEW_MODULES.format(statement="import d2lpar")) in ([], ["d2lpar"])


def test_import_of_torch_loads_the_entry_point_and_no_more():
    code = "import sys, torch; print(*(name for name in sys.modules if name[:6] == 'd2lpar'))"
    loaded = set(run(code))
    assert loaded <= {"vgpu_autoload", "d2lpar", "vgpu.cuda", "vgpu.cuda.autoload"}


def test_public_names_load_no_large_module():
    loaded = set(run(NEW_MODULES.format(statement="from d2lpar import *")))
    large = {"d2l", "matplotlib", "IPython", "torchvision", "pandas", "tqdm", "scipy", "PIL"}
    assert not loaded & large


def test_import_changes_nothing_in_torch():
    code = """
import torch
names, keys = set(vars(torch)), set(vars(torch.Tensor))
before = torch.__future__.get_swap_module_params_on_conversion(), torch.rand
from d2lpar import *
assert torch._C._get_privateuse1_backend_name() == "privateuseone"
assert set(vars(torch)) == names, set(vars(torch)) - names
assert set(vars(torch.Tensor)) == keys
assert (torch.__future__.get_swap_module_params_on_conversion(), torch.rand) == before
"""
    run(code)


@pytest.mark.parametrize("name", d2lpar.__all__)
def test_public_name_is_there_and_documented(name):
    value = getattr(d2lpar, name)
    assert value.__module__.startswith("d2lpar.")
    assert value.__doc__
    assert name in dir(d2lpar)


def test_modules_are_attributes():
    assert run("import d2lpar; print(d2lpar.data.__name__)") == ["d2lpar.data"]


def test_private_names_do_not_load_d2l():
    code = """
import sys, d2lpar
assert not hasattr(d2lpar, "_repr_html_") and not hasattr(d2lpar, "__wrapped__")
assert "d2lpar._d2l" not in sys.modules and "d2l" not in sys.modules
"""
    run(code)


def imports(path):
    """Return the rooms of d2lpar, its folders and modules, that a file imports anywhere."""
    here, rooms = path.relative_to(ROOT).with_suffix("").parts, set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [*here[: len(here) - node.level]] if node.level else []
            base += node.module.split(".") if node.module else []
            names = [[*base, alias.name] for alias in node.names]
        else:
            continue
        rooms |= {name[1] for name in names if name[0] == "d2lpar" and len(name) > 1}
    return rooms - {"__version__"}


def test_arrows_point_down():
    """Along the list of ARCHITECTURE.md, in which every room stands once."""
    text = (ROOT / "ARCHITECTURE.md").read_text().partition("## What may import what")[2]
    lines = re.findall(r"^\d\. ((?:`\w+`(?:, )?)+)", text, re.MULTILINE)
    levels = {name: i for i, line in enumerate(lines) for name in re.findall(r"\w+", line)}
    rooms = {path.stem for path in (ROOT / "d2lpar").iterdir() if path.suffix in ("", ".py")}
    assert set(levels) == rooms - {"__init__", "__pycache__"}
    for path in (ROOT / "d2lpar").rglob("*.py"):
        room = path.relative_to(ROOT / "d2lpar").parts[0].removesuffix(".py")
        if room != "__init__":
            wrong = {other for other in imports(path) - {room} if levels[other] <= levels[room]}
            assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"
