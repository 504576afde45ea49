"""Collective: an op in which several ranks take part."""

import functools

from vgpu.distributed import collective_costs, exchange
from vgpu.runtime.scheduler import Op


class Collective(Op):
    """One rank's call of a collective, or of a message.

    Args:
        name: the called function, in recordings and errors.
        detail: further text that must be equal on all ranks.
        kind: the name of its functions in exchange.py and collective_costs.py; by default `name`.
        shapes_of: tensors whose shapes must be equal on all ranks; by default the inputs.
        cost_bytes: bytes that its cost depends on; by default the inputs' or outputs', the larger.
        peer, sends: of a message, the other rank in the group and the direction.
        arguments: further ones of the function in exchange.py.

    Attributes:
        text: the call with its shapes; equal on all ranks.
        key: identifies the collective on all ranks; its last part is a counter.
        members: participating ranks, numbered as in the default group.
        failure: the error that prevents it from running on a modelled clock, or None.
        is_read: whether other ranks read the inputs.
        has_values: whether all ranks have the values that others read.
    """

    key = members = failure = None
    is_read = has_values = True

    def __init__(
        self,
        name,
        inputs,
        outputs,
        detail="",
        kind=None,
        *,
        shapes_of=None,
        cost_bytes=None,
        peer=None,
        sends=None,
        **arguments,
    ):
        super().__init__(name, "collective", None, None)
        self.inputs, self.outputs = inputs, outputs
        self.move = functools.partial(getattr(exchange, kind or name), **arguments)
        self._cost = getattr(collective_costs, kind or name)
        self.peer, self.sends = peer, sends
        if cost_bytes is None:
            cost_bytes = max(bytes_of(inputs), bytes_of(outputs))
        self._cost_bytes = cost_bytes
        shapes = (inputs or outputs) if shapes_of is None else shapes_of
        texts = ", ".join(map(described, shapes[:8]))
        if len(shapes) > 8:
            texts += f", ... ({len(shapes)} tensors, {sum(t.numel() for t in shapes)} elements)"
        self.text = f"{name}({', '.join(filter(None, (texts, detail)))})"

    def directions(self, out, into):
        """Return which of the two directions of this rank's link it occupies."""
        return {None: (out, into), True: (out,), False: (into,)}[self.sends]

    def meet(self, route, has_values=True):
        """Set cost, duration and `has_values` once the `Route` is known."""
        cost = self._cost(len(self.members), self._cost_bytes, route)
        self.num_bytes, self.seconds = cost.num_bytes, cost.seconds(route)
        self.has_values = has_values

    def drop_tensors(self):
        self.inputs = self.outputs = ()


def described(tensor):
    """Return dtype and shape of a tensor, such as "float32[3]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def bytes_of(tensors):
    return sum(tensor.nbytes for tensor in tensors)
