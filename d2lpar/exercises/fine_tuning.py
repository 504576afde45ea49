"""Reference solutions for exercise notebook 15."""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from d2lpar.collectives import allreduce
from d2lpar.exercises.marks import reference
from d2lpar.timelines.timeline import Timeline


def _num_bytes(tensors):
    return sum(tensor.nbytes for tensor in tensors)


@reference
def held_bytes(net):
    """Take a step with Adam; return the bytes of parameters, gradients and optimizer state."""
    optimizer = torch.optim.Adam(p for p in net.parameters() if p.requires_grad)
    sum(p.float().sum() for p in net.parameters()).backward()
    optimizer.step()
    grads = [p.grad for p in net.parameters() if p.grad is not None]
    states = [t for state in optimizer.state.values() for t in state.values() if t.dim()]
    return _num_bytes([*net.parameters(), *grads, *states])


@reference
def adapter_counts(num_inputs, num_outputs):
    """Return the number of weights of an adapter of a dense layer, a dict by rank."""
    with torch.device("meta"):
        pairs = {
            r: (nn.Linear(num_inputs, r, False), nn.Linear(r, num_outputs, False))
            for r in range(1, min(num_inputs, num_outputs))
        }
    return {r: sum(layer.weight.numel() for layer in pair) for r, pair in pairs.items()}


@reference
def bytes_out_of_first(count, devices):
    """Return the bytes that the first device sends in a ring allreduce of `count` numbers."""
    with Timeline() as timeline:
        allreduce([torch.zeros(count, device=device) for device in devices], "ring")
    sent = timeline.bytes_by_link().items()
    return sum(n for (source, _), n in sent if source == devices[0])


@reference
def trained_weight(net, batches, lr):
    """Return the weight of the head net[1] after a step of SGD for each batch."""
    weight, bias = (p.detach().clone() for p in net[1].parameters())
    features, speed = net[0].eval(), [0, 0]
    for X, y in batches:
        params = [p.requires_grad_() for p in (weight, bias)]
        loss = F.cross_entropy(F.linear(features(X).detach(), *params), y)
        speed = [0.9 * v + g for v, g in zip(speed, torch.autograd.grad(loss, params), strict=True)]
        weight, bias = (p.detach() - lr * v for p, v in zip(params, speed, strict=True))
    return weight


@reference
def counted_flop(chain, X, trained):
    """Return the FLOP of a step of a chain of parts, some of them trained."""
    for part, is_trained in zip(chain, trained, strict=True):
        part.requires_grad_(is_trained)
    with FlopCounterMode(display=False) as counter:
        loss = chain(X).sum()
        if any(trained):
            loss.backward()
    return counter.get_total_flops()


@reference
def bytes_summed(net, phases):
    """Return for each step the bytes of the gradients of the trained parts."""
    sizes = [_num_bytes(part.parameters()) for part in net]
    return [
        sum(sizes[i] for i in trained) for trained, num_steps in phases for _ in range(num_steps)
    ]


@reference
def unfrozen_on_one_device(net, phases, images, labels):
    """Train a network in phases; return its parameters by name."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for trained, num_steps in phases:
        for i, part in enumerate(net):
            part.requires_grad_(i in trained)
        for _ in range(num_steps):
            optimizer.zero_grad()
            F.cross_entropy(net(images), labels).backward()
            optimizer.step()
    return dict(net.named_parameters())


@reference
def head_of_one_device(body, head, images, y, batches, lr):
    """Return the head, trained on one device on the features of all images."""
    net, new = copy.deepcopy(body).eval(), copy.deepcopy(head)
    features = net(images).detach()
    for rows in batches:
        new.zero_grad()
        F.cross_entropy(new(features[rows]), y[rows]).backward()
        with torch.no_grad():
            for p in new.parameters():
                p -= lr * p.grad
    return new
