"""What a run of the tests says at its end of those that it skipped."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import how_to_run

TESTS = """
import os
from pathlib import Path

os.environ["PATH"] = "nowhere"
for name in ("CI", "FRAMEWORKS"):
    os.environ.pop(name, None)

import browser, pytest, test_frameworks
from test_frameworks import test_a_framework_finds_the_losses_of_the_cpu
from test_grading import needs_sandbox

test_frameworks.ENVIRONMENT = Path("nowhere")

@needs_sandbox
@pytest.mark.parametrize("number", range(6))
def test_in_a_sandbox(number):
    pass

@pytest.mark.parametrize("number", range(2))
def test_in_a_browser(number):
    found, reason = browser.find_browser()
    pytest.skip(reason)

@pytest.mark.skip("no command helps: this system does not allow it")
def test_that_is_never_run():
    pass

def test_that_passes():
    pass
"""

MARKERS = "-o", "markers=slow\nwaits"  # there, pytest's settings are not those of this project


@pytest.mark.parametrize("options", [(), pytest.param(("-n", "2"), marks=pytest.mark.slow)])
def test_the_line_before_the_last_says_what_to_install(options, tmp_path):
    (tmp_path / "test_them.py").write_text(TESTS)
    path = os.pathsep.join([*sys.path, str(Path(__file__).parents[1] / "vgpu")])
    environment = os.environ | {"PYTHONPATH": path}
    environment.pop("PYTEST_ADDOPTS", None)
    command = [sys.executable, "-m", "pytest", "-ra", "-p", "conftest", *MARKERS, *options, "."]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    reason, advice, last = done.stdout.splitlines()[-3:]
    assert reason.endswith("no command helps: this system does not allow it")
    assert advice == (
        "To run what was skipped: apt-get install bubblewrap (6), make test FRAMEWORKS=1 (5), "
        "apt-get install chromium chromium-driver (2)"
    )
    assert re.fullmatch(r"=+ 1 passed, 14 skipped in .+ =+", last)


def test_nothing_is_said_where_no_command_helps():
    reasons = ["Skipped: another system", "not installed", "does not work: apt-get install it"]
    assert how_to_run(reasons) == ""
