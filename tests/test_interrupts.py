"""Interrupts that are held back."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from d2lpar.virtual.interrupts import held_back


@pytest.fixture(autouse=True)
def default_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def test_interrupt_comes_after_the_block_and_is_noted_at_once():
    done = []
    with pytest.raises(KeyboardInterrupt), held_back(lambda: done.append("noted")):
        interrupt()
        done.append("end")
    assert done == ["noted", "end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_an_interrupted_block_raises_gives_way_to_the_interrupt():
    with pytest.raises(KeyboardInterrupt), held_back():
        interrupt()
        raise EOFError("a process ended")
    with pytest.raises(EOFError), held_back():
        raise EOFError("nobody interrupted")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_and_other_handlers_are_left_alone():
    seen, thread = [], threading.Thread(target=lambda: held_back().__enter__())
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, lambda *_: seen.append("theirs"))
    with held_back():
        interrupt()
        assert seen == ["theirs"]


def test_an_interrupt_waits_until_virtual_gpus_are_set_up():
    """The first shape inference imports much of torch, for about a second."""
    code = """
import builtins, os, signal, torch, d2lpar
real, seen = builtins.__import__, []

def interrupting(name, *args, **kwargs):
    if not seen and name.startswith("torch._dynamo"):
        seen.append(name)
        os.kill(os.getpid(), signal.SIGINT)
    return real(name, *args, **kwargs)

builtins.__import__ = interrupting
try:
    d2lpar.virtual_gpus(1)
except KeyboardInterrupt:
    print("interrupted at", seen[0].partition(".")[0])
builtins.__import__ = real
(device,) = d2lpar.virtual_gpus(1)
x = torch.ones(3, device=device)
print((x + 1).tolist())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["interrupted at torch", "[2.0, 2.0, 2.0]"], done.stderr
