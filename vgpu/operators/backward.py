"""Backward on the streams of forward, as CUDA does it.

Each operator of a backward pass is issued to the stream of its forward, after the ops of other
streams that wrote what it reads. At the end the caller's streams wait for all of them. The stream
of the forward is known for operators that the calling thread recorded. Operators that another
thread recorded on a stream of its own run on the caller's stream, with the same values.
"""

from vgpu.private.autograd import autograd_node, forward_number, in_backward
from vgpu.runtime.scheduler import under_way
from vgpu.runtime.threads import CurrentStreams, thread
from vgpu.tensors.cells import writers_of


class BackwardStreams:
    """The current streams during a backward pass, in the place of a `CurrentStreams`."""

    def __init__(self, caller):
        self._caller = caller
        self.used = set()
        self._chosen = {}  # index of a device -> (node of autograd, stream), see `set`
        self._own = None, set()  # the node under way, and the ops that it has issued

    def stream(self, device):
        """Return the stream that the forward of autograd's current operator was issued to."""
        node = autograd_node()
        if node is None:
            if not in_backward():
                self.leave()  # an interrupt kept the end of the pass from doing this
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
        """Make the caller's streams current; when next used, they wait for the pass's streams."""
        self._chosen, self._own = {}, (None, set())
        self._caller.unjoined = self
        thread.current = self._caller

    def after(self, stream, op):
        """Return the ops under way on other streams than `stream` that write what `op` reads.

        Those issued by the same node of autograd are left out: as on CUDA, a function that uses
        several streams in its backward synchronizes them itself. Collectives are not left out,
        because C++ code waits for their futures without any stream knowing.
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
        """Issue the work of the current operator to `stream`, as a user's own backward asks."""
        node = autograd_node()
        if node is None:
            self._caller.set(stream)
        else:
            self._chosen[stream.device.index] = node, stream


class StreamsOfForward:
    """Issue the operators of a backward pass in a `with` block to the streams of their forward."""

    def __enter__(self):
        caller = thread.current
        self._streams = None  # stays so with default streams only, or in a nested backward
        if type(caller) is CurrentStreams:
            thread.current = self._streams = BackwardStreams(caller)

    def __exit__(self, *exception):
        if self._streams is not None:
            self._streams.leave()
