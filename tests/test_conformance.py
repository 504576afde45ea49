"""PyTorch's own conformance suites, run on a virtual GPU against the CPU.

`op_db`: every operator that runs on the CPU in float32, forward, all sample inputs.
`module_db`: every module, forward, backward and one step of SGD.
"""

import copy
import warnings

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import tree_flatten, tree_map_only

import d2lpar

INDEX = 1
SPARSE = "a virtual GPU has dense tensors only"
OP_EXCEPTIONS = {
    "sparse.sampled_addmm": SPARSE,
    "sparse.mm.reduce": SPARSE,
    "to_sparse": SPARSE,
}
MODULE_EXCEPTIONS = {}
UNINITIALISED = {
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
}
# On CUDA too these take their indices from the CPU.
INDICES_ON_CPU = {"tensor_split"}
# Another formula for the same value (a fused kernel on the CPU): relative, absolute.
TOLERANCE = {"nn.functional.scaled_dot_product_attention": (1e-4, 1e-4)}


CPU = torch.device("cpu")


def leaves(*values):
    return tree_flatten(values)[0]


def op_name(op):
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


def runs_on_cpu(op):
    return torch.float32 in op.supported_dtypes("cpu") and not op.name.startswith("jiterator")


OPS = [op for op in op_db if runs_on_cpu(op)]


def cases(items, name, exceptions):
    return [
        pytest.param(
            item,
            id=name(item),
            marks=pytest.mark.xfail(reason=exceptions[name(item)], strict=True)
            if name(item) in exceptions
            else (),
        )
        for item in items
    ]


@pytest.fixture(scope="module")
def device():
    return d2lpar.virtual_gpus(2)[INDEX]


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def move(value, device):
    """Return `value` with every tensor, and every mention of the CPU, on `device`."""
    value = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), value)
    return tree_map_only(
        (str, torch.device), lambda leaf: device if str(leaf) == "cpu" else leaf, value
    )


def assert_same(result, reference, device, values=True, **tolerance):
    got, wanted = tree_flatten(result)[0], tree_flatten(reference)[0]
    assert len(got) == len(wanted)
    for value, expected in zip(got, wanted, strict=True):
        if not isinstance(expected, torch.Tensor):
            assert value == expected or value != value
            continue
        assert value.device == device
        assert (value.shape, value.dtype) == (expected.shape, expected.dtype)
        if values:
            torch.testing.assert_close(value.cpu(), expected, equal_nan=True, **tolerance)


@pytest.mark.parametrize("op", cases(OPS, op_name, OP_EXCEPTIONS))
def test_operator_gives_what_it_gives_on_the_cpu(op, device):
    name = op_name(op)
    tolerance = {}
    if name in TOLERANCE:
        tolerance["rtol"], tolerance["atol"] = TOLERANCE[name]
    torch.manual_seed(0)
    ran = 0
    for sample in op.sample_inputs("cpu", torch.float32):
        args, kwargs = (sample.input, *sample.args), sample.kwargs
        cpu_args, cpu_kwargs = tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
        torch.manual_seed(1)
        try:
            reference = op.op(*cpu_args, **cpu_kwargs)
        except Exception:
            continue
        ran += 1
        if name in INDICES_ON_CPU:
            args = (args[0].to(device), *args[1:])
        else:
            args, kwargs = move((args, kwargs), device)
        torch.manual_seed(1)
        result = op.op(*args, **kwargs)
        torch.vgpu.synchronize(device)
        asked = any(
            leaf is device or isinstance(leaf, torch.Tensor) for leaf in leaves(args, kwargs)
        )
        where = device if asked else CPU
        assert_same(result, reference, where, name not in UNINITIALISED, **tolerance)
    assert ran, f"no sample of {name} runs on the CPU"


def module_name(info):
    return info.name


def train_step(net, args, kwargs):
    """Return the outputs of `net` and what one step of SGD on their sum makes of it."""
    torch.manual_seed(1)
    output = net(*args, **kwargs)
    tensors = [value for value in tree_flatten(output)[0] if isinstance(value, torch.Tensor)]
    loss = sum(value.float().sum() for value in tensors if value.requires_grad)
    if isinstance(loss, torch.Tensor):
        loss.backward()
    parameters = list(net.parameters())
    if parameters:
        torch.optim.SGD(parameters, lr=0.1).step()
    gradients = [parameter.grad for parameter in parameters]
    return output, parameters, [grad for grad in gradients if grad is not None]


@pytest.mark.parametrize("info", cases(module_db, module_name, MODULE_EXCEPTIONS))
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_module_trains_to_the_values_of_the_cpu(info, training, device):
    samples = info.module_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=True, training=training
    )
    ran = 0
    for sample in samples:
        if sample.forward_input is None:
            continue
        torch.manual_seed(0)
        made = sample.constructor_input
        reference = info.module_cls(*made.args, **made.kwargs).train(training)
        net = copy.deepcopy(reference)
        args, kwargs = sample.forward_input.args, sample.forward_input.kwargs
        cpu_args, cpu_kwargs = tree_map_only(
            torch.Tensor,
            lambda t: t.detach().clone().requires_grad_(t.requires_grad),
            (args, kwargs),
        )
        try:
            expected = train_step(reference, cpu_args, cpu_kwargs)
        except Exception:
            continue
        ran += 1
        args, kwargs = tree_map_only(
            torch.Tensor,
            lambda t: t.detach().to(device).requires_grad_(t.requires_grad),
            (args, kwargs),
        )
        got = train_step(net.to(device), args, kwargs)
        torch.vgpu.synchronize(device)
        assert_same(got, expected, device, rtol=1e-4, atol=1e-5)
    if not ran:
        pytest.skip(f"no sample of {info.name} trains on the CPU in float32")


def test_exceptions_stay_under_two_percent():
    assert len(OP_EXCEPTIONS) < 0.02 * len(OPS)
    assert len(MODULE_EXCEPTIONS) < 0.02 * len(module_db)
    assert set(OP_EXCEPTIONS) <= {op_name(op) for op in OPS}
