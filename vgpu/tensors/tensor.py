"""VirtualTensor: a tensor on a virtual GPU.

Modules that import this one define how it dispatches operators, is pickled and stored: `register`
(backend.py) turns their functions into methods.
"""

import functools
import warnings
from copy import deepcopy
from traceback import walk_tb

import torch
from torch import nn

from vgpu.private.tensors import (
    dispatch_keys,
    dlpack_device,
    extra_attributes,
    is_parameter,
    make_wrapper,
    no_dispatch,
    no_torch_function,
    no_torch_function_at_all,
    set_conj,
    set_neg,
    tensor_string,
)
from vgpu.runtime import registry
from vgpu.runtime.interrupts import one_step
from vgpu.runtime.scheduler import check_not_forked, wait
from vgpu.tensors.cells import (
    CPU,
    META,
    NO_VALUES,
    Cell,
    TensorLayout,
    is_known,
    may_have_values,
    strided,
    with_bits,
)


class VirtualTensor(torch.Tensor):
    """A tensor on a virtual GPU: in user code a `torch.Tensor` whose device is `vgpu:i`.

    `_cell` holds its values and their layout, `_block` its memory.
    """

    __torch_function__ = no_torch_function

    def __new__(cls, *args, **kwargs):
        """Return the result of `type(p)(...)` on CUDA: with a tensor nn.Parameter, else a Tensor.

        Virtual GPUs have one class for both. On CUDA `torch.Tensor` rejects tensors on a GPU, so a
        call with a tensor can only mean nn.Parameter.
        """
        of_parameter = kwargs.keys() & {"data", "requires_grad"}
        if of_parameter or (args and isinstance(args[0], torch.Tensor)):
            return nn.Parameter(*args, **kwargs)
        return torch.Tensor(*args, **kwargs)

    @property
    def device(self):
        """The device, with the device type of programs: `vgpu:0` or `cuda:0`."""
        return self._cell.layout.device.torch_device

    @property
    def is_cuda(self):
        return registry.device_type == "cuda"

    def to(self, *args, **kwargs):
        if registry.device_type == "cuda":  # another device type in torch's C++ code
            if "device" in kwargs:
                kwargs["device"] = with_own_type(kwargs["device"])
            elif args:
                args = with_own_type(args[0]), *args[1:]
        return super().to(*args, **kwargs)

    def record_stream(self, stream):
        """Hold the memory of this tensor for a `torch.vgpu.Stream` that uses it.

        Once the tensor is deleted, its memory is freed when the stream has finished the work issued
        before.
        """
        self._cell.layout.device.memory.record_stream(self._block, stream._stream)

    def data_ptr(self):
        """Return the address of the first element, in the device's address range."""
        layout = self._cell.layout
        if not layout.num_bytes or not self._block.address:
            return 0
        return self._block.address + layout.offset * layout.dtype.itemsize

    def set_(self, source=None, *layout, **kwargs):
        if type(source) is VirtualTensor and (layout or kwargs):
            source = source.untyped_storage()  # C++ code would lose the values
        return super().set_(*(() if source is None else (source, *layout)), **kwargs)

    def __dlpack_device__(self):
        return dlpack_device(self.device)

    def __bool__(self):
        return super().__bool__() if has_values(self) else refuse_without_values("bool")

    def __int__(self):
        return super().__int__() if has_values(self) else refuse_without_values("int")

    def __index__(self):
        return super().__index__() if has_values(self) else refuse_without_values("index")

    def __format__(self, spec):
        is_number = self.dim() == 0 and not is_parameter(self)
        return format(self.item(), spec) if is_number else object.__format__(self, spec)

    def tolist(self):
        return self.detach().cpu().tolist()

    def numpy(self, *, force=False):
        if not force:
            raise TypeError(
                f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to "
                "copy the tensor to host memory first."
            )
        return self.cpu().numpy(force=True)

    def pin_memory(self, device=None):
        raise RuntimeError(f"cannot pin '{self.type()}' only dense CPU tensors can be pinned")

    def new_tensor(self, data, *, dtype=None, device=None, **more):
        return torch.tensor(data, dtype=dtype or self.dtype, device=device or self.device, **more)

    def __repr__(self, *, tensor_contents=None):
        if tensor_contents is None:
            tensor_contents = tensor_string(self.detach().cpu())
        text = super().__repr__(tensor_contents=tensor_contents).replace("Tensor(", "tensor(", 1)
        if is_parameter(self):
            text = "Parameter containing:\n" + text.removeprefix("Parameter(").removesuffix(")")
        return text

    def __copy__(self):
        copy = self.detach()
        if is_parameter(self):
            copy = nn.Parameter(copy, self.requires_grad)
        copy.__dict__.update(extra_attributes(self))
        return copy.requires_grad_(self.requires_grad)

    def __deepcopy__(self, memo):
        if not self.is_leaf:
            return super().__deepcopy__(memo)  # raises torch's own error
        if is_parameter(self):
            return nn.Parameter.__deepcopy__(self, memo)
        layout = self.storage_offset(), self.shape, self.stride()
        copy = self.new_empty(0).set_(deepcopy(self.untyped_storage(), memo), *layout)
        with torch.no_grad():
            copy = copy.conj_physical() if self.is_conj() else copy
            copy = copy.neg() if self.is_neg() else copy
        copy.__dict__.update(deepcopy(extra_attributes(self), memo))
        copy.requires_grad_(self.requires_grad)
        if self.grad is not None:
            copy.grad = deepcopy(self.grad, memo)
        return copy


VirtualTensor.__name__ = "Tensor"  # as torch's errors name it


def with_own_type(device):
    """Return a virtual GPU with the type "vgpu", as in torch's C++ code, and its index.

    Anything but a device or its name is returned unchanged.
    """
    if isinstance(device, (str, torch.device)):
        where = torch.device(device)
        if registry.is_virtual(where):
            return registry.find(where).own_torch_device
    return device


def has_values(tensor):
    """Return whether a tensor has values; on devices without values, wait for its last writer."""
    cell = tensor._cell
    device = cell.layout.device
    if device.has_values:
        return True
    writer = cell.root().writer
    if writer is not None:
        wait(writer, device.torch_device)
    return is_known(cell)


def refuse_without_values(what):
    """Raise RuntimeError: the operator `what` needs values that are not computed."""
    raise RuntimeError(
        f"{what} needs the values of a tensor, but without values only small tensors computed from "
        "small ones have any: omit --no-values, or call virtual_gpus(..., values=True)"
    )


def _refusing(what, cure):
    def refuse(func, *args, **kwargs):
        raise RuntimeError(f"{func} requires {what}, which virtual GPUs do not support: {cure}")

    return refuse


REFUSALS = {  # kind of tensors -> function(operator, *its arguments) that raises an error
    "NestedTensor": _refusing(
        "nested tensors of the strided layout",
        "use layout=torch.jagged. For attention, which requires them on jagged tensors, too, use "
        "x.to_padded_tensor(0.0) and a mask",
    ),
    "Quantized": _refusing(
        "quantized tensors",
        "keep them on the CPU, or round to their values by torch.fake_quantize_per_tensor_affine",
    ),
}


original_set_data = torch.Tensor.data.__set__  # of torch; `set_data` replaces it


def set_data(tensor, new):
    """Set `tensor.data`; either tensor, or both, may be on a virtual GPU."""
    if isinstance(tensor, VirtualTensor) and isinstance(new, VirtualTensor):
        become(tensor, new)
    elif can_become(tensor, new):
        _change_device(tensor, new)
    else:
        original_set_data(tensor, new)


def can_become(tensor, new):
    """Return whether setting `data` can move a tensor between the CPU and a virtual GPU."""
    if isinstance(tensor, VirtualTensor):
        return _is_dense_on_cpu(new)
    return isinstance(new, VirtualTensor) and _is_dense_on_cpu(tensor)


def _is_dense_on_cpu(tensor):
    return (
        isinstance(tensor, torch.Tensor)
        and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.is_quantized
    )


@functools.cache
def _warn_of_class(cls):
    """Warn once about methods lost on a virtual GPU, for tensor classes outside torch."""
    if cls.__module__.partition(".")[0] != "torch":
        kind = nn.Parameter if issubclass(cls, nn.Parameter) else torch.Tensor
        warnings.warn(
            f"a {cls.__qualname__} that moves to a virtual GPU becomes a plain {kind.__name__}, "
            "without the methods of its class; its attributes are kept",
            stacklevel=4,
        )


def _change_device(tensor, new):
    """Move a tensor in place to the kind of device of `new`, with its contents, or raise unchanged.

    As on CUDA the object, weak references, attributes, hooks and the gradient are kept; existing
    graphs keep their gradient accumulator.
    """
    keys, of_new = dispatch_keys(tensor), dispatch_keys(new).value
    before = keys.value, tensor.__class__, tensor.__dict__
    attributes = extra_attributes(tensor)
    if isinstance(new, VirtualTensor):
        _warn_of_class(tensor.__class__)
        kind = new.__class__
        attributes |= {"_cell": new._cell, "_block": new._block}
        if isinstance(tensor, nn.Parameter):
            attributes["_is_param"] = True
    else:
        kind = nn.Parameter if attributes.pop("_is_param", False) else torch.Tensor
    try:
        with no_dispatch(), no_torch_function_at_all():
            _set_all(tensor, keys, of_new, kind, attributes, new)
    except Exception as error:
        if _is_refused(error):
            keys.value, tensor.__class__, tensor.__dict__ = before
        raise


def become(tensor, new):
    """Replace a tensor's contents in place, as for `t_`, `resize_`, `out=` and `.data =`.

    After an interrupt or an error of torch, either all of it is done or nothing.
    """
    cell, block = tensor._cell, tensor._block
    try:
        _set_bits(tensor, cell.layout, new._cell.layout)
        with no_dispatch(), no_torch_function_at_all():
            _set_contents(tensor, new)
    except BaseException as error:
        if _is_refused(error) or tensor._cell is cell:  # the step has not begun
            _set_bits(tensor, new._cell.layout, cell.layout)
            tensor._cell, tensor._block = cell, block
        raise


@one_step
def _set_all(tensor, keys, of_new, kind, attributes, new):
    keys.value = of_new
    tensor.__class__ = kind
    tensor.__dict__ = attributes
    original_set_data(tensor, new)


@one_step
def _set_contents(tensor, new):
    tensor._cell = new._cell
    tensor._block = new._block
    original_set_data(tensor, new)


def _is_refused(error):
    """Return whether an exception caught around a step was raised by torch, in `original_set_data`.

    One of a signal handler, which may come once all is done, has the handler's frame; except
    KeyboardInterrupt, whose handler is in C.
    """
    last = [frame.f_code for frame, _ in walk_tb(error.__traceback__)][-1]
    return isinstance(error, Exception) and last in (_set_all.__code__, _set_contents.__code__)


def _set_bits(tensor, before, after):
    if before.conj != after.conj or before.neg != after.neg:
        set_conj(tensor, after.conj)
        set_neg(tensor, after.neg)


def wrap(cell, block=None):
    """Return a tensor with the values of a cell, in `block`, or in a new one if there is memory."""
    layout = cell.layout
    if block is None:
        block = layout.device.memory.allocate(layout.num_bytes)
    tensor = make_wrapper(
        VirtualTensor,
        layout.size,
        layout.stride,
        layout.offset,
        None,
        layout.dtype,
        torch.strided,
        layout.device.own_torch_device,
    )
    tensor._cell = cell
    tensor._block = block
    if layout.conj or layout.neg:
        with_bits(tensor, layout)
    return tensor


def new_tensor(layout):
    """Return a new, uninitialised tensor; OutOfMemoryError without enough memory.

    On devices without values, small tensors are zero: so indices that are never computed are valid,
    and every run is the same.
    """
    check_not_forked()
    tensor = wrap(Cell(layout))
    tensor._cell.data = layout.empty(CPU) if may_have_values(layout) else NO_VALUES
    if not layout.device.has_values and tensor._cell.data is not NO_VALUES:
        tensor._cell.data.zero_()
    return tensor


def copy_to_device(tensor, device):
    """Return a copy of a CPU tensor on a `Device`; the host waits for the copy."""
    target = new_tensor(TensorLayout.of(device, torch.empty_like(tensor, device=META)))
    torch.ops.aten.copy_.default(target, tensor)
    return target


def view_as(tensor, layout):
    return wrap(strided(tensor._cell, layout), tensor._block)


def on_virtual_gpu(value):
    """Return whether a tensor, or any tensor in a nested sequence, is on a virtual GPU."""
    if isinstance(value, torch.Tensor):
        return type(value) is VirtualTensor
    return any(on_virtual_gpu(item) for item in value)
