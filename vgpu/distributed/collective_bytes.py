"""CollectiveBytes: counts the bytes that a rank hands to collectives."""

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

    A call counts its inputs or its outputs, whichever are larger. Counted are all calls of vccl,
    and those of gloo and NCCL in the block's thread. In other threads, where communication hooks
    run once a message has arrived, only `torch.distributed.all_reduce` is counted.

    Attributes:
        calls: {name of the collective: bytes of each call}.
    """

    def __init__(self):
        self.calls = {}

    @property
    def total(self):
        """The sum over all calls."""
        return sum(map(sum, self.calls.values()))

    def _note(self, name, args):
        """Count a call of an operator or a method, such as "allreduce_"."""
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
    """Counts a thread's calls of gloo and NCCL, including those from C++, such as DDP's."""

    def __init__(self, note):
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.note(func.__name__.split(".")[0], (*args, *(kwargs or {}).values()))
        return func(*args, **(kwargs or {}))
