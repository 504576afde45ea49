"""How the workers of a DataLoader start, so that they know what a notebook defines."""

import sys
from multiprocessing.context import SpawnContext, SpawnProcess

import cloudpickle

CAN_FORK = sys.platform == "linux"  # Windows cannot fork, and on macOS a fork is not safe


def worker_context(num_workers):
    """Return a DataLoader's `multiprocessing_context`, for classes that a notebook may define.

    On Linux the workers are forked, so they have all that this process has. Elsewhere each is a new
    process, which needs seconds to import torch, and the data set and the functions that it calls
    are copies, pickled by value. For no workers it is None, as a DataLoader demands.
    """
    if not num_workers:
        return None
    return "fork" if CAN_FORK else _SpawnByValue()


class _SpawnByValue(SpawnContext):
    """Starts processes whose arguments are pickled by value."""

    @staticmethod
    def Process(target, args):
        """Return a process; objects of `multiprocessing` itself pickle their own way."""
        args = (a if type(a).__module__.startswith("multiprocessing.") else _Value(a) for a in args)
        return SpawnProcess(target=target, args=tuple(args))


class _Value:
    """Becomes a copy of `value` when it is unpickled in another process."""

    def __init__(self, value):
        self.value = value

    def __reduce__(self):
        return _read, (cloudpickle.dumps(self.value), "torchvision" in sys.modules)


def _read(data, with_torchvision):
    if with_torchvision:
        import d2lpar.vision  # noqa: F401
    return cloudpickle.loads(data)
