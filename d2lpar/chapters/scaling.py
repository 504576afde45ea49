"""Chapter 12: seconds of an allreduce, a figure of single runs, and the networks.

In the alpha-beta model a message of n bytes takes latency + n / bandwidth seconds. Every device has
one link, a `vgpu.Link`, that sends and receives at the same time, one message at a time in each
direction; the network between the links is never a bottleneck. Additions are free. Unless stated
otherwise, the formulas are those of Thakur, Rabenseifner and Gropp 2005
(https://doi.org/10.1177/1094342005051521) and of Patarasuk and Yuan 2009
(https://doi.org/10.1016/j.jpdc.2008.09.002).
"""

from numbers import Integral
from statistics import mean

from torch import nn

from d2lpar.plotting.charts import write_plain_numbers
from d2lpar.plotting.figures import LINES, MEASURED, PREDICTED, new_figure, style


def allreduce_seconds(algorithm, k, num_bytes, link):
    """Predict the seconds of an allreduce: k devices sum one tensor each, and all get the sum.

    With n bytes, latency L, bandwidth B and r = log2(k) rounded up:

    - "star": all to one and back, 2 (k - 1) (L + n / B);
    - "tree": pairs, then pairs of pairs, and back, 2 r (L + n / B);
    - "ring": k chunks around a ring, twice, 2 (k - 1) (L + n / (k B));
    - "halving": halves, quarters, ..., and back, 2 r L + 2 (k - 1) / k n / B, for k = 2**r.

    Args:
        algorithm: one of these names; `d2lpar.allreduce` runs the first three.
        k: number of devices.
        num_bytes: n, the size of one tensor.
        link: the `vgpu.Link` of each device.

    Raises:
        ValueError: the algorithm is unknown, k is not a positive integer or, for "halving", not a
            power of two, or n is negative.
    """
    if not (isinstance(k, Integral) and k > 0):
        raise ValueError(f"k must be a positive integer: got {k!r}")
    if not num_bytes >= 0:
        raise ValueError(f"num_bytes must not be negative: got {num_bytes}")
    if algorithm not in _MESSAGES:
        raise ValueError(f"unknown algorithm {algorithm!r}: choose one of {', '.join(_MESSAGES)}")
    if algorithm == "halving" and k & (k - 1):
        raise ValueError(f"k must be a power of two for halving: got k = {k}")
    num_messages, share = _MESSAGES[algorithm](k)
    return num_messages * link.latency + share * num_bytes / link.bandwidth


def _rounds(k):
    return (k - 1).bit_length()


_MESSAGES = {  # functions of k: number of consecutive messages, their total size in tensors
    "star": lambda k: (2 * (k - 1), 2 * (k - 1)),
    "tree": lambda k: (2 * _rounds(k), 2 * _rounds(k)),
    "ring": lambda k: (2 * (k - 1), 2 * (k - 1) / k),
    "halving": lambda k: (2 * _rounds(k), 2 * (k - 1) / k),
}


def two_level_seconds(num_machines, per_machine, num_bytes, inside, between):
    """Predict the seconds of an allreduce over machines with several devices each.

    A reduce-scatter over the g devices of a machine, then a ring over the M machines for each g-th
    of the tensor, then an allgather in the machine: 2 (g - 1) (L + n / (g B)) with the inner link,
    and 2 (M - 1) (L + n / (M B)) with the outer one, which the g rings of a machine share (the
    three phases of Goyal et al. 2017, section 4.1, https://arxiv.org/abs/1706.02677, which uses
    halving between machines).

    Args:
        num_machines: M.
        per_machine: g, number of devices per machine.
        num_bytes: n, the size of one tensor.
        inside: the `vgpu.Link` of a device inside its machine.
        between: the `vgpu.Link` of a machine to the others.

    Raises:
        ValueError: M or g is not a positive integer, or n is negative.
    """
    seconds = allreduce_seconds("ring", per_machine, num_bytes, inside)
    return seconds + allreduce_seconds("ring", num_machines, num_bytes, between)


def plot_runs(runs, xlabel, ylabel, formula):
    """Return a log-log figure of measured runs, their means and a formula.

    Args:
        runs: a dict from (group, x) to the results of its runs, a list.
        xlabel, ylabel: quantities and units.
        formula: a function of x, through the means at the least and the largest x.
    """
    ticks = sorted({x for _, x in runs})
    xs = [ticks[0] * (ticks[-1] / ticks[0]) ** (i / 50) for i in range(51)]
    groups = list(dict.fromkeys(group for group, _ in runs))
    figure, [[axes]] = new_figure(figsize=(5, 3.3))
    through = f"formula, through {ticks[0]:g} and {ticks[-1]:g}"
    with style():
        axes.plot(xs, [formula(x) for x in xs], "--", color=PREDICTED, label=through)
        for (group, x), numbers in runs.items():
            i = groups.index(group)
            at = x * 1.07 ** (i - 1)  # next to the other groups
            look = {"marker": LINES[i % len(LINES)][2], "linestyle": "none", "alpha": 0.4}
            label = f"{group}, measured" + " (moved left)" * (at < x)
            axes.plot([at] * len(numbers), numbers, color=MEASURED, label=label, **look)
            axes.scatter(at, mean(numbers), 250, "k", marker="_", zorder=3, label="mean")
        axes.set(xlabel=xlabel, ylabel=ylabel, xscale="log", yscale="log")
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
        axes.set_xticks([], minor=True)
        write_plain_numbers(axes.yaxis)
        axes.grid(True)
        handles = dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2)
    return figure


class Bert(nn.Module):
    """BERT base (Devlin et al. 2018) with logits for all tokens, as in its pre-training.

    It maps tokens (b, length) to logits (b, length, vocabulary).
    """

    def __init__(self, width=768, vocabulary=30_528):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 12, 4 * width, 0.1, "gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)

    def forward(self, tokens):
        return self.layers(self.embedding(tokens)) @ self.embedding.weight.T


def convnet():
    """Build the network whose training steps chapter 12 counts: (b, 1, 28, 28) to (b, 10)."""
    net = nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=3, padding=1),  # (b, 16, 9, 9)
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),  # (b, 32, 5, 5)
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(800, 10),
    )
    for p in net.parameters():
        if p.dim() > 1:
            nn.init.kaiming_normal_(p, nonlinearity="relu")
        else:
            nn.init.zeros_(p)
    return net
