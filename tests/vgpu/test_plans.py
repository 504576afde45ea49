"""Plans: what they depend on, what they do not, and what happens where there is none."""

import gc
import warnings

import pytest
import torch
from gates import Gate, only_here

from vgpu import virtual_gpus
from vgpu.operators import issuing, plans
from vgpu.tensors import cells

pytestmark = pytest.mark.usefixtures("here_and_elsewhere")


@pytest.fixture(scope="module")
def library():
    """Operators of one's own: `repeated` has a shape that a number decides."""
    library = torch.library.Library("d2lpar_test", "DEF")

    def turned(x):
        y = x.clone()
        return y.t().contiguous().t() if bool((x > 0).all()) else y

    def fails(x):
        raise ValueError("no shape for you")

    library.define("repeated(Tensor x, float times) -> Tensor")
    library.impl("repeated", lambda x, times: x.repeat(int(times)), "CompositeExplicitAutograd")
    for schema, kernel, shape in (
        ("turned(Tensor x) -> Tensor", turned, torch.empty_like),
        ("wrong(Tensor x) -> Tensor", lambda x: x[1:].clone(), torch.empty_like),
        ("wider(Tensor x) -> Tensor", lambda x: x.double(), torch.empty_like),
        ("conjugated(Tensor x) -> Tensor", lambda x: x.clone().conj(), torch.empty_like),
        ("later(Tensor x) -> Tensor", lambda x: torch.cat([x, x + 1])[len(x) :], torch.empty_like),
        (
            "pair(Tensor x) -> (Tensor, Tensor)",
            lambda x: (x.clone(), x.double()),
            lambda x: (x + 0, x + 0),
        ),
        ("shapeless(Tensor x) -> Tensor", lambda x: x + 1, fails),
        ("rest(Tensor(a) x) -> Tensor(a)", lambda x: x[1:], fails),
        ("counted(Tensor x) -> Tensor", *[lambda x: x.repeat(int(x[0].item()))] * 2),
    ):
        library.define(schema)
        library.impl(schema.partition("(")[0], kernel, "CPU")
        library.impl(schema.partition("(")[0], shape, "Meta")
    yield torch.ops.d2lpar_test
    library._destroy()


def new_plans(function):
    before = set(plans.plans_by_key)
    function()
    return len(set(plans.plans_by_key) - before)


@pytest.fixture
def default_dtype():
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def test_the_default_dtype_is_part_of_the_key(device, default_dtype):
    x = torch.arange(3, device=device)
    for dtype in (torch.float32, torch.float64, torch.float16, torch.float32):
        torch.set_default_dtype(dtype)
        for y in (x / 2, x.sqrt(), torch.zeros(7, device=device), torch.stack([x, x]).div(2)):
            assert y.dtype == y.cpu().dtype == dtype
    assert (x / 2).tolist() == [0, 0.5, 1]


@pytest.mark.parametrize("in_use", [True, False])
@pytest.mark.parametrize("kind, new", [("dtype", torch.half), ("tensor_type", torch.DoubleTensor)])
def test_what_is_queued_keeps_the_default_dtype_of_its_issue(kind, new, in_use, default_dtype):
    device = virtual_gpus(3)[2]
    x, side = torch.arange(3, device=device), torch.vgpu.Stream(device)
    torch.vgpu.synchronize(device)
    with Gate(device, side) as gate:
        with side:
            y = x / 2
        if not in_use:
            virtual_gpus(2)
        with gate.opened_later():
            getattr(torch, f"set_default_{kind}")(new)
    virtual_gpus(3)
    assert y.dtype == torch.float32 and y.tolist() == [0, 0.5, 1]


def test_a_default_dtype_that_stays_waits_for_nothing(device, default_dtype):
    """torch.compile sets it while it holds its lock, for which a queued kernel may wait."""
    x = torch.arange(3, device=device)
    with Gate(device) as gate:
        y = x / 2
        torch.set_default_dtype(torch.float32)
        assert not gate.open.is_set()
    assert y.tolist() == [0, 0.5, 1]


def test_new_numbers_make_no_new_plan(device):
    x, n = torch.ones(3, device=device), torch.ones(3, dtype=torch.int64, device=device)

    def compute(i):
        torch._foreach_add([x, x], i)
        results = x * i + i, n * i - i, x.add(x, alpha=i), x.clamp(max=i), x * (i + 0.5), n / i
        return [y[0].item() for y in results]

    assert compute(3) == [6, 0, 4, 1, 3.5, pytest.approx(1 / 3)]
    for i in range(4, 12):
        assert new_plans(lambda i=i: compute(i)) == 0
    assert compute(12) == [24, 0, 13, 1, 12.5, pytest.approx(1 / 12)]


def test_true_is_not_one(device):
    n = torch.ones(2, dtype=torch.bool, device=device)
    for number, dtype in ((1, torch.int64), (True, torch.bool), (1.0, torch.float32)) * 2:
        for each in number, type(number)(0):
            assert (n * each).dtype == dtype
            assert torch.mul(n, each).cpu().dtype == dtype
            assert torch.full((2,), each, device=device).dtype == dtype
    x = torch.rand(2, 3, device=device)
    for keep in (True, False, True):
        assert x.sum(1, keep).shape == ((2, 1) if keep else (2,))
        assert x.sum(1, keepdim=keep).shape == ((2, 1) if keep else (2,))


def test_the_names_of_arguments_matter(device):
    edges, x = torch.tensor([1, 3], device=device), torch.tensor([1, 2], device=device)
    for _ in range(2):
        right = torch.searchsorted(edges, x, right=True)
        narrow = torch.searchsorted(edges, x, out_int32=True)
        assert (right.dtype, right.tolist()) == (torch.int64, [1, 1])
        assert (narrow.dtype, narrow.tolist()) == (torch.int32, [0, 1])


def test_an_operator_whose_shape_depends_on_a_number_gets_the_right_one(device, library):
    x = torch.arange(2.0, device=device)
    for times in (1.0, 3.0, 2.0, 3.0):
        assert library.repeated(x, times).tolist() == [0, 1] * int(times)
    for step in (0.5, 0.25):
        assert len(torch.arange(0, 1, step, device=device)) == int(1 / step)
        assert len(torch.range(0, 1, step, device=device)) == 1 + int(1 / step)


def test_a_result_has_the_foreseen_layout_whatever_the_kernel_gives(device, library):
    for values in (torch.zeros(2, 3), torch.ones(2, 3), torch.zeros(2, 3)):
        y = library.turned(values.to(device))
        assert y.stride() == (3, 1)
        flat = y.view(-1)
        y += 1
        assert flat.tolist() == (values + 1).view(-1).tolist()
        torch.vgpu.synchronize(device)
        assert y._cell.data.stride() == (3, 1)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("wrong", "got torch.float32 of shape .2,."),
        ("wider", "must return torch.float32.* got torch.float64"),
        ("pair", "must return torch.float32.* got torch.float64"),  # the second of two
    ],
)
def test_a_result_of_another_shape_or_dtype_than_foreseen_is_reported(device, library, name, said):
    getattr(library, name)(torch.ones(3, device=device))
    with pytest.raises(torch.AcceleratorError, match=said):
        torch.vgpu.synchronize(device)


def test_a_result_that_the_kernel_marks_as_conjugated_is_so(device, library):
    x = torch.tensor([1 + 2j], device=device)
    for _ in range(2):
        y = library.conjugated(x)
        assert y.tolist() == [1 - 2j] and torch.view_as_real(y).tolist() == [[1, -2]]
    assert library.later(torch.view_as_real(x)[0])[1:].tolist() == [3]


@only_here  # a warning comes once
def test_an_operator_without_a_shape_inference_waits_and_says_so_once(device, library):
    x = torch.ones(3, device=device)
    with Gate(device) as gate, gate.opened_later():
        with pytest.warns(UserWarning, match="shapeless waits for its result.*no shape for you"):
            assert library.shapeless(x).tolist() == [2] * 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert library.shapeless(x).tolist() == [2] * 3
        assert library.counted(x + 1).tolist() == [2] * 6  # waits on CUDA, too


def test_a_custom_operator_without_a_shape_inference_is_known_by_that(device):
    """Not by what an error says."""

    def increment(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def refuse(x):
        raise RuntimeError("there is no fake impl for today")

    options = {"mutates_args": (), "device_types": "cpu"}
    plain = torch.library.custom_op("d2lpar_test_custom::plain", increment, **options)
    fails = torch.library.custom_op("d2lpar_test_custom::fails", increment, **options)
    fails.register_fake(refuse)
    x = torch.ones(2, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plain(x).tolist() == [2, 2]
    with pytest.warns(UserWarning, match="fails waits for its result.*for today"):
        assert fails(x).tolist() == [2, 2]


@pytest.mark.parametrize("device_types", ["cuda", "vgpu", None])
def test_a_custom_operator_runs_its_kernel_for_gpus(device, device_types):
    """On the tensors of the GPU; a kernel for all devices, too."""
    name = f"d2lpar_test_custom::kernels_{device_types}"
    seen = []

    def kernel(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.device)
        return x + torch.ones_like(x, device=device)

    options = {"mutates_args": (), "schema": "(Tensor x) -> Tensor"}
    operator = torch.library.custom_op(name, torch.neg, **options)  # if there is no other kernel
    operator.register_kernel(device_types)(kernel)
    operator.register_kernel("cpu", lambda x: x + 5)
    x = torch.ones(2, device=device)
    with Gate(device):
        y = operator(x)
    assert y.tolist() == [2, 2] and operator(x.cpu()).tolist() == [6, 6]
    assert seen == [device]


@pytest.mark.filterwarnings("ignore:.*rest waits for its result")
def test_a_view_without_a_shape_inference_takes_no_memory(device, library):
    x = torch.arange(3.0, device=device)
    gc.collect()
    before = torch.vgpu.memory_allocated(device)
    y = library.rest(x)
    assert torch.vgpu.memory_allocated(device) == before
    assert y.data_ptr() == x.data_ptr() + 4
    y += 1
    assert x.tolist() == [0, 2, 3]


@pytest.mark.parametrize("error", [TimeoutError, KeyboardInterrupt, SystemExit])
def test_an_exception_from_elsewhere_passes_through_shape_inference(device, error, monkeypatch):
    inferred = issuing.Call.infer
    raised = []

    def infer(call):
        if not raised:
            raised.append(tuple(call.key))
            raise error("time is up")
        return inferred(call)

    x = torch.ones(3, 11, device=device)
    monkeypatch.setattr(issuing.Call, "infer", infer)
    plans.plans_by_key.clear()
    with pytest.raises(error, match="time is up"):
        x * 2
    with Gate(device):
        y = x * 2  # it has a plan
    assert y.sum().item() == 66
    assert plans.find_plan(raised[0])


def test_a_number_of_the_cpu_may_change_after_the_call(device):
    x, number = torch.ones(3, device=device), torch.tensor(2.0)
    with Gate(device):
        y = x * number
        z = torch.where(x > 0, number, x)
        number.fill_(7)
    assert y.tolist() == z.tolist() == [2] * 3


def test_the_dtype_of_a_number_of_the_cpu_matters(device):
    n = torch.ones(2, dtype=torch.int64)
    for number in (torch.tensor(2), torch.tensor(2.5), torch.tensor(True), torch.tensor(2.5)):
        got, expected = n.to(device) * number, n * number
        assert got.dtype == expected.dtype and got.tolist() == expected.tolist()


def test_no_more_layouts_are_kept_than_fit(device, monkeypatch):
    monkeypatch.setattr(cells, "MAX_LAYOUTS", 30)
    total = torch.zeros((), device=device)
    for n in range(1001, 1061):
        total += torch.ones(n, device=device)[1000:].sum()
        assert len(cells.TensorLayout._known) <= 30
    assert total.item() == sum(range(1, 61))


def test_no_more_plans_are_kept_than_fit(device, monkeypatch):
    monkeypatch.setattr(plans, "MAX_PLANS", 30)
    for n in range(1, 60):
        x = torch.ones(n, device=device)
        assert (x + 1).shape == (n,)
        x.nonzero()
        assert len(plans.plans_by_key) <= 30


@pytest.mark.parametrize("name", ["add", "mul"])
def test_an_output_that_is_an_input_is_not_resized(device, name):
    c, b = torch.ones(1, device=device), torch.arange(3.0, device=device)
    for _ in range(2):
        torch.add(torch.ones(1, device=device), b, out=torch.ones(1, device=device).resize_(0))
        with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
            getattr(torch, name)(c, b, out=c)
    assert c.tolist() == [1]


def test_a_long_chain_of_views_is_read(device):
    x = torch.arange(6.0, device=device).reshape(2, 3)
    y = x
    for _ in range(1200):  # more than Python's calls may nest
        y = y.t()
    y[1:].add_(1)
    assert y.tolist() == x.tolist() == [[0, 1, 2], [4, 5, 6]]


def test_a_tensor_like_another_needs_none_of_its_values(devices):
    default, side = torch.vgpu.current_stream(devices[0]), torch.vgpu.Stream(devices[0])
    x = torch.ones(3, device=devices[0])
    with Gate(devices[1]):
        default.wait_stream(torch.vgpu.current_stream(devices[1]))
        y = x * 2
        with torch.vgpu.stream(side):
            likes = torch.zeros_like(y), torch.ones_like(y), y.new_zeros(2)
        side.synchronize()
        assert not default.query()
    assert [like.tolist() for like in likes] == [[0, 0, 0], [1, 1, 1], [0, 0]]


def test_a_new_tensor_like_another_is_made_on_the_device_that_is_named(devices):
    x = torch.ones(3, device=devices[0])
    for where in (devices[1], torch.device("cpu")):
        made = [
            x.new_full((2,), 5.0, device=where),
            x.new_tensor([5.0, 5.0], device=where),
            torch.full_like(x, 5.0, device=where)[:2],
            x.new_zeros(2, device=where) + 5,
            x.new_ones(2, device=where) * 5,
            x.new_empty(2, device=where).fill_(5),
        ]
        assert {y.device for y in made} == {where}
        assert [y.tolist() for y in made] == [[5, 5]] * 6
        assert torch.zeros_like(x.new_ones(3, 2).t(), device=where).stride() == (1, 2)


def test_a_tensor_is_not_set_to_one_of_another_device(devices):
    x, y = (torch.ones(2, device=device) for device in devices)
    for source in (y, y.untyped_storage(), torch.ones(2), torch.ones(2).untyped_storage()):
        with pytest.raises(RuntimeError, match=f'storage on different device "{source.device}"'):
            x.set_(source)
    assert x.device == devices[0] and x.tolist() == [1, 1]


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.conj().t(),
        lambda x: x.conj().conj(),
        lambda x: x.conj()[1:],
        lambda x: x.conj().imag,
        lambda x: x.conj().imag[1:],
    ],
    ids="transposed twice part imag part_of_imag".split(),
)
def test_views_are_conjugated_and_negated_as_on_the_cpu(device, view):
    x = torch.tensor([[1 + 2j, 3 + 4j], [5 + 6j, 7 + 8j]])
    got, expected = view(x.to(device)), view(x)
    assert (got.is_conj(), got.is_neg()) == (expected.is_conj(), expected.is_neg())
    assert got.tolist() == expected.tolist()


def test_an_index_among_floats_makes_no_operator_wait(device):
    x, y, index = torch.zeros(3), torch.ones(2), torch.tensor([0, 2])
    x, y, index = x.to(device), y.to(device), index.to(device)
    with Gate(device):
        z = x.index_add(0, index, y)
    assert z.tolist() == [1, 0, 1]
