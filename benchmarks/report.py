"""What the benchmarks share: a clock, and a row for each ratio beside the limit it must keep."""

import statistics
import time

import d2lpar


def median(values):
    return statistics.median(values)


def seconds(work):
    """Return what a call takes, with the work that it leaves on the devices."""
    d2lpar.synchronize()
    start = time.perf_counter()
    work()
    d2lpar.synchronize()
    return time.perf_counter() - start


def ratio_row(name, ratio, limit, at_least=True):
    """Print a ratio beside its limit; return whether it keeps it."""
    kept = ratio >= limit if at_least else ratio <= limit
    sign = ">=" if at_least else "<="
    print(f"{name:66} {ratio:7.3f}  {sign} {limit:5.2f}  {'ok' if kept else 'MISSED'}")
    return kept
