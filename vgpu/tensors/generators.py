"""Random numbers of a device: as on CUDA, a seed and the number of draws so far.

Each kernel draws from a new CPU generator, whose seed is computed from both at the issue. So the
host knows the state of a device without waiting for its kernels.
"""

import struct
import weakref

import torch

from vgpu.private.tensors import CPUGenerator, generator_id

_STATE = struct.Struct("<QQ")  # seed and offset, as in the state of a generator of CUDA
_ALL = 2**64 - 1

# Identity of a generator -> weak reference to it: torch passes another Python object for the same
# generator.
_known = {}


class Generator(CPUGenerator):
    """Random numbers for kernels of one virtual GPU.

    The first kernel after a new seed draws the same numbers as the CPU; later ones do not.

    Args:
        owner: the `Device`.
        seed: an integer; by default the seed of a new torch generator.

    Attributes:
        offset: the number of kernels that have drawn since the seed was set.
    """

    def __new__(cls, owner, seed=None):
        return super().__new__(cls)

    def __init__(self, owner, seed=None):
        for identity in [identity for identity, known in tuple(_known.items()) if known() is None]:
            _known.pop(identity, None)
        _known[generator_id(self)] = weakref.ref(self)
        self.owner = owner
        self.manual_seed(CPUGenerator().initial_seed() if seed is None else seed)

    @property
    def device(self):
        return self.owner.torch_device

    def manual_seed(self, seed):
        self._seed, self.offset = CPUGenerator().manual_seed(seed).initial_seed(), 0
        return self

    def seed(self):
        seed = CPUGenerator().seed()
        self.manual_seed(seed)
        return seed

    def initial_seed(self):
        return self._seed

    def next_seed(self):
        """Return the seed of the next kernel: `offset` steps of SplitMix64 from the seed.

        Source: Steele, Lea and Flood 2014, https://doi.org/10.1145/2660193.2660195.
        """
        if self.offset == 0:
            return self._seed
        mixed = (self._seed + self.offset * 0x9E3779B97F4A7C15) & _ALL
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _ALL
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _ALL
        return mixed ^ (mixed >> 31)

    def get_state(self):
        """Return the state after all issued draws, without waiting: 16 bytes, a CPU ByteTensor."""
        state = bytearray(_STATE.pack(self._seed, self.offset & _ALL))
        return torch.frombuffer(state, dtype=torch.uint8)

    def set_state(self, state):
        """Set the state, a ByteTensor of `get_state`; return the generator.

        Raises:
            RuntimeError: the state has another size or dtype, as on CUDA.
        """
        if state.dtype != torch.uint8 or state.numel() != _STATE.size:
            raise RuntimeError(
                f"RNG state is wrong size: a state of {self.device} is {_STATE.size} bytes "
                f"(uint8), got {state.numel()} elements of {state.dtype}"
            )
        self._seed, self.offset = _STATE.unpack(bytes(state.tolist()))
        return self

    def clone_state(self):
        return Generator(self.owner).set_state(self.get_state())

    def __repr__(self):
        return f"<torch.Generator device={self.device}>"


def checked(generator, device):
    """Return the generator of a kernel: the given one, or that of its `Device`.

    Raises RuntimeError, as on CUDA, for a generator of the CPU or of another device.
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
