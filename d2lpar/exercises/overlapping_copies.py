"""Reference solutions for exercise notebook 04."""

from collections import defaultdict

from d2lpar.exercises.marks import reference


@reference
def schedule(t_comp, t_copy, num_streams):
    """Return the start times of the copies of four items, and the time when all has ended."""
    free_at, starts = defaultdict(float), []
    compute, copy = ("compute", "copy") if num_streams == 2 else ("both", "both")
    for _ in range(4):
        computed = max(free_at[compute], free_at["compute engine"]) + t_comp
        free_at[compute] = free_at["compute engine"] = computed
        starts.append(max(free_at[copy], free_at["copy engine"], computed))
        free_at[copy] = free_at["copy engine"] = starts[-1] + t_copy
    return starts, free_at["copy engine"]


@reference
def part_before_the_last_kernel(copies, kernels):
    """Return the fraction of consecutive copies that precedes the end of the last kernel."""
    late = sum(max(0, copy.end - max(copy.start, kernels[-1].end)) for copy in copies)
    return 1 - late / sum(copy.end - copy.start for copy in copies)
