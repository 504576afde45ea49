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


def ratio_row(name, ratio, limit, at_least=True, reached=None):
    """Print a ratio beside its limit; return False if it fails.

    `reached` is a looser bound, for an aim that is not met reliably: a ratio between the two is
    SHORT, and does not fail.
    """

    def keeps(bound):
        return ratio >= bound if at_least else ratio <= bound

    met, kept = keeps(limit), keeps(limit if reached is None else reached)
    sign = ">=" if at_least else "<="
    said = "ok" if met else f"SHORT, but {sign} {reached:.2f}" if kept else "MISSED"
    print(f"{name:66} {ratio:7.3f}  {sign} {limit:5.2f}  {said}")
    return kept
