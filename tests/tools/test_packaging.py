"""The sdist and the wheel, which work where nothing else of ours is; and scripts of tools."""

import os
import re
import shutil
import site
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import d2lpar

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
AUTOLOAD = "vgpu_autoload.py"
NOT_COPIED = (".git", ".venv*", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", "figures")


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def copied(folder):
    """Return a copy of this repository in a folder."""
    ignore = shutil.ignore_patterns(*NOT_COPIED)
    return shutil.copytree(ROOT, folder / "d2lpar", ignore=ignore)


@pytest.fixture
def clean(tmp_path, monkeypatch):
    """Return a Python with torch and the like from here, but nothing of ours, and its packages."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    venv.create(tmp_path / "clean")
    python = tmp_path / "clean" / ("Scripts" if os.name == "nt" else "bin") / "python"
    (here,) = (path for path in site.getsitepackages() if Path(path, "torch").is_dir())
    find = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(run(python, "-c", find).strip())
    (packages / "of_the_tests.pth").write_text(f"{here}\n")
    return python, packages


def pip(python, *arguments):
    command = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    run(*command, *arguments)


def install(python, *what):
    pip(python, "install", "--no-index", "--no-deps", "--no-build-isolation", *what)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return the sdist and the wheel that was built from it, without a network."""
    folder = copied(tmp_path_factory.mktemp("build"))
    run(sys.executable, "-m", "build", "--no-isolation", cwd=folder)
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    (wheel,) = (folder / "dist").glob("*.whl")
    return sdist, wheel


def sources():
    """Return the files of the packages that are under version control or new, as texts."""
    return {
        path.relative_to(ROOT).as_posix()
        for package in ("d2lpar", "vgpu")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_holds_the_package_and_no_more(built):
    with zipfile.ZipFile(built[1]) as wheel:
        names = set(wheel.namelist())
        metadata = f"d2lpar-{d2lpar.__version__}.dist-info"
        said = wheel.read(f"{metadata}/METADATA").decode()
        scripts = wheel.read(f"{metadata}/entry_points.txt").decode()
    assert {name for name in names if not name.startswith(metadata)} == sources() | {AUTOLOAD}
    assert f"{metadata}/licenses/LICENSE" in names
    assert "d2lpar = d2lpar.__main__:main" in scripts
    assert "vgpu = vgpu.__main__:main" in scripts and "[torch.backends]" in scripts
    assert "License-Expression: MIT" in said and "Requires-Python: <3.14,>=3.11" in said


def test_the_sdist_holds_what_a_wheel_is_built_from_and_no_chapters(built):
    with tarfile.open(built[0]) as sdist:
        names = {
            name.partition("/")[2] for name in sdist.getnames() if sdist.getmember(name).isfile()
        }
    ours = {name for name in names if not re.match(r"d2lpar\.egg-info/|PKG-INFO|setup\.cfg", name)}
    others = {"pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md"}
    assert ours == sources() | others | {"CITATION.cff", "tools/build_backend.py", AUTOLOAD}


def test_the_wheel_works_in_a_clean_environment(built, clean, tmp_path):
    python, packages = clean
    install(python, built[1])
    use = """
import d2lpar, torch, vgpu
print(d2lpar.__file__, vgpu.__file__)
from d2lpar.plotting.figures import new_figure
assert new_figure(1, 1)
x = torch.ones(3, device=d2lpar.virtual_gpus(2)[1])
assert (x + 1).sum().item() == 6
"""
    for file in run(python, "-c", use, cwd=tmp_path).split():
        assert Path(file).is_relative_to(packages)
    alone = """
import sys
sys.modules.update(dict.fromkeys(["matplotlib", "tqdm"]))
import d2lpar, torch
from d2lpar.plotting.progress import progress
for choice in ({}, {"model": "v100"}):
    devices = d2lpar.virtual_gpus(2, **choice)
    with d2lpar.Timeline() as timeline:
        torch.ones(3, device=devices[1]).sum().item()
    assert timeline.busy(devices[1]) > 0
try:
    timeline.plot()
except ImportError as error:
    print("pip install matplotlib" in str(error))
print(*progress([1], "without tqdm"))
"""
    assert run(python, "-c", alone, cwd=tmp_path) == "True\n1\n"
    command = python.with_name("vgpu")
    said = subprocess.run([command, "doctor"], capture_output=True, text=True, cwd=tmp_path).stdout
    assert "torch.backends lists vgpu" in said
    if sys.platform == "linux":
        count = "import torch; print(torch.cuda.device_count())"
        assert run(command, "run", "--gpus", "3", python, "-c", count, cwd=tmp_path) == "3\n"


@pytest.mark.parametrize("editable", [False, True])
def test_torch_is_imported_where_the_package_has_gone(built, clean, tmp_path, editable):
    python, packages = clean
    if editable:
        folder = copied(tmp_path)
        install(python, "-e", folder)
        shutil.rmtree(folder)
    else:
        install(python, built[1])
        for package in ("d2lpar", "vgpu"):
            shutil.rmtree(packages / package)
    assert (packages / AUTOLOAD).read_text() == (ROOT / AUTOLOAD).read_text()
    gone = """
import importlib.metadata
try:
    import vgpu
except ModuleNotFoundError:
    (point,) = importlib.metadata.entry_points(group="torch.backends", name="vgpu")
    import torch
    print(point.load().__module__, torch.ones(2).sum().item())
"""
    for gpus in ("", "vgpu:2"):  # unasked, and asked by a command of another Python
        environment = os.environ | {"VGPU_CUDA": gpus}
        assert run(python, "-c", gone, cwd=tmp_path, env=environment) == "vgpu_autoload 2.0\n"
    pip(python, "uninstall", "--yes", "d2lpar")
    assert not list(packages.glob("*d2lpar*")) and not list(packages.glob("*vgpu*"))


@pytest.mark.parametrize(
    "script", ["lab", "book/book", "book/slides", "grading/assignments", "grading/grade"]
)
def test_a_script_finds_tools_of_other_folders_by_itself(script, tmp_path):
    """pytest's `pythonpath` is no help to who calls it by hand, from any folder."""
    command = [sys.executable, ROOT / "tools" / f"{script}.py", "--help"]
    said = run(*command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert f"usage: {Path(script).name}.py" in said
