"""Megatron's GPT: its sizes, and the layer and the head that a rank has of it.

Source: Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class GPT:
    """The sizes of a GPT.

    Attributes:
        layers, width, heads: of the transformer.
        length: tokens per sequence.
        vocabulary: size of the padded vocabulary, in tokens.
    """

    layers: int
    width: int
    heads: int
    length: int = 2048
    vocabulary: int = 51_200

    @property
    def parameters(self):
        """The number of parameters (Narayanan et al. 2021, equation 2)."""
        h = self.width
        return self.layers * (12 * h * h + 13 * h) + (self.vocabulary + self.length) * h

    def flops(self, batch):
        """Return the FLOPs of a step of `batch` sequences: forward, and twice as many backward.

        Source: Narayanan et al. 2021, equation 3, without recomputation.
        """
        s, h, tokens = self.length, self.width, batch * self.length
        return tokens * (
            72 * self.layers * h * h + 12 * self.layers * s * h + 6 * h * self.vocabulary
        )


# Narayanan et al. 2021, table 1: billions of parameters; layers, width, heads
SIZES = {
    1.7: GPT(24, 2304, 24),
    3.6: GPT(30, 3072, 32),
    7.5: GPT(36, 4096, 32),
    18.4: GPT(40, 6144, 48),
    39.1: GPT(48, 8192, 64),
    76.1: GPT(60, 10240, 80),
    145.6: GPT(80, 12288, 96),
    310.1: GPT(96, 16384, 128),
    529.6: GPT(105, 20480, 128),
    1008.0: GPT(128, 25600, 160),
}


class Split(torch.autograd.Function):
    """Megatron's f: identity in forward, allreduce of the gradient in backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        if ctx.group.size() > 1:
            gradient = gradient.contiguous()
            dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Sum(torch.autograd.Function):
    """Megatron's g: allreduce in forward, identity in backward."""

    @staticmethod
    def forward(ctx, x, group):
        if group.size() > 1:
            dist.all_reduce(x, group=group)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class RowLinear(nn.Linear):
    """1/t of a linear layer split by inputs: outputs are summed, and the caller adds the bias."""

    def __init__(self, width, out, t, group):
        super().__init__(width, out)
        self.t, self.group = t, group

    def forward(self, x):
        x = functional.linear(x, self.weight)
        return Sum.apply(x, self.group) if self.t > 1 else x


class Layer(nn.Module):
    """1/t of a layer of Megatron's GPT; what TorchScript fuses there is one operator here."""

    def __init__(self, width, heads, t, group):
        super().__init__()
        self.heads, self.t, self.group = heads // t, t, group
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.up = nn.Linear(width, 3 * width // t), nn.Linear(width, 4 * width // t)
        self.out = RowLinear(width // t, width, t, group)
        self.down = RowLinear(4 * width // t, width, t, group)
        self.softmax, self.dropout = nn.Softmax(-1), nn.Dropout(0.1)

    def split(self, x):
        return Split.apply(x, self.group) if self.t > 1 else x

    def forward(self, x):  # (s, b, h)
        s, b, _ = x.shape
        heads = self.qkv(self.split(self.first(x))).view(s, b * self.heads, -1).transpose(0, 1)
        q, k, v = heads.chunk(3, -1)
        scores = torch.bmm(q, k.transpose(1, 2))
        weights = self.dropout(self.softmax(scores))
        attended = self.out(torch.bmm(weights, v).transpose(0, 1).reshape(s, b, -1))
        x = x + functional.dropout(attended + self.out.bias, 0.1)
        hidden = self.down(functional.gelu(self.up(self.split(self.second(x)))))
        return x + functional.dropout(hidden + self.down.bias, 0.1)


class Head(nn.Module):
    """1/t of the output embedding, and Megatron's cross-entropy over the parts."""

    def __init__(self, width, vocabulary, t, group):
        super().__init__()
        self.norm, self.t, self.group = nn.LayerNorm(width), t, group
        self.weight = nn.Parameter(torch.empty(vocabulary // t, width))

    def reduce(self, x):
        if self.t > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def forward(self, x, targets):  # (s, b, h), (s, b)
        x = self.norm(x)
        if self.t > 1:
            x = Split.apply(x, self.group)
        return _CrossEntropy.apply(functional.linear(x, self.weight).float(), targets, self).mean()


class _CrossEntropy(torch.autograd.Function):
    """Megatron's kernels and its three sums, for their time only.

    `split_cross_entropy` of chapter 10 computes the values, with two sums.
    """

    @staticmethod
    def forward(ctx, logits, targets, head):
        logits = logits - head.reduce(logits.max(-1)[0]).unsqueeze(-1)
        chosen = head.reduce(logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1))
        weights = logits.exp()
        total = head.reduce(weights.sum(-1))
        ctx.save_for_backward(weights.div_(total.unsqueeze(-1)), targets)
        return total.log() - chosen

    @staticmethod
    def backward(ctx, gradient):
        weights, targets = ctx.saved_tensors
        weights.scatter_add_(-1, targets.unsqueeze(-1), -gradient.new_ones(*targets.shape, 1))
        return weights.mul_(gradient.unsqueeze(-1)), None, None
