"""Interrupts at each place where Python may raise one, while GPUs are modelled."""

import gc
import signal
import sys

import pytest
import test_interrupts
import torch
from modelling import Fixed
from test_interrupts import Interrupter, give_up, harmless_interrupts, interrupted

from vgpu import clock, hardware_name, virtual_gpus
from vgpu.runtime import registry


@pytest.fixture(scope="module", autouse=True)
def frozen():
    """What there is before an interrupt, so that the collections after it take a moment only."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def in_the_end_by_the_wall_clock():
    alarm = signal.signal(signal.SIGALRM, give_up)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, alarm)
    virtual_gpus(2)


EVERY = 3  # of how many places one is tried, to save time


def polls(a, b):
    event = torch.vgpu.Event(enable_timing=True)

    def call():
        torch.ones(3, device=a)
        event.record()
        event.query()
        torch.vgpu.current_stream(a).query()
        torch.vgpu.synchronize(a)
        return event.elapsed_time(event)

    return call


def full_queue(a, b):
    def call():
        for _ in range(7):
            torch.vgpu._sleep(1.0)

    call.limit = 4
    return call


CASES = [
    getattr(test_interrupts, name)
    for name in "operator waiting_operators random_numbers copy_between_devices backward".split()
] + [polls, full_queue]


@pytest.mark.parametrize("case", CASES, ids=[case.__name__ for case in CASES])
def test_an_interrupt_anywhere_does_no_harm(case, monkeypatch):
    devices = virtual_gpus(2, model="v100")
    call = case(*devices)
    for module in ("runtime.scheduler", "modelled.simulation") if hasattr(call, "limit") else ():
        monkeypatch.setattr(f"vgpu.{module}.QUEUE_LIMIT", call.limit)
    places, started = 0, clock()
    for where in harmless_interrupts(call, devices, EVERY):
        assert clock() >= started, where
        started = clock()
        places += where is not None
    assert clock() < 60 * places, "an interrupt has set the clock wrong"


@pytest.mark.parametrize(("values", "first"), [(True, 0), (False, 7)])
def test_a_change_of_the_clock_that_is_interrupted_can_be_done_again(values, first):
    x = torch.full((3,), 2.0, device=virtual_gpus(2)[0])

    def change():
        virtual_gpus(2, model=Fixed(0.5), values=values)

    change()
    virtual_gpus(2)
    with Interrupter(sys.maxsize) as counter:
        change()
    virtual_gpus(2)
    count = len(counter.places)
    assert count > 100
    for number in (*range(first, count, 13), *range(count - 12, count)):
        signal.alarm(30)
        where = interrupted(change, number)
        devices = virtual_gpus(2)
        assert hardware_name() == "", where
        assert all(registry.find(device).model is None for device in devices), where
        assert (x + 1).to(devices[1]).tolist() == [3] * 3, where
        virtual_gpus(2, model="t4")  # from one model to another, too
        where = interrupted(change, number)
        virtual_gpus(2, model=Fixed(0.5))
        assert clock() == 0, where
        assert (x + 1).to(devices[1]).tolist() == [3] * 3, where
        assert 0.5 <= clock() < 0.501, where
        virtual_gpus(2)
