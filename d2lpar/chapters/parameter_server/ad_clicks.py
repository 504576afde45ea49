"""Clicks on advertisements: a synthetic sparse data set."""

import torch


class AdClicks:
    """Synthetic examples of sparse logistic regression.

    Args:
        num_features: n; feature i has a probability proportional to 1 / (i + 1).
        per_example: m, the number of features drawn per example.

    Attributes:
        probabilities: the probability of each feature, (n,).
    """

    def __init__(self, num_features, per_example):
        self.per_example = per_example
        p = 1 / torch.arange(1, num_features + 1, dtype=torch.float64)
        self.probabilities = p / p.sum()
        self._cumulative = self.probabilities.cumsum(0)
        self._true_w = torch.randn(num_features, generator=torch.Generator().manual_seed(0))

    def minibatch(self, batch_size, seed):
        """Return features (batch_size, m) and labels (batch_size,), 0 or 1, of a seed."""
        generator = torch.Generator().manual_seed(seed)
        draws = torch.rand(batch_size, self.per_example, generator=generator, dtype=torch.float64)
        X = torch.searchsorted(self._cumulative, draws).clamp_(max=len(self._cumulative) - 1)
        chances = torch.rand(batch_size, generator=generator)
        return X, (chances < self._true_w[X].sum(1).sigmoid()).float()
