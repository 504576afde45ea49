"""Steps that others have measured, and how well an order agrees with theirs."""

import torch

from d2lpar.chapters.planning_a_training_run.layouts import Layout

_SECONDS = {  # (t, p): {micro-batch: seconds of a step}
    (1, 1): {2: 3.7005, 4: 3.6383, 8: 3.5665},
    (1, 2): {2: 4.0349, 4: 4.3821, 8: 5.0456},
    (2, 1): {2: 4.2642, 4: 4.0782, 8: 3.9752, 16: 3.9375},
    (4, 1): {2: 6.2283, 4: 4.764, 8: 4.6344, 16: 4.4921, 32: 4.5482},
    (8, 1): {2: 8.8809, 4: 5.618, 8: 5.178, 16: 5.0178, 32: 4.9723, 64: 9.8389},
    (16, 1): {2: 13.4722, 4: 11.9601, 8: 10.894, 16: 10.7193, 32: 10.5806},
}


def steps_on_64_a100s():
    """Return measured seconds per step of GPT(30, 3072, 32), a dict by `Layout`.

    512 sequences a step, Megatron-DeepSpeed with recomputation.

    Source: Bang et al. 2024, https://arxiv.org/abs/2312.12391, the rows of 64 GPUs in
    ground_truth_multi.csv of https://github.com/VIA-Research/vTrain at f8dda84 (MIT licence).
    """
    return {
        Layout(t, p, 64 // (t * p), micro_batch, recompute=True): seconds
        for (t, p), row in _SECONDS.items()
        for micro_batch, seconds in row.items()
    }


def rank_correlation(x, y):
    """Return Spearman's correlation of two lists: 1 for the same order, -1 for the opposite.

    Equal numbers share the mean of their ranks.
    """
    x, y = torch.tensor([*x]), torch.tensor([*y])
    ranks = [(z[:, None] > z).sum(1) - (z[:, None] < z).sum(1) for z in (x, y)]
    return torch.corrcoef(torch.stack(ranks).double())[0, 1].item()
