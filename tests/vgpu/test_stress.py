"""Interrupts at any moment do no harm; and the harnesses that say so see each kind of harm."""

import pytest
from stops import any_wrong, print_table, shows_ours, stops
from stress import WRONG, stress, total
from stress import print_table as print_stress_table

pytestmark = [pytest.mark.slow, pytest.mark.waits]


def test_interrupts_do_no_harm():
    rows = stress(interrupts=100, seed=0, failures=3)
    print_stress_table(rows)  # shown when the test fails
    assert not any(total(rows)[column] for column in WRONG)
    assert total(rows)["interrupts"] == 100 and total(rows)["twice"] > 0


def test_stopped_cells_do_no_harm():
    rows = stops(tries=3)
    print_table(rows)
    assert not any_wrong(rows)


# The harnesses themselves


@pytest.mark.parametrize("fault, workload, column, waits", [
    ("hang", "streams", "hangs", {"patience": 1}),
    ("stuck", "streams", "hangs", {"patience": 1, "late": 0.2}),
    ("death", "streams", "deaths", {}),
    ("leak", "streams", "leaked", {"patience": 3}),
    ("wrong", "streams", "wrong", {}),
    ("error", "streams", "wrong", {}),
    ("lost", "waiting", "lost", {"late": 0.3}),
], ids="hang stuck death leak wrong error lost".split())  # fmt: skip
def test_a_fault_is_counted_where_it_belongs(fault, workload, column, waits):
    """Where the harness waits in vain it has little patience; nothing else is due then."""
    rows = stress(20, seed=1, workload=workload, failures=1, fault=fault, **waits)
    assert [name for name in WRONG if total(rows)[name]] == [column]


SET_UP = """
import os, signal
answer = 42

def stopped(then):
    try:
        while True:
            pass
    except KeyboardInterrupt:
        then()
        raise

def forget():
    global answer
    answer = 0
"""
CELLS = {
    "fine": "while True:\n    pass",
    "dies": "stopped(os.abort)",
    "raises": "stopped(lambda: 1 / 0)",
    "forgets": "stopped(forget)",
}
DEAF = {"deaf": "signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True:\n    pass"}


def test_what_a_stop_does_is_counted_where_it_belongs():
    program = {"set_up": SET_UP, "next_cell": "print(answer)", "right": "42"}
    rows = stops(1, cells=CELLS, **program) | stops(1, patience=1, cells=DEAF, **program)
    found = {name: [key for key in ("fine", "hang", "died", "wrong") if row[key]]
             for name, row in rows.items()}  # fmt: skip
    assert found == {
        "fine": ["fine"], "deaf": ["hang"], "dies": ["died"], "raises": ["wrong"],
        "forgets": ["wrong"],
    }  # fmt: skip
    assert rows["fine"]["shown"] == 1 and rows["fine"]["ours"] == 0


def test_frames_of_ours_are_found_in_a_traceback():
    from d2lpar import timing

    theirs = (
        "Cell In[1], line 2\n      1 while True:\n----> 2     x + 1\n\nFile ~/d2lpar/a.py:1, in f()"
    )
    assert not shows_ours(theirs)
    assert shows_ours(f"{theirs}\n\nFile {timing.__file__}:12, in g(x)\n")
