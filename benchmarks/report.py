"""What the benchmarks share: a row for each ratio, beside the limit that it must keep."""

import statistics


def median(values):
    return statistics.median(values)


def ratio_row(name, ratio, limit, at_least=True):
    """Print a ratio beside its limit; return whether it keeps it."""
    kept = ratio >= limit if at_least else ratio <= limit
    sign = ">=" if at_least else "<="
    print(f"{name:66} {ratio:7.3f}  {sign} {limit:5.2f}  {'ok' if kept else 'MISSED'}")
    return kept
