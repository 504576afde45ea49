"""What the benchmarks share: a clock, and a row for each ratio beside the limit it must keep."""

import threading
import time

import torch

import d2lpar


def nine_of_ten(errors):
    """Return the size within which nine of ten errors are."""
    sizes = sorted(map(abs, errors))
    return sizes[int(0.9 * len(sizes))]


def seconds(work):
    """Return what a call takes, with the work that it leaves on the devices."""
    d2lpar.synchronize()
    start = time.perf_counter()
    work()
    d2lpar.synchronize()
    return time.perf_counter() - start


def cores_of_two_threads(count=40, size=1000):
    """Return how many cores this machine gives two plain threads at this moment, at most 2.

    Two cores of a shared machine may be worth 1.5 in one minute and 2 in the next: what two
    devices gain is held against it.
    """
    inputs = [torch.rand(size, size) for _ in range(2)]

    def products(x):
        torch.set_num_threads(1)  # of this thread
        for _ in range(count):
            x.mm(x)

    def took(*inputs):
        threads = [threading.Thread(target=products, args=(x,)) for x in inputs]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - start

    return min(2.0, sum(map(took, inputs)) / took(*inputs))


def ratio_row(name, ratio, limit, at_least=True):
    """Print a ratio beside its limit; return whether it keeps it."""
    kept = ratio >= limit if at_least else ratio <= limit
    sign = ">=" if at_least else "<="
    print(f"{name:66} {ratio:7.3f}  {sign} {limit:5.2f}  {'ok' if kept else 'MISSED'}")
    return kept
