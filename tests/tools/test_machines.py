"""The matrix of machines: what it records of comparisons, and what it reads out of a run."""

import ast
import json
from types import SimpleNamespace

import matrix
import parities
import pytest
import torch


@pytest.fixture
def record(tmp_path, monkeypatch):
    """Return a function that runs a cell as `parities` rewrites it, and reads what was noted."""
    file = tmp_path / "parities.jsonl"
    monkeypatch.setenv(parities.FILE, str(file))
    monkeypatch.setenv("JPY_SESSION_NAME", "notebooks/05_a.ipynb")
    plain = getattr(torch.testing.assert_close, "function", torch.testing.assert_close)
    monkeypatch.setattr(torch.testing, "assert_close", plain)  # these tests may be recorded, too

    def run(source, **names):
        file.write_text("")
        tree = parities.Recorded(SimpleNamespace(execution_count=8)).visit(ast.parse(source))
        code = compile(ast.fix_missing_locations(tree), "cell", "exec")
        error = None
        try:
            exec(code, {"__parities__": parities, "torch": torch, **names})
        except AssertionError as caught:
            error = caught
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        assert all(row["key"].startswith("05 cell 7 ") for row in rows)
        return [(row["difference"], row["bound"]) for row in rows], error

    return run


def test_an_assertion_is_noted_and_means_what_it_meant(record):
    assert record("assert x < 1e-5", x=3e-6) == ([(3e-6, 1e-5)], None)
    noted, error = record("assert x < 1e-5, f'{x}'", x=1e-5)
    assert noted == [(1e-5, 1e-5)] and error.args == ("1e-05",)
    assert record("assert x <= 1e-5", x=1e-5) == ([(1e-5, 1e-5)], None)
    noted, error = record("assert all(x < 1e-5 * 2 for x in X) and n == 3", X=[0.0, 1.0], n=3)
    assert noted == [(0.0, 2e-5), (1.0, 2e-5)] and error is not None
    assert record("assert x < 1 and 0 < x", x=0.5) == ([], None)  # no parity


def test_what_assert_close_allows_stands_beside_the_worst_entry(record):
    source = "torch.testing.assert_close(a, b, rtol=0.1, atol=1.0)"
    noted, error = record(source, a=torch.tensor([0.5, 105.0]), b=torch.tensor([0.0, 100.0]))
    assert noted == [(0.5, 1.0)] and error is None  # 0.5 of 1 is nearer than 5 of 11
    noted, error = record(source, a=torch.tensor([9.0]), b=torch.tensor([0.0]))
    assert noted == [] and "not close" in str(error)
    pair = {"w": torch.zeros(2, dtype=torch.float64)}
    noted, _ = record("torch.testing.assert_close(a, b)", a=pair, b=pair)
    assert noted == [(0.0, 1e-7)]


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


def test_the_table_names_the_worst_of_all_conditions(tmp_path, monkeypatch):
    monkeypatch.setattr(matrix, "OUT", tmp_path)
    for name, difference in (("native", 1e-7), ("avx2", 3e-7), ("sse4", 2e-7)):
        (tmp_path / name).mkdir()
        line = json.dumps({"key": "05 cell 7 assert x", "difference": difference, "bound": 1e-5})
        (tmp_path / name / "chapters.jsonl").write_text(line + "\n")
        failures = [["chapters", "03_a failed"]] if name == "sse4" else []
        result = {"failures": failures, "peaks": {}, "ran": {"chapters": "05 9 s"}}
        (tmp_path / name / "result.json").write_text(json.dumps(result))
    text = matrix.tables()
    assert "3.0e-07 1.0e-05 3.0e-02 avx2       05 cell 7 assert x" in text
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
