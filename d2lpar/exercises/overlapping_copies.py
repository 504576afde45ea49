"""What the checks of the exercises 04 compare answers with."""

from collections import defaultdict

from d2lpar.exercises.marks import reference


@reference
def schedule(t_comp, t_copy, num_streams):
    """Return the starts of the copies of four items, and when all is done."""
    taken, starts = defaultdict(float), []
    compute, copy = ("compute", "copy") if num_streams == 2 else ("both", "both")
    for _ in range(4):
        computed = max(taken[compute], taken["compute engine"]) + t_comp
        taken[compute] = taken["compute engine"] = computed
        starts.append(max(taken[copy], taken["copy engine"], computed))
        taken[copy] = taken["copy engine"] = starts[-1] + t_copy
    return starts, taken["copy engine"]


@reference
def part_before_the_last_kernel(copies, kernels):
    """Return the part of copies, which follow each other, that ends before the kernels end."""
    late = sum(max(0, copy.end - max(copy.start, kernels[-1].end)) for copy in copies)
    return 1 - late / sum(copy.end - copy.start for copy in copies)
