"""Kernels measured on one device, and a simulation that uses their times."""

import pytest
import torch
from gates import Gate, named, recorded

import d2lpar
import vgpu
from vgpu import Link, clock
from vgpu.modelled import calibration, kernels
from vgpu.modelled.calibration import Calibration
from vgpu.runtime import registry


def product(m, name="aten.mm"):
    given = (name, m)
    return kernels.Kernel(name, (kernels.Product(1, m, m, m),), 12 * m * m, torch.float32, given)


def addition(num_bytes, name="aten.add"):
    return kernels.Kernel(name, (), num_bytes, torch.float32, (name, num_bytes))


@pytest.fixture
def measured():
    """A product of 2 s, an addition of 3 s for 300 bytes, and one of 5 s for 100 bytes."""
    seconds = {product(10): 2.0, addition(300): 3.0, addition(100): 5.0}
    return Calibration("a device", seconds, 1e-5, 2**20, Link(1e9), None)


def test_a_measured_kernel_takes_the_time_that_was_measured(measured):
    assert measured.kernel_seconds(product(10)) == 2.0
    assert measured.kernel_seconds(addition(100)) == 5.0
    assert not measured.estimated


def test_another_size_is_estimated_from_the_nearest_of_the_same_operator(measured):
    assert measured.kernel_seconds(product(20)) == 2.0 * 8  # FLOPs, not bytes
    assert measured.kernel_seconds(addition(290)) == pytest.approx(3.0 * 290 / 300)
    assert measured.kernel_seconds(addition(50)) == 5.0 / 2
    assert len(measured.estimated) == 3


def test_another_operator_is_estimated_from_all_that_are_no_products(measured):
    assert measured.kernel_seconds(addition(80, "aten.relu")) == pytest.approx(80 * 8.0 / 400)
    assert measured.rows() == [
        (
            "calibrated",
            "3 kernels measured, 1 estimated from these; 10 µs to issue an operator",
        )
    ]


@pytest.fixture
def gpu():
    (device,) = d2lpar.virtual_gpus(1, link=1e9)
    return device


def test_calibrate_measures_the_kernels_of_a_program(gpu):
    X = torch.ones(64, 64, device=gpu)
    calls = []

    def program():
        calls.append(1)
        (X @ X + 1).relu_()

    times = vgpu.calibrate(program, gpu, repeats=4)
    names = [signature[0] for signature in times.seconds]
    assert sorted(names) == ["aten.add", "aten.mm", "aten.relu_"]
    assert all(seconds > 0 for seconds in times.seconds.values())
    assert len(calls) == 6
    assert times.host > 0
    assert times.link == Link(1e9)
    assert times.name == "calibrated Virtual GPU (1 CPU thread)"


def test_the_median_of_the_repeats_counts(gpu, monkeypatch):
    X = torch.ones(8, device=gpu)
    ends = iter([5.0, 1.0, 2.0])
    execute = type(registry.find(gpu).compute)._execute

    def timed(engine, op):
        execute(engine, op)
        if op.name == "aten.add" and op.start:
            op.end = op.start + next(ends, 9.0)

    X + 1  # the first call is not timed
    torch.vgpu.synchronize(gpu)
    programs = iter([lambda: None, *[lambda: X + 1] * 4])
    monkeypatch.setattr(type(registry.find(gpu).compute), "_execute", timed)
    times = vgpu.calibrate(lambda: next(programs)(), gpu)
    assert list(times.seconds.values()) == [pytest.approx(2.0)]


def test_the_host_waits_after_each_operator(gpu):
    """So that no kernel shares the machine with the issue of the next one."""
    X = torch.ones(8, device=gpu)
    done = []

    def program():
        first = X + 1
        done.append(first._cell.writer.done)

    vgpu.calibrate(program, gpu, repeats=2)
    assert done[1:3] == [True, True]


def test_a_simulation_takes_the_measured_times(gpu):
    X = torch.ones(64, 64, device=gpu)
    times = vgpu.calibrate(lambda: X @ X, gpu)
    (seconds,) = times.seconds.values()
    devices = d2lpar.virtual_gpus(2, model=times)
    inputs = [torch.ones(64, 64, device=device) for device in devices]
    d2lpar.synchronize()
    start = clock()
    for Y in inputs:
        for _ in range(3):
            Y @ Y
    d2lpar.synchronize()
    took = clock() - start
    assert took >= 3 * seconds
    assert took <= 3 * seconds + 6 * times.host + 1e-12


def test_copies_over_an_unlimited_link_are_measured():
    (device,) = d2lpar.virtual_gpus(1)
    X = torch.ones(2**18).pin_memory()

    def program():
        torch.vgpu._sleep(0.02)  # the copy waits for it, which takes no time of the link
        X.to(device, non_blocking=True) + 1

    with recorded() as recording:
        times = vgpu.calibrate(program, device, repeats=2)
    _, *copies, _ = named(recording, "copy")  # first and last runs are not measured
    assert len(copies) == 2
    _, *sleeps, _ = named(recording, "sleep")
    assert all(a.end <= b.start for a, b in zip(sleeps, copies, strict=True))
    measured = 2 * 2**20 / sum(copy.seconds for copy in copies)
    assert times.link.bandwidth == pytest.approx(measured)
    assert times.peer_link is None


def test_calibrate_refuses(gpu):
    with pytest.raises(ValueError, match="repeats must be at least 1: got 0"):
        vgpu.calibrate(lambda: None, gpu, repeats=0)
    with pytest.raises(ValueError, match="not on cpu"):
        vgpu.calibrate(lambda: None, "cpu")
    with pytest.raises(ValueError, match="ran no kernels on vgpu:0"):
        vgpu.calibrate(lambda: None, gpu)
    d2lpar.virtual_gpus(1, model="v100")
    with pytest.raises(ValueError, match="vgpu:0 is modelled"):
        vgpu.calibrate(lambda: None, gpu)


def test_a_program_that_raises_leaves_nothing_behind(gpu):
    X = torch.ones(8, device=gpu)
    runs = iter([None, ZeroDivisionError])

    def program():
        if next(runs):
            raise ZeroDivisionError
        X + 1

    with pytest.raises(ZeroDivisionError):
        vgpu.calibrate(program, gpu)
    with Gate(gpu):  # a mode that was left on would wait for this
        (X + 1)._cell.writer  # noqa: B018


def test_waits_of_the_host_are_not_taken_for_launches():
    """Gaps of 1, 2, 3 and 2, and one of 500."""
    assert calibration._usual_gap([0.0, 1.0, 3.0, 6.0, 506.0, 508.0]) == 2


def test_calibrate_says_what_is_missing():
    with pytest.raises(TypeError, match="takes a function without arguments: got 3"):
        vgpu.calibrate(3, "vgpu:0")
    with pytest.raises(ValueError, match="there is no device cuda"):
        vgpu.calibrate(lambda: None, "cuda")
