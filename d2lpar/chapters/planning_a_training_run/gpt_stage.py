"""For the lab of chapter 13: a stage of GPT, the check of its gradients, and its full size.

A layer is a class of the lab, `make_layer(net, group, methods)`, with its way into the tensor
group as `f`. A trainer, also of the lab, has `stages`, `buckets`, the groups `tensor` and `data`,
and `gradients(X, y)`.
"""

import contextlib
import functools
import itertools
import zlib
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from d2lpar.chapters.planning_a_training_run.layouts import sweep


@dataclass
class Methods:
    """The methods of a step; all of them are those of today.

    Attributes:
        sequence: whether ranks of a tensor group split the tokens between the products.
        fused: whether attention is one kernel.
        hide: whether sums of gradients start in the backward pass.
        dtype: of weights and activations.
    """

    sequence: bool = True
    fused: bool = True
    hide: bool = True
    dtype: torch.dtype = torch.bfloat16


def group_of(layout, axis):
    """Return the group of this process along an axis, "tensor" or "data".

    All processes must call it, in the same order.
    """
    firsts = range(layout.tensor * layout.data)  # the ranks of the first stage
    groups = {tuple(layout.ranks_of(rank, axis)) for rank in firsts}
    return dist.new_subgroups_by_enumeration(sorted(map(list, groups)))[0]


@contextlib.contextmanager
def own_numbers(device, group, own=True):
    """Context manager: ranks of a group with the same generator draw different numbers.

    Afterwards they draw the same again. Both follow from the state of the device's generator, so a
    layer that is recomputed draws the same numbers again. Without `own` they are never different.
    """
    if group.size() == 1:
        yield
        return
    generator = torch.get_device_module(device).default_generators[device.index]
    seed = zlib.crc32(bytes(generator.get_state().tolist()))
    generator.manual_seed(seed + own * group.rank())
    yield
    generator.manual_seed(seed + group.size())


def attend(queries, keys, values, dropout, fused):
    """Return the attention of some heads, all of the shape (heads, tokens, size).

    Fused, a token sees itself and the tokens before it. Otherwise the kernels are those of 2021,
    which have scale and mask in the kernel of the softmax: they have its time, but neither.
    """
    if fused:
        heads = (queries[None], keys[None], values[None])
        options = {"dropout_p": dropout, "is_causal": True}
        return functional.scaled_dot_product_attention(*heads, **options)[0]
    scores = torch.bmm(queries, keys.transpose(1, 2))
    return torch.bmm(functional.dropout(functional.softmax(scores, -1), dropout), values)


class GPTStage(nn.Module):
    """1/p of the layers; the first stage has the embedding, and the last one the head."""

    def __init__(self, make_layer, net, s, layout, group, methods):
        super().__init__()
        self.recompute, self.group, last = layout.recompute, group, layout.pipeline - 1
        num_layers = net.layers // layout.pipeline
        self.embed = nn.Embedding(net.vocabulary, net.width) if s == 0 else None
        self.parts = nn.ModuleList(make_layer(net, group, methods) for _ in range(num_layers))
        num_words = net.vocabulary // group.size()
        self.norm = nn.LayerNorm(net.width) if s == last else None
        self.out = nn.Linear(net.width, num_words, False) if s == last else None

    def forward(self, X):  # (b, tokens) at the first stage, else (tokens, b, width)
        X = self.embed(X.T) if self.embed else X
        for layer in self.parts:
            X = checkpoint(layer, X, use_reentrant=False) if self.recompute else layer(X)
        return self.out(self.parts[0].f(self.norm(X), self.group)) if self.out else X


CUT = {"project": 0, "up": 0, "out": 0, "mix.weight": 1, "down.weight": 1}


def cut_of(name):
    """Return the dimension along which a tensor group cuts a parameter, or None."""
    return next((dim for end, dim in CUT.items() if f".{end}." in f".{name}."), None)


def named_gradients(trainer):
    """Yield the name, the gradient and the tensor group of each parameter of a trainer."""
    of = {p: grad for each in trainer.buckets for p, grad in each.with_params(each.grads)}
    for stage in trainer.stages:
        yield from ((name, of[p], stage.group) for name, p in stage.named_parameters())


def gradient_errors(trainer, whole, X, y):
    """Compare a trainer, which gets its parts of the weights, with the whole network, on this rank.

    Args:
        trainer: a trainer of the lab.
        whole: a `GPTStage` with all layers, on one device.
        X, y: words, (sequences of the batch, tokens).

    Returns:
        The trainer's loss, that of `whole`, and the largest error of a gradient, relative to the
        largest entry of that gradient.
    """
    expected = functional.cross_entropy(whole(X).flatten(0, 1), y.T.flatten())
    expected.backward()

    def part(name, Z):
        dim, t = cut_of(name), trainer.tensor
        return Z if dim is None else Z.chunk(t.size(), dim)[t.rank()]

    params = itertools.chain(*(stage.named_parameters() for stage in trainer.stages))
    for (name, p), right in zip(params, whole.parameters(), strict=True):
        p.data.copy_(part(name, right.data))
    mine, num_parts = trainer.data.rank(), trainer.data.size()
    loss = trainer.gradients(*(Z.chunk(num_parts)[mine] for Z in (X, y)))
    grads = zip(named_gradients(trainer), whole.parameters(), strict=True)
    off = [
        (grad.cpu() - part(name, right.grad)).abs().max() / right.grad.abs().max()
        for (name, grad, _), right in grads
    ]
    return loss.item(), expected.item(), max(off).item()


def full_size(make_trainer, net, layout, batch, machine):
    """Return the modelled seconds of a step, and the bytes that a GPU needs for it.

    All layers take equally long, so stages of one and of two layers run, and the line is extended.

    Args:
        make_trainer: a function of a `GPT` and a list of devices, one for each stage, that returns
            a trainer.
        net: a `GPT`.
        layout: a `Layout`.
        batch: sequences of a step.
        machine: a `Machine`.
    """

    def step(per_stage, layout):
        gpus = [torch.device("vgpu", i) for i in range(layout.pipeline)]
        trainer = make_trainer(replace(net, layers=per_stage * layout.pipeline), gpus)

        def run(m):
            size = m * layout.micro_batch, net.length
            words = torch.zeros(size, dtype=torch.long, device=gpus[0])
            trainer.step(words, words.to(gpus[-1]))

        return run

    one, two = (sweep(functools.partial(step, n), [layout], batch, machine)[0] for n in (1, 2))
    more = net.layers // layout.pipeline - 1
    seconds = one.seconds + more * (two.seconds - one.seconds)
    return seconds, one.num_bytes + more * (two.num_bytes - one.num_bytes)
