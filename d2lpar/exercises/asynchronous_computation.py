"""Reference solutions for exercise notebook 02."""

import torch

from d2lpar.exercises.marks import reference
from d2lpar.timelines.timeline import Timeline
from vgpu import clock, host_takes, virtual_gpus


@reference
def lines_that_wait(lines, x, count_waits):
    """Return the letters of the lines that make the host wait for products of x."""
    letters = ""
    for letter, (_, ask) in lines.items():
        y = [x @ x for _ in range(20)][-1]
        _, count = count_waits(lambda ask=ask, y=y: ask(y))
        letters += letter * (count > 0)
    return letters


@reference
def thousand_products_us(n, wait_each):
    """Return the microseconds of 1000 products on a modelled V100, which replaces the devices."""
    [v100] = virtual_gpus(1, model="v100", values=False)
    accel, matrix = torch.get_device_module(v100), torch.zeros(n, n, device=v100)
    start = clock()
    for _ in range(1000):
        matrix @ matrix
        if wait_each:
            accel.synchronize(v100)
    accel.synchronize(v100)
    return 1e6 * (clock() - start)


@reference
def smallest_exact(t_1):
    """Return the smallest t_2 for which d2l's formula gives the time of 1000 computations."""
    for t_2 in range(1, 100):
        launched = ended = 0
        for _ in range(1000):
            launched += t_1
            ended = max(launched, ended) + t_2
        if ended == t_1 + 1000 * t_2:
            return t_2


@reference
def kernel_us(matrix):
    """Return the microseconds of a product of a matrix with itself."""
    with Timeline() as timeline:
        matrix @ matrix
    return 1e6 * timeline.busy(matrix.device)


@reference
def times_on_the_device(program, matrices):
    """Run a program, matrices in place of durations; return host and device time in µs."""
    device = next(iter(matrices.values())).device
    accel = torch.get_device_module(device)
    accel.synchronize(device)
    events, start = [], clock()
    with Timeline() as timeline:
        for what, *numbers in program:
            if what == "launch":
                matrices[numbers[0]] @ matrices[numbers[0]]
            elif what == "python":
                host_takes(1e-6 * numbers[0])
            elif what == "record":
                events.append(accel.current_stream(device).record_event())
            elif what == "wait":
                events[numbers[0]].synchronize()
            else:
                accel.synchronize(device)
        host = clock() - start
    ends = [span.end for span in timeline.select(device, "kernel")]
    return [1e6 * host, 1e6 * max(ends, default=0)]
