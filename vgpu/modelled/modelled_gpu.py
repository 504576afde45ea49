"""A GPU as its data sheet describes it, and the time of a kernel on it."""

import warnings
from dataclasses import dataclass, field
from functools import cache
from math import ceil
from typing import NamedTuple

import torch

from vgpu.modelled.links import Link
from vgpu.private.dispatch import tf32_is_allowed
from vgpu.runtime.identity import GPUIdentity

# Figures that no data sheet has, and what they were fitted to: rows of one GPU, never of several.
PRODUCT_EFFICIENCY = 0.92  # 50 products of 4000 x 4000 in 0.466 s on a V100 (d2l 13.3); 0.473 here
TENSOR_CORE_EFFICIENCY = 0.88  # the largest tiles on A100s, before waves and TILE_SECONDS
MEMORY_EFFICIENCY = 0.85  # BabelStream's triad: 0.94 on a V100, 0.85 to 0.89 on an A100
LEAST_SECONDS = 3e-6  # on a V100, from the launch of a small kernel to the launch of the next
TILE_LOSS = 32  # a tile of t x t reaches t / (t + 32) of what an unlimited one would
TILE_SECONDS = 2.5e-6  # for a tile on tensor cores to begin and end
UNITS = ("float64", "float32", "tf32", "bfloat16", "float16")
# What a multiprocessor computes at a time. cuBLAS has nothing narrower in float32 (NeuSight).
TILES = ((128, 128), (64, 64))
CONVOLUTION_TILES = (*TILES, (32, 32))
TILE_STEPS = 9  # terms by which the sums of a tile outside tensor cores seem longer (NeuSight)
TENSOR_CORE_TILES = ((256, 128), (128, 128), (128, 64), (64, 64), (32, 32))
_PLAIN = ("float64", "float32")  # units that are no tensor cores
QUERIES = 128  # of a tile of fused attention
SPLITS = (1, 2, 4, 8, 16, 32, 64, 128)  # parts that the sums of a product may be cut into
# Small tiles that a multiprocessor computes at the same time, so that they begin together
TOGETHER = {(128, 64): 2, (64, 64): 4, (32, 32): 8}
BLOCKS = 4  # of threads that a multiprocessor runs at a time, each for a row of a normalization
# What products without tiles reach of the peak of float32: each reads two numbers, and a
# multiprocessor of a V100 has 32 units that load for 64 that multiply (whitepaper WP-08608-001)
DIRECT = 0.25
# Bytes for the parts of sums: what torch gives cuBLAS (aten/src/ATen/cuda/CublasHandlePool.cpp)
WORKSPACE = 8 * 2**20
# FLOP/s that the tensor cores of a multiprocessor reach where it cannot read the matrices 16 bytes
# at a time: products of 16,384 x 768 x 50,257 on an H200, 0.7 to 1.2e12; assumed for other GPUs
UNALIGNED = 1e12
TRANSFORM_EFFICIENCY = 0.5  # of the bandwidth, what kernels of Winograd's transforms reach


class Overheads(NamedTuple):
    """What kernels take besides their products and bytes, in seconds; 0 where nobody measured it.

    Attributes:
        convolution: the least that each product of a convolution takes: cuDNN converts layouts,
            computes, and sums parts.
        row: what a multiprocessor takes to begin and end a row of a normalization.
        element: what a block of threads takes for an element of its row.
        strided: what a multiprocessor takes for an element of an operation whose tensors lie
            differently in memory, or are broadcast: it computes where each number is.
        product: what a product takes besides its tiles, before the first and after the last.
    """

    convolution: float = LEAST_SECONDS
    row: float = 0.0
    element: float = 0.0
    strided: float = 0.0
    product: float = 0.0


@dataclass(frozen=True)
class GPU:
    """A GPU as its data sheet describes it.

    Args:
        name: the name to print.
        memory: bytes of its memory.
        bandwidth: bytes/s of its memory.
        peaks: FLOP/s of products by the type they compute in: "float64", "float32", "tf32",
            "bfloat16", "float16". A dtype that is missing runs as float32.
        multiprocessors: the number of multiprocessors; each computes one tile of a product at a
            time.
        link: its `Link` to the CPU.
        peer_link: its `Link` to another GPU of the machine; None for the way over `link`.
        tensor_efficiency: what the largest tiles reach of the peak of tensor cores.
        collective_link: its `Link` in collectives of many GPUs of the machine, which use several
            ways at a time; None for `peer_link`.
        source: where the figures come from.
        identity: what programs are told that it is; None for a GPU that is not sold.
        workspace: bytes that torch gives cuBLAS for the parts of sums: 32 MiB on H100s.
        product_efficiency: what the largest products reach of the peaks of other units.
        special: exponentials that a multiprocessor computes for each multiplication in float32.
        memory_efficiency: what kernels reach of the bandwidth.
        overheads: its `Overheads`.
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

    def __post_init__(self):
        figures = {"memory": self.memory, "bandwidth": self.bandwidth, **self.peaks}
        figures["multiprocessors"] = self.multiprocessors
        for name, value in figures.items():
            if isinstance(value, str) or not value > 0:
                raise ValueError(f"{name} of a GPU must be a positive number: got {value!r}")
        for unit in self.peaks:
            if unit not in UNITS:
                raise ValueError(f"peaks of a GPU are those of {', '.join(UNITS)}: got {unit!r}")
        if "float32" not in self.peaks:
            raise ValueError(f"a GPU needs its peak for float32: got {list(self.peaks)}")

    def kernel_seconds(self, kernel):
        """Return how long a `Kernel` takes: the longest of three.

        - LEAST_SECONDS, for each product of a convolution that of its `overheads`;
        - its bytes, at `memory_efficiency` of the bandwidth of the memory, and what its `overheads`
          say of rows and `strided` elements;
        - its products of matrices, one after the other, see `product_seconds`. Where these are not
          known it warns, once for each operator.

        A convolution on tensor cores has its tensors copied before and after, unless their layout
        is channels_last.
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
            seconds += 2 * num_bytes  # into the layout that tensor cores take, and back
        return seconds

    def product_seconds(self, product, dtype=torch.float32, name="aten.mm"):
        """Return how long a `Product` takes.

        The result is cut into tiles. Each multiprocessor computes one tile at a time, so the tiles
        run in waves, the last of which may leave most multiprocessors idle: small and narrow
        products are slow. Smaller tiles fill a wave better and reach less (TILE_LOSS). On tensor
        cores each tile takes TILE_SECONDS to begin and end, elsewhere as long as TILE_STEPS more
        terms of its sums, so short sums are slow, too. What the whole takes besides is in its
        `overheads`.

        The sums can be split into parts (SPLITS), which another kernel adds in LEAST_SECONDS,
        except those that stay `whole` outside tensor cores, where a kernel also runs at `reached`
        of the rate. The bytes of the parts are left out: the caches hold most of them. The parts
        of a product of matrices on tensor cores are kept in float32 in the `workspace` of cuBLAS,
        so large results cannot be split; cuDNN asks for more space. Tensor cores run at UNALIGNED
        at most where matrices are not `aligned`. The fastest counts, as a library chooses it, also
        among the `ways` of the product; what these write and read besides moves at
        TRANSFORM_EFFICIENCY of the bandwidth. Products without tiles run on the units for float32,
        in any dtype, at a rate of their own (DIRECT).

        Args:
            product: a `Product`.
            dtype: the dtype of the matrices.
            name: the name of the operator; float32 convolutions may use TF32 where products may
                not.
        """
        if product.direct:
            return product.flops / (DIRECT * self.peaks["float32"])
        if product.exponentials:
            return self._attention_seconds(product, self._rate(self.unit(dtype, name)))
        unit = self.unit(dtype, name)
        rate = self._rate(unit) / self.multiprocessors  # of one of them
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
            for way, num_bytes in product.ways:
                in_memory = num_bytes / (TRANSFORM_EFFICIENCY * self.bandwidth)
                of_products = self.product_seconds(way, dtype, "aten.bmm" if num_bytes else name)
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
        """Return how long fused attention takes: its products, and then its exponentials.

        A tile is what one multiprocessor computes for QUERIES queries of a head.
        """
        scores = product.m * product.n * product.batch
        special = self.special * self.peaks["float32"] / 2
        tiles = product.batch * ceil(product.m / QUERIES)
        full = ceil(tiles / self.multiprocessors) / (tiles / self.multiprocessors)
        return full * (product.flops / rate + product.exponentials * scores / special)

    def _block_seconds(self, rows, elements, passes):
        """Return what the blocks of threads of a normalization take besides its bytes."""
        together = BLOCKS * self.multiprocessors
        begin = rows * self.overheads.row / self.multiprocessors
        return passes * max(begin, ceil(rows / together) * elements * self.overheads.element)

    def _rate(self, unit):
        reached = self.product_efficiency if unit in _PLAIN else self.tensor_efficiency
        return reached * self.peaks.get(unit, 0.0)

    def unit(self, dtype, name="aten.mm"):
        """Return what products of `dtype` are computed in, a key of `peaks`.

        It is TF32 for float32 where the GPU has it and torch allows it: by default for
        convolutions only, see `torch.backends.cudnn.allow_tf32`.
        """
        unit = str(dtype).removeprefix("torch.")
        if unit == "float32" and self._rate("tf32") > self._rate("float32"):
            in_products, in_convolutions = tf32_is_allowed()
            if in_convolutions if "convolution" in name else in_products:
                return "tf32"
        return unit if unit in self.peaks else "float32"

    def rows(self):
        """Return rows of a table about it: pairs of strings."""
        peaks = ", ".join(f"{unit} {peak / 1e12:g}" for unit, peak in self.peaks.items())
        return [
            (
                f"{self.name}",
                f"{peaks} TFLOP/s; memory {self.bandwidth / 1e9:g} GB/s ({self.source})",
            ),
            (
                "fitted",
                f"products reach {self.product_efficiency:g} of the peak, on tensor cores "
                f"{self.tensor_efficiency:g}, memory {self.memory_efficiency:g}; a kernel takes at "
                f"least {LEAST_SECONDS * 1e6:g} µs",
            ),
            ("collectives", f"over {self.collective_link or self.peer_link or self.link}"),
        ]


def _reached(m, n):
    """Return what a tile of m x n reaches of what an unlimited one would."""
    side = 2 * m * n / (m + n)  # a square tile with as much work for each number that it reads
    return side / (side + TILE_LOSS)


@cache
def warn_of_unknown_products(name):
    """Warn, once for each operator, that the model does not know its products."""
    warnings.warn(
        f"{name} is counted by its bytes only: its products are not known to the model, so that it "
        "may take longer on a GPU",
        stacklevel=3,
    )
