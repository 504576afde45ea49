"""What a step costs: operations of a network, and sums over devices in the alpha-beta model.

In the alpha-beta model a message of n bytes takes latency + n / bandwidth. Every device has one
link, a `vgpu.Link`, that sends and receives at the same time, one message after the
other in each direction; what joins the links is never in the way. Adding up is free. Unless another
source is given, the formulas are those of Thakur, Rabenseifner and Gropp 2005
(https://doi.org/10.1177/1094342005051521) and of Patarasuk and Yuan 2009
(https://doi.org/10.1016/j.jpdc.2008.09.002).

Chapters predict with these. Virtual GPUs take the seconds of
`vgpu/distributed/collective_costs.py`.
"""

import copy
import operator

import torch
from torch.utils.flop_counter import FlopCounterMode


def allreduce_seconds(algorithm, k, num_bytes, link):
    """Predict the seconds that k devices take to sum a tensor each, so that all have the sum.

    With n bytes, latency L, bandwidth B and r = log2(k) rounded up:

    - "star": everyone to one and back, 2 (k - 1) (L + n / B);
    - "tree": pairs, then pairs of pairs, and back, 2 r (L + n / B);
    - "ring": k chunks around a ring, twice, 2 (k - 1) (L + n / (k B));
    - "sharded": device i is the server of chunk i, 2 (k - 1) (L + n / (k B)) as well, since a
      link sends its k - 1 messages one after the other (Li et al. 2014, with as many servers as
      workers, https://www.usenix.org/conference/osdi14/technical-sessions/presentation/li_mu);
    - "halving": halves, quarters, ..., and back, 2 r L + 2 (k - 1) / k n / B, for k = 2**r.

    Args:
        algorithm: one of these names; `d2lpar.allreduce` runs the first three.
        k: number of devices.
        num_bytes: n, the bytes of one tensor.
        link: the `vgpu.Link` of each device.

    Raises:
        ValueError: the algorithm is unknown, k is not positive, n is negative, or k is not a power
            of two for "halving".
        TypeError: k is not an integer.
    """
    _check(k=k)
    if not num_bytes >= 0:
        raise ValueError(f"num_bytes must not be negative: got {num_bytes}")
    if algorithm not in _MESSAGES:
        raise ValueError(f"unknown algorithm {algorithm!r}: choose one of {', '.join(_MESSAGES)}")
    if algorithm == "halving" and k & (k - 1):
        raise ValueError(f"halving needs a power of two: got k = {k}")
    num_messages, share = _MESSAGES[algorithm](k)
    return num_messages * link.latency + share * num_bytes / link.bandwidth


def _rounds(k):
    return (k - 1).bit_length()


_MESSAGES = {  # functions of k: messages that follow each other, their total size in tensors
    "star": lambda k: (2 * (k - 1), 2 * (k - 1)),
    "tree": lambda k: (2 * _rounds(k), 2 * _rounds(k)),
    "ring": lambda k: (2 * (k - 1), 2 * (k - 1) / k),
    "sharded": lambda k: (2 * (k - 1), 2 * (k - 1) / k),
    "halving": lambda k: (2 * _rounds(k), 2 * (k - 1) / k),
}


def crossover_bytes(k, link):
    """Return the size in bytes from which a ring sums faster over k devices than a tree.

    Below it latencies decide, of which the tree has fewer: with r = log2(k) rounded up it is
    L B (k - 1 - r) / (r - (k - 1) / k). It is 0 for two devices, where the ring is never slower.

    Raises ValueError if k is less than two, TypeError if it is not an integer.
    """
    _check(k=k)
    if k < 2:
        raise ValueError(f"one device has nothing to sum: k = {k}")
    rounds = _rounds(k)
    return link.latency * link.bandwidth * (k - 1 - rounds) / (rounds - (k - 1) / k)


def two_level_seconds(num_machines, per_machine, num_bytes, inside, between):
    """Predict the seconds of a sum over machines with several devices each.

    Each of the g devices of a machine first gets the sum of one g-th of the tensor over its
    machine, then sums that over the M machines in a ring, then all exchange what they have:
    2 (g - 1) (L + n / (g B)) with the inner link, and 2 (M - 1) (L + n / (M B)) with the outer
    one, which the g rings of a machine share (the three phases of Goyal et al. 2017, section 4.1,
    https://arxiv.org/abs/1706.02677; there the machines are summed by halving).

    Args:
        num_machines: M.
        per_machine: g, devices in each machine.
        num_bytes: n, the bytes of one tensor.
        inside: the `vgpu.Link` of a device to its machine.
        between: the link of a machine to the others.

    Raises:
        ValueError: a number is not positive, or n is negative.
        TypeError: a number of machines or devices is not an integer.
    """
    _check(num_machines=num_machines, per_machine=per_machine)
    return allreduce_seconds("ring", per_machine, num_bytes, inside) + allreduce_seconds(
        "ring", num_machines, num_bytes, between
    )


def training_flops(net, *shape):
    """Count the floating-point operations of a forward and a backward pass, without computing.

    A multiplication and an addition are two. Like torch's FlopCounterMode it counts products of
    matrices, convolutions and attention.

    Args:
        net: a module; it is copied to the meta device and stays as it is.
        *shape: the shape of the input, with the batch in front, (N, ...).
    """
    on_meta = copy.deepcopy(net).to("meta")
    with FlopCounterMode(display=False) as counter:
        on_meta(torch.empty(shape, device="meta")).sum().backward()
    return counter.get_total_flops()


def _check(**numbers):
    for name, number in numbers.items():
        try:
            number = operator.index(number)
        except TypeError:
            raise TypeError(f"{name} is a whole number: got {number!r}") from None
        if number < 1:
            raise ValueError(f"{name} must be at least 1: got {number}")
