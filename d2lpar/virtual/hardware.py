"""GPUs and machines that can be modelled: their published figures, and the time of a kernel.

The peaks are those of the makers' documents named as `source`, dense and without sparsity. Memory
is what torch reports as `total_memory`. The bandwidths of links are measured ones, because a copy
never reaches the figure on the box.
"""

from dataclasses import dataclass, field, replace
from math import ceil

import torch

from .links import PRESETS, Link, as_link

# What is not in any datasheet, and what it was fitted to: rows of one GPU, never of several.
PRODUCT_EFFICIENCY = 0.92  # 50 float32 products of 4000 x 4000 in 0.466 s on a V100 (d2l 13.3)
TENSOR_CORE_EFFICIENCY = 0.75  # cuBLAS in float16: V100 0.66 to 0.8, A100 0.77 (see SOURCES)
MEMORY_EFFICIENCY = 0.85  # BabelStream's triad: 0.94 on a V100, 0.85 to 0.89 on an A100
LEAST_SECONDS = 3e-6  # of a kernel on a V100, from the launch of one to that of the next
LAUNCH_SECONDS = 8e-6  # of the host for an operator in eager mode: 7 to 8 µs on hosts of A100s
NEW_MEMORY = 1.9e9  # bytes/s at which the host makes new memory ready, pinned or not (d2l 13.3:
NEW_MEMORY_FROM = 32 * 2**20  # 2.3125 s for 50 copies of 64 MB); less is taken from what it has
TILE_LOSS = 32  # a tile of t x t reaches t / (t + 32) of what an unlimited one would

UNITS = ("float64", "float32", "tf32", "bfloat16", "float16")
TILES = (128, 64, 32)  # sides of the tiles that a multiprocessor computes at a time
SPLITS = (1, 2, 4, 8, 16, 32, 64, 128)  # parts that the sums of a product may be cut into


@dataclass(frozen=True)
class GPU:
    """A GPU as its datasheet describes it.

    Args:
        name: what it is called.
        memory: bytes.
        bandwidth: of its memory, bytes/s.
        peaks: FLOP/s of products by what they compute in: "float64", "float32", "tf32", "bfloat16",
            "float16". A dtype that is missing runs as float32.
        multiprocessors: their number; each computes one tile of a product at a time.
        link: its `Link` to the CPU.
        peer_link: its `Link` to other GPUs of the machine; None for the way over `link`.
        source: where the figures come from.
    """

    name: str
    memory: int
    bandwidth: float
    peaks: dict = field(hash=False)
    multiprocessors: int
    link: Link
    peer_link: Link | None = None
    source: str = "the caller"

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
        """Return how long a kernel takes: the longest of three.

        - LEAST_SECONDS;
        - its bytes, at MEMORY_EFFICIENCY of the bandwidth of the memory;
        - its products of matrices, one after the other, see `product_seconds`.

        Args:
            kernel: a `Kernel`.
        """
        products = sum(
            self.product_seconds(each, kernel.dtype, kernel.name) for each in kernel.products
        )
        num_bytes = kernel.num_bytes / (MEMORY_EFFICIENCY * self.bandwidth)
        return max(LEAST_SECONDS, num_bytes, products)

    def product_seconds(self, product, dtype=torch.float32, name="aten.mm"):
        """Return how long products of matrices take.

        The result is cut into square tiles. Each multiprocessor computes one tile at a time, so
        the tiles run in waves, the last of which may leave most of them idle; that is why small and
        narrow products are slow. Smaller tiles fill a wave better and reach less (TILE_LOSS).
        Where there are few tiles, the sums can be split into parts, too. The fastest of all these
        ways counts, as a library chooses it.

        Args:
            product: a `Product`.
            dtype: of the matrices.
            name: of the operator; convolutions of float32 may use TF32 where products may not.
        """
        unit = self.unit(dtype, name)
        rate = self._rate(unit) / self.multiprocessors  # of one of them
        best = float("inf")
        for tile in TILES:
            relative = tile / (tile + TILE_LOSS) * (TILES[0] + TILE_LOSS) / TILES[0]
            tiles = product.batch * ceil(product.m / tile) * ceil(product.n / tile)
            for split in SPLITS:
                if split > 1 and product.k < 64 * split:
                    break
                waves = ceil(tiles * split / self.multiprocessors)
                flops = 2 * tile * tile * ceil(product.k / split)
                best = min(best, waves * flops / (relative * rate))
        return best

    def _rate(self, unit):
        """Return the FLOP/s that large products reach."""
        on_tensor_cores = unit not in ("float64", "float32")
        reached = TENSOR_CORE_EFFICIENCY if on_tensor_cores else PRODUCT_EFFICIENCY
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
        """Return facts about it for a table: pairs of texts."""
        peaks = ", ".join(f"{unit} {peak / 1e12:g}" for unit, peak in self.peaks.items())
        return [
            (
                f"{self.name}",
                f"{peaks} TFLOP/s; memory {self.bandwidth / 1e9:g} GB/s ({self.source})",
            ),
            (
                "fitted",
                f"products reach {PRODUCT_EFFICIENCY:g} of the peak, on tensor cores "
                f"{TENSOR_CORE_EFFICIENCY:g}, memory {MEMORY_EFFICIENCY:g}; a kernel takes at "
                f"least {LEAST_SECONDS * 1e6:g} µs",
            ),
        ]


class Scaled:
    """A GPU whose kernels take `factor` times as long: one number, fitted to one measurement.

    Args:
        gpu: a `GPU`, or the name of one.
        factor: a positive number.

    Raises:
        ValueError: `factor` is not positive, or no GPU has the name.
    """

    def __init__(self, gpu, factor):
        if not factor > 0:
            raise ValueError(f"the factor of a GPU's times must be positive: got {factor}")
        self._gpu = gpu = as_gpu(gpu)
        self.factor = factor
        self.name = f"{gpu.name}, kernels x {factor:.3g}"
        self.memory, self.link, self.peer_link = gpu.memory, gpu.link, gpu.peer_link

    def rows(self):
        """Return facts about it for a table: pairs of texts."""
        return [*self._gpu.rows(), ("scaled", f"kernels take {self.factor:.4g} times as long")]

    def kernel_seconds(self, kernel):
        """Return how long a `Kernel` takes."""
        return self.factor * self._gpu.kernel_seconds(kernel)


def tf32_is_allowed():
    """Return whether torch allows TF32 in products of matrices, and in convolutions."""
    try:
        return torch._C._get_cublas_allow_tf32(), torch._C._get_cudnn_allow_tf32()
    except RuntimeError:  # the program uses torch's newer names, and torch refuses both at a time
        backends = torch.backends
        precisions = backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision
        return tuple(precision == "tf32" for precision in precisions)


PCIE3 = Link(
    12.1e9, 5e-6, 5.2e9, "PCIe 3.0 x16", "bandwidthTest and nvprof on a V100-SXM2; latency d2l 13.4"
)
PCIE4 = Link(25.7e9, 5e-6, 10e9, "PCIe 4.0 x16", "bandwidthTest on a DGX A100; latency d2l 13.4")
PCIE5 = Link(54.3e9, 5e-6, None, "PCIe 5.0 x16", "p2pmark: 86 % of 63 GB/s; latency d2l 13.4")
THROUGH_HOST = Link(
    20.9e9, 12e-6, None, "PCIe 4.0 through the host", "p2pBandwidthLatencyTest with P2P off"
)
NVLINK1 = Link(
    36.4e9, 2e-6, None, "NVLink 1, 2 links", "Dell HPC: 91 % of 2 x 20 GB/s, as between two P100"
)
NVLINK2 = Link(47.9e9, 2e-6, None, "NVLink 2, 2 links", "Dell HPC: 96 % of 2 x 25 GB/s on V100")
NVLINK3 = Link(
    240e9, 2.7e-6, None, "NVLink 3, 12 links", "20 of 25 GB/s a link (nccl-tests issue 149)"
)
NVLINK4 = Link(
    374e9, 2.7e-6, None, "NVLink 4, 18 links", "p2pBandwidthLatencyTest (NCCL issue 1264)"
)

MIB = 2**20
GPUS = {
    "p100": GPU(
        "P100-SXM2-16GB",
        16280 * MIB,
        732e9,
        {"float32": 10.6e12, "float64": 5.3e12},  # torch sums float16 in float32, at that rate
        56,
        PCIE3,
        NVLINK1,
        "NVIDIA Tesla P100 whitepaper WP-08019-001",
    ),
    "v100": GPU(
        "V100-SXM2-16GB",
        16160 * MIB,
        900e9,
        {"float32": 15.7e12, "float16": 125e12, "float64": 7.8e12},
        80,
        PCIE3,
        NVLINK2,
        "NVIDIA Tesla V100 whitepaper WP-08608-001, table 1",
    ),
    "t4": GPU(
        "T4",
        15109 * MIB,
        320e9,
        {"float32": 8.1e12, "float16": 65e12, "float64": 8.1e12 / 32},
        40,
        PCIE3,
        None,
        "NVIDIA T4 datasheet",
    ),
    "rtx4090": GPU(
        "GeForce RTX 4090",
        24563 * MIB,
        1008e9,
        {
            "float32": 82.6e12,
            "tf32": 82.6e12,
            "bfloat16": 165.2e12,
            "float16": 165.2e12,
            "float64": 82.6e12 / 64,
        },
        128,
        PCIE4,
        THROUGH_HOST,
        "NVIDIA Ada architecture whitepaper, appendix A; float16 with sums in float32",
    ),
    "a100": GPU(
        "A100-SXM4-80GB",
        81158 * MIB,
        2039e9,
        {
            "float32": 19.5e12,
            "tf32": 156e12,
            "bfloat16": 312e12,
            "float16": 312e12,
            "float64": 9.7e12,
        },
        108,
        PCIE4,
        NVLINK3,
        "NVIDIA A100 datasheet",
    ),
    "h100": GPU(
        "H100-SXM5-80GB",
        81089 * MIB,
        3350e9,
        {
            "float32": 66.9e12,
            "tf32": 494.7e12,
            "bfloat16": 989.4e12,
            "float16": 989.4e12,
            "float64": 33.5e12,
        },
        132,
        PCIE5,
        NVLINK4,
        "NVIDIA H100 architecture whitepaper",
    ),
}
GPUS["v100-32gb"] = replace(
    GPUS["v100"], name="V100-SXM2-32GB", memory=32494 * MIB, source="NVIDIA V100 datasheet"
)
GPUS["a100-40gb"] = replace(
    GPUS["a100"],
    name="A100-SXM4-40GB",
    memory=40441 * MIB,
    bandwidth=1555e9,
    source="NVIDIA A100 architecture whitepaper",
)
GPUS["h200"] = replace(
    GPUS["h100"],
    name="H200-SXM-141GB",
    memory=143156 * MIB,
    bandwidth=4800e9,
    source="NVIDIA H200 product page, its sparse figures halved",
)


@dataclass(frozen=True)
class Machine:
    """Machines with several GPUs, and what joins them.

    Args:
        gpu: a `GPU`, or what stands for one.
        gpus: how many each machine has; None for all in one.
        gpus_per_switch: how many share one PCIe link to the CPU.
        network: the `Link` of a machine to the others; None where there is one machine.
        launch_seconds: what the host takes to issue an operator.
        name: what it is called.
        source: where the figures come from.
    """

    gpu: object
    gpus: int | None = None
    gpus_per_switch: int = 1
    network: Link | None = None
    launch_seconds: float = LAUNCH_SECONDS
    name: str = ""
    source: str = "the caller"

    def rows(self):
        """Return facts about it for a table: pairs of texts."""
        facts = [f"{self.launch_seconds * 1e6:g} µs to launch an operator"]
        if self.gpus is not None:
            facts.append(f"{self.gpus} GPUs in each, {self.gpus_per_switch} on a link to the CPU")
        if self.network is not None:
            facts.append(f"network {self.network}")
        return [*self.gpu.rows(), (self.name or "machine", "; ".join(facts))]

    def __post_init__(self):
        object.__setattr__(self, "gpu", as_gpu(self.gpu))
        object.__setattr__(self, "network", as_link(self.network))
        for name in ("gpus", "gpus_per_switch"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} of a Machine is a positive whole number: got {value!r}")
        if not 0 <= self.launch_seconds < float("inf"):
            raise ValueError(f"launch_seconds must not be negative: got {self.launch_seconds}")


_OF_A_GPU = ("kernel_seconds", "link", "memory", "name", "peer_link", "rows")


def as_gpu(gpu):
    """Return the `GPU` that is meant.

    Args:
        gpu: a name in `GPUS`, or an object that has `kernel_seconds`.

    Raises:
        ValueError: no GPU has this name.
        TypeError: `gpu` is none of these.
    """
    if isinstance(gpu, str):
        if gpu.lower() not in GPUS:
            what = "a machine, not a GPU" if gpu.lower() in MACHINES else "no GPU of ours"
            raise ValueError(f"{gpu!r} is {what}; GPUs are {', '.join(GPUS)}")
        return GPUS[gpu.lower()]
    missing = [name for name in _OF_A_GPU if not hasattr(gpu, name)]
    if missing:
        raise TypeError(
            f"a GPU is the name of one, or an object with {', '.join(_OF_A_GPU)}: got {gpu!r}, "
            f"without {', '.join(missing)}"
        )
    return gpu


def as_machine(model):
    """Return the `Machine` that is meant.

    Args:
        model: a `Machine`, the name of one or of a GPU, or a `GPU`.

    Raises:
        ValueError: neither a GPU nor a machine has this name.
        TypeError: `model` is none of these.
    """
    if isinstance(model, Machine):
        return model
    if isinstance(model, str):
        if model.lower() in MACHINES:
            return MACHINES[model.lower()]
        if model.lower() not in GPUS:
            known = ", ".join((*GPUS, *MACHINES))
            raise ValueError(f"no GPU and no machine named {model!r}; there are {known}")
    gpu = as_gpu(model)
    return Machine(gpu, launch_seconds=getattr(gpu, "launch_seconds", LAUNCH_SECONDS))


def machines_of(n, models):
    """Return for each of `n` devices the `Machine` that it is in.

    Args:
        models: `n` models, see `as_machine`; either all the same, or GPUs.

    Raises:
        ValueError: there are more GPUs than in one machine and no network, or machines differ.
        TypeError: a model is none.
    """
    machines = [as_machine(model) for model in models]
    first = machines[0]
    if any(replace(machine, gpu=first.gpu) != first for machine in machines):
        raise ValueError("devices of several kinds of machines: give one Machine, or GPUs")
    if first.gpus is not None and n > first.gpus and first.network is None:
        raise ValueError(
            f"{n} devices need several machines of {first.gpus}, and they have no network"
        )
    return machines


MACHINES = {
    machine.name: machine
    for machine in (
        Machine("v100", 8, 2, PRESETS["infiniband-edr"], name="dgx1", source="NVIDIA DGX-1 guide"),
        Machine("v100", 8, 2, PRESETS["25gbe"], name="p3.16xlarge", source="AWS"),
        Machine(
            "p100", 8, 2, PRESETS["50gbe"], name="bigbasin", source="Goyal et al. 2017, section 4"
        ),
        Machine(
            "a100", 8, 2, PRESETS["infiniband-hdr"], name="dgxa100", source="NVIDIA DGX A100 guide"
        ),
    )
}
