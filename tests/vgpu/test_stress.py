"""Interrupts at any moment do no harm; and the harnesses that say so see each kind of harm."""

import contextlib
from pathlib import Path

import fresh
import pytest
import stops

pytestmark = [pytest.mark.slow, pytest.mark.waits]


def stress(workload=None, interrupts=20, patience=20, fault=""):
    """Run stress.py in a process in which a statement has done harm."""
    code = f"""
import sys, os, threading, time
sys.path.insert(0, {str(Path(stops.__file__).parent)!r})
import torch
from stress import Stress
program = Stress({patience}, {workload!r})
{fault}
print(program.run({interrupts}, seed=1))
"""
    return fresh.run(code, fresh.SET_UP, timeout=280)


def test_interrupts_do_no_harm():
    done = stress(interrupts=100)
    assert done.returncode == 0 and "twice" in done.stdout, done.stderr


def test_stopped_cells_do_no_harm():
    stops.stop_often(tries=3)


# The harnesses themselves


@pytest.mark.parametrize("workload, fault, said", [
    ("operators", "torch.vgpu.synchronize = lambda device: threading.Event().wait()", "Timeout"),
    ("operators", "torch.vgpu.synchronize = lambda device: os.abort()", "Fatal Python error"),
    ("operators", "torch.Tensor.__matmul__ = torch.Tensor.__mul__", "instead of 2048"),
    ("operators", "kept = []; torch.vgpu.synchronize = lambda device: "
     "kept.append(torch.zeros(1000, device=device))", "bytes in use instead of"),
    ("operators", "torch.vgpu.synchronize = lambda device: 1 / 0", "ZeroDivisionError"),
    ("waiting", "torch.vgpu._sleep = lambda seconds: 1 / 0", "no interrupt, but"),
    ("waiting", """
def lose(seconds):
    try:
        time.sleep(seconds)
    except KeyboardInterrupt:
        pass
torch.vgpu._sleep = lose""", "Timeout"),
], ids="hang death wrong leak error raises lost".split())  # fmt: skip
def test_each_harm_is_seen(workload, fault, said):
    done = stress(workload, patience=1 if said == "Timeout" else 20, fault=fault)
    assert done.returncode and said in done.stderr, done.stderr


SET_UP = """
import os, signal; answer = 42

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
DEAF = "signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True:\n    pass"


@pytest.mark.parametrize("cell, said", [
    ("stopped(lambda: None)", None),
    ("stopped(os.abort)", "died:"),
    ("stopped(lambda: 1 / 0)", "wrong: no KeyboardInterrupt, but ZeroDivisionError"),
    ("stopped(forget)", "wrong: the next cell: 0"),
    (DEAF, "hangs:"),
], ids="fine dies raises forgets deaf".split())  # fmt: skip
def test_what_a_stop_does_is_seen(cell, said):
    patience = 1 if cell == DEAF else 15
    with contextlib.closing(stops.Kernel(SET_UP, "print(answer)", "42", patience)) as kernel:
        raises = pytest.raises(stops.Trouble, match=said) if said else contextlib.nullcontext()
        with raises:
            kernel.stop(cell, 0.1)
