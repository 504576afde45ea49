"""pyproject.toml, environment.yml and the Makefile agree."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import d2lpar

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
ENVIRONMENT = (ROOT / "environment.yml").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()


def requirements(lines):
    """Return ``{name: Requirement}`` for requirement lines."""
    return {Requirement(line).name: Requirement(line) for line in lines}


_, *CONDA = re.findall(r"^  - ([^:\n]+)$", ENVIRONMENT, re.MULTILINE)  # the first is the channel
PIP = re.findall(r"^      - (.+)$", ENVIRONMENT, re.MULTILINE)
PIP_REQUIREMENTS = requirements(line for line in PIP if not line.startswith("-"))
DECLARED = requirements([*PROJECT["dependencies"], *(r for rs in EXTRAS.values() for r in rs)])


def test_environment_names():
    assert re.search(r"^name: (.+)$", ENVIRONMENT, re.MULTILINE)[1] == PROJECT["name"] == "d2lpar"
    assert CONDA == ["python=3.11", "pip", "ipykernel"]
    assert set(PIP_REQUIREMENTS) == {
        "torch", "torchvision", "d2l", "numpy", "matplotlib", "jupyterlab", "nbval"
    }  # fmt: skip


def test_environment_installs_the_package_itself():
    editable = [line for line in PIP if line.startswith("-e ")]
    assert len(editable) == 1
    extras = re.fullmatch(r"-e \.\[(.+)\]", editable[0])[1].split(",")
    assert set(extras) <= set(EXTRAS)
    assert {"lab", "test"} <= set(extras)


def test_environment_takes_builds_for_the_cpu():
    """pip prefers 2.13.0+cpu of the second index to PyPI's 2.13.0: a local version is greater."""
    assert PIP[0] == "--extra-index-url https://download.pytorch.org/whl/cpu"
    assert Version("2.13.0+cpu") > Version("2.13.0")
    assert Version("2.13.0+cpu") in PIP_REQUIREMENTS["torch"].specifier


@pytest.mark.parametrize("name", PIP_REQUIREMENTS)
def test_environment_pins_are_within_what_pyproject_allows(name):
    allowed = DECLARED[name].specifier
    pins = [part for part in PIP_REQUIREMENTS[name].specifier if part.operator == "=="]
    if name in ("torch", "torchvision", "d2l", "numpy", "matplotlib"):
        assert len(pins) == 1
    for pin in pins:
        assert allowed.contains(pin.version), f"{name} {pin.version} is outside {allowed}"


def test_python_of_environment_is_supported():
    python = CONDA[0].removeprefix("python=")
    supported = Requirement(f"python{PROJECT['requires-python']}").specifier
    assert supported.contains(python)
    listed = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if ":: 3." in c]
    assert listed == [v for v in ("3.10", "3.11", "3.12", "3.13", "3.14") if supported.contains(v)]


def test_environment_holds_the_pins_of_d2l():
    exact = {name: str(requirement.specifier) for name, requirement in PIP_REQUIREMENTS.items()}
    assert exact["d2l"] == "==1.0.3"
    assert exact["numpy"] == "==1.23.5"
    assert exact["matplotlib"] == "==3.7.2"


def test_makefile_names_extras_that_exist():
    extras = re.search(r"^EXTRAS := (.+)$", MAKEFILE, re.MULTILINE)[1].split(",")
    assert set(extras) <= set(EXTRAS)


def test_torchvision_fits_torch():
    """torchvision 0.N belongs to torch 2.(N - 15), for the pins and for both ends of the range.

    0.29.2, the newest, asks for torch 2.14 or newer.
    """
    for torch, torchvision in (("2.11.0", "0.26.0"), ("2.13.0", "0.28.0"), ("2.15.0", "0.29.2")):
        assert DECLARED["torch"].specifier.contains(torch)
        assert DECLARED["torchvision"].specifier.contains(torchvision)
    torch, torchvision = (
        Version(str(PIP_REQUIREMENTS[name].specifier).removeprefix("=="))
        for name in ("torch", "torchvision")
    )
    assert torchvision.minor == torch.minor + 15


def test_version_is_written_once():
    assert "version" in PROJECT["dynamic"] and "version" not in PROJECT
    assert re.fullmatch(r"\d+\.\d+\.\d+", d2lpar.__version__)
