"""Work of virtual GPUs that stays under way for as long as a test wants it to."""

import contextlib
import threading

import torch

from vgpu.runtime import engines


@contextlib.contextmanager
def held(count=1):
    """Keep the first copy over a slow link, or a `torch.vgpu._sleep`, of each of `count` engines
    under way until the block ends: an engine sleeps for as long as they take, here until then."""
    asleep, awake, sleep_until = threading.Semaphore(0), threading.Event(), engines.sleep_until

    def sleep_until_awake(moment):
        asleep.release()
        awake.wait(30)

    engines.sleep_until = sleep_until_awake
    try:
        yield
        assert all(asleep.acquire(timeout=30) for _ in range(count)), "not all of them were held"
    finally:
        engines.sleep_until = sleep_until
        awake.set()


def run_what_is_ready(device):
    """Run all kernels of a virtual GPU that wait for nothing: it runs them in order, ours last."""
    stream = torch.vgpu.Stream(device)
    with torch.vgpu.stream(stream):
        torch.ones(1, device=device)
    stream.record_event().synchronize()
