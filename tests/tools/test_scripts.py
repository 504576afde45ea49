"""Tools that use those of another folder find them by themselves: pytest's `pythonpath` is no help
to who calls them by hand."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", ["lab", "book/book", "book/slides", "grading/assignments", "grading/grade"]
)
def test_a_script_starts_from_any_folder(script, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(TOOLS.parent)}
    command = [sys.executable, TOOLS / f"{script}.py", "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"usage: {Path(script).name}.py" in done.stdout
