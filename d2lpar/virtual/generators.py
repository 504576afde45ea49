"""Random numbers of a device, drawn in the order of issue."""

import weakref

import torch

from .private.tensors import CPUGenerator, generator_id
from .scheduler import wait

# The identity of a generator -> a weak reference to it. torch hands over another Python object for
# the same generator.
_known = {}


class Generator(CPUGenerator):
    """Random numbers for kernels of one virtual GPU: those that the CPU draws from the same seed.

    A kernel keeps the `state` that it was issued with. A new seed puts another one in its place,
    and so does not change what kernels that were issued before draw.

    Args:
        owner: the `Device`.
        seed: an integer; by default the seed of a new torch generator.

    Attributes:
        state: a torch generator of the CPU.
        last: the op that drew last, or None.
    """

    def __new__(cls, owner, seed=None):
        return super().__new__(cls)

    def __init__(self, owner, seed=None):
        for identity in [identity for identity, known in tuple(_known.items()) if known() is None]:
            _known.pop(identity, None)
        _known[generator_id(self)] = weakref.ref(self)
        self.owner = owner
        self.last = None
        self.state = CPUGenerator()
        if seed is not None:
            self.state.manual_seed(seed)

    @property
    def device(self):
        return self.owner.torch_device

    def manual_seed(self, seed):
        """Draw later numbers from `seed`; return the generator."""
        self.state = CPUGenerator().manual_seed(seed)
        return self

    def seed(self):
        """Draw later numbers from a random seed; return the seed."""
        state = CPUGenerator()
        seed = state.seed()
        self.state = state
        return seed

    def initial_seed(self):
        """Return the seed that the numbers come from."""
        return self.state.initial_seed()

    def get_state(self):
        """Wait for all draws so far and return the state after them, a ByteTensor on the CPU."""
        if self.last is not None:
            wait(self.last, self.device)
        return self.state.get_state()

    def set_state(self, state):
        """Draw later numbers from `state`, a ByteTensor of `get_state`; return the generator."""
        generator = CPUGenerator()
        generator.set_state(state)
        self.state = generator
        return self

    def clone_state(self):
        """Return a generator of the same device in the same state."""
        return Generator(self.owner).set_state(self.get_state())

    def __repr__(self):
        return f"<torch.Generator device={self.device}>"


def checked(generator, device):
    """Return the generator that a kernel draws from: the given one, or its `Device`'s own.

    Raises:
        RuntimeError: the generator belongs to the CPU or to another device, as on CUDA.
    """
    if generator is None:
        return device.generator
    known = _known.get(generator_id(generator))
    found = known and known()
    if not found:
        raise RuntimeError(
            f"Expected a '{device.torch_device.type}' device type for generator but found "
            f"'{generator.device.type}'"
        )
    if found.owner is not device:
        raise RuntimeError(
            f"Expected a '{device.torch_device}' generator device but found '{found.device}'"
        )
    return found


def forget_draws(owner):
    """Forget the draws from generators of the `Device` `owner`: no later kernel waits for them."""
    for known in tuple(_known.values()):
        generator = known()
        if generator is not None and generator.owner is owner:
            generator.last = None


def new_generator(owner):
    """Return a generator of the `Device` `owner` with the seed of torch's own generator."""
    return Generator(owner, torch.initial_seed())
