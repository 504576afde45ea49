"""The bytes that a rank hands to collectives."""

import contextlib
import threading

import torch
import torch.distributed as dist

from vgpu.distributed import process_group
from vgpu.private.dispatch import TorchDispatchMode, tree_leaves
from vgpu.private.patching import replace


class CollectiveBytes:
    """Count the bytes that a rank hands to collectives in a block.

        with CollectiveBytes() as counted:
            loss.backward()
        counted.total

    Each call counts its inputs or its outputs, whichever are larger. All calls of vccl are counted,
    and calls of gloo and NCCL in the thread of the block. Of the calls that a communication hook
    makes in another thread, once a message has arrived, only `torch.distributed.all_reduce` counts.

    Attributes:
        calls: a dict from the collective's name to the list of its sizes in bytes, by call.
    """

    def __init__(self):
        self.calls = {}

    @property
    def total(self):
        """The sum over all calls."""
        return sum(map(sum, self.calls.values()))

    def _note(self, name, args):
        """Count a call of an operator or a method, "allreduce_" for example."""
        sizes = (
            sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
            for value in args
        )
        self.calls.setdefault(name.strip("_"), []).append(max(sizes))

    def __enter__(self):
        self._all_reduce, thread = dist.all_reduce, threading.get_ident()

        def all_reduce(*args, **kwargs):
            mine = threading.get_ident() == thread
            with contextlib.nullcontext() if mine else _Counting(self._note):
                return self._all_reduce(*args, **kwargs)

        self._mode = _Counting(self._note)
        self._mode.__enter__()
        replace(dist, all_reduce=all_reduce)
        process_group.observers.append(self._note)
        return self

    def __exit__(self, *error):
        process_group.observers.remove(self._note)
        replace(dist, all_reduce=self._all_reduce)
        self._mode.__exit__(*error)


class _Counting(TorchDispatchMode):
    """Sees what a thread hands to gloo and NCCL, including what C++ does, as for DDP's buckets."""

    def __init__(self, note):
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.note(func.__name__.split(".")[0], (*args, *(kwargs or {}).values()))
        return func(*args, **(kwargs or {}))
