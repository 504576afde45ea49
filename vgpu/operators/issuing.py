"""Issues an operator on virtual GPUs: from its call to an op on a stream.

torch calls `dispatch` for every operator. It computes the key of the call and looks up its plan,
which queues the op. Other calls (with lists of tensors, keyword arguments, CPU tensors, or a new
key) take the slow path, a `Call`.
"""

import warnings
from traceback import walk_tb

import torch

from vgpu.operators.plans import (
    CONSTANT,
    NEW,
    SAME,
    VIEW,
    Plan,
    draw,
    find_operator,
    find_plan,
    keep_plan,
    operator_of,
    tables,
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
    Failure,
    TensorLayout,
    Unavailable,
    fail,
    fetch,
    fetch_nested,
)
from vgpu.tensors.tensor import (
    VirtualTensor,
    become,
    copy_to_device,
    has_values,
    refuse,
    refuse_nested,
    wrap,
)

TorchDevice = type(META)  # `torch.device` may be replaced, see as_cuda.py
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}  # by tensors of indices
SYNCHRONIZING = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
MAX_TRIAL_BYTES = 2**26  # of zeros, on which an operator without values is tried
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
    # The key holds all that the results depend on. In it, True, 1 and 1.0 differ. A number that
    # only scales values is represented by type and sign, on which integer powers depend.
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
        if kind is int:
            key.append(arg if by_value else int if arg >= 0 else "negative")
        elif kind is bool:
            key.append("yes" if arg else "no")
        elif kind is list:
            key.append(tuple(arg))
        elif arg is None:
            key.append(None)
        elif kind is float:
            key.append((float, arg) if by_value else float if arg >= 0 else "negative float")
        elif len(types) > 1:
            return NotImplemented
        else:
            return Call(operator, args, {}).issue()
    if operator.written:
        key.append(_first_places(tensors))
    plan = find_plan(tuple(key))
    if not plan:
        return Call(operator, args, {}).issue()
    return plan.issue(tensors, values, None)


def _first_places(tensors):
    """Return the index of each tensor's first occurrence, which matters if a tensor is written."""
    if len(tensors) == 1:
        return (0,)
    return tuple([_first_place(tensors, tensor) for tensor in tensors])


def _first_place(tensors, tensor):
    for place, other in enumerate(tensors):
        if other is tensor:
            return place


def issue_factory(func, args, kwargs):
    """Issue a factory, such as `empty` or `zeros`, on `kwargs["device"]` or the current device."""
    where = kwargs.get("device")
    return Call(operator_of(func), args, kwargs, registry.find(where)).issue()


class Call:
    """One call of an operator, with parsed arguments.

    Attributes:
        tensors: the virtual tensors among the arguments, in order.
        key: a list of all that the results depend on.
        values, kwvalues: the arguments for the engine, with cells in place of tensors.
        refused: the exception of the shape inference, or None.
    """

    refused = None

    def __init__(self, operator, args, kwargs, device=None):
        self.device = device or device_of((args, kwargs))
        if operator.cpu_arguments == "move":
            args = [_indices_on(self.device, arg) if type(arg) is list else arg for arg in args]
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
        if operator.written:
            self.key.append(_first_places(self.tensors))
        for position, name in operator.written:
            value = args[position] if position < len(args) else kwargs.get(name)
            for tensor in value if type(value) is list else (value,):
                if isinstance(tensor, torch.Tensor) and type(tensor) is not VirtualTensor:
                    raise two_devices(self.device.torch_device, tensor.device)

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
        elif kind is int:
            key.append(value if by_value else int if value >= 0 else "negative")
        elif kind is bool:
            key.append("yes" if value else "no")
        elif kind is float:
            key.append((float, value) if by_value else float if value >= 0 else "negative float")
        elif kind is TorchDevice:
            key.append(value)
            return CPU
        elif kind is complex:
            key.append((complex, value))
        elif isinstance(value, torch.Tensor):
            return self._parse_cpu_tensor(value)
        elif isinstance(value, CPUGenerator):
            key.append("generator")
        else:
            key.append(value)
        return value

    def _parse_cpu_tensor(self, value):
        if value.device.type != "cpu" or (value.dim() and self.operator.cpu_arguments != "keep"):
            raise two_devices(self.device.torch_device, value.device)
        self.key.append((value.dtype, tuple(value.shape), "cpu"))
        return value.clone()

    def issue(self):
        """Queue the operator and return its results.

        If their layouts are unknown before it runs, the host waits for it.
        """
        if self.operator.waits:
            return self.run_now()
        key = tuple(self.key)
        plan = find_plan(key)
        if plan is None:
            check_kernel(self.operator.func)
            plan = self._plan()
            if plan is None:
                result = self.run_now()
                self._warn()
                return result
            keep_plan(key, plan)
        return plan.issue(self.tensors, self.values, self.kwvalues) if plan else self.run_now()

    def _plan(self):
        """Infer the layouts of the results on meta tensors; return a `Plan`.

        Returns False if the operator has no shape inference, and None if the inference fails for
        these arguments: then the operator runs, and raises a better error itself. Exceptions from
        elsewhere, such as a time-out, are passed on; they differ in place among three attempts.
        """
        errors, places = [], []
        try:
            for _ in range(3):
                try:
                    plan = self.infer()
                except Exception as error:
                    errors.append(error)
                    places.append(_place(error))
                else:
                    break
            if not errors:
                return plan
            if len(errors) < 3 or places != places[:1] * 3:
                raise errors[0]
            self.refused = errors[0].with_traceback(None)
            return None
        finally:
            del errors  # whose tracebacks would leak the tensors

    def infer(self):
        """Return a new plan, from the layouts that torch infers; see `Plan`."""
        metas = []
        places = _first_places(self.tensors)

        def substitute(value):
            if type(value) is VirtualTensor:
                place = places[len(metas)]  # a tensor passed twice is one meta tensor
                meta = metas[place] if place < len(metas) else value._cell.layout.empty(META)
                metas.append(meta)
                return meta
            if type(value) is list or type(value) is tuple:
                return [substitute(item) for item in value]
            if isinstance(value, CPUGenerator):
                return None
            return META if type(value) is TorchDevice else value

        operator = self.operator
        args = [substitute(value) for value in self.args]
        kwargs = {name: substitute(value) for name, value in self.kwargs.items()}
        if operator.packet in tables.same_dtype:
            if len({meta.dtype for meta in metas if meta.is_floating_point()}) > 1:
                return None
        try:
            result = tables.shape.get(operator.func, operator.func)(*args, **kwargs)
        except RuntimeError as error:
            if not lacks_shape_inference(operator.func, error):
                raise
            return False
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
                    if places.count(places[source]) > 1:
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
        if self.operator.packet in INDEXED and self.device.model is not None:
            indexed, indices, *rest = self.args
            if any(map(_is_mask, indices)):
                return self.operator.func(indexed, [*_mask_indices(indices)], *rest, **self.kwargs)
        if not all(map(has_values, self.tensors)):
            self._try_with_zeros()
            refuse(self.operator.name)
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
            draw(op, operator, device)
        issue_op(op, device)
        if operator.written:
            for cell in (tensor._cell for tensor in tensors):
                cell.root().writer = op
        wait(op, device.torch_device)
        raise_now(op, device)
        result, inputs = box
        for tensor, data in zip(tensors, inputs, strict=True):
            layout = TensorLayout.of(device, data)
            if layout is not tensor._cell.layout:
                block = tensor._block if layout.num_bytes <= tensor._block.num_bytes else None
                become(tensor, wrap(Cell(layout, data), block))
        return tree_map_only(torch.Tensor, lambda value: self._wrap(value, inputs), result)

    def _try_with_zeros(self):
        """Run an operator on zeros if its arguments may be wrong, so that it raises its own error.

        For arguments larger than MAX_TRIAL_BYTES, raise the error of the shape inference.
        """
        if self.refused is None and self.operator.packet not in tables.same_dtype:
            return
        if sum(tensor._cell.layout.num_bytes for tensor in self.tensors) <= MAX_TRIAL_BYTES:
            args = [_zeros(value) for value in self.values]
            self.operator.run(*args, **{k: _zeros(value) for k, value in self.kwvalues.items()})
        elif self.refused is not None:
            raise self.refused

    def _wrap(self, value, inputs):
        """Return a virtual tensor with the values of `value`, the operator's result on the CPU."""
        for tensor, data in zip(self.tensors, inputs, strict=True):
            if value is data:
                return tensor
        if value.is_nested:
            refuse_nested(self.operator.func)
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


def _zeros(value):
    """Return `value` with CPU zeros in place of each cell in it, also in nested lists."""
    if type(value) is list:
        return [_zeros(item) for item in value]
    return value.layout.empty(CPU).zero_() if type(value) is Cell else value


def _place(error):
    """Return where an error was raised, and from where that was called.

    The caller tells a signal handler, which can be called anywhere, from the operator.
    """
    return [(frame.f_code, line) for frame, line in walk_tb(error.__traceback__)][-2:]


_warned = set()  # operators


def _indices_on(device, indices):
    return [
        copy_to_device(index, device)
        if isinstance(index, torch.Tensor) and index.device == CPU
        else index
        for index in indices
    ]


def device_of(arguments, device=None):
    """Return the `Device` of the virtual tensors in nested arguments, or `device` without any.

    Raises RuntimeError if the tensors are on two devices.
    """
    if type(arguments) is VirtualTensor:
        found = arguments._cell.layout.device
        if device is not None and device is not found:
            raise two_devices(device.torch_device, found.torch_device)
        return found
    if isinstance(arguments, dict):
        arguments = arguments.values()
    elif not isinstance(arguments, (list, tuple)):
        return device
    for argument in arguments:
        device = device_of(argument, device)
    return device


def two_devices(first, second):
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
    if error is not None:
        device.forget(op)
        op.error = None  # the stream references this op, and the traceback would leak tensors
    if isinstance(error, Unavailable):
        device.raise_error()
        raise torch.AcceleratorError(
            f"{scheduler.error_name} error: {op.name} {error}"
        ) from error.failure.error
    if error is not None:
        raise error
    device.raise_error()


def issue_function(name, function, inputs, layouts):
    """Queue a function as one kernel on the current stream of the device of its inputs.

    Args:
        name: its name in recordings.
        function: function(list of CPU tensors, the values of `inputs`) that returns a list of
            tensors.
        inputs: tensors on one virtual GPU.
        layouts: a `TensorLayout` for each result of `function`.

    Returns:
        A list of new tensors, which hold the results once the kernel has run.
    """
    device = inputs[0]._cell.layout.device
    out = [Cell(layout) for layout in layouts]

    def work(op):
        try:
            values = function([fetch(cell) for cell in op.args])
        except Unavailable as unavailable:
            fail(op.out, unavailable.failure)
        except BaseException as error:
            fail(op.out, Failure(error))
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
