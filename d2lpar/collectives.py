"""Collective operations on lists of tensors, one tensor a device, in one process."""

import itertools
from typing import NamedTuple

import torch

from d2lpar.side_streams import let_go, receive, send
from d2lpar.training import check_none_missing


class Transfer(NamedTuple):
    """A message: device `source` sends `chunk` to device `target`, which adds or keeps it."""

    source: int
    target: int
    chunk: int
    add: bool


def _star(k):
    """Everyone sends to device 0, which adds and sends the sum back."""
    yield [Transfer(i, 0, 0, add=True) for i in range(1, k)]
    yield [Transfer(0, i, 0, add=False) for i in range(1, k)]


def _tree(k):
    """Pairs add, then pairs of pairs, down to device 0; the sum goes back the same way."""
    rounds = []
    distance = 1
    while distance < k:
        rounds.append([(i + distance, i) for i in range(0, k - distance, 2 * distance)])
        distance *= 2
    for pairs in rounds:
        yield [Transfer(child, parent, 0, add=True) for child, parent in pairs]
    for pairs in reversed(rounds):
        yield [Transfer(parent, child, 0, add=False) for child, parent in pairs]


def _ring(k):
    """Everyone sends one of k chunks to the right: k - 1 times to add, k - 1 times to keep."""
    for step in range(k - 1):
        yield [Transfer(i, (i + 1) % k, (i - step) % k, add=True) for i in range(k)]
    for step in range(k - 1):
        yield [Transfer(i, (i + 1) % k, (i + 1 - step) % k, add=False) for i in range(k)]


_ALGORITHMS = {"star": _star, "tree": _tree, "ring": _ring}


def _schedule(algorithm, k):
    """Return the rounds of transfers of `algorithm` on k devices, and the number of chunks."""
    if algorithm not in _ALGORITHMS:
        known = ", ".join(_ALGORITHMS)
        raise ValueError(f"unknown algorithm {algorithm!r}: choose one of {known}")
    return list(_ALGORITHMS[algorithm](k)), k if algorithm == "ring" else 1


_counting = []  # the counters whose blocks are open


class CollectiveCounter:
    """Count the collectives in a block: each is a barrier that no device passes before all come.

        with CollectiveCounter() as counter:
            torch.autograd.backward(losses)
        print(counter.barriers)

    Attributes:
        calls: a dict from "allreduce" and "allgather" to the list of the sizes, in bytes, of the
            whole tensors summed or put together. Calls with one tensor do not count.
    """

    def __init__(self):
        self.calls = {}

    @property
    def barriers(self):
        """The number of calls."""
        return sum(map(len, self.calls.values()))

    def __enter__(self):
        _counting.append(self)
        return self

    def __exit__(self, *error):
        _counting.remove(self)


def _count(name, data, num_bytes):
    if len(data) > 1:
        for counter in _counting:
            counter.calls.setdefault(name, []).append(num_bytes)


def allreduce(data, algorithm="star"):
    """Replace every tensor of `data` by the sum of all, in place, without waiting for the devices.

    All replicas come out with the same bits. With N bytes in each of k tensors, "star" moves
    (k - 1) N into device 0 and as much out of it, in 2 rounds; "tree" at most r N into a device
    and as much out of it, in 2 r rounds, r = log2(k) rounded up; "ring" 2 (k - 1) / k N out of
    every device, the least that is possible, in 2 (k - 1) rounds (Patarasuk and Yuan 2009,
    https://doi.org/10.1016/j.jpdc.2008.09.002).

    Args:
        data: k tensors of one shape and dtype, one a device.
        algorithm: "star", "tree" or "ring".

    Raises:
        ValueError: `data` is empty, holds None, a tensor twice or tensors of unequal shape or
            dtype, or the algorithm is unknown.
    """
    rounds, num_chunks = _schedule(algorithm, len(data))
    _check(data)
    _count("allreduce", data, data[0].nbytes)
    with torch.no_grad():
        flat = [tensor.contiguous().view(-1) for tensor in data]
        chunks = [tensor.tensor_split(num_chunks) for tensor in flat]
        sent = [message for transfers in rounds for message in _exchange(chunks, transfers)]
        for message in sent:
            let_go(message)
        for tensor, summed in zip(data, flat, strict=True):
            if not tensor.is_contiguous():
                tensor.copy_(summed.view(tensor.shape))


def allgather(data):
    """Send every tensor of `data` to all devices, without waiting; return a list of all k for each.

    With n bytes in each of k tensors, (k - 1) n leave every device and as many reach it. Devices
    send at the same time. In the list of a device, its own tensor is the given one, not a copy.

    Raises ValueError if `data` holds None.
    """
    check_none_missing("tensor", data)
    _count("allgather", data, sum(tensor.nbytes for tensor in data))
    with torch.no_grad():
        sent = [
            [None if source is target else _send_copy(source, target.device) for source in data]
            for target in data
        ]
        for message in itertools.chain(*sent):
            if message is not None:
                let_go(message)
        return [
            [own if message is None else receive(message) for message in messages]
            for own, messages in zip(data, sent, strict=True)
        ]


def _send_copy(tensor, device):
    return send(tensor, torch.empty_like(tensor, device=device))


def _check(data):
    """Raise ValueError unless `data` is a list of distinct tensors of one shape and dtype."""
    if not data:
        raise ValueError("allreduce of no tensors: the list is empty")
    check_none_missing("tensor", data)
    for i, tensor in enumerate(data):
        if tensor.shape != data[0].shape or tensor.dtype != data[0].dtype:
            raise ValueError(
                f"tensor {i} is {tensor.dtype} of shape {tuple(tensor.shape)}, "
                f"tensor 0 is {data[0].dtype} of shape {tuple(data[0].shape)}"
            )
        for j in range(i):
            if tensor is data[j]:
                raise ValueError(f"tensors {j} and {i} are the same tensor")


def _exchange(chunks, transfers):
    """Issue one round of transfers so that they can run at once; return what `send` returned.

    All are sent before the first is waited for. On the devices' own streams, a ring would send one
    message after the other.
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
