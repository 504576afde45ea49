"""The matrix of machines: its conditions, and what it reads out of a run."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools" / "machines"))

import matrix  # noqa: E402


def test_seeds_are_moved_in_the_sources_of_notebooks():
    text = "torch.manual_seed(0); g.manual_seed(12); manual_seed(i); seed(3)"
    moved = "torch.manual_seed(1000); g.manual_seed(1012); manual_seed(i); seed(3)"
    assert matrix.with_seeds(text, 1000) == moved


def test_failures_are_read_out_of_the_table_of_a_run():
    table = (
        "chapter                seconds  result\n"
        "05_multi_gpu              23.9  ok\n"
        "10_tensor                 76.5  failed in cell 33: AssertionError: \n"
        "total                    100.4  1 of 2 failed\n"
    )
    (failure,) = matrix.failures_in("chapters", table)
    assert failure.startswith("10_tensor ") and "cell 33" in failure
    assert matrix.failures_in("chapters", table.replace("failed in cell 33: ", "ok ")) == []
    assert matrix.failures_in(
        "tests", "FAILED tests/test_a.py::test_b - AssertionError\n3 passed"
    ) == ["tests/test_a.py::test_b - AssertionError"]


def test_the_table_says_under_which_condition_something_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(matrix, "OUT", tmp_path)
    for name in ("native", "sse4"):
        (tmp_path / name).mkdir()
        failures = [["chapters", "03_a failed"]] if name == "sse4" else []
        result = {"failures": failures, "peaks": {}, "ran": {"chapters": "05 9 s"}}
        (tmp_path / name / "result.json").write_text(json.dumps(result))
    text = matrix.tables()
    assert "sse4        FAILED" in text and "chapters: 03_a failed" in text
    assert "native      ok (chapters 05 9 s)" in text and "busy        not run" in text


def test_conditions_are_joined(tmp_path, monkeypatch):
    both = matrix.condition_of("odd-path+seeds-2+c-locale")
    assert (both.folder, both.seeds) == ("ein Weg/für alle", 2000)
    assert both.variables == {"LC_ALL": "C", "LANG": "C"} and both.memory == 0
    assert matrix.condition_of("not-root+no-network").prefix == (
        matrix.CONDITIONS["not-root"].prefix + matrix.CONDITIONS["no-network"].prefix
    )
    with pytest.raises(ValueError, match="no condition 'no-wifi': choose from native, avx2"):
        matrix.condition_of("busy+no-wifi")
    monkeypatch.setattr(matrix, "OUT", tmp_path)
    (tmp_path / "c-locale+no-home").mkdir()
    result = {"failures": [], "peaks": {}, "ran": {"tests": "9 s"}}
    (tmp_path / "c-locale+no-home" / "result.json").write_text(json.dumps(result))
    text = matrix.tables()
    assert "c-locale    see c-locale+no-home" in text and "c-locale+no-home ok (tests 9 s)" in text


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_peak_counts_the_children():
    """The child holds 200 MB that its parent has not touched."""
    import subprocess

    hold = "x = b'1' * 200_000_000; print(1, flush=True); input()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {hold!r}])"
    command = [sys.executable, "-c", parent]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        process.stdout.readline()
        assert 200e6 < matrix.memory_of(process.pid) < 300e6
        process.communicate("\n")
