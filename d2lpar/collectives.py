"""Collective operations in one process, on lists with one tensor per device."""

import itertools
from typing import NamedTuple

import torch

from d2lpar.side_streams import Message, receive, send, wait_until_sent


class Transfer(NamedTuple):
    """A message: device `source` sends `chunk` to device `target`, which adds or stores it."""

    source: int
    target: int
    chunk: int
    add: bool


def _star(k):
    """All devices send to device 0, which adds and sends the sum back."""
    yield [Transfer(i, 0, 0, add=True) for i in range(1, k)]
    yield [Transfer(0, i, 0, add=False) for i in range(1, k)]


def _tree(k):
    """Pairs add, then pairs of pairs, up to device 0; the sum returns the same way."""
    distances = [2**i for i in range((k - 1).bit_length())]
    rounds = [[(i + d, i) for i in range(0, k - d, 2 * d)] for d in distances]
    for pairs in rounds:
        yield [Transfer(child, parent, 0, add=True) for child, parent in pairs]
    for pairs in reversed(rounds):
        yield [Transfer(parent, child, 0, add=False) for child, parent in pairs]


def _ring(k):
    """Each device sends a chunk to the right: k - 1 times to add, k - 1 times to store."""
    for step in range(k - 1):
        yield [Transfer(i, (i + 1) % k, (i - step) % k, add=True) for i in range(k)]
    for step in range(k - 1):
        yield [Transfer(i, (i + 1) % k, (i + 1 - step) % k, add=False) for i in range(k)]


_ALGORITHMS = {"star": _star, "tree": _tree, "ring": _ring}


def _schedule(algorithm, k):
    """Return the rounds of transfers of `algorithm` on k devices, and the number of chunks."""
    if algorithm not in _ALGORITHMS:
        raise ValueError(f"unknown algorithm {algorithm!r}: choose one of {', '.join(_ALGORITHMS)}")
    return list(_ALGORITHMS[algorithm](k)), k if algorithm == "ring" else 1


_active_counters = []


class CollectiveCounter:
    """Count the collectives of several devices in a block; each is a barrier for all of them.

        with CollectiveCounter() as counter:
            torch.autograd.backward(losses)

    Attributes:
        barriers: the number of collectives.
    """

    def __enter__(self):
        self.barriers = 0
        _active_counters.append(self)
        return self

    def __exit__(self, *error):
        _active_counters.remove(self)


def _count(data):
    for counter in _active_counters:
        counter.barriers += len(data) > 1


def allreduce(data, algorithm="star"):
    """Replace each tensor of `data` by the sum of all, in place and asynchronously.

    All devices get bitwise equal sums. For k tensors of N bytes:

    - "star" moves (k - 1) N into and out of device 0, in 2 rounds;
    - "tree" moves at most r N into and out of a device, in 2 r rounds, r = log2(k) rounded up;
    - "ring" moves 2 (k - 1) / k N out of every device, the minimum, in 2 (k - 1) rounds
      (Patarasuk and Yuan 2009, https://doi.org/10.1016/j.jpdc.2008.09.002).

    Args:
        data: k tensors of one shape and dtype, one per device.
        algorithm: "star", "tree" or "ring".

    Raises:
        ValueError: `data` is empty or contains None, duplicates or unequal shapes or dtypes, or
            the algorithm is unknown.
    """
    rounds, num_chunks = _schedule(algorithm, len(data))
    _check(data)
    _count(data)
    with torch.no_grad():
        flat = [tensor.contiguous().view(-1) for tensor in data]
        chunks = [tensor.tensor_split(num_chunks) for tensor in flat]
        sent = [message for transfers in rounds for message in _exchange(chunks, transfers)]
        for message in sent:
            wait_until_sent(message)
        for tensor, summed in zip(data, flat, strict=True):
            if not tensor.is_contiguous():
                tensor.copy_(summed.view(tensor.shape))


def allgather(data):
    """Copy each tensor of `data` to all devices, asynchronously; return a list of k tensors each.

    For k tensors of n bytes, (k - 1) n leave and (k - 1) n reach every device. A device's own
    tensor is not copied.

    Args:
        data: k tensors, one per device.

    Raises:
        ValueError: `data` contains None.
    """
    check_none_missing("tensor", data)
    _count(data)
    with torch.no_grad():
        sent = [[_send_copy(source, target) for source in data] for target in data]
        for message in itertools.chain(*sent):
            wait_until_sent(message)
        return [[receive(message) for message in messages] for messages in sent]


def _send_copy(tensor, target):
    if tensor is target:
        return Message(tensor.device, tensor, None)
    return send(tensor, torch.empty_like(tensor, device=target.device))


def _check(data):
    """Raise ValueError unless `data` is a list of distinct tensors of one shape and dtype."""
    if not data:
        raise ValueError("allreduce needs at least one tensor: the list is empty")
    check_none_missing("tensor", data)
    for i, tensor in enumerate(data):
        if tensor.shape != data[0].shape or tensor.dtype != data[0].dtype:
            raise ValueError(
                "tensors must have the same shape and dtype: "
                f"tensor {i} is {tensor.dtype} of shape {tuple(tensor.shape)}, "
                f"tensor 0 is {data[0].dtype} of shape {tuple(data[0].shape)}"
            )
        for j in range(i):
            if tensor is data[j]:
                raise ValueError(f"tensors must be distinct: {j} and {i} are the same tensor")


def check_none_missing(what, data):
    """Raise ValueError if an entry of the list `data`, a gradient for example, is None."""
    for i, tensor in enumerate(data):
        if tensor is None:
            raise ValueError(
                f"{what} {i} of {len(data)} is None, a missing gradient: "
                "call backward() on a loss that uses the parameter"
            )


def _exchange(chunks, transfers):
    """Issue one round of transfers concurrently; return the messages.

    All are sent before the first is received: otherwise a ring would send them one by one.
    """
    sent = []
    for source, target, chunk, add in transfers:
        here, there = chunks[source][chunk], chunks[target][chunk]
        if here.numel():
            sent.append((send(here, torch.empty_like(there) if add else there), there, add))
    for message, there, add in sent:
        values = receive(message)
        if add:
            there.add_(values)
    return [message for message, _, _ in sent]
