"""OperatorGraph: record the data dependencies of operators while a program runs."""

import threading
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdRef

from d2lpar.plotting.figures import new_figure
from vgpu.torch_internals import TorchDispatchMode, schema_of, tree_leaves

_NAMES = {"_local_scalar_dense": "item", "threshold_backward": "relu'"}
_NO_WORK = {"is_pinned", "record_stream"}
_FONT_SIZE = 7  # points, like the next three
_PAD = 4  # between a label and the end of an arrow
_SPACE = 26  # between the labels of two levels
_LINE = 16  # height of a line of boxes
_MAX_INCHES = 40  # maximum width of a figure
_READS = {"color": "#777777", "linewidth": 0.7, "linestyle": "solid"}
_WAITS = {"color": "#b3202c", "linewidth": 1.3, "linestyle": (0, (3, 1.5))}


@dataclass(frozen=True, slots=True)
class OperatorNode:
    """One operator that an `OperatorGraph` has recorded.

    Attributes:
        name: its name in PyTorch, without leading underscores; `'` stands for `_backward`.
        device: the device of its result or, without a result, of its inputs.
        reads: indices of the operators that wrote what it reads or changes, ascending.
        waits: indices of earlier operators that read what it overwrites, except those implied by
            `reads` and by the rest of `waits`.
        before: indices of all operators that must end before it starts.
        level: the earliest step in which it can run if every operator takes one step.
    """

    name: str
    device: torch.device
    reads: tuple
    waits: tuple
    before: frozenset
    level: int


class OperatorGraph(TorchDispatchMode):
    """Record every operator of a block and its dependencies.

        with OperatorGraph() as graph:
            A = torch.full((3,), 2.0)
            B = A + 1
        print(graph)

    It records the calls of the current thread, including backward passes. Creating a view or an
    empty tensor is no operator. Dependencies are those of whole storages: writing to a part of a
    tensor counts as writing to all of it. No tensor is kept alive. As the last value of a cell the
    graph draws itself.

    Attributes:
        nodes: the `OperatorNode`s, in the order of their calls.
    """

    def __init__(self):
        super().__init__()
        self.nodes = []
        self._writer = None  # memory: index of the last operator that wrote it
        self._readers = {}  # memory: indices of the operators that have read it since
        self._lock = threading.Lock()  # backward has a thread for each GPU

    def __enter__(self):
        if self._writer is not None:
            raise RuntimeError("this graph is recording already: create another one")
        self.nodes, self._writer = [], {}
        return super().__enter__()

    def __exit__(self, *error):
        self._writer, self._readers = None, {}
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = _tensors((args, kwargs))
        read = {_memory(tensor) for tensor in inputs}
        result = func(*args, **kwargs)
        changed, outputs = _changed(func, args, kwargs), _tensors(result)
        written = {_memory(tensor) for tensor in changed}  # `out=` may have reallocated it
        made = {_memory(tensor) for tensor in outputs}
        is_view = bool(made) and made <= read and not written
        name = _base_name(func)
        no_work = "empty" in name or name in _NO_WORK or torch.Tag.inplace_view in func.tags
        if (inputs or outputs) and not (is_view or no_work):
            if name.endswith("_like") or name.startswith("new_"):  # reads only shapes
                read = set()
            devices = [tensor.device for tensor in (*outputs, *inputs)]
            with self._lock:
                self._add(_name(func, devices), devices[0], read, written | (made - read))
        return result

    def _add(self, name, device, read, written):
        """Append an operator, given the memories that it reads and writes."""
        number = len(self.nodes)
        reads = {self._writer[memory] for memory in read if memory in self._writer}
        before = reads.union(*(self.nodes[i].before for i in reads))
        waits = {i for memory in written for i in self._readers.get(memory, ())} - before
        waits -= set().union(*(self.nodes[i].before for i in waits))
        before = before.union(waits, *(self.nodes[i].before for i in waits))
        for memory in read:
            self._readers.setdefault(memory, []).append(number)
        for memory in written:
            self._writer[memory], self._readers[memory] = number, []
        level = 1 + max((self.nodes[i].level for i in before), default=-1)
        reads, waits = tuple(sorted(reads)), tuple(sorted(waits))
        self.nodes.append(OperatorNode(name, device, reads, waits, frozenset(before), level))

    def independent_pairs(self):
        """Return the pairs (i, j), i < j, of operators that do not depend on each other.

        They can run at the same time, although a single device may run them in turn.
        """
        return [
            (i, j) for j, node in enumerate(self.nodes) for i in range(j) if i not in node.before
        ]

    def plot(self, title=None, labels=None):
        """Return a figure of the operators by device and level, with arrows for dependencies.

        Boxes with sharp corners are copies. A dashed red arrow leads to an operator that overwrites
        what the other has read. The width depends on the labels, up to 40 inches.

        Args:
            title: the text above the figure.
            labels: a list with a text for each operator; by default the names.

        Raises:
            ValueError: nothing was recorded, or labels and operators differ in number.
        """
        if not self.nodes:
            raise ValueError("nothing to draw: no operator was recorded")
        labels = [node.name for node in self.nodes] if labels is None else labels
        if len(labels) != len(self.nodes):
            raise ValueError(f"labels must have length {len(self.nodes)}: got {len(labels)}")
        widths = [_width(label) for label in labels]
        places, ticks, num_lines = self._places()
        num_levels = 1 + max(node.level for node in self.nodes)
        width = min(_MAX_INCHES, 0.9 + num_levels * (max(widths) + _SPACE) / 72)
        _, [[axes]] = new_figure(figsize=(width, 0.9 + num_lines * _LINE / 72))
        for number, node in enumerate(self.nodes):
            for style, sources in ((_READS, node.reads), (_WAITS, node.waits)):
                for i in sources:
                    ends = (places[i], widths[i]), (places[number], widths[number])
                    _draw_arrow(axes, *ends, style)
            _draw_box(axes, places[number], labels[number], node.name.startswith("copy"))
        axes.set_yticks(list(ticks.values()), list(ticks), fontsize=8)
        axes.set_xticks(range(0, num_levels, 1 + num_levels // 12))
        axes.set(xlabel="level", xlim=(-0.6, num_levels - 0.4), ylim=(num_lines - 0.5, -1))
        axes.set_title(title)
        return axes.figure

    def _places(self):
        """Return (level, line) of each operator, each device's first line, and the line count."""
        devices = sorted({str(node.device) for node in self.nodes})
        used, slots = {}, []  # operators of one device and level are drawn below each other
        for node in self.nodes:
            slots.append(used.get((str(node.device), node.level), 0))
            used[str(node.device), node.level] = slots[-1] + 1
        ticks, line = {}, 0
        for device in devices:
            ticks[device] = line
            line += 2 + max(count for (where, _), count in used.items() if where == device)
        places = [
            (node.level, ticks[str(node.device)] + slot)
            for node, slot in zip(self.nodes, slots, strict=True)
        ]
        return places, ticks, line - 1

    def __str__(self):
        names = max((len(node.name) for node in self.nodes), default=0)
        devices = max((len(str(node.device)) for node in self.nodes), default=0)
        digits = len(str(len(self.nodes) - 1))
        lines = []
        for number, node in enumerate(self.nodes):
            where = f"{number:>{digits}}: {node.name:<{names}} on {node.device!s:<{devices}}"
            waits = f", waits for {[*node.waits]}" if node.waits else ""
            lines.append(f"{where} reads {[*node.reads]}{waits}, level {node.level}")
        return "\n".join(lines)

    def __repr__(self):
        num_devices = len({node.device for node in self.nodes})
        return f"OperatorGraph({len(self.nodes)} operators on {num_devices} devices)"

    def _repr_mimebundle_(self, include=None, exclude=None):
        from d2lpar.plotting.figures import in_notebook

        if not self.nodes or not in_notebook():
            return {}
        return {**self.plot()._repr_mimebundle_(), "text/plain": "<OperatorGraph>"}


def _tensors(values):
    """Return the tensors in nested lists and dicts."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _memory(tensor):
    """Return a unique key of a tensor and its views that does not keep them alive."""
    try:
        storage = tensor.untyped_storage()
    except RuntimeError:  # a sparse tensor has no storage
        return WeakIdRef(tensor)
    return storage.weak_key() if hasattr(storage, "weak_key") else StorageWeakRef(storage)


def _changed(func, args, kwargs):
    """Return the tensors that an operator changes in place, according to its schema."""
    arguments = schema_of(func).arguments
    values = [*args, *(kwargs.get(argument.name) for argument in arguments[len(args) :])]
    pairs = zip(arguments, values, strict=True)
    return _tensors([v for a, v in pairs if a.alias_info is not None and a.alias_info.is_write])


def _base_name(func):
    return schema_of(func).name.split("::")[1]


def _name(func, devices):
    """Return a short name of an operator with results and arguments on `devices`."""
    name = _base_name(func)
    if name == "_to_copy":
        return "copy" if len(set(devices)) > 1 else "to"
    name = _NAMES.get(name, name.lstrip("_"))
    return name.removesuffix("_like").replace("_backward_data", "'").replace("_backward", "'")


def _width(text):
    """Return the width of a label, in points."""
    from matplotlib.textpath import TextPath

    return TextPath((0, 0), text, size=_FONT_SIZE).get_extents().width if text.strip() else 0


def _draw_arrow(axes, source, target, style):
    """Draw an arrow between two labels: pairs of a place (level, line) and a width in points."""
    from matplotlib.transforms import offset_copy

    (start, start_width), (end, end_width) = source, target
    bend = 0.2 if end[0] - start[0] > 1 and end[1] == start[1] else 0  # around boxes in between
    right, left = start_width / 2 + _PAD, -end_width / 2 - _PAD
    from_right, to_left = (
        offset_copy(axes.transData, axes.figure, x=x, units="points") for x in (right, left)
    )
    style = style | {
        "arrowstyle": "->",
        "connectionstyle": f"arc3,rad={bend}",
        "shrinkA": 0,
        "shrinkB": 0,
    }
    axes.annotate("", end, start, to_left, from_right, arrowprops=style, zorder=1)


def _draw_box(axes, place, label, is_copy):
    """Draw a label in a box, with sharp corners for a copy."""
    shape, face, edge = "round", "#e4ecf5", "#12355b"
    if is_copy:
        shape, face, edge = "square", "#fbe6bf", "#8a5a00"
    box = {"boxstyle": f"{shape},pad=0.25", "facecolor": face, "edgecolor": edge}
    axes.text(*place, label, size=_FONT_SIZE, bbox=box, ha="center", va="center")
