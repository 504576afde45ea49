"""PyTorch's own conformance suites, run on a virtual GPU against the CPU; no other test reads them.

`op_db`: every operator that runs on the CPU in float32: its results, and where it has gradients
those of every input that has one, for random gradients of its outputs. Of some operators torch
makes fewer samples that ask for gradients than that do not
(`nn.functional.multi_head_attention_forward`: 1 of 192); then both kinds run. Not in here: what
`op_db` has besides for in-place and `out=` variants.
Each also runs with wrong values, with torch's erroneous inputs and with integers: see
`test_checks.py` and `test_refused_at_the_call.py`.
`module_db`: every module, forward, backward and one step of SGD; in training and in evaluation
where that makes a difference.
Where torch makes more than `FEW` samples, which are then all combinations of some arguments (1,440
of `max_pool2d`), every argument comes with every value, and with every value of each other one that
it ever comes with: the samples that bring nothing new in this sense are left out.
"""

import copy
import functools
import inspect
import itertools
import random
import re
import warnings

import numpy as np
import pytest
import torch
from gates import error_of
from torch import nn
from torch.nn.parameter import is_lazy
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_map

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

FEW = 25  # samples of an operator or a module, all of which run
SPARSE = {"sparse.sampled_addmm", "sparse.mm.reduce", "to_sparse"}
# Modules with dropout of which torch says that training and evaluation do not differ.
MODES_DIFFER = {"nn.Transformer", "nn.TransformerDecoderLayer"}
UNINITIALISED = "empty empty_like empty_permuted empty_strided new_empty new_empty_strided".split()
# On CUDA too these take their indices from the CPU.
INDICES_ON_CPU = {"tensor_split"}
# Another formula for the same value (a fused kernel on the CPU).
TOLERANCE = {"nn.functional.scaled_dot_product_attention": {"rtol": 1e-4, "atol": 1e-4}}
CPU = torch.device("cpu")


def leaves(*values):
    return tree_flatten(values)[0]


def op_name(op):
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


def trains_on_cpu(op):
    return op.supports_autograd and torch.float32 in op.supported_backward_dtypes("cpu")


OPS = [
    op for op in op_db if torch.float32 in op.supported_dtypes("cpu") and "jiterator" not in op.name
]


def marked(op):
    refused = pytest.mark.xfail(reason="a virtual GPU has dense tensors only", strict=True)
    return pytest.param(op, id=op_name(op), marks=[refused] if op_name(op) in SPARSE else [])


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def equal(value, expected):
    """Return whether both have the same values; a quick answer for most, without NaN."""
    return value.dtype != torch.complex32 and torch.equal(value, expected)


def assert_same(result, reference, device, values=True, **tolerance):
    for value, expected in zip(leaves(result), leaves(reference), strict=True):
        if not isinstance(expected, torch.Tensor):
            assert value == expected or value != value
            continue
        assert value.device == device
        assert (value.shape, value.dtype) == (expected.shape, expected.dtype)
        assert value.requires_grad == expected.requires_grad
        if values and expected.is_complex():
            # a lazily conjugated tensor has other views of its parts than one that is not
            parts, wanted = (value.real, value.imag), (expected.real, expected.imag)
            assert_same(parts, wanted, device, **tolerance)
        if values and not equal(value := value.detach().cpu(), expected):
            pair = of_largest(value, expected)
            torch.testing.assert_close(*pair, equal_nan=True, **tolerance)


def of_largest(value, expected):
    """Return both as parts of the largest of `expected`, if that is more than 1.

    The rounding of a sum is a part of its largest terms, not of a sum that is near 0.
    """
    finite = expected[expected.isfinite()]
    if not expected.is_floating_point() or not finite.numel():
        return value, expected
    largest = finite.abs().max().clamp(min=1)
    return value / largest, expected / largest


def copied(value, device=CPU):
    """Return `value` with a copy of every tensor, and every mention of the CPU, on `device`.

    The copies are leaves of their own and ask for gradients where the originals do.
    """

    def copy(leaf):
        if isinstance(leaf, torch.Tensor):
            new = leaf.detach().clone() if device == CPU else leaf.detach().to(device)
            return new.requires_grad_(leaf.requires_grad)
        if isinstance(leaf, (str, torch.device)) and str(leaf) == "cpu":
            return device
        return leaf

    return tree_map(copy, value)


def varied(samples, arguments_of):
    """Return the samples that bring a value of an argument, or a pair of two, not seen before.

    A tensor counts as its layout, and which arguments there are as a value, too.
    """
    if len(samples) <= FEW:
        return samples
    seen, kept = set(), []
    for sample in samples:
        found = {
            keystr(path): (leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad)
            if isinstance(leaf, torch.Tensor)
            else repr(leaf)
            for path, leaf in tree_flatten_with_path(arguments_of(sample))[0]
        }
        found["names"] = tuple(found)
        pairs = set(itertools.combinations_with_replacement(found.items(), 2))
        if pairs - seen:
            kept.append(sample)
            seen |= pairs
    return kept


def samples_of(op):
    """Return the sample inputs of `op`: those that ask for gradients, where it has any.

    Of some operators torch makes fewer of these; then those without follow, for the values alone.
    """
    plain = sample_inputs(op)
    if not trains_on_cpu(op):
        return plain
    training = sample_inputs(op, requires_grad=True)
    return training + plain if len(plain) > len(training) else training


def sample_inputs(op, requires_grad=False):
    seed(0)
    random.seed(0)
    np.random.seed(0)
    # `op.sample_inputs` would seed for each, and look for the test in all frames below it: both
    # take longer than most operators
    return list(op.sample_inputs_func(op, "cpu", torch.float32, requires_grad))


def seed(number):
    """Seed the CPU and the virtual GPUs.

    `torch.manual_seed` writes a traceback for CUDA too, which takes longer than most operators.
    """
    torch.default_generator.manual_seed(number)
    torch.vgpu.manual_seed_all(number)


def asks(value):
    return isinstance(value, torch.Tensor) and value.requires_grad


def gradients(sample, result, arguments):
    """Return the gradients of the tensors among `arguments` that ask for them.

    Those of the outputs are random numbers of the CPU. Returns None where no output has any.
    """
    outputs = [value for value in leaves(sample.output_process_fn_grad(result)) if asks(value)]
    if not outputs:
        return None
    generator = torch.Generator().manual_seed(2)
    cotangents = [
        torch.randn(output.shape, dtype=output.dtype, generator=generator).to(output.device)
        for output in outputs
    ]
    inputs = [value for value in leaves(arguments) if asks(value)]
    return torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True)


@pytest.mark.parametrize("op", [*map(marked, OPS)])
def test_operator_gives_what_it_gives_on_the_cpu(op, device):
    name = op_name(op)
    tolerance = TOLERANCE.get(name, {})
    ran = trained = 0
    for sample in varied(samples_of(op), lambda each: (each.input, each.args, each.kwargs)):
        original = (sample.input, *sample.args), sample.kwargs
        args, kwargs = cpu_arguments = copied(original)
        seed(1)  # what comes first after a seed are the same numbers on the CPU and the device
        try:
            reference = op.op(*args, **kwargs)
        except Exception:
            continue
        ran += 1
        if name in INDICES_ON_CPU:
            arguments = (copied(sample.input, device), *copied(sample.args)), copied(sample.kwargs)
        else:
            arguments = copied(original, device)
        args, kwargs = arguments
        seed(1)
        result = op.op(*args, **kwargs)
        asked = any(leaf is device or isinstance(leaf, torch.Tensor) for leaf in leaves(arguments))
        where = device if asked else CPU
        assert_same(result, reference, where, name not in UNINITIALISED, **tolerance)
        try:
            expected = gradients(sample, reference, cpu_arguments)
        except Exception:
            continue
        got = gradients(sample, result, arguments)
        assert_same(got, expected, where, **tolerance)
        trained += expected is not None
    torch.vgpu.synchronize(device)
    assert ran, f"no sample of {name} runs on the CPU"
    assert trained or not trains_on_cpu(op), f"no sample of {name} trains on the CPU"


def modes_differ(info):
    return info.train_and_eval_differ or info.name in MODES_DIFFER


NETS = [(info, True) for info in module_db] + [
    (info, False) for info in module_db if modes_differ(info)
]


@functools.cache
def reads_mode(module_cls):
    """Return whether modules of a class look whether they train."""
    classes = [each for each in module_cls.__mro__ if each not in (nn.Module, object)]
    return any("self.training" in inspect.getsource(each) for each in classes)


def train_step(net, args, kwargs):
    """Return the outputs of `net` and what one step of SGD on their sum makes of it."""
    seed(1)
    output = net(*args, **kwargs)
    loss = sum(value.double().sum() for value in leaves(output) if asks(value))
    if isinstance(loss, torch.Tensor):
        loss.backward()
    parameters = list(net.parameters())
    if parameters:
        torch.optim.SGD(parameters, lr=0.1).step()
    gradients = [parameter.grad for parameter in parameters]
    return output, parameters, [grad for grad in gradients if grad is not None]


def arguments_of_both(sample):
    """Return the arguments of the constructor and of `forward` of a sample of a module."""
    return [(each.args, each.kwargs) for each in (sample.constructor_input, sample.forward_input)]


@pytest.mark.parametrize(
    "which", NETS, ids=[f"{'train' if on else 'eval'}-{info.name}" for info, on in NETS]
)
def test_module_trains_to_the_values_of_the_cpu(which, device):
    info, training = which
    # In float64, in which no other order of summation moves an input of a ReLU to beyond 0.
    samples = info.module_inputs_func(
        info, device="cpu", dtype=torch.float64, requires_grad=True, training=training
    )
    samples = [sample for sample in samples if sample.forward_input is not None]
    ran = 0
    for sample in varied(samples, arguments_of_both):
        seed(0)
        made = sample.constructor_input
        reference = info.module_cls(*made.args, **made.kwargs).double().train(training)
        assert modes_differ(info) or not any(reads_mode(type(m)) for m in reference.modules())
        net = copy.deepcopy(reference)
        original = sample.forward_input.args, sample.forward_input.kwargs
        cpu_args, cpu_kwargs = copied(original)
        lazy = any(map(is_lazy, reference.parameters()))
        try:
            if lazy:
                reference(*cpu_args, **cpu_kwargs)
                drawn = copy.deepcopy(reference.state_dict())
            expected = train_step(reference, cpu_args, cpu_kwargs)
        except Exception:
            continue
        ran += 1
        args, kwargs = copied(original, device)
        net = net.to(device)
        if lazy:  # its parameters are made now, by several draws
            net(*args, **kwargs)
            net.load_state_dict(drawn)
        got = train_step(net, args, kwargs)
        torch.vgpu.synchronize(device)
        assert_same(got, expected, device)
    if not ran:
        pytest.skip(f"no sample of {info.name} trains on the CPU in float64")


def test_exceptions_stay_under_one_percent():
    assert SPARSE <= {op_name(op) for op in OPS}
    trained = {op_name(op) for op in OPS if trains_on_cpu(op)}
    assert len(SPARSE) < 0.01 * len(OPS) and len(trained & SPARSE) < 0.01 * len(trained)


# -- errors by values, by arguments and by types

# CUDA asserts in a kernel that probabilities are valid, and that indices are in range.
ASSERTED = """
    bernoulli multinomial nn.functional.binary_cross_entropy poisson quantile nanquantile
""".split()
FILLS = {"nan": float("nan"), "-1": -1.0, "0": 0.0}
CRASHES = {("linalg.eigvals", "nan")}  # of the CPU


def filled(value):
    """Return a function that fills a tensor of floats; indices stay, as wrong ones may crash."""

    def fill(tensor):
        if isinstance(tensor, torch.Tensor) and (tensor.is_floating_point() or tensor.is_complex()):
            return torch.full_like(tensor, value, requires_grad=False)
        return tensor

    return fill


DENSE = [
    op
    for op in OPS
    if "sparse" not in op.name
    and op.name not in ("as_strided", "tensor_split")  # needs the storage; indices on the CPU
]


@pytest.mark.parametrize("op", DENSE, ids=op_name)
def test_every_operator_fails_by_its_values_when_cuda_does(op, device):
    samples = list(op.sample_inputs("cpu", torch.float32))
    for sample in samples[:: 1 + len(samples) // 6]:
        for name, value in FILLS.items():
            if (op.name, name) in CRASHES:
                continue
            check_sample(op, sample.transform(filled(value)), device)


def check_sample(op, sample, device):
    """Compare the errors of a sample, whose values are wrong, with those of the CPU."""
    on_device = sample.transform(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x)
    expected, error = (
        error_of(op, each.input, *each.args, **each.kwargs)
        for each in (copy.deepcopy(sample), on_device)
    )
    later = error_of(torch.vgpu.synchronize, device)
    if expected is not None and op.name in ASSERTED and error is None:
        assert later is None or isinstance(later, torch.AcceleratorError)
    else:
        assert type(error) is type(expected) and later is None, (error, expected, later)


# All that may be late: CUDA finds these in a kernel, or reads values first; the last is a check of
# more bytes than are tried at the call.
OF_VALUES = dict.fromkeys(("gather", "scatter", "scatter_add"), r"index \d+ is out of bounds")
OF_VALUES["multinomial"] = (
    r"probability (tensor|entry)|sum of probabilities|number of categories cannot exceed 2\^24"
)


def on(device, value):
    """Return nested arguments with their tensors, and mentions of the CPU, on a device."""

    def move(leaf):
        if isinstance(leaf, torch.Tensor):
            dense = leaf.device.type == "cpu" and leaf.layout is torch.strided
            return leaf.detach().clone().to(device) if dense else leaf
        return device if isinstance(leaf, (str, torch.device)) and str(leaf) == "cpu" else leaf

    return tree_map(move, value)


ERRING = [op for op in op_db if op.error_inputs_func is not None]


@pytest.mark.parametrize("op", ERRING, ids=op_name)
def test_error_inputs_of_torch_are_refused_at_the_call_with_the_class_of_the_cpu(op, device):
    for given in op.error_inputs("cpu"):
        sample = given.sample_input
        call = (sample.input, *sample.args), sample.kwargs
        args, kwargs = on("cpu", call)
        expected = error_of(op.op, *args, **kwargs)
        if expected is None:
            continue
        args, kwargs = on(device, call)
        got = error_of(op.op, *args, **kwargs)
        if got is None and re.search(OF_VALUES.get(op.name, "$^"), str(expected)):
            got = error_of(torch.vgpu.synchronize, device)
            assert isinstance(got, torch.AcceleratorError) and str(expected) in str(got)
        else:
            assert type(got) is type(expected), f"{expected}\nhere: {got}"


INTEGERS = [
    op
    for op in op_db
    if torch.int64 in set(op.dtypes) - set(op.dtypesIfCUDA) and "backward" not in op.name
]


@pytest.mark.parametrize("op", INTEGERS, ids=op_name)
def test_integers_are_refused_where_cuda_has_no_kernel_for_them(op, device):
    """By torch's tables of dtypes, `dtypes` and `dtypesIfCUDA`."""
    refused = 0
    for sample in op.sample_inputs("cpu", torch.int64):
        args, kwargs = on(device, ((sample.input, *sample.args), sample.kwargs))
        error = error_of(op.op, *args, **kwargs)
        if error is not None:
            refused += 1
            assert isinstance(error, NotImplementedError)
            assert re.search("not implemented for '(Long|Bool)'", str(error))
    assert refused
