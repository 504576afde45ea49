"""Issues an operator on virtual GPUs: from its call to an op on a stream.

Lists of tensors, keyword arguments, CPU tensors and new keys take the slow path, a `Call`.
"""

import re
import warnings

import torch

from vgpu.operators.plans import (
    CONSTANT,
    NEW,
    NO_PLAN,
    SAME,
    VIEW,
    Plan,
    find_operator,
    find_plan,
    keep_plan,
    operator_of,
    tables,
    use_generator,
)
from vgpu.private.dispatch import (
    check_kernel,
    function_of,
    lacks_shape_inference,
    tree_flatten,
    tree_map_only,
)
from vgpu.private.tensors import CPUGenerator, storage_id
from vgpu.runtime import registry, scheduler
from vgpu.runtime.scheduler import Op, note_sync, wait
from vgpu.runtime.threads import issue_op
from vgpu.tensors.cells import (
    CPU,
    META,
    Cell,
    Missing,
    TensorLayout,
    Unavailable,
    fetch,
    fetch_nested,
    set_missing,
)
from vgpu.tensors.tensor import (
    REFUSALS,
    VirtualTensor,
    become,
    copy_to_device,
    has_values,
    refuse_without_values,
    wrap,
)

TorchDevice = type(META)  # `torch.device` may be replaced, see cuda_device.py
SYNCHRONIZING = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
MAX_TRIAL_BYTES = 2**26  # of the tensors in a trial, see `Call._refusal`
KERNEL_ERRORS = (RuntimeError, LookupError, ValueError, TypeError, AssertionError, AttributeError)
MAX_UNKNOWN = 64  # a larger integer that is no length of a tensor has no small substitute
default_dtype = torch.get_default_dtype


def dispatch(cls, func, types, args=(), kwargs=None):
    """Issue the operator `func`; torch calls this as `VirtualTensor.__torch_dispatch__`."""
    operator = find_operator(function_of(func)) or operator_of(func)
    if operator.special is not None:
        if len(types) > 1:
            return NotImplemented  # for the other tensor class, such as DTensor
        return operator.special(func, args, kwargs or {})
    if operator.nested or kwargs:
        if len(types) > 1:
            return NotImplemented
        return Call(operator, args, kwargs or {}).issue()
    # The key holds all that the results depend on.
    key = [operator, default_dtype()]
    values = []
    tensors = []
    for arg in args:
        kind = type(arg)
        if kind is VirtualTensor:
            cell = arg._cell
            key.append(cell.layout)
            values.append(cell)
            tensors.append(arg)
            continue
        by_value = operator.by_value[len(values)]
        values.append(arg)
        if kind in _NUMBERS:
            key.append(_key_of(arg, kind, by_value))
        elif kind is list:
            key.append(tuple(arg))
        elif arg is None:
            key.append(None)
        elif len(types) > 1:
            return NotImplemented
        else:
            return Call(operator, args, {}).issue()
    if operator.written:
        key.append(_aliases(tensors))
    plan = find_plan(tuple(key))
    if not plan:
        return Call(operator, args, {}).issue()
    return plan.issue(tensors, values, None)


_NUMBERS = {int, bool, float, complex}


def _key_of(number, kind, by_value):
    """Return the part of a key for a number; it differs for True, 1 and 1.0.

    Of a number that only scales values it has type and sign, on which integer powers and checks
    depend.
    """
    if by_value or not number or kind is bool or kind is complex:
        return kind, number
    return kind if number > 0 else (kind, "negative")


def _aliases(tensors):
    """Return for each tensor the index of the first one in its memory; matters for writes."""
    if len(tensors) == 1:
        return (0,)
    blocks = [tensor._block for tensor in tensors]
    return tuple([blocks.index(block) for block in blocks])


def issue_factory(func, args, kwargs):
    """Issue a factory, such as `empty` or `zeros`, on `kwargs["device"]` or the current device."""
    where = kwargs.get("device")
    return Call(operator_of(func), args, kwargs, registry.find(where)).issue()


class Call:
    """One call of an operator, with parsed arguments.

    Attributes:
        tensors: the virtual tensors among the arguments, in order.
        aliases: see `_aliases`; if none is written, all different.
        key: a list of all that the results depend on.
        values, kwvalues: the arguments for the engine, with cells in place of tensors.
        refused: the exception of the shape inference or of `_refusal`; or None.
    """

    refused = None

    def __init__(self, operator, args, kwargs, device=None):
        if operator.cpu_arguments == "move" and len(args) > 1:
            args = [args[0], _indices_for(*args[:2]), *args[2:]]
        self.device = device or device_of((args, kwargs))
        self.operator = operator
        self.args = args
        self.kwargs = kwargs
        self.tensors = []
        self.key = [operator, default_dtype()]
        if device is not None:
            self.key.append(device)
        self.values = [
            self._parse(arg, by_value)
            for arg, by_value in zip(args, operator.by_value, strict=False)
        ]
        self.kwvalues = {}
        for name, value in kwargs.items():
            self.key.append(name)
            self.kwvalues[name] = self._parse(value, operator.by_value_of.get(name, True))
        self.aliases = range(len(self.tensors))
        if operator.written:
            self.aliases = _aliases(self.tensors)
            self.key.append(self.aliases)
        for position, name in operator.written:
            value = args[position] if position < len(args) else kwargs.get(name)
            for tensor in value if type(value) is list else (value,):
                if isinstance(tensor, torch.Tensor) and type(tensor) is not VirtualTensor:
                    raise two_devices_error(self.device.torch_device, tensor.device)

    def _parse(self, value, by_value=True):
        """Add an argument to the key; return it in the form for the engine."""
        key = self.key
        kind = type(value)
        if kind is VirtualTensor:
            self.tensors.append(value)
            key.append(value._cell.layout)
            return value._cell
        if kind is list or kind is tuple:
            if self.operator.nested:
                key.append(len(value))
                return [self._parse(item) for item in value]
            key.append(tuple(value))
        elif kind in _NUMBERS:
            key.append(_key_of(value, kind, by_value))
        elif kind is TorchDevice:
            key.append(value)
            return CPU
        elif isinstance(value, torch.Tensor):
            if value.device.type != "cpu" or (
                value.dim() and self.operator.cpu_arguments != "keep"
            ):
                raise two_devices_error(self.device.torch_device, value.device)
            key.append((value.dtype, tuple(value.shape), "cpu"))
            return value.clone()
        elif isinstance(value, CPUGenerator):
            key.append("generator")
        else:
            key.append(value)
        return value

    def issue(self):
        """Queue the operator and return its results.

        If their layouts are unknown before it runs, the host waits for it.
        """
        if self.operator.is_synchronous:
            return self.run_now()
        key = tuple(self.key)
        plan = find_plan(key)
        if plan is None:
            check_kernel(self.operator.func, self.tensors)
            try:
                plan = self.infer()
                self.refused = self._refusal(plan) if plan else None
            except KERNEL_ERRORS as error:
                self.refused = error.with_traceback(None)  # which would leak the tensors
            if plan is None or self.refused is not None:
                result = self.run_now()  # the kernel's own error says more; or there is a result
                if plan is None:
                    self._warn()
                else:
                    keep_plan(key, plan)
                return result
            keep_plan(key, plan)
        return plan.issue(self.tensors, self.values, self.kwvalues) if plan else self.run_now()

    def check(self):
        """Raise what the operator refuses whatever the values are; ask once for each key."""
        key = tuple(self.key)
        if find_plan(key) is None:
            error = self._refusal()
            if error is not None:
                raise error
            keep_plan(key, NO_PLAN)

    def infer(self):
        """Return a new `Plan`, from the layouts that torch infers.

        NO_PLAN if the operator has no shape inference; None if only the kernel knows the results.
        """
        metas = self._placeholders(META)
        args, kwargs = self._with(metas, META)
        operator = self.operator
        try:
            result = tables.shape.get(operator.func, operator.func)(*args, **kwargs)
        except RuntimeError as error:
            if not lacks_shape_inference(operator.func, error):
                raise
            return NO_PLAN
        flat, spec = (result,), None
        if isinstance(result, (list, tuple)):
            flat, spec = result, type(result)
            if spec not in (list, tuple) or any(isinstance(item, (list, tuple)) for item in result):
                flat, spec = tree_flatten(result)
        ids = reversed([*enumerate(map(storage_id, metas))])
        storages = {storage: position for position, storage in ids}
        outputs = []
        for value in flat:
            if not isinstance(value, torch.Tensor):
                outputs.append((CONSTANT, None, value))
                continue
            source = next((i for i, meta in enumerate(metas) if meta is value), None)
            if source is not None:
                outputs.append((SAME, None, source))
                continue
            if value.device.type != "meta":
                return None
            source = storages.get(storage_id(value))
            mode = NEW if source is None else VIEW
            outputs.append((mode, TensorLayout.of(self.device, value), source))
        changes = []
        if operator.written:
            for source, (tensor, meta) in enumerate(zip(self.tensors, metas, strict=True)):
                after = TensorLayout.of(self.device, meta)
                if after is not tensor._cell.layout:
                    if self.aliases.count(self.aliases[source]) > 1:
                        return None  # the output is an input, too: only the kernel knows the result
                    changes.append((source, after))
        return Plan(operator, self.device, outputs, spec, changes)

    def _warn(self):
        """Warn once that the operator is synchronous, because its shape inference fails.

        No warning for operators that read a value, which are synchronous on CUDA, too.
        """
        reads = ".item() cannot be called on meta" in str(self.refused)
        reads |= bool(SYNCHRONIZING & {*self.operator.func.tags})
        if self.refused is not None and not reads and self.operator not in _warned:
            _warned.add(self.operator)
            error = " ".join([f"{type(self.refused).__name__}:", *str(self.refused).split()])
            warnings.warn(
                f"{self.operator.name} waits for its result on virtual GPUs, because torch's shape "
                f"inference for it fails ({error:.200})",
                stacklevel=2,
            )

    def run_now(self):
        """Run the operator on the current stream, wait for it, and return its results.

        Raises the exception of the operator, torch.AcceleratorError if an op that was issued before
        has failed, and RuntimeError where virtual GPUs compute no values.
        """
        if self.operator.cpu_arguments == "move" and self.device.model is not None:
            indexed, indices, *rest = self.args
            if any(map(_is_mask, indices)):
                return self.operator.func(indexed, [*_mask_indices(indices)], *rest, **self.kwargs)
        if not all(map(has_values, self.tensors)):
            error = self.refused and self._refusal()
            if error is not None:
                raise error
            refuse_without_values(self.operator.name)
        box = []
        operator, tensors, device = self.operator, self.tensors, self.device
        if SYNCHRONIZING & {*operator.func.tags}:
            note_sync()

        def work(op):
            try:
                args = [fetch_nested(value) for value in op.args]
                kwargs = {name: fetch_nested(value) for name, value in op.kwargs.items()}
                inputs = [fetch(tensor._cell) for tensor in tensors]
                box.extend((operator.run(*args, **kwargs), inputs))
            except BaseException as error:
                op.error = error.with_traceback(None)

        op = Op(operator.name, "kernel", device.compute, work, self.values, self.kwvalues)
        if operator.random:
            use_generator(op, operator, device)
        issue_op(op, device)
        if operator.written:
            for cell in (tensor._cell for tensor in tensors):
                cell.root().writer = op
        wait(op, device.torch_device)
        raise_now(op, device)
        result, inputs = box
        for tensor, data in zip(tensors, inputs, strict=True):
            layout = TensorLayout.of(device, data)
            cell, old = tensor._cell, tensor._cell.layout
            if layout is not old:  # others may see the memory as it was
                cell.data = torch.as_strided(data, old.size, old.stride, old.offset)
                block = tensor._block if layout.num_bytes <= tensor._block.num_bytes else None
                become(tensor, wrap(Cell(layout, data), block))
        return tree_map_only(torch.Tensor, lambda value: self._wrap(value, inputs), result)

    def _placeholders(self, device):
        """Return new tensors on a torch device, with the layouts and shared memory of `tensors`."""
        layouts = [tensor._cell.layout for tensor in self.tensors]
        sizes = {}
        for alias, layout in zip(self.aliases, layouts, strict=True):
            sizes[alias] = max(sizes.get(alias, 0), layout.num_bytes)
        storages = {n: torch.UntypedStorage(size, device=device) for n, size in sizes.items()}
        aliases = zip(self.aliases, layouts, strict=True)
        return [layout.empty(device, storages[alias]) for alias, layout in aliases]

    def _with(self, tensors, device, lengths=None):
        """Return args and kwargs with `tensors` and `device` in place of theirs, and `lengths`."""
        rest = iter(tensors)

        def substitute(value):
            kind = type(value)
            if kind is VirtualTensor:
                return next(rest)
            if kind is list or kind is tuple:
                return [substitute(item) for item in value]
            if kind is int and lengths is not None:
                # Without a substitute: the KeyError ends the small trial.
                return lengths[value] if value > MAX_UNKNOWN else lengths.get(value, value)
            if isinstance(value, CPUGenerator):
                return None
            return device if kind is TorchDevice else value

        args = [substitute(value) for value in self.args]
        return args, {name: substitute(value) for name, value in self.kwargs.items()}

    def _refusal(self, plan=None):
        """Return the kernel's error if it refuses both zeros and ones of these layouts; or None.

        Such an error does not depend on values, so CUDA's host raises it at the call, whereas shape
        inference may not know it: dtypes, memory overlap, arguments compared with sizes. Small
        lengths in the same order are tried first, for speed; if they fail, the true ones.
        """
        operator = self.operator
        layouts = [tensor._cell.layout for tensor in self.tensors]
        if plan is not None and (plan.only_views or not operator.is_tried or not layouts):
            return None
        error = self.refused
        lengths = sorted({n for layout in layouts for n in layout.size} - {0, 1})
        small = {length: n for n, length in enumerate(lengths, 2)}
        overlap = len({*self.aliases}) < len(layouts) or any(0 in x.stride for x in layouts)
        if error is None and not (operator.written and overlap) and lengths != [*small.values()]:
            outs, tensors = [self.kwargs.get(name) for name in operator.outs], []
            for tensor, x in zip(self.tensors, layouts, strict=True):
                is_out = any(tensor is out for out in outs)  # resized without a warning if empty
                size = [0] if is_out else [small.get(n, n) for n in x.size]
                tensors.append(torch.empty(size, dtype=x.dtype, device=CPU))
            error = self._tried(tensors, small)
            if error is None:
                return None
        outputs = () if plan is None else plan.outputs
        layouts += [layout for mode, layout, _ in outputs if mode == NEW]
        if sum(layout.num_bytes for layout in layouts) > MAX_TRIAL_BYTES:
            # Too large to try: the small trial is believed about dtypes and missing kernels only.
            known = self.refused is not None or re.search("type|not implemented", str(error))
            return error if known else None
        return self._tried(self._placeholders(CPU))

    def _tried(self, tensors, lengths=None):
        """Return the error of the kernel for ones, if it is the same for zeros; or None.

        Ones come first: LAPACK numbers pivots from 1, and writes past its memory for a pivot of 0.
        """
        operator, errors = self.operator, []
        for value in (1, 0):
            try:
                args, kwargs = self._with(tensors, CPU, lengths)
                if operator.random:
                    if operator.generator is not None:
                        del args[operator.generator : operator.generator + 1]
                    kwargs["generator"] = CPUGenerator()
                for tensor in tensors:
                    tensor.fill_(value)
                operator.run(*args, **kwargs)
            except KERNEL_ERRORS as error:
                errors.append(error.with_traceback(None))
            else:
                return None
        return errors[0] if str(errors[0]) == str(errors[1]) else None

    def _wrap(self, value, inputs):
        """Return a virtual tensor with the values of `value`, the operator's result on the CPU."""
        for tensor, data in zip(self.tensors, inputs, strict=True):
            if value is data:
                return tensor
        if value.is_nested:
            REFUSALS["NestedTensor"](self.operator.func)
        layout = TensorLayout.of(self.device, value)
        for tensor, data in zip(self.tensors, inputs, strict=True):
            if storage_id(value) == storage_id(data):
                return wrap(Cell(layout, value), tensor._block)
        return wrap(Cell(layout, value))


def _mask_indices(indices):
    """Yield indices, with each mask replaced by the indices of its true elements, as on CUDA.

    So the host waits for the mask only, and the indexed tensor needs no values.
    """
    for index in indices:
        if _is_mask(index):
            yield from index.nonzero().unbind(1)
        else:
            yield index


def _is_mask(index):
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


_warned = set()  # operators


def _indices_for(indexed, indices):
    """Return indices on the device of the tensor that they index; those on the CPU are copied."""
    where = indexed.device
    if any(index is not None and index.device not in (CPU, where) for index in indices):
        raise RuntimeError(
            f"indices should be either on cpu or on the same device as the indexed tensor ({where})"
        )
    if where == CPU:
        return indices
    device = registry.find(where)
    return [
        index if index is None or index.device == where else copy_to_device(index, device)
        for index in indices
    ]


def device_of(arguments, device=None):
    """Return the `Device` of the virtual tensors in nested arguments, or `device` without any.

    Raises RuntimeError if the tensors are on two devices.
    """
    if type(arguments) is VirtualTensor:
        found = arguments._cell.layout.device
        if device is not None and device is not found:
            raise two_devices_error(device.torch_device, found.torch_device)
        return found
    if isinstance(arguments, dict):
        arguments = arguments.values()
    elif not isinstance(arguments, (list, tuple)):
        return device
    for argument in arguments:
        device = device_of(argument, device)
    return device


def two_devices_error(first, second):
    """Return CUDA's error for operands on two devices."""
    return RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"{first} and {second}!"
    )


def raise_now(op, device):
    """Raise the error of a finished op, or an earlier one of its `Device`, if there is one.

    The latter, and that of an op that computed an input, is a torch.AcceleratorError.
    """
    error = op.error
    try:
        if error is not None:
            device.forget(op)
        if isinstance(error, Unavailable):
            device.raise_error()
            text = f"{scheduler.error_name} error: {op.name} {error}"
            raise torch.AcceleratorError(text) from error.missing.error
        if isinstance(error, NotImplementedError):  # of the kernel "bitwise_and_cpu", for example
            error.args = tuple(str(arg).replace('_cpu" not', '_cuda" not') for arg in error.args)
        if error is not None:
            raise error
        device.raise_error()
    finally:
        op.error = error = None  # the traceback would leak tensors: no cycle, none in the stream


def issue_function(name, function, inputs, layouts):
    """Queue a function as one kernel on the current stream of the device of its inputs.

    `function` takes a list of CPU tensors, the values of `inputs`, and returns a list of tensors
    with `layouts`, a `TensorLayout` each. Returns a list of new tensors, not yet computed.
    """
    device = inputs[0]._cell.layout.device
    out = [Cell(layout) for layout in layouts]

    def work(op):
        try:
            values = function([fetch(cell) for cell in op.args])
        except Unavailable as unavailable:
            set_missing(op.out, unavailable.missing)
        except BaseException as error:
            set_missing(op.out, Missing(error))
            raise
        else:
            for cell, value in zip(op.out, values, strict=True):
                cell.data = value

    op = Op(name, "kernel", device.compute, work, [t._cell for t in inputs], None, out)
    results = [wrap(cell) for cell in out]
    issue_op(op, device)
    for cell in out:
        cell.writer = op
    return results
