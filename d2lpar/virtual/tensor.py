"""VirtualTensor: a tensor on a virtual GPU, and how an operator on it is issued.

Issuing an operator works out the shape of its result (once for each combination of operator,
input shapes and arguments: a `Plan`), makes an empty tensor of that shape and queues the operator;
the device's engine fills in the values later. A view is no work at all: it is another description
of the same memory, on a CUDA GPU and here.
"""

import torch
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from .engine import Failure, Op, wait

aten = torch.ops.aten
CPU = torch.device("cpu")
META = torch.device("meta")
_make_wrapper = torch.Tensor._make_wrapper_subclass


class Cell:
    """The values of a tensor: `data`, a CPU tensor, once they are computed.

    The cell of a view has a `parent` and a function that makes its data from the parent's.
    """

    __slots__ = ("data", "parent", "view")

    def __init__(self, data=None, parent=None, view=None):
        self.data = data
        self.parent = parent
        self.view = view


class Meta:
    """Device, dtype and layout of a tensor; one object for each combination, so `is` compares."""

    __slots__ = ("device", "dtype", "size", "stride", "offset", "num_bytes")
    _known = {}

    @classmethod
    def of(cls, device, tensor):
        """Return the Meta of `tensor` (a CPU or meta tensor) as a tensor of `device`."""
        return cls._get(
            device, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        )

    @classmethod
    def contiguous(cls, device, dtype, size, offset=0):
        """Return the Meta of a contiguous tensor that begins at element `offset` of its memory."""
        strides = [1]
        for length in reversed(size[1:]):
            strides.append(strides[-1] * max(length, 1))
        return cls._get(device, dtype, tuple(size), tuple(strides[::-1])[: len(size)], offset)

    @classmethod
    def _get(cls, *key):
        meta = cls._known.get(key)
        if meta is None:
            meta = cls()
            meta.device, meta.dtype, meta.size, meta.stride, meta.offset = key
            elements = 0
            if 0 not in meta.size:
                elements = 1 + meta.offset
                elements += sum((n - 1) * s for n, s in zip(meta.size, meta.stride, strict=True))
            meta.num_bytes = elements * meta.dtype.itemsize
            meta = cls._known.setdefault(key, meta)
        return meta

    def empty(self, device):
        """Return an empty tensor of this layout on a torch device (CPU or meta)."""
        if self.offset:
            base = torch.empty(
                self.num_bytes // self.dtype.itemsize, dtype=self.dtype, device=device
            )
            return base.as_strided(self.size, self.stride, self.offset)
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=device)


class VirtualTensor(torch.Tensor):
    """A tensor on a virtual GPU. User code sees a `torch.Tensor` whose device is `vgpu:i`."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        info = _infos.get(func._op) or info_of(func)
        if info.special is not None:
            return info.special(func, args, kwargs or {})
        if info.nested or kwargs:
            return Call(info, args, kwargs or {}).issue()
        key = [info]
        values = []
        tensors = []
        for arg in args:
            kind = type(arg)
            if kind is VirtualTensor:
                key.append(arg._meta)
                values.append(arg._cell)
                tensors.append(arg)
                continue
            values.append(arg)
            if kind is list:
                key.append(tuple(arg))
            elif kind is float:
                key.append(arg if info.keyed_by_value else float)
            elif kind is bool:
                key.append("yes" if arg else "no")
            elif kind is int or arg is None:
                key.append(arg)
            else:
                return Call(info, args, {}).issue()
        plan = _plans.get(tuple(key))
        if plan is None:
            return Call(info, args, {}).issue()
        return plan.issue(tensors, values, None)

    @property
    def data(self):
        return _get_data(self)

    @data.setter
    def data(self, new):
        if type(new) is not VirtualTensor:
            raise RuntimeError(
                f"cannot set the data of a tensor on {self.device} to a tensor on "
                f"{getattr(new, 'device', type(new).__name__)}"
            )
        _set_data(self, new)
        self._meta, self._cell, self._block = new._meta, new._cell, new._block

    def record_stream(self, stream):
        """Keep the memory accounted until `stream` has got as far as it is when this is freed."""
        self._block.record_stream(stream._stream)

    def __format__(self, format_spec):
        return format(self.item() if self.dim() == 0 else repr(self), format_spec)

    def tolist(self):
        return self.detach().cpu().tolist()

    def numpy(self, *, force=False):
        if not force:
            raise TypeError(
                f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to "
                "copy the tensor to host memory first."
            )
        return self.cpu().numpy(force=True)

    def new_tensor(self, data, *, dtype=None, device=None, requires_grad=False):
        dtype, device = dtype or self.dtype, device or self.device
        return torch.tensor(data, dtype=dtype, device=device, requires_grad=requires_grad)

    def __repr__(self, *, tensor_contents=None):
        if tensor_contents is None:
            tensor_contents = torch._tensor_str._tensor_str(self.detach().cpu(), len("tensor("))
        text = super().__repr__(tensor_contents=tensor_contents)
        text = text.replace("VirtualTensor(", "tensor(", 1)
        if getattr(self, "_is_param", False):
            text = "Parameter containing:\n" + text.removeprefix("Parameter(").removesuffix(")")
        return text

    def __deepcopy__(self, memo):
        if not self.is_leaf:
            return super().__deepcopy__(memo)  # raises torch's own error
        if id(self) in memo:
            return memo[id(self)]
        with torch.no_grad():
            copy = self.clone()
        extra = {k: v for k, v in self.__dict__.items() if k not in ("_meta", "_cell", "_block")}
        copy.__dict__.update(extra)
        copy.requires_grad_(self.requires_grad)
        if self.grad is not None:
            copy.grad = self.grad.__deepcopy__(memo)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol):
        from .saving import reduce

        return reduce(self)


_get_data = torch.Tensor.data.__get__
_set_data = torch.Tensor.data.__set__


def wrap(meta, cell, block):
    """Return a tensor of layout `meta` whose values are in `cell` and whose memory is `block`."""
    tensor = _make_wrapper(
        VirtualTensor,
        meta.size,
        meta.stride,
        meta.offset,
        None,
        meta.dtype,
        device=meta.device.torch_device,
    )
    tensor._meta = meta
    tensor._cell = cell
    tensor._block = block
    return tensor


def new_tensor(device, like):
    """Return a new, uninitialised tensor on `device` with the layout of `like` (CPU or meta)."""
    meta = Meta.of(device, like)
    block = device.allocate(meta.num_bytes)
    return wrap(meta, Cell(meta.empty(CPU)), block)


def _become(tensor, meta, cell, block):
    """Change the layout and the values of `tensor` in place (`t_`, `resize_`, `out=`)."""
    tensor.data = wrap(meta, cell, block)


# -- what an operator reads: cells, resolved by the engine that runs it


class Unavailable(Exception):
    """A tensor that an op wants to read has no values: its kernel failed."""

    def __init__(self, failure):
        self.failure = failure
        error = failure.error
        super().__init__(f"reads a tensor whose kernel failed: {type(error).__name__}: {error}")


def fetch(cell):
    """Return the CPU tensor with the values of `cell`, for an op that runs now."""
    data = cell.data
    if data is None:
        if cell.parent is None:
            raise RuntimeError(
                "a tensor was read before the stream that computes it got so far: let the reading "
                "stream wait (wait_stream, wait_event). CUDA would go on with whatever lies in "
                "that memory"
            )
        data = cell.data = cell.view(fetch(cell.parent))
    elif type(data) is Failure:
        raise Unavailable(data)
    return data


def _fetch_nested(value):
    if type(value) is Cell:
        return fetch(value)
    if type(value) is list:
        return [_fetch_nested(item) for item in value]
    return value


# -- operators


class Info:
    """What is known of an operator from its schema and from the tables in `operators.py`."""

    __slots__ = (
        "func",
        "name",
        "special",
        "nested",
        "keyed_by_value",
        "written",
        "only_layout",
        "random",
        "run",
        "allocates",
        "waits",
        "cpu_arguments",
    )

    def __init__(self, func):
        schema = func._schema
        packet = schema.name.split("::")[1]
        self.func = func
        self.name = str(func).rpartition(".")[0]
        self.special = tables.special.get(func)
        if self.special is None and _is_composite(func):
            self.special = _decompose
        self.nested = any(
            "Tensor" in str(a.type) and "List" in str(a.type) for a in schema.arguments
        )
        self.keyed_by_value = packet in tables.keyed_by_value
        self.written = [
            (position, argument.name)
            for position, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        self.only_layout = torch.Tag.inplace_view in func.tags
        self.random = func in tables.random or any(a.name == "generator" for a in schema.arguments)
        self.run = tables.run.get(func, func._op)
        self.allocates = packet in tables.allocating
        self.waits = packet in tables.waiting
        self.cpu_arguments = tables.cpu_arguments.get(packet)


def _is_composite(func):
    """Return whether `func` consists of others: where autograd is off (`torch.inference_mode`, an
    operator that calls another) such ones arrive here whole."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _decompose(func, args, kwargs):
    return func.decompose(*args, **kwargs)


class tables:  # noqa: N801
    """What the schema of an operator does not say. `operators.py` fills these in."""

    special = {}  # operator -> function(func, args, kwargs) that issues it
    run = {}  # operator -> function of CPU tensors that computes it instead
    random = set()  # operators without a generator argument whose function in `run` takes one
    shape = {}  # operator -> function that gives empty results of the right layout on `meta`
    keyed_by_value = set()  # names: the value of a float decides the shape of the result
    allocating = set()  # names: the result's values do not matter
    waiting = set()  # names: the shape of the result, or the result, depends on values
    same_dtype = set()  # names: `meta` takes floats of two dtypes, the CPU does not
    cpu_arguments = {}  # name -> "move" or "keep": what to do with a tensor of the CPU
    bit_views = set()  # operators: views that differ by more than their layout


_infos = {}  # by the operator's C++ function: an OpOverload's own hash is slow


def info_of(func):
    """Return what is known of an operator."""
    info = _infos.get(func._op)
    if info is None:
        info = _infos[func._op] = Info(func)
    return info


_plans = {}
_unplanned = set()  # keys whose results' shapes depend on values
MAX_PLANS = 50_000


class Plan:
    """How to issue an operator for one combination of input layouts and arguments."""

    __slots__ = (
        "info",
        "device",
        "outputs",
        "spec",
        "single",
        "only_views",
        "changes",
        "fixes",
    )

    def __init__(self, info, device, outputs, spec, changes):
        self.info = info
        self.device = device
        self.outputs = outputs
        self.spec = spec
        self.changes = changes
        self.fixes = None
        self.single = outputs[0] if spec is None else None
        self.only_views = outputs and not info.written and all(o[0] == VIEW for o in outputs)

    def issue(self, tensors, values, kwargs):
        """Queue the operator on the current stream; return its (still empty) results.

        `tensors` are the tensors among the arguments, in order; `values` the arguments with cells
        in place of tensors.
        """
        info = self.info
        device = self.device
        if self.changes:
            for source, meta in self.changes:
                old, new = _change(tensors[source], meta)
                values = _replace(values, old, new)
                kwargs = kwargs and {k: _replace(v, old, new) for k, v in kwargs.items()}
            if info.only_layout:
                return tensors[0]
        single = self.single
        if single is not None:
            mode, meta, source = single
            if mode == NEW:
                block = device.allocate(meta.num_bytes)
                if info.allocates:
                    return wrap(meta, Cell(meta.empty(CPU)), block)
                cells = Cell()
                result = wrap(meta, cells, block)
            elif mode == VIEW:
                return _view(tensors[source], meta, info, values, kwargs)
            else:
                result = tensors[source] if mode == SAME else source
                cells = None
                if mode == CONSTANT and not info.written:
                    return result
        else:
            cells = []
            results = []
            for mode, meta, source in self.outputs:
                cell = None
                if mode == NEW:
                    cell = Cell()
                    results.append(wrap(meta, cell, device.allocate(meta.num_bytes)))
                elif mode == VIEW:
                    results.append(_view(tensors[source], meta, info, None, None))
                else:
                    results.append(tensors[source] if mode == SAME else source)
                cells.append(cell)
            result = tree_unflatten(results, self.spec)
            if self.only_views:
                return result
        stream = device.current_stream()
        op = Op(info.name, "kernel", stream, device.compute, _run, values, kwargs, self, cells)
        if info.random:
            op.kwargs = {**(kwargs or {}), "generator": device.generator}
            stream.issue(op, (device.last_random,))
            device.last_random = op
        else:
            stream.issue(op)
        return result

    def store(self, out, result):
        """Put what the operator returned into the cells of its results."""
        if type(out) is Cell:
            pairs = ((out, result, self.single[1]),)
        else:
            flat = tree_flatten(result)[0] if self.spec is not None else (result,)
            pairs = [
                (cell, value, output[1])
                for cell, value, output in zip(out, flat, self.outputs, strict=True)
                if cell is not None
            ]
        if self.fixes is None:
            self.fixes = any(not _same_layout(value, meta) for _, value, meta in pairs)
        for cell, value, meta in pairs:
            if self.fixes and not _same_layout(value, meta):
                if tuple(value.shape) != meta.size or value.dtype != meta.dtype:
                    raise RuntimeError(
                        f"{self.info.name} gave {value.dtype} of shape {tuple(value.shape)} where "
                        f"{meta.dtype} of shape {meta.size} was foreseen"
                    )
                value = meta.empty(CPU).copy_(value)
            cell.data = value


NEW, VIEW, SAME, CONSTANT = range(4)


def _same_layout(tensor, meta):
    if tensor.storage_offset() != meta.offset or tensor.dtype != meta.dtype:
        return False
    if tensor.stride() == meta.stride and tuple(tensor.shape) == meta.size:
        return True
    if tuple(tensor.shape) != meta.size:
        return False
    return all(
        n <= 1 or a == b for n, a, b in zip(meta.size, tensor.stride(), meta.stride, strict=True)
    )


def _run(op):
    plan = op.plan
    cells = op.out
    try:
        if plan.info.nested:
            args = [_fetch_nested(value) for value in op.args]
        else:
            args = [fetch(value) if type(value) is Cell else value for value in op.args]
        kwargs = op.kwargs
        if kwargs:
            kwargs = {name: _fetch_nested(value) for name, value in kwargs.items()}
            result = plan.info.run(*args, **kwargs)
        else:
            result = plan.info.run(*args)
        if type(cells) is Cell and plan.fixes is False:
            cells.data = result
        elif cells is not None:
            plan.store(cells, result)
    except Unavailable as unavailable:
        _fail(cells, unavailable.failure)
    except BaseException as error:
        _fail(cells, Failure(error))
        raise


def _fail(cells, failure):
    for cell in (cells,) if type(cells) is Cell else cells or ():
        if cell is not None:
            cell.data = failure


def _view(tensor, meta, info, values, kwargs):
    """Return a view of `tensor` with layout `meta`: no work, another description of its memory."""
    if info.func in tables.bit_views or meta.dtype != tensor._meta.dtype:
        run, (_, *rest), kwargs = info.func, values, kwargs or {}
        cell = Cell(None, tensor._cell, lambda data: run(data, *rest, **kwargs))
    elif meta is tensor._meta:
        cell = tensor._cell
    else:
        cell = _strided(tensor._cell, meta)
    return wrap(meta, cell, tensor._block)


def _strided(cell, meta):
    size, stride, offset = meta.size, meta.stride, meta.offset
    return Cell(None, cell, lambda data: torch.as_strided(data, size, stride, offset))


# -- the general path: lists of tensors, keyword arguments, tensors of the CPU, new plans


class Call:
    """One call of an operator, with its arguments taken apart."""

    def __init__(self, info, args, kwargs, device=None):
        self.device = device or _device_of((args, kwargs))
        if info.cpu_arguments == "move":
            args = [_indices_on(self.device, arg) if type(arg) is list else arg for arg in args]
        self.info = info
        self.args = args
        self.kwargs = kwargs
        self.tensors = []
        self.key = [info, device]
        if device is None:
            del self.key[1]
        self.values = [self._take(arg) for arg in args]
        self.kwvalues = {}
        for name, value in kwargs.items():
            self.key.append(name)
            self.kwvalues[name] = self._take(value)
        for position, name in info.written:
            value = args[position] if position < len(args) else kwargs.get(name)
            for tensor in value if type(value) is list else (value,):
                if isinstance(tensor, torch.Tensor) and type(tensor) is not VirtualTensor:
                    raise two_devices(self.device.torch_device, tensor.device)

    def _take(self, value):
        """Add `value` to the key; return it as the engine shall see it."""
        key = self.key
        kind = type(value)
        if kind is VirtualTensor:
            self.tensors.append(value)
            key.append(value._meta)
            return value._cell
        if kind is list or kind is tuple:
            if self.info.nested:
                key.append(len(value))
                return [self._take(item) for item in value]
            key.append(tuple(value))
        elif kind is float:
            key.append(value if self.info.keyed_by_value else float)
        elif kind is bool:
            key.append("yes" if value else "no")
        elif kind is torch.device:
            key.append(value)
            return CPU
        elif kind is complex:
            key.append((complex, value))
        elif isinstance(value, torch.Tensor):
            return self._take_cpu_tensor(value)
        else:
            key.append(value)
        return value

    def _take_cpu_tensor(self, value):
        if value.device.type != "cpu" or (value.dim() and self.info.cpu_arguments != "keep"):
            raise two_devices(self.device.torch_device, value.device)
        self.key.append((value.dtype, tuple(value.shape), "cpu"))
        return value.clone()

    def issue(self):
        info = self.info
        if info.waits:
            return self.run_now()
        key = tuple(self.key)
        plan = _plans.get(key)
        if plan is None:
            plan = None if key in _unplanned else self._plan(key)
            if plan is None:
                return self.run_now()
            if len(_plans) >= MAX_PLANS:
                _plans.clear()
            _plans[key] = plan
        return plan.issue(self.tensors, self.values, self.kwvalues)

    def _plan(self, key):
        """Work out the results' layouts on meta tensors; None where only running it can tell."""
        metas = []

        def substitute(value):
            if type(value) is VirtualTensor:
                metas.append(value._meta.empty(META))
                return metas[-1]
            if type(value) is list or type(value) is tuple:
                return [substitute(item) for item in value]
            return META if type(value) is torch.device else value

        args = [substitute(value) for value in self.args]
        kwargs = {name: substitute(value) for name, value in self.kwargs.items()}
        if self.info.name.rpartition(".")[2] in tables.same_dtype:
            if len({meta.dtype for meta in metas if meta.is_floating_point()}) > 1:
                return None
        try:
            result = tables.shape.get(self.info.func, self.info.func)(*args, **kwargs)
        except NotImplementedError:
            if len(_unplanned) >= MAX_PLANS:
                _unplanned.clear()
            _unplanned.add(key)
            return None
        except Exception:
            return None  # the operator itself shall say what is wrong
        flat, spec = (result,), None
        if isinstance(result, (list, tuple)):
            flat, spec = tree_flatten(result)
        storages = {_storage(meta): position for position, meta in reversed([*enumerate(metas)])}
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
            source = storages.get(_storage(value))
            mode = NEW if source is None else VIEW
            outputs.append((mode, Meta.of(self.device, value), source))
        changes = []
        if self.info.written:
            for source, (tensor, meta) in enumerate(zip(self.tensors, metas, strict=True)):
                after = Meta.of(self.device, meta)
                if after is not tensor._meta:
                    changes.append((source, after))
        return Plan(self.info, self.device, outputs, spec, changes)

    def run_now(self):
        """Run the operator on the current stream and wait for it; errors are raised at once."""
        box = []
        info, tensors = self.info, self.tensors

        def work(op):
            try:
                args = [_fetch_nested(value) for value in op.args]
                kwargs = {name: _fetch_nested(value) for name, value in op.kwargs.items()}
                inputs = [fetch(tensor._cell) for tensor in tensors]
                box.extend((info.run(*args, **kwargs), inputs))
            except BaseException as error:
                op.error = error

        stream = self.device.current_stream()
        op = Op(info.name, "kernel", stream, self.device.compute, work, self.values, self.kwvalues)
        if info.random:
            op.kwargs = {**self.kwvalues, "generator": self.device.generator}
            stream.issue(op, (self.device.last_random,))
            self.device.last_random = op
        else:
            stream.issue(op)
        wait(op, self.device.torch_device)
        raise_now(op, self.device)
        result, inputs = box
        for tensor, data in zip(tensors, inputs, strict=True):
            meta = Meta.of(self.device, data)
            if meta is not tensor._meta:
                if meta.num_bytes > tensor._block.num_bytes:
                    tensor._block = self.device.allocate(meta.num_bytes)
                _become(tensor, meta, Cell(data), tensor._block)
        return tree_map_only(torch.Tensor, lambda value: self._wrap(value, inputs), result)

    def _wrap(self, value, inputs):
        for tensor, data in zip(self.tensors, inputs, strict=True):
            if value is data:
                return tensor
        meta = Meta.of(self.device, value)
        for tensor, data in zip(self.tensors, inputs, strict=True):
            if _storage(value) == _storage(data):
                return wrap(meta, Cell(value), tensor._block)
        return wrap(meta, Cell(value), self.device.allocate(meta.num_bytes))


def _indices_on(device, indices):
    return [
        copy_to_device(index, device)
        if isinstance(index, torch.Tensor) and index.device == CPU
        else index
        for index in indices
    ]


def _storage(tensor):
    return tensor.untyped_storage()._cdata


def _change(tensor, meta):
    """Give a tensor that an operator resizes or re-strides its new layout.

    Returns the cell that it had and the one that it has now.
    """
    old, block = tensor._cell, tensor._block
    if meta.num_bytes > block.num_bytes:
        block, cell = meta.device.allocate(meta.num_bytes), Cell(meta.empty(CPU))
    else:
        cell = _strided(old, meta)
    _become(tensor, meta, cell, block)
    return old, cell


def _replace(value, old, new):
    if type(value) is list:
        return [_replace(item, old, new) for item in value]
    return new if value is old else value


def _device_of(arguments, device=None):
    """Return the device of the tensors in `arguments`; raises RuntimeError for two devices."""
    if type(arguments) is VirtualTensor:
        found = arguments._meta.device
        if device is not None and device is not found:
            raise two_devices(device.torch_device, found.torch_device)
        return found
    if isinstance(arguments, dict):
        arguments = arguments.values()
    elif not isinstance(arguments, (list, tuple)):
        return device
    for argument in arguments:
        device = _device_of(argument, device)
    return device


def two_devices(first, second):
    """Return the error that CUDA raises for operands on two devices."""
    return RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"{first} and {second}!"
    )


def raise_now(op, device):
    """After waiting for `op`: raise what went wrong on its device before it, or in it."""
    error = op.error
    if error is not None:
        device.forget(op)
    if isinstance(error, Unavailable):
        device.raise_error()
        raise torch.AcceleratorError(f"vgpu error: {op.name} {error}") from error.failure.error
    if error is not None:
        raise error
    device.raise_error()


def issue_kernel(name, function, inputs, metas):
    """Queue `function` on the current stream of the inputs' device as one kernel.

    `function` takes the list of the inputs' values and returns tensors of the layouts `metas`;
    returned are new tensors that will hold them.
    """
    device = inputs[0]._meta.device
    cells = [tensor._cell for tensor in inputs]
    out = [Cell() for _ in metas]
    results = [
        wrap(meta, cell, device.allocate(meta.num_bytes))
        for meta, cell in zip(metas, out, strict=True)
    ]

    def work(op):
        try:
            values = function([fetch(cell) for cell in cells])
        except Unavailable as unavailable:
            _fail(out, unavailable.failure)
        except BaseException as error:
            _fail(out, Failure(error))
            raise
        else:
            for cell, value in zip(out, values, strict=True):
                cell.data = value

    stream = device.current_stream()
    stream.issue(Op(name, "kernel", stream, device.compute, work))
    return results


def view_as(tensor, meta):
    """Return a view of the memory of `tensor` with the layout `meta`."""
    return wrap(meta, _strided(tensor._cell, meta), tensor._block)


def run_copy(op):
    """Work of a copy: the first cell or CPU tensor receives the values of the second.

    A new tensor (`op.out`) whose source failed has failed too.
    """
    try:
        target, source = (fetch(value) if type(value) is Cell else value for value in op.args)
    except Unavailable as unavailable:
        if op.out is None:
            raise
        op.out.data = unavailable.failure
    else:
        target.copy_(source)


def copy_to_device(tensor, device):
    """Return a copy of a CPU tensor on `device`, issued to its current stream; waits for it."""
    target = new_tensor(device, torch.empty_like(tensor, device=META))
    aten.copy_.default(target, tensor)
    return target
