"""Backward on the streams of forward, as on CUDA.

Each operator of a backward pass is issued to the stream of its forward, after the ops of other
streams that wrote its inputs. At the end the caller's streams wait for all of them. Operators that
another thread recorded, on its own stream, run on the caller's stream, with the same values.
"""

from vgpu.private.autograd import autograd_node, forward_number, in_backward
from vgpu.runtime.scheduler import under_way
from vgpu.runtime.threads import CurrentStreams, thread
from vgpu.tensors.cells import writers_of


class BackwardStreams:
    """The current streams during a backward pass, in place of a `CurrentStreams`."""

    def __init__(self, caller):
        self._caller = caller
        self.used = set()
        self._chosen = {}  # index of a device -> (node of autograd, stream), see `set`
        self._own = None, set()  # the current node, and the ops that it has issued

    def stream(self, device):
        """Return the stream of the forward of autograd's current operator."""
        node = autograd_node()
        if node is None:
            if not in_backward():
                self.leave()  # an interrupt prevented this at the end of the pass
            return self._caller.stream(device)
        chosen_in, stream = self._chosen.get(device.index, (None, None))
        if chosen_in is not node:
            number = forward_number(node)
            if number is None:
                return self._caller.stream(device)
            stream = self._caller.at(device, number)
        self.used.add(stream)
        return stream

    def leave(self):
        """Make the caller's streams current, and wait for the pass's streams."""
        self._chosen, self._own = {}, (None, set())
        self._caller.unjoined = self
        thread.current = self._caller
        self._caller.join()

    def after(self, stream, op):
        """Return the ops under way on other streams than `stream` that write inputs of `op`.

        Excluded are those of the same node of autograd: as on CUDA, a function that uses several
        streams in its backward synchronizes them itself. Collectives are included, because C++ code
        waits for their futures without making a stream wait.
        """
        node = autograd_node()
        if self._own[0] is not node:
            self._own = node, set()
        own = self._own[1]
        after = tuple(
            writer
            for writer in writers_of(op)
            if writer is not None
            and writer.stream is not stream
            and writer not in own
            and under_way(writer)
        )
        if op.kind != "collective":
            own.add(op)
        return after

    def set(self, stream):
        """Issue the work of the current operator to `stream`, set in a user's own backward."""
        node = autograd_node()
        if node is None:
            self._caller.set(stream)
        else:
            self._chosen[stream.device.index] = node, stream


class StreamsOfForward:
    """Issue the operators of a backward pass in a `with` block to the streams of their forward."""

    def __enter__(self):
        caller = thread.current
        self._streams = None  # remains None with default streams only, or in a nested backward
        if type(caller) is CurrentStreams:
            thread.current = self._streams = BackwardStreams(caller)

    def __exit__(self, *exception):
        if self._streams is not None:
            self._streams.leave()
