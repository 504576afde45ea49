"""Collective: an op that involves other ranks."""

from vgpu.runtime.scheduler import Op


class Collective(Op):
    """A collective, or a message, as called on this rank.

    Args:
        move: function(gloo, inputs, outputs) of flat CPU tensors; see `exchange`.
        cost: function of k, bytes and `Route`; see `costs`.
        detail: what ranks must agree on, besides the shapes.
        shapes_of: the tensors whose shapes must agree; by default the inputs.
        cost_bytes: the bytes for `cost`; by default the bytes of the inputs or of the outputs,
            whichever are more.
        peer, sends, tag: for a message, the other rank in the group, the direction and the tag.
        is_read: whether other ranks read the inputs.

    Attributes:
        text: the call with its shapes; the same on all ranks.
        key: identifies the collective on all of its ranks; its last part is a counter.
        members: these ranks, numbered as in the default group.
        failure: the error that keeps it from running on a modelled clock, or None.
        has_values: whether all ranks have the values that others read; see `values` in
            `Simulation`.
    """

    key = members = failure = None
    has_values = True

    def __init__(
        self,
        name,
        inputs,
        outputs,
        move,
        cost,
        detail="",
        *,
        shapes_of=None,
        cost_bytes=None,
        peer=None,
        sends=None,
        tag=None,
        is_read=True,
    ):
        super().__init__(name, "collective", None, None)
        self.inputs, self.outputs, self.move, self._cost = inputs, outputs, move, cost
        self.peer, self.sends, self.tag, self.is_read = peer, sends, tag, is_read
        if cost_bytes is None:
            cost_bytes = max(bytes_of(inputs), bytes_of(outputs))
        self._cost_bytes = cost_bytes
        shapes = (inputs or outputs) if shapes_of is None else shapes_of
        texts = ", ".join(map(described, shapes[:8]))
        if len(shapes) > 8:
            texts += f", ... ({len(shapes)} tensors, {sum(t.numel() for t in shapes)} elements)"
        self.text = f"{name}({', '.join(filter(None, (texts, detail)))})"

    def directions(self, out, into):
        """Return the directions of this rank's link that it occupies, of these two."""
        return {None: (out, into), True: (out,), False: (into,)}[self.sends]

    def meet(self, route, has_values=True):
        """Set its cost on the `Route` of its ranks, and whether there are values."""
        cost = self._cost(len(self.members), self._cost_bytes, route)
        self.num_bytes, self.seconds = cost.num_bytes, cost.seconds(route)
        self.has_values = has_values

    def drop_tensors(self):
        """Drop the references to tensors, which keep their memory allocated."""
        self.inputs = self.outputs = ()


def described(tensor):
    """Return dtype and shape of a tensor as a string, "float32[3]" for example."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def bytes_of(tensors):
    return sum(tensor.nbytes for tensor in tensors)
