"""What `make` does on a new machine; nothing is installed here."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()


def make(folder, *arguments):
    """Call `make` as from a terminal, also where these tests run under make."""
    ours = ("MAKE", "ALL", "TESTS", "OPTIONS", "FRAMEWORKS")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return subprocess.run(["make", *arguments], cwd=folder, env=env, capture_output=True, text=True)


def fake_python(folder, pip_status=0, version="3.11.0"):
    """Return `PYTHON=...` for a Python whose venv holds a pip that notes its arguments."""
    numbers = tuple(map(int, version.split(".")))
    python = folder / "fake-python"
    python.write_text(
        "#!/bin/sh\n"
        f'case "$*" in\n'
        f'  --version) echo "Python {version}";;\n'
        f'  "-m venv "*) mkdir -p .venv/bin; cp "$0" .venv/bin/python;;\n'
        f'  "-m pip "*) echo "$*" >> pip.txt; echo "pip says"; exit {pip_status};;\n'
        f'  tools/*) echo "$*" >> run.txt;;\n'
        f'  "-c "*) exec {sys.executable} -c "import sys; sys.version_info = {numbers}; $2";;\n'
        "esac\n"
    )
    python.chmod(0o755)
    (folder / "Makefile").write_text(MAKEFILE)
    (folder / "pyproject.toml").write_text("")
    return f"PYTHON={python}"


@pytest.mark.parametrize("version", ["3.9.2", "3.14.0"])
def test_a_python_that_was_not_tried_is_refused(tmp_path, version):
    done = make(tmp_path, "run", fake_python(tmp_path, version=version))
    assert done.returncode != 0
    assert "runs on Python 3.11, 3.12 and 3.13" in done.stdout
    assert f"Python {version}. Name another one: make PYTHON=python3.12" in done.stdout
    assert not (tmp_path / ".venv" / "ready").exists()


def test_second_call_does_not_set_up_again(tmp_path):
    python = fake_python(tmp_path)
    first, second = make(tmp_path, "run", python), make(tmp_path, "run", python)
    assert first.returncode == second.returncode == 0, first.stdout + first.stderr
    assert "1/3 torch==" in first.stdout and "pip says" not in first.stdout
    assert second.stdout == ""
    calls = (tmp_path / "pip.txt").read_text().splitlines()
    assert "torch==" in calls[0]
    assert calls[2].endswith("--no-deps d2l==1.0.3")
    assert calls[3].endswith("--no-deps torchvision==0.28.0")
    assert len(calls) == 4
    assert len((tmp_path / "run.txt").read_text().splitlines()) == 2


def test_builds_without_cuda_are_those_of_torch_and_of_torchvision(tmp_path):
    make(tmp_path, "run", fake_python(tmp_path), "CPU=1")
    calls = (tmp_path / "pip.txt").read_text().splitlines()
    index = "--index-url https://download.pytorch.org/whl/cpu"
    assert [call.split()[-3] for call in calls if call.endswith(index)] == [
        "torch==2.13.0",
        "torchvision==0.28.0",
    ]


def test_failed_set_up_shows_the_log_and_is_tried_again(tmp_path):
    python = fake_python(tmp_path, pip_status=1)
    for attempt in (1, 2):
        done = make(tmp_path, "run", python)
        assert done.returncode != 0
        assert "pip says" in done.stdout and "setup.log" in done.stdout
        assert len((tmp_path / "pip.txt").read_text().splitlines()) == attempt
    assert not (tmp_path / "run.txt").exists()


LESSON, PAGE = "notebooks/01_a.ipynb", "notebooks/deeper/01_b.ipynb"
FOLDERS = ["tests/d2lpar", "tests/vgpu", "tests/tools"]


@pytest.mark.parametrize(("options", "slow", "named"), [
    ([], False, ["--nbval", LESSON, *FOLDERS]),
    (["ALL=1"], True, ["--nbval", LESSON, PAGE, *FOLDERS]),
    (["FRAMEWORKS=1"], True, ["--nbval", LESSON, PAGE, *FOLDERS]),
    (["TESTS=tests/d2lpar"], False, ["tests/d2lpar"]),
    (["TESTS=tests/d2lpar", "ALL=1"], True, ["tests/d2lpar"]),
    (["TESTS=tests/vgpu/test_run.py"], True, ["tests/vgpu/test_run.py"]),
    (["TESTS=tests/vgpu/test_run.py::test_a"], True, ["tests/vgpu/test_run.py::test_a"]),
])  # fmt: skip
def test_slow_tests_run_where_all_are_asked_for_or_their_file(options, slow, named, tmp_path):
    for name in (LESSON, PAGE, "pyproject.toml", ".venv/ready", ".venv/frameworks/ready"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "Makefile").write_text(MAKEFILE)
    now = [f"--assume-old={name}" for name in ("Makefile", "pyproject.toml")]
    done = make(tmp_path, "--dry-run", *now, "test", *options)
    words = shlex.split(done.stdout)
    assert words[1:3] == ["-m", "pytest"], done.stdout + done.stderr
    assert ("not slow" not in words) == slow
    assert words[-len(named) :] == named and ("--nbval" in words) == ("--nbval" in named)


def test_folders_of_tests_are_those_that_make_names():
    """Other lists of them are those of .ci/run and of the machines; lint and browser have targets
    of their own."""
    others = {"tests/helpers", "tests/wrong_answers", "tests/lint", "tests/browser"}
    there = {f"tests/{path.parent.name}" for path in (ROOT / "tests").glob("*/*.py")}
    assert there - others == {*FOLDERS}
    for place in (".ci/run", "tools/machines/matrix.py"):
        assert f'"{" ".join(FOLDERS)}"' in (ROOT / place).read_text()


def test_no_path_of_a_machine_in_the_settings():
    for name in ("pyproject.toml", "environment.yml", "Makefile", ".ci/run"):
        assert not re.search(r"/(home|root|work|tmp)/", (ROOT / name).read_text()), name
