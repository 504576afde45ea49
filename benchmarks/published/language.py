"""Programs of transformers and language models: on one GPU, on one machine and on many.

`language.toml` has the rows. Programs do what the source's code does, without its fused kernels.
"""

import contextlib
import functools
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy, gelu, linear, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import d2lpar
from d2lpar.chapters.pipeline_parallelism import one_forward_one_backward, pipeline_step
from d2lpar.chapters.planning_a_training_run.gpt import Split, Sum
from vgpu import clock, equal_ranks

from . import modelled, read, seconds_of

# -- what the programs share


@contextlib.contextmanager
def grid(device, **sizes):
    """Run one rank in place of all of a mesh, whose last dimension has neighbouring ranks.

    As `equal_ranks`, which loses its store once a group is made of some of its ranks.
    """
    store = FakeStore()
    dist.init_process_group("vccl", store=store, rank=0, world_size=math.prod(sizes.values()))
    try:
        yield init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    finally:
        dist.destroy_process_group()


def on(device, make, dtype=None):
    """Return a network with parameters on `device`, without memory on the CPU."""
    with torch.device("meta"):
        net = make()
    return (net if dtype is None else net.to(dtype)).to_empty(device=device)


def text(batch, length, device):
    """Return tokens and labels, (batch, length) each."""
    return torch.zeros(2, batch, length, dtype=torch.long, device=device)


def many(step, count, few):
    """Return the seconds of a step of `count` micro-batches.

    They follow from those of steps of `few` and `few + 1`: later micro-batches take equally long.
    """
    if count <= few + 1:
        return seconds_of(lambda: step(count))
    some = seconds_of(lambda: step(few))
    start = clock()
    step(few + 1)
    d2lpar.synchronize()
    return some + (count - few) * (clock() - start - some)


class MixedPrecision:
    """Adam on float32 copies of half-precision parameters, with a limit on the gradients' norm."""

    def __init__(self, parameters, clip=1.0):
        self.parameters, self.clip = list(parameters), clip
        self.masters = [torch.empty_like(p, dtype=torch.float32) for p in self.parameters]
        for master in self.masters:
            master.grad = torch.empty_like(master)
        self.adam = torch.optim.Adam(self.masters, foreach=True)

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None

    def step(self):
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            master.grad.copy_(parameter.grad)
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.masters, self.clip)
        self.adam.step()
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            parameter.data.copy_(master)


def sum_gradients(parameters, group):
    """Average the gradients over a group in one buffer, after the backward pass."""
    if group.size() == 1:
        return
    gradients = [p.grad for p in parameters]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    flat /= group.size()
    dist.all_reduce(flat, group=group)
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


# -- GPT as in Megatron-LM: tensor parallel, recomputed layers, half precision


class FusedSoftmax(torch.autograd.Function):
    """Megatron's kernel, which masks, too. Its gradient reads two tensors and writes one.

    That of log_softmax stands for it, which reads one of the two again if rows are long. That of
    torch's softmax moves twice as much.
    """

    @staticmethod
    def forward(ctx, scores):
        weights = scores.softmax(3)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx, gradient):
        (weights,) = ctx.saved_tensors
        return torch.ops.aten._log_softmax_backward_data(gradient, weights, 3, weights.dtype)


class GPTLayer(nn.Module):
    """A rank's part of a layer: heads and hidden units are split over the group."""

    def __init__(self, width, heads, group):
        super().__init__()
        k = group.size()
        self.heads, self.group = heads // k, group
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width // k), nn.Linear(width // k, width)
        self.up, self.down = nn.Linear(width, 4 * width // k), nn.Linear(4 * width // k, width)

    def forward(self, x):  # (N, T, C)
        q, k, v = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(Split.apply(self.first(x), self.group)).chunk(3, 2)
        )
        # baddbmm scales in Megatron, which takes no kernel; here that of the queries is small
        scores = (q * q.shape[3] ** -0.5) @ k.transpose(2, 3)
        weights = nn.functional.dropout(FusedSoftmax.apply(scores), 0.1)
        attended = self.out((weights @ v).transpose(1, 2).flatten(2))
        x = x + nn.functional.dropout(Sum.apply(attended, self.group), 0.1)
        hidden = gelu(self.up(Split.apply(self.second(x), self.group)))
        return x + nn.functional.dropout(Sum.apply(self.down(hidden), self.group), 0.1)


class GPT(nn.Module):
    """A rank's part of a GPT, which returns its loss and keeps the inputs of layers only."""

    def __init__(self, width, heads, depth, vocabulary, length, group):
        super().__init__()
        self.group = group
        self.embedding = nn.Embedding(vocabulary // group.size(), width)
        self.positions = nn.Parameter(torch.empty(length, width))
        self.layers = nn.ModuleList(GPTLayer(width, heads, group) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens, labels):  # (N, T) each
        x = Sum.apply(self.embedding(tokens), self.group) + self.positions
        x = nn.functional.dropout(x, 0.1)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        scores = linear(Split.apply(self.norm(x), self.group), self.embedding.weight)
        return _LossOfParts.apply(scores.float(), labels, self.group)


class _LossOfParts(torch.autograd.Function):
    """The mean loss of scores whose vocabulary is split over a group (Megatron's)."""

    @staticmethod
    def forward(ctx, scores, labels, group):
        top = scores.amax(-1, keepdim=True)
        if group.size() > 1:
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        scores = scores - top
        chosen = scores.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        parts = scores.exp_()
        total = parts.sum(-1)
        if group.size() > 1:
            dist.all_reduce(chosen, group=group)
            dist.all_reduce(total, group=group)
        ctx.save_for_backward(parts.div_(total.unsqueeze(-1)), labels)
        return (total.log() - chosen).mean()

    @staticmethod
    def backward(ctx, gradient):
        parts, labels = ctx.saved_tensors
        places = labels.unsqueeze(-1)
        parts.scatter_add_(-1, places, torch.full_like(places, -1, dtype=parts.dtype))
        return parts.mul_(gradient / labels.numel()), None, None


SIZES = {  # width, heads, layers
    "0.5B": (1536, 16, 16),  # DLPerf
    "1.5B": (2304, 24, 24),
    "1.8B": (3072, 32, 16),
    "3.6B, 32 layers": (3072, 32, 32),
    "1B": (1920, 15, 24),  # Megatron-LM in 2020
    "2B": (2304, 18, 30),
    "4B": (3072, 24, 36),
    "8B": (4096, 32, 42),
    "1.7B": (2304, 24, 24),  # Megatron-LM in 2021
    "3.6B": (3072, 32, 30),
    "7.5B": (4096, 32, 36),
    "18B": (6144, 48, 40),
}


def megatron(model, tensor, batch, micro_batches, gpus, one=None, length=2048, overlapped=False):
    """Return the program of a step of Megatron-LM in half precision.

    Args:
        model: one of SIZES.
        tensor: how many GPUs share its tensors.
        batch, micro_batches: the micro-batch and the number of micro-batches.
        gpus: the number of GPUs of these.
        one: the same four for any other number of GPUs.
        length: tokens of a sequence.
        overlapped: whether DistributedDataParallel sums gradients during the backward pass, or
            Megatron's own class after it.
    """

    def program(machine, k):
        size, t, sequences, count = (model, tensor, batch, micro_batches) if k == gpus else one
        (device,) = modelled(1, machine)
        with grid(device, data=k // t, tensor=t) as mesh:
            data, group = mesh["data"].get_group(), mesh["tensor"].get_group()
            make = functools.partial(GPT, *SIZES[size], 51_200, length, group)
            net = on(device, make, torch.half)
            trainer = MixedPrecision(net.parameters())
            parallel = overlapped and data.size() > 1
            replica = DistributedDataParallel(net, process_group=data) if parallel else net
            X, y = text(sequences, length, device)

            def step(batches):
                trainer.zero_grad()
                for i in range(batches):
                    waits = parallel and i + 1 < batches
                    with replica.no_sync() if waits else contextlib.nullcontext():
                        (replica(X, y) * 8192 / batches).backward()
                if not parallel:
                    sum_gradients(net.parameters(), data)
                trainer.step()

            if parallel:
                step(1)  # after which DDP builds its buckets anew
            return many(step, count, 1)

    return program


def seconds_of_teraflops(teraflops, gpus, given):
    """Return seconds by the formula of Narayanan et al. 2021, section 5.1, with recomputation."""
    width, _, depth = SIZES[given["model"]]
    per_token = 96 * depth * width**2 * (1 + 2048 / (6 * width) + 51_200 / (16 * depth * width))
    batch = gpus // given["tensor"] * given["batch"] * given["micro_batches"]
    return batch * 2048 * per_token / (teraflops * 1e12 * gpus)


# -- BERT


class BertLayer(nn.Module):
    """A layer of BERT with separate projections, as in the code of Hugging Face and NVIDIA."""

    def __init__(self, width, heads, dropout=0.1):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out, self.first = nn.Linear(width, width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.second, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)

    def forward(self, x, mask=None):  # (N, T, C)
        q, k, v = (
            project(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
        if mask is not None:
            scores = scores + mask
        attended = (self.dropout(scores.softmax(3)) @ v).transpose(1, 2).flatten(2)
        x = self.first(self.dropout(self.out(attended)) + x)
        return self.second(self.dropout(self.down(gelu(self.up(x)))) + x)


class Bert(nn.Module):
    """BERT with one of its heads: "words" for pretraining, "span" for questions and answers."""

    def __init__(self, width, heads, depth, head, vocabulary=30_528):
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.positions, self.types = nn.Embedding(512, width), nn.Embedding(2, width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.1)
        self.layers = nn.ModuleList(BertLayer(width, heads) for _ in range(depth))
        self.head = head
        if head == "words":
            self.transform, self.last = nn.Linear(width, width), nn.LayerNorm(width)
            self.bias = nn.Parameter(torch.empty(vocabulary))
        else:
            self.span = nn.Linear(width, 2)

    def forward(self, tokens):  # (N, T)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.words(tokens) + self.positions(places) + self.types(torch.zeros_like(tokens))
        x = self.dropout(self.norm(x))
        mask = torch.zeros(len(x), 1, 1, x.shape[1], dtype=x.dtype, device=x.device)
        for layer in self.layers:
            x = layer(x, mask)
        if self.head == "span":
            return self.span(x)
        return linear(self.last(gelu(self.transform(x))), self.words.weight, self.bias)


def loss_of_words(scores, labels):
    return cross_entropy(scores.flatten(0, 1).float(), labels.flatten())


def loss_in_half_precision(scores, labels):
    return cross_entropy(scores.flatten(0, 1), labels.flatten())


def loss_of_span(scores, labels):
    return sum(cross_entropy(part.float(), labels[:, 0]) for part in scores.unbind(2)) / 2


BERTS = {"base": (768, 12, 12), "large": (1024, 16, 24)}  # width, heads, layers


def bert(size, batch, length, dtype, tf32=False, bucket_cap_mb=None):
    """Return the program of a step of BERT, one of BERTS, under DDP.

    Half precision is apex' O2: the network in float16, Adam on float32 copies. In float32 the
    optimizer updates one parameter after the other.
    """
    head = "words" if length == 128 else "span"

    def program(machine, gpus):
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = tf32
        try:
            (device,) = modelled(1, machine)
            net = on(device, lambda: Bert(*BERTS[size], head), getattr(torch, dtype))
            if dtype == "float16":
                trainer = MixedPrecision(net.parameters(), None if head == "words" else 1.0)
            else:
                fused = head == "words"  # FusedAdam; for questions BertAdam
                trainer = torch.optim.Adam(net.parameters(), foreach=fused)
            X, y = text(batch, length, device)
            loss = loss_of_words if head == "words" else loss_of_span

            def step():
                trainer.zero_grad()
                loss(replica(X), y).backward()
                trainer.step()

            with equal_ranks(gpus):
                replica = net
                if gpus > 1:
                    replica = DistributedDataParallel(net, bucket_cap_mb=bucket_cap_mb)
                step()  # after which DDP builds its buckets anew
                return seconds_of(step)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before

    return program


def bert_encoder(batch, length):
    """Return the program of BERT base's encoder in half precision, without training."""

    def program(machine, gpus):
        (device,) = modelled(1, machine)
        net = on(device, lambda: nn.ModuleList(BertLayer(768, 12) for _ in range(12)), torch.half)
        net.eval()
        X = torch.empty(batch, length, 768, dtype=torch.half, device=device)

        def step():  # the launches of 20 runs hide the latency of one
            for _ in range(20):
                x = X
                for layer in net:
                    x = layer(x)

        return seconds_of(step) / 20

    return program


# -- GPT-2 of Hugging Face


class GPT2Block(nn.Module):
    """A block of GPT-2 with the parts of its activation as kernels of their own (gelu_new)."""

    def __init__(self, width, heads, length):
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("visible", torch.empty(1, 1, length, length, dtype=torch.bool))

    def forward(self, x):  # (N, T, C)
        q, k, v = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.first(x)).chunk(3, 2)
        )
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
        scores = torch.where(self.visible, scores, torch.full_like(scores[:1, :1, :1, :1], -1e4))
        attended = (self.dropout(scores.softmax(3)) @ v).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(attended))
        h = self.up(self.second(x))
        h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h.pow(3))))
        return x + self.dropout(self.down(h))


class GPT2(nn.Module):
    """GPT-2, of 124 million parameters unless told otherwise: its loss, or its scores."""

    def __init__(self, width=768, heads=12, depth=12, vocabulary=50_257, length=1024):
        super().__init__()
        self.words, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(GPT2Block(width, heads, length) for _ in range(depth)))
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.1)

    def forward(self, tokens, labels=None):  # (N, T) each
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.dropout(self.words(tokens) + self.positions(places)))
        scores = linear(self.norm(x), self.words.weight)
        if labels is None:
            return scores
        return cross_entropy(scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def gpt2(data_parallel):
    """Return the program of a training step of GPT-2, four sequences of 1024 a GPU, float32.

    It has nn.DataParallel or DDP.
    """

    def program(machine, gpus):
        devices = modelled(gpus if data_parallel else 1, machine)
        net = on(devices[0], GPT2)
        trainer = torch.optim.AdamW(net.parameters(), foreach=False)
        X, y = torch.zeros(2, 4 * len(devices), 1024, dtype=torch.long)

        def step(replica):
            net.zero_grad()
            loss = replica(X.to(devices[0]), y.to(devices[0])).mean()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            trainer.step()

        if data_parallel:
            replica = nn.DataParallel(net, device_ids=devices)
            return seconds_of(lambda: step(replica))
        with equal_ranks(gpus):
            replica = DistributedDataParallel(net, find_unused_parameters=True)
            step(replica)  # after which DDP builds its buckets anew
            return seconds_of(lambda: step(replica))

    return program


# -- language models under fully_shard


class RMSNorm(nn.Module):
    """RMSNorm as separate operators, in float32 or in the type of x."""

    def __init__(self, width, upcast=True):
        super().__init__()
        self.weight, self.upcast = nn.Parameter(torch.empty(width)), upcast

    def forward(self, x):
        y = x.float() if self.upcast else x
        y = y * torch.rsqrt((y * y).mean(-1, keepdim=True) + 1e-5)
        return y.type_as(x) * self.weight


def rotary(x, angles):
    """Rotate the halves of each head, x (N, heads, T, d), in the type of the angles."""
    cos, sin = angles
    first, second = x.to(cos.dtype).chunk(2, -1)
    rotated = first * cos - second * sin, second * cos + first * sin
    return torch.cat(rotated, -1).type_as(x)


def angles_of(length, size, device, dtype=torch.float32):
    return torch.empty(2, length, size // 2, dtype=dtype, device=device)


class LlamaLayer(nn.Module):
    """A layer of Llama: grouped queries, rotary positions, a gated unit."""

    def __init__(self, width, heads, groups, hidden, norm):
        super().__init__()
        size = width // heads
        self.size, self.repeats = size, heads // groups
        self.first, self.second = norm(width), norm(width)
        self.query, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(width, groups * size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):  # (N, T, C)
        y = self.first(x)
        q, k, v = (
            project(y).unflatten(2, (-1, self.size)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        angles = angles_of(x.shape[1], self.size, x.device)
        q, k = rotary(q, angles), rotary(k, angles)
        if self.repeats > 1:
            k, v = (part.repeat_interleave(self.repeats, 1) for part in (k, v))
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y = self.second(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class MPTLayer(nn.Module):
    """A layer of MPT: no biases, learned positions elsewhere."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.first, self.second = (nn.LayerNorm(width, bias=False) for _ in range(2))
        self.qkv, self.out = (nn.Linear(width, n * width, bias=False) for n in (3, 1))
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):  # (N, T, C)
        q, k, v = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.first(x)).chunk(3, 2)
        )
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.second(x))))


class Recomputed(nn.Module):
    """A layer whose activations are computed again: all of them, or not those of some operators."""

    def __init__(self, layer, some_operators=False):
        super().__init__()
        self.layer = layer
        self.options = {"context_fn": _keep_some} if some_operators else {}

    def forward(self, x):
        return checkpoint(
            self.layer, x, use_reentrant=False, preserve_rng_state=False, **self.options
        )


def _keep_some():
    """Keep every other product, and attention, as torchtitan's selective recomputation by op."""
    seen = defaultdict(int)
    kept = {
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
    }

    def policy(context, operator, *args, **kwargs):
        keep = operator in kept
        if operator == torch.ops.aten.mm.default:
            seen[context.is_recompute] += 1
            keep = seen[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class LanguageModel(nn.Module):
    """Layers between an embedding and scores; with `positions`, both share their weight."""

    def __init__(self, layers, width, vocabulary, norm, positions=None):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        if positions is None:
            self.head = nn.Linear(width, vocabulary, bias=False)
        else:
            self.positions, self.head = nn.Embedding(positions, width), None
        self.layers, self.norm = nn.ModuleList(layers), norm(width)

    def forward(self, tokens):  # (N, T)
        x = self.embedding(tokens)
        if self.head is None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return linear(x, self.embedding.weight) if self.head is None else self.head(x)


LLAMA = {  # width, layers, heads, groups, hidden units, vocabulary
    "Llama 2 7B": (4096, 32, 32, 32, 11008, 32_000),
    "Llama 2 13B": (5120, 40, 40, 40, 13824, 32_000),
    "Llama 34B": (8192, 48, 64, 8, 22016, 32_000),
    "Llama 2 70B": (8192, 80, 64, 8, 28672, 32_000),
    "Llama 3.1 8B": (4096, 32, 32, 8, 14336, 128_256),
    "Llama 3 15B": (5120, 40, 40, 8, 17920, 128_256),  # KempnerForge's "13B"
}
MPT = {  # width, layers, heads
    "MPT 1B": (2048, 24, 16),
    "MPT 7B": (4096, 32, 32),
    "MPT 13B": (5120, 40, 40),
}


def network(name, recompute, fused_norm):
    """Return a Llama or an MPT; `recompute` is "", "all" or "some" of a layer's operators."""
    if name in LLAMA:
        width, depth, heads, groups, hidden, vocabulary = LLAMA[name]
        norm, positions = nn.RMSNorm if fused_norm else RMSNorm, None
        layers = [LlamaLayer(width, heads, groups, hidden, norm) for _ in range(depth)]
    else:
        width, depth, heads = MPT[name]
        norm, positions = functools.partial(nn.LayerNorm, bias=False), 2048
        layers, vocabulary = [MPTLayer(width, heads) for _ in range(depth)], 50_368
    if recompute:
        layers = [Recomputed(layer, recompute == "some") for layer in layers]
    return LanguageModel(layers, width, vocabulary, norm, positions)


LOSSES = {"words": loss_of_words, "words in half precision": loss_in_half_precision}


def sharded(
    net,
    batch,
    length,
    recompute="",
    reduced_in="float32",
    hybrid=False,
    micro_batches=1,
    memory="",
    pure=False,
    loss="words",
    fused_norm=False,
):
    """Return the program of a training step in bfloat16 with fully_shard of each layer.

    Args:
        net: one of LLAMA or MPT.
        batch, length: sequences a GPU and their tokens.
        recompute: "", "all" or "some".
        reduced_in: the dtype in which gradients are summed.
        hybrid: whether shards stay within a machine, and machines are summed over.
        micro_batches: the batches of a step, whose gradients are summed after the last.
        memory: "max_memory_reserved" or "max_memory_allocated" in place of seconds.
        pure: whether parameters and Adam's state are kept in bfloat16.
        loss: one of LOSSES.
        fused_norm: whether a norm of Llama is one operator.
    """

    def program(machine, gpus):
        (device,) = modelled(1, machine)
        sizes = {"shards": gpus}
        if hybrid:
            sizes = {"replicas": gpus // machine.gpus, "shards": machine.gpus}
        dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": getattr(torch, reduced_in)}
        policy = MixedPrecisionPolicy(**dtypes)
        with grid(device, **sizes) as mesh:
            with torch.device("meta"):
                placed = network(net, recompute, fused_norm)
            if pure:
                placed.bfloat16()
            for layer in placed.layers:
                fully_shard(layer, mesh=mesh, mp_policy=policy)
            fully_shard(placed, mesh=mesh, mp_policy=policy)
            placed.to_empty(device=device)
            trainer = torch.optim.AdamW(placed.parameters(), foreach=True)
            X, y = text(batch, length, device)

            def step(count):
                trainer.zero_grad()
                for i in range(count):
                    placed.set_requires_gradient_sync(i + 1 == count)
                    (LOSSES[loss](placed(X), y) / count).backward()
                nn.utils.clip_grad_norm_(placed.parameters(), 1.0)
                trainer.step()

            if not memory:
                return many(step, micro_batches, 1)
            step(1)
            step(min(micro_batches, 2))
            return getattr(torch.get_device_module(device), memory)(device)

    return program


# -- Llama in nanotron: data, tensor and pipeline parallel


def gathered(x, group):
    """Return the parts of all ranks, one after the other."""
    if group.size() == 1:
        return x
    parts = x.new_empty(group.size() * len(x), *x.shape[1:])
    dist.all_gather_into_tensor(parts, x.contiguous(), group=group)
    return parts


def summed_part(x, group):
    """Return this rank's part of the sum over all ranks."""
    if group.size() == 1:
        return x
    part = x.new_empty(len(x) // group.size(), *x.shape[1:])
    dist.reduce_scatter_tensor(part, x.contiguous(), group=group)
    return part


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return summed_part(gradient, ctx.group), None


class _SumPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return summed_part(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return gathered(gradient, ctx.group), None


class SequenceParallelLayer(nn.Module):
    """A rank's part of a layer of Llama; x is split by tokens, (T / k, N, C)."""

    def __init__(self, width, heads, hidden, group):
        super().__init__()
        k = group.size()
        self.heads, self.group = heads // k, group
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width // k, bias=False)
        self.out = nn.Linear(width // k, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * hidden // k, bias=False)
        self.down = nn.Linear(hidden // k, width, bias=False)

    def forward(self, x):
        qkv = self.qkv(_Gather.apply(self.first(x), self.group))
        q, k, v = (
            part.unflatten(2, (self.heads, -1)).permute(1, 2, 0, 3) for part in qkv.chunk(3, 2)
        )  # (N, heads, T, d)
        angles = angles_of(q.shape[2], q.shape[3], x.device)
        q, k = rotary(q, angles), rotary(k, angles)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        attended = self.out(attended.permute(2, 0, 1, 3).flatten(2))
        x = x + _SumPart.apply(attended, self.group)
        gate, up = self.gate_up(_Gather.apply(self.second(x), self.group)).chunk(2, 2)
        return x + _SumPart.apply(self.down(nn.functional.silu(gate) * up), self.group)


class Stage(nn.Module):
    """A rank's part of a stage: tokens (N, T) or x in, x or scores in float32 out."""

    def __init__(self, layers, begins, ends, group, width=2048, heads=32, vocabulary=50_257):
        super().__init__()
        self.group, words = group, -(-vocabulary // group.size())
        self.embedding = nn.Embedding(words, width) if begins else None
        self.layers = nn.ModuleList(
            SequenceParallelLayer(width, heads, 4096, group) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width) if ends else None
        self.head = nn.Linear(width, words, bias=False) if ends and not begins else None

    def forward(self, x):
        if self.embedding is not None:
            x = _SumPart.apply(self.embedding(x.T), self.group)
        for layer in self.layers:
            x = layer(x)
        if self.norm is None:
            return x
        weight = (self.head or self.embedding).weight
        return linear(_Gather.apply(self.norm(x), self.group), weight).float()


class ShardedAdam:
    """Adam whose state is sharded over a group (ZeRO-1), on gradients added up in float32."""

    def __init__(self, stage, group):
        self.group, self.parameters = group, list(stage.parameters())
        device = self.parameters[0].device
        sizes = [p.numel() for p in self.parameters]
        padding = -sum(sizes) % group.size()
        self.gradients = torch.empty(sum(sizes) + padding, device=device)
        parts = self.gradients.split([*sizes, padding])
        for parameter, part in zip(self.parameters, parts[:-1], strict=True):
            parameter.register_post_accumulate_grad_hook(
                functools.partial(self.add, part.view_as(parameter))
            )
        self.sizes, self.padding = sizes, padding
        self.master = torch.empty(len(self.gradients) // group.size(), device=device)
        self.adam = torch.optim.AdamW([self.master], foreach=True)

    @staticmethod
    def add(total, parameter):
        total.add_(parameter.grad)
        parameter.grad = None

    def zero_grad(self):
        self.gradients.zero_()

    def step(self):
        self.master.grad = summed_part(self.gradients, self.group)
        nn.utils.clip_grad_norm_([self.master], 1.0)
        self.adam.step()
        self.master.grad = None
        weights = gathered(self.master.bfloat16(), self.group)
        parts = weights.split([*self.sizes, self.padding])
        for parameter, part in zip(self.parameters, parts[:-1], strict=True):
            parameter.data.copy_(part.view_as(parameter))


# What nanotron's costs of blocks make of 24 layers and the scores, which cost 2.5 layers
LAYERS_OF_STAGES = {1: [24], 2: [14, 10], 4: [7, 7, 6, 4], 8: [4, 3, 3, 4, 3, 3, 4, 0]}


def nanotron(data, tensor, stages, batch, memory=False):
    """Return the program of a step of nanotron's Llama of 1.1 billion parameters.

    1024 sequences of 4096 a step, in micro-batches of `batch`, in bfloat16 without recomputation.
    One rank of each stage stands for its equals; the embedding tied over stages is summed nowhere.
    With `memory` it returns the bytes that the allocator reserves on the first stage.
    """

    def program(machine, gpus):
        # one process issues for all stages here, where each has its own
        host = machine.host.scaled(1 / stages, machine.host.source)
        devices = modelled(stages, replace(machine, host=host))
        with grid(devices[0], data=data, tensor=tensor) as mesh:
            replicas, group = mesh["data"].get_group(), mesh["tensor"].get_group()
            nets = []
            for i, layers in enumerate(LAYERS_OF_STAGES[stages]):
                make = functools.partial(Stage, layers, i == 0, i + 1 == stages, group)
                nets.append(on(devices[i], make, torch.bfloat16))
            trainers = [ShardedAdam(net, replicas) for net in nets]

            def loss(scores, labels):
                return _LossOfParts.apply(scores, labels.T.contiguous(), group)

            def step(count):
                for trainer in trainers:
                    trainer.zero_grad()
                if stages == 1:
                    X, y = text(batch, 4096, devices[0])
                    for _ in range(count):
                        (loss(nets[0](X), y) / count).backward()
                else:
                    X, y = text(batch * count, 4096, devices[0])
                    schedule = one_forward_one_backward(stages, count)
                    pipeline_step(nets, X, y, loss, schedule)
                for trainer in trainers:
                    trainer.step()

            if memory:
                step(2)
                step(2)
                return torch.get_device_module(devices[0]).max_memory_reserved(devices[0])
            return many(step, 1024 // (data * batch), 2 * stages)

    return program


# -- Lit-GPT on one GPU


class LitLayer(nn.Module):
    """A layer of Llama in Lit-GPT, with low-rank changes of queries and values, or a cache."""

    def __init__(self, width, heads, hidden, rank, cached):
        super().__init__()
        self.heads, self.rank = heads, rank
        self.first, self.second = (RMSNorm(width, upcast=False) for _ in range(2))
        self.qkv, self.out = (nn.Linear(width, n * width, bias=False) for n in (3, 1))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)
        if rank:
            self.down_to_rank = nn.Parameter(torch.empty(2 * rank, width))
            self.up_from_rank = nn.Parameter(torch.empty(2 * width, rank))
        if cached:
            self.register_buffer("keys", torch.empty(1, heads, cached, width // heads))
            self.register_buffer("values", torch.empty(1, heads, cached, width // heads))

    def project(self, x):
        qkv = self.qkv(x)
        if not self.rank:
            return qkv
        changes = linear(nn.functional.dropout(x, 0.05), self.down_to_rank).transpose(1, 2)
        changes = nn.functional.conv1d(changes, self.up_from_rank.unsqueeze(2), groups=2)
        changes = changes.permute(2, 0, 1)
        width = x.shape[2]
        columns = torch.zeros(2 * width, dtype=torch.long).to(x.device)
        zeros = changes.new_zeros(changes.shape[0] * changes.shape[1], 3 * width)
        changes = zeros.index_copy(1, columns, changes.reshape(-1, 2 * width))
        return qkv + changes.view(x.shape[1], x.shape[0], -1).transpose(0, 1) * 2.0

    def forward(self, x, angles, mask=None, place=None):  # (N, T, C)
        q, k, v = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in self.project(self.first(x)).chunk(3, 2)
        )
        q, k = rotary(q, angles), rotary(k, angles)
        q, k = (torch.cat((part, part[..., :0]), -1) for part in (q, k))
        if place is not None:
            k, v = self.keys.index_copy_(2, place, k), self.values.index_copy_(2, place, v)
        attended = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y = self.second(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class LitGPT(nn.Module):
    """A Llama of Lit-GPT."""

    def __init__(self, size, rank=0, cached=0):
        super().__init__()
        width, depth, heads, _, hidden, vocabulary = LLAMA[size]
        self.size = width // heads
        self.embedding, self.norm = nn.Embedding(vocabulary, width), RMSNorm(width, upcast=False)
        self.layers = nn.ModuleList(
            LitLayer(width, heads, hidden, rank, cached) for _ in range(depth)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens, angles, mask=None, place=None):  # (N, T)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, angles, mask, place)
        return self.norm(x)


def lit_generation(size):
    """Return the program of a new token, with a cache of 56 and the 200 most probable kept."""

    def program(machine, gpus):
        (device,) = modelled(1, machine)
        net = on(device, lambda: LitGPT(size, cached=56), torch.bfloat16)
        tokens = torch.zeros(56, dtype=torch.long, device=device)
        place = torch.zeros(1, dtype=torch.long, device=device)
        cos, sin = (torch.empty(56, net.size // 2, dtype=torch.bfloat16, device=device),) * 2
        visible = torch.empty(1, 1, 56, 56, dtype=torch.bool, device=device)

        def step():
            nonlocal tokens, place
            with torch.no_grad():
                for _ in range(5):
                    angles = cos.index_select(0, place), sin.index_select(0, place)
                    mask = visible.index_select(2, place)
                    x = net(tokens.index_select(0, place).view(1, -1), angles, mask, place)
                    scores = net.head(x)[0, -1] / 0.8
                    best, _ = torch.topk(scores, 200)
                    scores = torch.where(scores < best[[-1]], -float("inf"), scores)
                    new = torch.multinomial(scores.softmax(-1), 1)
                    place = place[-1:] + 1
                    tokens = tokens.index_copy(0, place, new)

        return seconds_of(step) / 5

    return program


def lit_lora(size, batch, length):
    """Return the program of the bytes that fine-tuning with LoRA of rank 8 needs at most."""

    def program(machine, gpus):
        (device,) = modelled(1, machine)
        net = on(device, lambda: LitGPT(size, rank=8), torch.bfloat16)
        for name, parameter in net.named_parameters():
            parameter.requires_grad = "rank" in name
        trainer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad])
        X, y = text(batch, length, device)
        angles = angles_of(length, net.size, device, torch.bfloat16)
        for _ in range(2):
            x = net(X, angles)
            scores = [net.head(part) for part in x.split(128, 1)]  # lm_head_chunk_size=128
            losses = [
                cross_entropy(part.flatten(0, 1), labels.flatten(), reduction="none")
                for part, labels in zip(scores, y.split(128, 1), strict=True)
            ]
            (torch.cat(losses).mean() / 128).backward()
            del x, scores, losses
        trainer.step()
        trainer.zero_grad()
        return torch.get_device_module(device).max_memory_allocated(device)

    return program


PROGRAMS = {
    "bert": bert,
    "bert_encoder": bert_encoder,
    "gpt2": gpt2,
    "lit_generation": lit_generation,
    "lit_lora": lit_lora,
    "megatron": megatron,
    "nanotron": nanotron,
    "sharded": sharded,
}
UNITS = {"TFLOP/s of a GPU": seconds_of_teraflops}
ROWS = list(read(Path(__file__).with_suffix(".toml"), PROGRAMS, UNITS))
