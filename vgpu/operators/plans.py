"""Plans: the layouts of an operator's results, and how they share memory with the inputs."""

import torch

from vgpu.private.dispatch import (
    function_of,
    is_composite,
    python_kernel,
    schema_of,
    tree_flatten,
    tree_unflatten,
)
from vgpu.private.tensors import CPUGenerator
from vgpu.runtime.scheduler import Op
from vgpu.runtime.threads import issue_op
from vgpu.tensors.cells import (
    CPU,
    ONLY_WRITTEN,
    Cell,
    Missing,
    Unavailable,
    fetch,
    fetch_nested,
    revive,
    set_missing,
    strided,
)
from vgpu.tensors.generators import checked
from vgpu.tensors.tensor import become, new_tensor, view_as, wrap

aten = torch.ops.aten
MAX_PLANS = 50_000
NEW, VIEW, SAME, CONSTANT = range(4)  # kinds of results, see `Plan.outputs`


class tables:  # noqa: N801
    """Facts missing in schemas of operators, added by `special_operators.py`, `copies.py`, ..."""

    special = {}  # operator -> function(func, args, kwargs) that issues it
    special_names = {}  # "namespace" or "namespace::name", maybe not defined yet -> the same
    run = {}  # operator -> function of CPU tensors that computes it instead
    random = set()  # operators without a generator argument whose function in `run` takes one
    shape = {}  # operator -> function that returns empty results of the right layout on `meta`
    keyed_by_value = set()  # names: the values of numbers determine the result's shape, or errors
    allocating = set()  # names: the result is uninitialised
    synchronous = set()  # names: the shape of the result, or a Python result, depends on values
    cpu_arguments = {}  # name -> "move" or "keep" CPU tensors among the arguments
    bit_views = set()  # operators: views that differ by more than their layout


class Operator:
    """Properties of an operator, from its schema and from `tables`.

    Attributes:
        name: its name in a recording, such as "aten.mm".
        packet: the name without namespace and overload, as in `tables`.
        nested: whether it takes lists of tensors.
        by_value: for each argument, whether its value, not only its type, is part of the key.
        by_value_of: the same by the name of the argument.
        written: (position, name) of the arguments that it writes.
        outs: the names of those that it resizes, such as `out`.
        statistics: (position, name) of running statistics that it writes, which torch's schema
            omits.
        only_layout: whether it only changes the layout of its first argument.
        generator: the position of the argument of this name; or None.
        is_tried: whether zeros and ones may be tried for errors that do not depend on values.
        special, random, run, allocates, is_synchronous, cpu_arguments: see `tables`.
    """

    def __init__(self, func):
        schema = schema_of(func)
        namespace, packet = schema.name.split("::")
        self.func = func
        self.name = str(func).rpartition(".")[0]
        self.packet = packet
        names = tables.special_names
        self.special = tables.special.get(func) or names.get(schema.name) or names.get(namespace)
        if self.special is None and is_composite(func):
            self.special = lambda func, args, kwargs: func.decompose(*args, **kwargs)
        elif self.special is None and namespace != "aten":
            self.special = python_kernel(func)
        names = [argument.name for argument in schema.arguments]
        self.generator = names.index("generator") if "generator" in names else None
        self.random = func in tables.random or self.generator is not None
        types = [str(argument.type) for argument in schema.arguments]
        self.nested = any("Tensor" in type and "List" in type for type in types)
        self.is_tried = namespace in ("aten", "torch_nn") and packet not in tables.allocating
        self.is_tried &= "backward" not in packet  # autograd's arguments fit
        values_matter = namespace != "aten" or packet in tables.keyed_by_value or self.random
        self.by_value = [values_matter or not _is_number(type) for type in types]
        self.by_value_of = dict(zip(names, self.by_value, strict=True))
        self.written = [
            (position, argument.name)
            for position, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        self.outs = [argument.name for argument in schema.arguments if argument.is_out]
        self.statistics = [
            (position, name)
            for position, name in enumerate(names)
            if packet in UPDATES_STATISTICS and name.startswith("running_")
        ]
        self.only_layout = torch.Tag.inplace_view in func.tags
        self.run = tables.run.get(func, function_of(func))
        self.allocates = packet in tables.allocating
        self.is_synchronous = packet in tables.synchronous
        self.cpu_arguments = tables.cpu_arguments.get(packet)


UPDATES_STATISTICS = set(
    "native_batch_norm batch_norm_update_stats batch_norm_gather_stats_with_counts".split()
)


def _is_number(type):
    """Return whether a number for an argument of this schema type only scales values.

    A number in place of a tensor does, too, as in `x * 3`.
    """
    return type.removeprefix("Optional[").rstrip("]") in ("number", "float", "Tensor")


_operators = {}  # by the operator's C++ function


def operator_of(func):
    function = function_of(func)
    operator = _operators.get(function)
    if operator is None:
        if func.namespace == "c10d":  # a process group in C++
            raise RuntimeError(
                f"{func}: this process group does not support virtual GPUs; create one by "
                'torch.distributed.new_group(backend="vccl")'
            )
        operator = _operators[function] = Operator(func)
    return operator


find_operator = _operators.get
plans_by_key = {}
find_plan = plans_by_key.get  # None for a new key
NO_PLAN = False  # kept for a key if layouts of results are unknown before the operator has run


def keep_plan(key, plan):
    """Cache the plan of a key, or NO_PLAN."""
    if len(plans_by_key) >= MAX_PLANS:
        plans_by_key.clear()
    plans_by_key[key] = plan


class Plan:
    """How to issue an operator for one key: operator, layouts, arguments, torch's default dtype.

    Attributes:
        outputs: for each result (mode, layout, source): NEW memory of that layout, a VIEW of input
            number `source`, the SAME tensor as that input, or the CONSTANT `source`.
        spec: nesting of the results: None for a single one, `tuple` or `list` for a flat sequence,
            otherwise the spec of `tree_flatten`.
        single: the output of a single result; or None.
        changes: (number of an input, its layout afterwards) for resized inputs.
        only_views: whether all results are views, which need no op.
        is_foreseen: whether the single result has had the inferred layout once, so that later runs
            check only its shape and strides.
        modelled: the duration of its kernel, see `Model.seconds`; or None.
    """

    __slots__ = (
        "operator device outputs spec single only_views is_foreseen changes work name modelled"
    ).split()

    def __init__(self, operator, device, outputs, spec, changes):
        self.operator = operator
        self.device = device
        self.outputs = outputs
        self.spec = spec
        self.changes = changes
        self.single = outputs[0] if spec is None else None
        self.only_views = (
            bool(outputs) and not operator.written and all(o[0] == VIEW for o in outputs)
        )
        self.is_foreseen = False
        self.work = self._run
        self.name = operator.name
        self.modelled = None

    def issue(self, tensors, values, kwargs):
        """Queue the operator on the current stream and return its results, not yet computed.

        `tensors` are those among the arguments, in order; `values` and `kwargs`, which may be None,
        the arguments with cells in place of tensors.
        """
        operator = self.operator
        device = self.device
        changed = ()
        if self.changes:
            if operator.only_layout:
                become(tensors[0], _view(tensors[0], self.changes[0][1]))
                return tensors[0]
            changed = [(tensors[n], _resized(tensors[n], layout)) for n, layout in self.changes]
            for tensor, new in changed:
                old, cell = tensor._cell, new._cell
                values = _replace(values, old, cell)
                kwargs = {k: _replace(v, old, cell) for k, v in (kwargs or {}).items()}
        single = self.single
        if single is not None:
            mode, layout, source = single
            if mode == NEW:
                if operator.allocates:
                    return new_tensor(layout)
                out = Cell(layout)
                result = wrap(out)
            elif mode == VIEW:
                return _view(tensors[source], layout, operator, values, kwargs)
            else:
                result = tensors[source] if mode == SAME else source
                out = None
                if mode == CONSTANT and result is not None and not operator.written:
                    return result
        else:
            out = []
            results = []
            for mode, layout, source in self.outputs:
                cell = None
                if mode == NEW:
                    cell = Cell(layout)
                    results.append(wrap(cell))
                elif mode == VIEW:
                    results.append(_view(tensors[source], layout))
                else:
                    results.append(tensors[source] if mode == SAME else source)
                out.append(cell)
            nest = self.spec
            result = nest(results) if nest in (tuple, list) else tree_unflatten(results, nest)
            if self.only_views:
                return result
        op = Op(self.name, "kernel", device.compute, self.work, values, kwargs, out)
        op.plan = self
        if operator.random:
            use_generator(op, operator, device)
        issue_op(op, device)
        if type(out) is Cell:
            out.writer = op
        elif out is not None:
            for cell in out:
                if cell is not None:
                    cell.writer = op
        if operator.written:
            note_writer(op, operator, values, kwargs)
        for tensor, new in changed:
            become(tensor, new)
        return result

    def _run(self, op):
        """Run an op of this plan; store its results, or a `Missing`, in their cells."""
        out = op.out
        operator = self.operator
        try:
            if operator.packet in ONLY_WRITTEN:
                revive(op.args[0])
            if operator.nested:
                args = [fetch_nested(value) for value in op.args]
            else:
                args = [fetch(value) if type(value) is Cell else value for value in op.args]
            if op.kwargs:
                kwargs = {name: fetch_nested(value) for name, value in op.kwargs.items()}
                result = operator.run(*args, **kwargs)
            else:
                result = operator.run(*args)
            if type(out) is Cell:
                out.data = self._fitting(result, out.layout)
            elif out is not None:
                flat = (result,) if self.spec is None else result
                if self.spec not in (None, tuple, list):
                    flat = tree_flatten(result)[0]
                for cell, value in zip(out, flat, strict=True):
                    if cell is not None:
                        cell.data = self._fitting(value, cell.layout)
        except Unavailable as unavailable:
            set_missing(out, unavailable.missing)
            if operator.written:  # what it was to change is as it was
                raise
        except BaseException as error:
            set_missing(out, Missing(error))
            raise

    def _fitting(self, value, layout):
        """Return `value`, a kernel's result, in the inferred layout.

        Raises RuntimeError if its shape or its dtype differs.
        """
        if value.stride() == layout.stride and value.shape == layout.size:
            if self.is_foreseen:
                return value
            if value.dtype == layout.dtype and value.storage_offset() == layout.offset:
                if not value.is_conj() and not value.is_neg():
                    self.is_foreseen = self.single is not None
                    return value
        value = value.resolve_conj().resolve_neg()
        if tuple(value.shape) != layout.size or value.dtype != layout.dtype:
            raise RuntimeError(
                f"{self.name} must return {layout.dtype} of shape {layout.size}, as inferred: got "
                f"{value.dtype} of shape {tuple(value.shape)}"
            )
        return layout.empty(CPU).copy_(value)


def use_generator(op, operator, device):
    """Make a kernel draw from the generator among its arguments, or from that of its device."""
    position, given = operator.generator, None
    if position is not None and position < len(op.args):
        given, op.args = op.args[position], [*op.args[:position], *op.args[position + 1 :]]
    op.generator = checked((op.kwargs or {}).get("generator", given), device)
    op.kwargs = {**(op.kwargs or {}), "generator": CPUGenerator()}  # seeded at the issue


def note_writer(op, operator, values, kwargs):
    """Set `op` as the last writer of the cells that its operator writes."""
    for position, name in operator.written:
        value = values[position] if position < len(values) else (kwargs or {}).get(name)
        for cell in value if type(value) is list else (value,):
            if type(cell) is Cell:
                cell.root().writer = op


def _view(tensor, layout, operator=None, values=None, kwargs=None):
    """Return a view with another layout, without an op; RuntimeError beyond the storage."""
    cell = tensor._cell
    if layout.num_bytes > cell.layout.num_bytes and layout.num_bytes > tensor._block.num_bytes:
        raise RuntimeError(  # torch's text
            f"setStorage: sizes {[*layout.size]}, strides {[*layout.stride]}, storage offset "
            f"{layout.offset}, and itemsize {layout.dtype.itemsize} requiring a storage size of "
            f"{layout.num_bytes} are out of bounds for storage of size {tensor._block.num_bytes}"
        )
    if operator is not None and (
        operator.func in tables.bit_views or layout.dtype != cell.layout.dtype
    ):
        run, (_, *rest), kwargs = operator.func, values, kwargs or {}
        view = Cell(layout, None, cell, lambda data: run(data, *rest, **kwargs))
    elif layout is cell.layout:
        view = cell
    else:
        view = strided(cell, layout)
    return wrap(view, tensor._block)


def _resized(tensor, layout):
    """Return the new contents of `tensor` after a change to `layout`."""
    if layout.num_bytes > tensor._block.num_bytes:
        return new_tensor(layout)
    return view_as(tensor, layout)


def _replace(value, old, new):
    if type(value) is list:
        return [_replace(item, old, new) for item in value]
    return new if value is old else value
