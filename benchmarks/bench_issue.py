"""(c) What it costs to issue an operator on a virtual GPU.

The floor is what torch itself takes to enter Python and to make an empty result. An operator may
cost 15 µs where the floor is 4 µs: 3.75 times the floor. Two figures for each operator, each
against the floor under the same conditions: behind a device that is busy, where issuing is all
that happens; and on an idle device, whose engine runs each of these tiny operators at once. There
two threads share Python's lock, and the floor is what torch takes beside a plain thread that runs
the same operator on tensors of the CPU. How these take turns differs from run to run: conv2d has
given 3.2 to 4.2, however many rounds a run takes.
"""

import contextlib
import sys
import threading
import time
from statistics import median

import torch
from report import ratio_row

import d2lpar
from vgpu.runtime.registry import find
from vgpu.runtime.scheduler import Op

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


@contextlib.contextmanager
def plain_thread(call):
    """Let a plain thread do `call` again and again, with as many CPU threads as an engine has."""
    started, stop = threading.Event(), []

    def run():
        torch.set_num_threads(1)
        with torch.inference_mode():
            call()
            started.set()
            while not stop:
                call()

    thread = threading.Thread(target=run)
    thread.start()
    started.wait()
    try:
        yield
    finally:
        stop.append(True)
        thread.join()


def keep_busy(device, go_on):
    """Let the current stream of `device` stand still until the event `go_on` is set."""
    stream = find(device).current_stream()
    stream.issue(Op("busy", "kernel", stream.device.compute, lambda op: go_on.wait()))


def operators(device):
    """Return the calls that are measured, by name, on tensors of `device`."""
    a, b = torch.rand(8, 8, device=device), torch.rand(8, 8, device=device)
    x, w = torch.rand(1, 4, 8, 8, device=device), torch.rand(4, 4, 3, 3, device=device)
    return {
        "add": lambda: a + b,
        "mm": lambda: a.mm(b),
        "view": lambda: a.view(64),
        "relu_": lambda: a.relu_(),
        "conv2d": lambda: torch.nn.functional.conv2d(x, w),
    }


def main():
    (device,) = d2lpar.virtual_gpus(1)
    plain, empty, kept = operators("cpu"), make_floor(), []

    def floor():
        return empty + empty

    with torch.no_grad():
        for name, call in operators(device).items():
            # The machine's pace changes from second to second: ratios are taken round by round.
            rounds = []
            for _ in range(ROUNDS):
                busy = microseconds(call, device) / microseconds(floor)
                with plain_thread(plain[name]):
                    floor_beside = microseconds(floor)
                rounds.append((busy, floor_beside, microseconds(call)))
            rounds = rounds[1:]  # the first one is to warm up
            kept.append(
                ratio_row(
                    f"(c) issuing {name} / floor",
                    median([busy for busy, *_ in rounds]),
                    3.75,
                    False,
                )
            )
            print(
                "    beside an engine {2:.1f} µs, floor beside a thread {1:.1f} µs".format(
                    *map(median, zip(*rounds, strict=True))
                )
            )
            idle = median([ours / peer for _, peer, ours in rounds])
            kept.append(ratio_row("(c) the same beside its engine", idle, 3.75, False, reached=4.5))
    return int(not all(kept))


if __name__ == "__main__":
    sys.exit(main())
