"""Interrupts that are held back."""

import os
import signal
import threading

import pytest

from d2lpar.interrupts import held_back


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
