"""A GPU by its data sheet, and the duration of its kernels."""

import warnings
from dataclasses import dataclass, field, replace
from functools import cache
from math import ceil
from typing import NamedTuple

import torch

from vgpu.modelled.links import Link
from vgpu.private.dispatch import tf32_is_allowed
from vgpu.runtime.identity import GPUIdentity

# Figures missing in data sheets, and their sources, each with rows of a single GPU only.
PRODUCT_EFFICIENCY = 0.92  # 50 products of 4000 x 4000 in 0.466 s on a V100 (d2l 13.3); 0.473 here
TENSOR_CORE_EFFICIENCY = 0.88  # the largest tiles on A100s, before waves and TILE_SECONDS
MEMORY_EFFICIENCY = 0.85  # BabelStream's triad: 0.94 on a V100, 0.85 to 0.89 on an A100
LEAST_SECONDS = 3e-6  # on a V100, between the launches of two small kernels
TILE_LOSS = 32  # a tile of t x t reaches t / (t + 32) of an unlimited tile's rate
TILE_SECONDS = 2.5e-6  # start and end of a tile on tensor cores
UNITS = ("float64", "float32", "tf32", "bfloat16", "float16")
# Tiles of a multiprocessor. cuBLAS has no narrower ones in float32 (NeuSight).
TILES = ((128, 128), (64, 64))
CONVOLUTION_TILES = (*TILES, (32, 32))
TILE_STEPS = 9  # additional terms in the sums of a tile outside tensor cores (NeuSight)
TENSOR_CORE_TILES = ((256, 128), (128, 128), (128, 64), (64, 64), (32, 32))
_PLAIN = ("float64", "float32")  # units other than tensor cores
QUERIES = 128  # of a tile of fused attention
SPLITS = (1, 2, 4, 8, 16, 32, 64, 128)  # possible numbers of parts of a product's sums
# Number of small tiles that a multiprocessor computes, and starts, at the same time
TOGETHER = {(128, 64): 2, (64, 64): 4, (32, 32): 8}
BLOCKS = 4  # of threads that a multiprocessor runs at a time, each for a row of a normalization
# Fraction of the float32 peak that products without tiles reach: each reads two numbers, and a
# multiprocessor of a V100 has 32 load units for 64 multipliers (whitepaper WP-08608-001)
DIRECT = 0.25
# Bytes for parts of sums: torch's workspace of cuBLAS (aten/src/ATen/cuda/CublasHandlePool.cpp)
WORKSPACE = 8 * 2**20
# FLOP/s of a multiprocessor's tensor cores if it cannot read the matrices 16 bytes at a time:
# products of 16,384 x 768 x 50,257 on an H200, 0.7 to 1.2e12; assumed for other GPUs
UNALIGNED = 1e12
TRANSFORM_EFFICIENCY = 0.5  # fraction of the bandwidth in Winograd's transforms


class Overheads(NamedTuple):
    """Time of kernels besides their products and bytes, in seconds; 0 if not measured."""

    # minimum of each product of a convolution: cuDNN converts layouts, computes, and sums parts
    convolution: float = LEAST_SECONDS
    row: float = 0.0  # start and end of a row of a normalization on a multiprocessor
    element: float = 0.0  # an element of a row, in a block of threads
    # an element of an operation whose tensors have different layouts, or are broadcast, on a
    # multiprocessor, which computes its address
    strided: float = 0.0
    product: float = 0.0  # start and end of a product, besides its tiles


@dataclass(frozen=True)
class GPU:
    """A GPU by its data sheet.

    Args:
        name: the name to print.
        memory: bytes of its memory.
        bandwidth: bytes/s of its memory.
        peaks: FLOP/s of products by type: "float64", "float32", "tf32", "bfloat16", "float16".
            Missing dtypes run as float32.
        multiprocessors: number of multiprocessors; each computes one tile of a product at a time.
        link: its `Link` to the CPU.
        peer_link: its `Link` to another GPU of the machine; None for the path over `link`.
        tensor_efficiency: fraction of the tensor cores' peak that the largest tiles reach.
        collective_link: its `Link` in collectives of many GPUs of the machine, which use several
            paths at a time; None for `peer_link`.
        source: the source of the figures.
        identity: its `GPUIdentity`; None for a GPU that does not exist.
        workspace: bytes of cuBLAS's workspace in torch, for parts of sums: 32 MiB on H100s.
        product_efficiency: fraction of the peaks of other units that the largest products reach.
        special: exponentials of a multiprocessor per multiplication in float32.
        memory_efficiency: fraction of the bandwidth that kernels reach.
        overheads: its `Overheads`.
        factor: factor on the time of each kernel, see `scaled`.
    """

    name: str
    memory: int
    bandwidth: float
    peaks: dict = field(hash=False)
    multiprocessors: int
    link: Link
    peer_link: Link | None = None
    source: str = "the caller"
    collective_link: Link | None = None
    tensor_efficiency: float = TENSOR_CORE_EFFICIENCY
    identity: GPUIdentity | None = None
    workspace: int = WORKSPACE
    product_efficiency: float = PRODUCT_EFFICIENCY
    special: float = 0.25
    memory_efficiency: float = MEMORY_EFFICIENCY
    overheads: Overheads = Overheads()
    factor: float = 1.0

    def __post_init__(self):
        figures = {"memory": self.memory, "bandwidth": self.bandwidth, **self.peaks}
        figures["multiprocessors"] = self.multiprocessors
        for name, value in figures.items():
            if isinstance(value, str) or not value > 0:
                raise ValueError(f"{name} of a GPU must be a positive number: got {value!r}")
        for unit in self.peaks:
            if unit not in UNITS:
                raise ValueError(f"peaks of a GPU must be of {', '.join(UNITS)}: got {unit!r}")
        if "float32" not in self.peaks:
            raise ValueError(f"peaks of a GPU must include float32: got {list(self.peaks)}")

    def kernel_seconds(self, kernel):
        """Return the duration of a `Kernel`: the maximum of least time, bytes and products.

        A convolution on tensor cores copies its tensors before and after, unless their layout is
        channels_last. Unknown products cause a warning, once for each operator.
        """
        if kernel.products is None:
            warn_of_unknown_products(kernel.name)
        products = sum(
            self.product_seconds(each, kernel.dtype, kernel.name) for each in kernel.products or ()
        )
        num_bytes = kernel.num_bytes / (self.memory_efficiency * self.bandwidth)
        if kernel.blocks is not None:
            num_bytes += self._block_seconds(*kernel.blocks)
        num_bytes += kernel.strided * self.overheads.strided / self.multiprocessors
        least = LEAST_SECONDS
        if "convolution" in kernel.name:
            least = self.overheads.convolution * len(kernel.products or (1,))
        seconds = max(least, num_bytes, products)
        if kernel.channels_first and self.unit(kernel.dtype, kernel.name) not in _PLAIN:
            seconds += 2 * num_bytes  # conversion to the layout of tensor cores, and back
        return self.factor * seconds

    def product_seconds(self, product, dtype=torch.float32, name="aten.mm"):
        """Return the duration of a `Product` of matrices of `dtype`, for the operator `name`.

        The result is divided into tiles. Each multiprocessor computes one tile at a time, so tiles
        run in waves, and the last wave may leave most multiprocessors idle: small and narrow
        products are slow. Smaller tiles fill a wave better, at a lower rate (TILE_LOSS). A tile
        starts and ends in TILE_SECONDS on tensor cores, elsewhere in the time of TILE_STEPS more
        terms of its sums, so short sums are slow, too.

        Sums can be split into parts (SPLITS), which another kernel adds in LEAST_SECONDS. The bytes
        of the parts are ignored: caches hold most of them. On tensor cores the parts of a matrix
        product are stored in float32 in cuBLAS's `workspace`, so large results cannot be split;
        cuDNN allocates more. The fastest option counts, as a library selects it, also among the
        product's alternatives. Products without tiles run on float32 units, in any dtype (DIRECT).
        """
        if product.direct:
            return product.flops / (DIRECT * self.peaks["float32"])
        if product.exponentials:
            return self._attention_seconds(product, self._rate(self.unit(dtype, name)))
        unit = self.unit(dtype, name)
        rate = self._rate(unit) / self.multiprocessors  # of one multiprocessor
        start, steps, sides, splits = TILE_SECONDS, 0, TENSOR_CORE_TILES, SPLITS
        room = self.workspace
        if unit in _PLAIN or "convolution" in name:
            room = float("inf")
        best = float("inf")
        if unit in _PLAIN:
            start, steps = 0.0, TILE_STEPS
            sides = CONVOLUTION_TILES if "convolution" in name else TILES
            splits = SPLITS[:1] if product.whole else SPLITS
            rate *= product.reached
            for other, num_bytes in product.alternatives:
                in_memory = num_bytes / (TRANSFORM_EFFICIENCY * self.bandwidth)
                of_products = self.product_seconds(other, dtype, "aten.bmm" if num_bytes else name)
                best = min(best, in_memory + of_products)
        elif not product.aligned:
            rate = min(rate, UNALIGNED)
        for m, n in sides:
            relative = _reached(m, n) / _reached(*sides[0])
            tiles = product.batch * ceil(product.m / m) * ceil(product.n / n)
            for split in splits:
                parts = 4 * split * product.batch * product.m * product.n
                if split > 1 and (product.k < 64 * split or parts > room):
                    break
                waves = ceil(tiles * split / self.multiprocessors)
                begun = ceil(waves / TOGETHER.get((m, n), 1))
                flops = 2 * m * n * (ceil(product.k / split) + steps)
                seconds = self.overheads.product + begun * start + waves * flops / (relative * rate)
                if split > 1:
                    seconds += LEAST_SECONDS
                best = min(best, seconds)
        return best

    def _attention_seconds(self, product, rate):
        """Return the duration of fused attention: its products, then its exponentials.

        A tile has QUERIES queries of a head, on one multiprocessor.
        """
        scores = product.m * product.n * product.batch
        special = self.special * self.peaks["float32"] / 2
        tiles = product.batch * ceil(product.m / QUERIES)
        full = ceil(tiles / self.multiprocessors) / (tiles / self.multiprocessors)
        return full * (product.flops / rate + product.exponentials * scores / special)

    def _block_seconds(self, rows, elements, passes):
        """Return the time of a normalization's blocks of threads, besides its bytes."""
        together = BLOCKS * self.multiprocessors
        begin = rows * self.overheads.row / self.multiprocessors
        return passes * max(begin, ceil(rows / together) * elements * self.overheads.element)

    def _rate(self, unit):
        reached = self.product_efficiency if unit in _PLAIN else self.tensor_efficiency
        return reached * self.peaks.get(unit, 0.0)

    def unit(self, dtype, name="aten.mm"):
        """Return the unit of products of `dtype`, a key of `peaks`.

        float32 uses TF32 if the GPU has it and torch allows it, separately for convolutions (by
        default) and other products: see `torch.backends.cudnn.allow_tf32`.
        """
        unit = str(dtype).removeprefix("torch.")
        if unit == "float32" and self._rate("tf32") > self._rate("float32"):
            in_products, in_convolutions = tf32_is_allowed()
            if in_convolutions if "convolution" in name else in_products:
                return "tf32"
        return unit if unit in self.peaks else "float32"

    def scaled(self, factor):
        """Return a GPU whose kernels take `factor` times as long, fitted to one measurement.

        Raises:
            ValueError: `factor` is not positive.
        """
        if not factor > 0:
            raise ValueError(f"the factor of a GPU's times must be positive: got {factor}")
        name = f"{self.name}, kernels x {factor:.3g}"
        return replace(self, name=name, factor=factor * self.factor)


def _reached(m, n):
    """Return the rate of a tile of m x n, as a fraction of an unlimited tile's."""
    side = 2 * m * n / (m + n)  # of the square tile with equal work per number read
    return side / (side + TILE_LOSS)


@cache
def warn_of_unknown_products(name):
    """Warn, once for each operator, that the model does not know its products."""
    warnings.warn(
        f"{name} is counted by its bytes only: its products are not known to the model, so that it "
        "may take longer on a GPU",
        stacklevel=3,
    )
