"""Random numbers of a device: whose they are, and in which order they are drawn."""

import gc

import pytest
import torch
from gates import Gate

from vgpu import virtual_gpus
from vgpu.runtime import registry
from vgpu.tensors import generators

# A seed, and the numbers of SplitMix64 that follow it: https://rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64
SEEDS = 1234567, 6457827717110365317, 3203168211198807973, 9817491932198370423

pytestmark = pytest.mark.usefixtures("here_and_elsewhere")


DRAWS = {
    "normal_": lambda where, g: torch.empty(5, device=where).normal_(generator=g),
    "uniform_": lambda where, g: torch.empty(5, device=where).uniform_(1, 2, generator=g),
    "rand": lambda where, g: torch.rand(5, device=where, generator=g),
    "randn": lambda where, g: torch.randn(2, 3, device=where, generator=g),
    "randint": lambda where, g: torch.randint(100, (5,), device=where, generator=g),
    "randperm": lambda where, g: torch.randperm(9, device=where, generator=g),
    "bernoulli": lambda where, g: torch.full((9,), 0.5, device=where).bernoulli(generator=g),
    "multinomial": lambda where, g: torch.ones(6, device=where).multinomial(3, generator=g),
    "init": lambda where, g: torch.nn.init.trunc_normal_(
        torch.empty(3, 3, device=where), a=-9, b=9, generator=g
    ),
}


def of_cpu(draw, seeds):
    """Return what the CPU draws first from each of the seeds."""
    return [draw("cpu", torch.Generator().manual_seed(seed)).tolist() for seed in seeds]


@pytest.mark.parametrize("name", DRAWS)
def test_a_generator_of_the_device_is_drawn_from_and_no_other(devices, name):
    draw = DRAWS[name]
    expected = of_cpu(draw, SEEDS[:2])
    generator = torch.Generator(device=devices[1]).manual_seed(SEEDS[0])
    torch.vgpu.manual_seed_all(5)
    states = torch.vgpu.get_rng_state(devices[1]), torch.get_rng_state()
    assert [draw(devices[1], generator).tolist() for _ in range(2)] == expected
    now = torch.vgpu.get_rng_state(devices[1]), torch.get_rng_state()
    assert all(map(torch.equal, now, states)), "the device's own was used, or the CPU's"


def test_what_has_no_shape_inference_draws_from_the_device(devices):
    count, half = torch.full((9,), 9.0), torch.full((9,), 0.5)
    expected = of_cpu(lambda _, g: torch.binomial(count, half, generator=g), SEEDS[:2])
    count, half = count.to(devices[1]), half.to(devices[1])
    torch.manual_seed(SEEDS[0])
    got = [torch.binomial(count, half).tolist() for _ in range(2)]
    assert got == expected
    torch.vgpu.manual_seed_all(SEEDS[0])
    assert torch.binomial(count, half).tolist() == expected[0]


@pytest.mark.parametrize("name", DRAWS)
def test_a_generator_of_elsewhere_is_refused(devices, name):
    draw = DRAWS[name]
    with pytest.raises(RuntimeError, match="Expected a 'vgpu' device type for generator.*'cpu'"):
        draw(devices[1], torch.Generator())
    with pytest.raises(RuntimeError, match="Expected a 'vgpu:1' generator device.*'vgpu:0'"):
        draw(devices[1], torch.Generator(device=devices[0]))
    assert draw(devices[1], torch.Generator(device=devices[1])).device == devices[1]


def test_a_generator_says_where_it_is(devices):
    for where in (devices[1], "vgpu:1"):
        generator = torch.Generator(device=where)
        assert generator.device == devices[1] and isinstance(generator, torch.Generator)
    assert torch.Generator(devices[0]).device == devices[0]
    assert torch.Generator("cpu").device == torch.Generator().device == torch.device("cpu")
    assert generator.manual_seed(-1).get_state().tolist() == [255] * 8 + [0] * 8  # as on CUDA
    assert generator.manual_seed(7).initial_seed() == 7
    seed = generator.seed()
    assert generator.initial_seed() == seed != 7


def test_a_new_seed_does_not_change_what_was_drawn_before(devices):
    def numbers(seed):
        return torch.rand(3, generator=torch.Generator().manual_seed(seed)).tolist()

    generator = torch.Generator(device=devices[0]).manual_seed(1)
    torch.vgpu.manual_seed_all(1)
    state = torch.Generator(device=devices[1]).manual_seed(2).get_state()
    drawn, own = [], []
    with Gate(devices[0]):
        for change in (
            lambda: generator.manual_seed(2),
            lambda: generator.set_state(state),
            generator.seed,
        ):
            drawn.append(torch.rand(3, device=devices[0], generator=generator))
            change()
        for change in (
            lambda: torch.vgpu.set_rng_state(state),
            lambda: torch.vgpu.manual_seed(3),
            torch.vgpu.default_generators[0].seed,
        ):
            own.append(torch.rand(3, device=devices[0]))
            change()
    assert [x.tolist() for x in drawn] == [numbers(1), numbers(2), numbers(2)]
    assert [x.tolist() for x in own] == [numbers(1), numbers(2), numbers(3)]


def test_the_state_of_a_generator_is_that_after_all_draws_so_far(devices):
    """It is known at once: the draws are held, by what only the end of the block opens."""
    generator = torch.Generator(device=devices[0]).manual_seed(SEEDS[0])
    with Gate(devices[0]) as gate:
        torch.rand(3, device=devices[0], generator=generator)
        state = generator.get_state()
        torch.rand(3, device=devices[0], generator=generator)
        twin = generator.clone_state()
        assert not gate.open.is_set()
    assert (state.dtype, state.device) == (torch.uint8, torch.device("cpu"))
    assert state.numpy().view("uint64").tolist() == [SEEDS[0], 1]  # as on CUDA
    first, second, third = of_cpu(DRAWS["rand"], SEEDS[:3])
    for each in (generator, twin):
        assert DRAWS["rand"](devices[0], each).tolist() == third
    other = torch.Generator(device=devices[1])  # the state of another
    for each in (other.set_state(state), generator.set_state(state)):
        assert DRAWS["rand"](each.device, each).tolist() == second
    assert first not in (second, third)


@pytest.mark.parametrize("size", [0, 15, 17, 5056])
def test_a_state_of_another_size_is_refused(devices, size):
    torch.vgpu.manual_seed_all(1)
    own = torch.vgpu.get_rng_state(devices[0])
    message = f"wrong size.* vgpu:0 is 16 bytes.* got {size} elements of torch.uint8"
    with pytest.raises(RuntimeError, match=message):
        torch.vgpu.set_rng_state(torch.zeros(size, dtype=torch.uint8), devices[0])
    with pytest.raises(RuntimeError, match="16 bytes.* got 16 elements of torch.int64"):
        torch.vgpu.set_rng_state(torch.zeros(16, dtype=torch.int64), devices[0])
    assert torch.equal(torch.vgpu.get_rng_state(devices[0]), own)


def test_one_generator_is_drawn_from_in_the_order_of_issue(devices):
    generator = torch.Generator(device=devices[0]).manual_seed(SEEDS[0])
    sides = [torch.vgpu.Stream(devices[0]) for _ in range(2)]
    drawn = []
    with Gate(devices[0], sides[0]):
        for i in range(4):
            with torch.vgpu.stream(sides[i % 2]):
                drawn.append(torch.rand(3, device=devices[0], generator=generator))
    torch.vgpu.synchronize()
    assert [x.tolist() for x in drawn] == of_cpu(lambda _, g: torch.rand(3, generator=g), SEEDS[:4])


def test_the_default_generators_are_those_of_the_devices_in_use(devices):
    assert len(virtual_gpus(3)) == len(torch.vgpu.default_generators)
    virtual_gpus(2)
    own = torch.vgpu.default_generators
    assert [generator.device for generator in own] == devices
    torch.vgpu.manual_seed_all(4)
    x = torch.rand(3, device=devices[1], generator=own[1])
    torch.vgpu.manual_seed_all(4)
    assert torch.rand(3, device=devices[1]).tolist() == x.tolist()
    assert not hasattr(torch.vgpu, "no_such_name")


@pytest.mark.parametrize(("is_new", "seed"), [(True, 0), (False, 5)])
def test_a_seed_of_torch_reaches_devices_that_are_new_or_not_in_use(devices, is_new, seed):
    number = len(registry.devices) + 1 if is_new else len(virtual_gpus(3))
    virtual_gpus(2)
    torch.manual_seed(seed)
    device = virtual_gpus(number)[-1]
    assert torch.rand(3, device=device).tolist() == torch.rand(3).tolist()


def test_generators_that_are_gone_are_forgotten(devices):
    gc.collect()
    torch.Generator(device=devices[0])  # forgets those of other tests
    before = len(generators._known)
    for _ in range(20):
        torch.Generator(device=devices[0])
    gc.collect()
    torch.Generator(device=devices[0])
    assert len(generators._known) <= before


def test_random_integers_like_a_tensor_keep_their_bounds(devices):
    x = torch.zeros(100, dtype=torch.int64, device=devices[0])
    torch.manual_seed(0)
    got = [torch.randint_like(x, 3), torch.randint_like(x, 5, 8)]
    assert [set(each.tolist()) for each in got] == [{0, 1, 2}, {5, 6, 7}]


@pytest.mark.parametrize("p", [0.0, 0.2, 0.5, 0.9, 1.0])
def test_dropout_keeps_the_mean(devices, p):
    torch.manual_seed(0)
    expected = torch.nn.functional.dropout(torch.ones(1000), p)
    torch.manual_seed(0)
    x = torch.ones(1000, device=devices[0], requires_grad=True)
    got = torch.nn.functional.dropout(x, p)
    torch.testing.assert_close(got.cpu(), expected)
    got.sum().backward()
    torch.testing.assert_close(x.grad.cpu(), expected)


def test_dropout_of_everything_leaves_zeros(devices):
    values, kept = torch.native_dropout(torch.ones(9, device=devices[0]), 1.0, True)
    assert values.tolist() == [0] * 9 and not kept.any()
    x = torch.ones(9, device=devices[0])
    torch.native_dropout(x, 0.0, True)[0].zero_()
    assert x.all()


@pytest.mark.parametrize(
    "sample",
    [
        torch.poisson,
        torch._standard_gamma,
        torch._sample_dirichlet,
        lambda x, generator: torch.binomial(x, x / 8, generator=generator),
    ],
    ids="poisson gamma dirichlet binomial".split(),
)
def test_a_generator_may_be_given_by_its_place(devices, sample):
    x = torch.arange(1.0, 9)
    expected = sample(x, generator=torch.Generator().manual_seed(3))
    own = torch.Generator(device=devices[0]).manual_seed(3)
    torch.manual_seed(4)
    assert sample(x.to(devices[0]), generator=own).tolist() == expected.tolist()
    with pytest.raises(RuntimeError, match="generator"):
        sample(x.to(devices[0]), generator=torch.Generator())
