"""What `import d2lpar` loads, and what it leaves alone."""

import ast
import inspect
import re
from pathlib import Path

import fresh
import nbformat
import pytest

import d2lpar
import vgpu
from vgpu.modelled.simulation import Simulation
from vgpu.runtime.scheduler import DeviceClock, WallClock

ROOT = Path(__file__).resolve().parents[2]


def run(code):
    return fresh.printed(code, fresh.TORCH).split()


NEW_MODULES = """
import sys, torch
before = set(sys.modules)
{statement}
print(*sorted({{name.split(".")[0] for name in set(sys.modules) - before}}))
"""


def test_import_loads_no_other_module():
    assert run(NEW_MODULES.format(statement="import d2lpar")) == ["d2lpar"]
    assert run(NEW_MODULES.format(statement="import vgpu")) == ["vgpu"]


def test_import_of_torch_loads_the_entry_point_and_no_more():
    code = "import sys, torch; print(*(name for name in sys.modules if 'vgpu' in name))"
    assert run(code) == ["vgpu_autoload"]


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
    assert value.__module__.partition(".")[0] in ("d2lpar", "vgpu")
    assert value.__doc__


def test_the_table_is_all_that_a_reader_sees():
    assert dir(d2lpar) == sorted(d2lpar.__all__)
    assert len(dir(d2lpar)) <= 45
    assert not {"os", "importlib"} & {*vars(d2lpar)}


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
    """Yield (module, name, whether a function imports it) for each import in a file.

    The name is None for `import module`.
    """
    tree = ast.parse(path.read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    late = {id(node) for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None, id(node) in late) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            yield from ((node.module, alias.name, id(node) in late) for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "vgpu":
            yield "vgpu", node.attr, False


@pytest.mark.parametrize("package", ["d2lpar", "vgpu"])
def test_arrows_point_down(package):
    """Along the list of ARCHITECTURE.md, in which every room of the package stands once."""
    folder = ROOT / package
    text = (ROOT / "ARCHITECTURE.md").read_text()
    text = re.search(rf"^In {package}[:,].*?(?=^In |^`test_import)", text, re.MULTILINE | re.DOTALL)
    lines = re.findall(r"^\d+\. ((?:`\w+`(?:, )?)+)", text[0], re.MULTILINE)
    levels = {name: i for i, line in enumerate(lines) for name in re.findall(r"\w+", line)}
    rooms = {path.stem for path in folder.iterdir() if path.suffix in ("", ".py")}
    assert set(levels) == rooms - {"__init__", "__pycache__"}
    public = vgpu._PUBLIC if package == "vgpu" else {}  # `from vgpu import Span`: of runtime
    for path in folder.rglob("*.py"):
        room = path.relative_to(folder).parts[0].removesuffix(".py")
        if room != "__init__":
            others = {
                (module.split(".")[1:] or public.get(name, name).split("."))[0]
                for module, name, _ in imports(path)
                if module.partition(".")[0] == package and (module, name) != (package, None)
            } - {room, "__version__"}
            wrong = {other for other in others if levels[other] <= levels[room]}
            assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


def test_the_engine_imports_nothing_of_d2lpar():
    files = [*(ROOT / "vgpu").rglob("*.py"), ROOT / "vgpu_autoload.py"]
    assert len(files) > 80
    for path in files:
        assert not [m for m, *_ in imports(path) if m.partition(".")[0] == "d2lpar"], path


def test_d2lpar_takes_few_names_of_the_engine():
    """They are public; for what torch has no public name there is `vgpu.torch_internals`."""
    taken = set(d2lpar._OF_VGPU)
    for path in (ROOT / "d2lpar").rglob("*.py"):
        for module, name, _ in imports(path):
            if module.partition(".")[0] == "vgpu" and name and module != "vgpu.torch_internals":
                taken.add(name if module == "vgpu" else module.removeprefix("vgpu."))
    modules = {"other_programs", "recording"}
    assert taken <= {*vgpu.__all__, *modules}
    assert len(taken) <= 25, sorted(taken)


LESSONS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_chapter_imports_d2lpar_and_two_more_modules(path):
    notebook = nbformat.read(path, 4)
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    found = {
        module
        for source in code
        for module in re.findall(
            r"^ *(?:from|import) ((?:d2lpar|vgpu)[\w.]*)", source, re.MULTILINE
        )
    }
    assert "d2lpar" in found and len(found) <= 3, found


def test_rooms_of_the_engine_are_small():
    for folder in [ROOT / "vgpu", *filter(Path.is_dir, (ROOT / "vgpu").iterdir())]:
        modules = {path.name for path in folder.glob("*.py")} - {"__init__.py", "__main__.py"}
        assert len(modules) <= 12, folder


def test_no_two_classes_have_the_same_name():
    places = {}
    for package in ("vgpu", "d2lpar"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert len(places) > 100
    assert not {name: found for name, found in places.items() if len(found) > 1}


# Modules of vgpu that a function of vgpu imports, each with what importing it at the top would cost
LATE_IMPORTS = {
    ("vgpu.__main__", "vgpu.cuda.run"): "signals that Windows lacks",
    ("vgpu.cuda.autoload", "vgpu.cuda.torch_cuda"): "torch: `vgpu run` reads names of autoload",
    ("vgpu.cuda.autoload", "vgpu.modelled.program_clock"): "torch, again",
    ("vgpu.cuda.autoload", "vgpu.cuda.report"): "torch, again",
    ("vgpu.cuda.doctor", "vgpu.private.virtual_tables"): "torch, which may fail to import",
    ("vgpu.cuda.summary", "vgpu.recording.chrome_trace"): "torch, for `vgpu run --trace` alone",
    ("vgpu.processes.launcher", "vgpu.processes.agent"): "torch's elastic agent",
    ("vgpu.devices.backend", "vgpu.distributed.functional"): "a torch without torch.distributed",
    ("vgpu.devices.backend", "vgpu.distributed.process_group"): "a torch without it, again",
    ("vgpu.devices.device_setup", "vgpu.modelled.model"): "the simulation, for modelled GPUs alone",
    ("vgpu.devices.device_setup", "vgpu.devices.backend"): "the engine, for virtual GPUs alone",
}


def imports_of_vgpu():
    """Return (importing module, imported module, whether a function imports it): a set."""
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (ROOT / "vgpu").rglob("*.py")
    }
    found = set()
    for importing, path in paths.items():
        for outer, name, late in imports(path):
            inner = f"{outer}.{name}"
            imported = inner if inner in paths else outer
            if imported in paths:
                found.add((importing, imported, late))
    return found


def test_a_function_of_the_engine_imports_what_is_heavy_and_no_more():
    assert {(name, other) for name, other, late in imports_of_vgpu() if late} == set(LATE_IMPORTS)


def test_no_modules_of_the_engine_import_each_other():
    """Neither directly nor in a circle, imports inside functions included."""
    below = {}
    for name, other, _ in imports_of_vgpu():
        below.setdefault(name, set()).add(other)
        below.setdefault(other, set())
    assert len(below) > 80
    while below:
        lowest = {name for name, others in below.items() if not others}
        assert lowest, f"these modules import each other in a circle: {sorted(below)}"
        below = {name: others - lowest for name, others in below.items() if name not in lowest}


def test_both_clocks_have_the_methods_of_a_clock():
    """Of as many arguments: a caller need not ask which clock is in force."""
    methods = {name: m for name, m in vars(DeviceClock).items() if inspect.isfunction(m)}
    methods = {name: method for name, method in methods.items() if not name.startswith("_")}
    assert len(methods) == 15
    assert {*methods} <= {*vars(Simulation)}, "what it inherits would take no modelled time"
    for kind in (WallClock, Simulation):
        for name, method in methods.items():
            given = inspect.signature(getattr(kind, name)).parameters
            assert len(given) == len(inspect.signature(method).parameters), (kind, name)
