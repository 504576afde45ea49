"""(c) What it costs to issue an operator on a virtual GPU.

The floor is what torch itself takes to enter Python and to make an empty result. An operator may
cost 15 µs where the floor is 4 µs: 3.75 times the floor. Two figures for each operator: behind a
device that is busy, where issuing is all that happens; and on an idle device, whose engine runs
each of these tiny operators at once and takes Python's lock from the issuing thread for it.
"""

import sys
import threading
import time

import torch
from report import median, ratio_row

import d2lpar
from d2lpar.virtual.device import find
from d2lpar.virtual.scheduler import Op

CALLS, ROUNDS = 200, 31


class Floor(torch.Tensor):
    """A tensor whose operators do nothing but make an empty tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return make_floor()


def make_floor():
    return torch.Tensor._make_wrapper_subclass(
        Floor, (8, 8), (8, 1), 0, None, torch.float32, device=torch.device("vgpu", 0)
    )


def microseconds(call, device=None):
    """Return the mean time of a call, issued to an empty queue.

    With a `device`, its engine waits meanwhile: the calls are issued and run later.
    """
    d2lpar.synchronize()
    go_on = threading.Event()
    if device is not None:
        keep_busy(device, go_on)
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    seconds = time.perf_counter() - start
    go_on.set()
    return seconds / CALLS * 1e6


def keep_busy(device, go_on):
    """Let the current stream of `device` stand still until the event `go_on` is set."""
    stream = find(device).current_stream()
    stream.issue(Op("busy", "kernel", stream.device.compute, lambda op: go_on.wait()))


def main():
    (device,) = d2lpar.virtual_gpus(1)
    a, b = torch.rand(8, 8, device=device), torch.rand(8, 8, device=device)
    x, w = torch.rand(1, 4, 8, 8, device=device), torch.rand(4, 4, 3, 3, device=device)
    empty = make_floor()
    calls = {
        "add": lambda: a + b,
        "mm": lambda: a.mm(b),
        "view": lambda: a.view(64),
        "relu_": lambda: a.relu_(),
        "conv2d": lambda: torch.nn.functional.conv2d(x, w),
    }
    kept = []
    with torch.no_grad():
        for name, call in calls.items():
            # The machine's pace changes from second to second: ratios are taken round by round.
            rounds = [
                (
                    microseconds(lambda: empty + empty),
                    microseconds(call, device),
                    microseconds(call),
                )
                for _ in range(ROUNDS)
            ][1:]
            floor, busy, idle = map(median, zip(*rounds, strict=True))
            print(
                f"    floor {floor:.1f} µs, {name} {busy:.1f} µs, beside its engine {idle:.1f} µs"
            )
            busy = median([busy / floor for floor, busy, _ in rounds])
            idle = median([idle / floor for floor, _, idle in rounds])
            kept.append(ratio_row(f"(c) issuing {name} / floor", busy, 3.75, False))
            kept.append(ratio_row("(c) the same beside its engine", idle, 3.75, False))
    return int(not all(kept))


if __name__ == "__main__":
    sys.exit(main())
