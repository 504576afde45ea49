"""Chapter 14: start the workers of a DataLoader for classes that a notebook defines."""

import sys
from multiprocessing.context import SpawnContext, SpawnProcess

import cloudpickle

CAN_FORK = sys.platform == "linux"  # Windows cannot fork, and macOS cannot fork safely


def worker_context(num_workers):
    """Return the `multiprocessing_context` of a DataLoader whose classes a notebook may define.

    On Linux workers are forked and share all objects of this process. Elsewhere each is a new
    process: it takes seconds to import torch, and the data set and its functions are pickled by
    value.

    Args:
        num_workers: number of workers; 0 returns None, as a DataLoader requires.
    """
    if not num_workers:
        return None
    return "fork" if CAN_FORK else _SpawnByValue()


class _SpawnByValue(SpawnContext):
    """A context that starts processes with arguments pickled by value."""

    @staticmethod
    def Process(target, args):
        """Return a process; objects of `multiprocessing` are pickled as usual."""
        args = (a if type(a).__module__.startswith("multiprocessing.") else _Value(a) for a in args)
        return SpawnProcess(target=target, args=tuple(args))


class _Value:
    """Wrapper that unpickles to a copy of `value` in another process."""

    def __init__(self, value):
        self.value = value

    def __reduce__(self):
        return _read, (cloudpickle.dumps(self.value), "torchvision" in sys.modules)


def _read(data, with_torchvision):
    if with_torchvision:
        import d2lpar.vision  # noqa: F401
    return cloudpickle.loads(data)
