"""Published figures of the GPUs that can be modelled.

Peaks are those of the manufacturers' documents in `source`, without sparsity. Memory is torch's
`total_memory`. Links are measured, because copies never reach the nominal bandwidth.

A `GPUIdentity` has name, compute capability and L2 cache as torch reports them, and clocks and bus
width from the same documents; `nvidia-smi -q -d CLOCK` and CUDA's deviceQuery print them. The peaks
follow from them: a V100 has 80 multiprocessors of 64 units with 2 FLOPs at 1530 MHz, and transfers
4096 bits twice at 877 MHz.

"NeuSight" are float32 kernels of more than 0.2 ms, of github.com/sitar-lab/NeuSight,
scripts/asplos/data/dataset. "DeepBench" are products and convolutions in float32 and float16, of
github.com/baidu-research/DeepBench. A random half of each was held out, see
benchmarks/bench_kernels.py.
"""

from dataclasses import replace

from vgpu.modelled.links import PRESETS
from vgpu.modelled.modelled_gpu import GPU, Overheads
from vgpu.runtime.identity import MIB, V100, GPUIdentity


def _peaks(float32, tf32, half, float64):
    """Return the peaks of a GPU from Ampere on, FLOP/s; `half` is for both 16-bit dtypes."""
    peaks = {"float32": float32, "tf32": tf32, "bfloat16": half, "float16": half}
    return {**peaks, "float64": float64}


GPUS = {
    "p100": GPU(
        "P100-SXM2-16GB",
        16280 * MIB,
        732e9,
        {"float32": 10.6e12, "float64": 5.3e12},  # torch computes float16 products in float32
        56,
        PRESETS["pcie3-measured"],
        PRESETS["2xnvlink1-measured"],
        "NVIDIA Tesla P100 whitepaper WP-08019-001",
        identity=GPUIdentity("Tesla P100-SXM2-16GB", (6, 0), 4 * MIB, 1480e6, 715e6, 4096),
        product_efficiency=0.77,  # bmm reaches 0.92, linear layers 0.6 (NeuSight)
        memory_efficiency=0.78,
        overheads=Overheads(element=2.3e-9),  # layer normalization (NeuSight), as below
    ),
    "v100": GPU(
        "V100-SXM2-16GB",
        16160 * MIB,
        900e9,
        {"float32": 15.7e12, "float16": 125e12, "float64": 7.8e12},
        80,
        PRESETS["pcie3-measured"],
        PRESETS["2xnvlink2-measured"],
        "NVIDIA Tesla V100 whitepaper WP-08608-001, table 1",
        PRESETS["nvlink2-collectives"],
        0.78,
        identity=V100,
        overheads=Overheads(element=1.15e-9),
    ),
    "t4": GPU(
        "T4",
        15109 * MIB,
        320e9,
        {"float32": 8.1e12, "float16": 65e12, "float64": 8.1e12 / 32},
        40,
        PRESETS["pcie3-measured"],
        None,
        "NVIDIA T4 data sheet",
        identity=GPUIdentity("Tesla T4", (7, 5), 4 * MIB, 1590e6, 5001e6, 256),
        tensor_efficiency=0.66,  # products in float16 (DeepBench)
        product_efficiency=0.5,  # power limit of 70 W: kernels 0.42, BERT 0.56 (NeuSight)
        memory_efficiency=0.75,
        overheads=Overheads(element=2.7e-9),
    ),
    "rtx4090": GPU(
        "GeForce RTX 4090",
        24563 * MIB,
        1008e9,
        _peaks(82.6e12, 82.6e12, 165.2e12, 82.6e12 / 64),
        128,
        PRESETS["pcie4-measured"],
        PRESETS["pcie4-through-host-measured"],
        "NVIDIA Ada architecture whitepaper, appendix A; float16 with sums in float32",
        PRESETS["pcie4-through-host-collectives"],
        special=0.125,
        identity=GPUIdentity("NVIDIA GeForce RTX 4090", (8, 9), 72 * MIB, 2520e6, 10501e6, 384),
    ),
    "a100": GPU(
        "A100-SXM4-80GB",
        81158 * MIB,
        2039e9,
        _peaks(19.5e12, 156e12, 312e12, 9.7e12),
        108,
        PRESETS["pcie4-measured"],
        PRESETS["nvlink3-measured"],
        "NVIDIA A100 data sheet",
        PRESETS["nvlink3-collectives"],
        identity=GPUIdentity("NVIDIA A100-SXM4-80GB", (8, 0), 40 * MIB, 1410e6, 1593e6, 5120),
        overheads=Overheads(element=0.97e-9),
    ),
    "h100": GPU(
        "H100-SXM5-80GB",
        81089 * MIB,
        3350e9,
        _peaks(66.9e12, 494.7e12, 989.4e12, 33.5e12),
        132,
        PRESETS["pcie5-measured"],
        PRESETS["nvlink4-measured"],
        "NVIDIA H100 architecture whitepaper",
        PRESETS["nvlink4-collectives"],
        0.78,
        identity=GPUIdentity("NVIDIA H100 80GB HBM3", (9, 0), 50 * MIB, 1980e6, 2619e6, 5120),
        workspace=32 * MIB,
        product_efficiency=0.77,  # products of 8192 x 1024 x 50304 on an H100: power limit
        special=0.125,
        # benchmarks/one_gpu.py; `strided` and `product` on an H200
        overheads=Overheads(
            convolution=11e-6, row=145e-9, element=0.87e-9, strided=0.2e-9, product=2e-6
        ),
    ),
}
GPUS["v100-32gb"] = replace(
    GPUS["v100"],
    name="V100-SXM2-32GB",
    memory=32494 * MIB,
    source="NVIDIA V100 data sheet",
    identity=replace(V100, name="Tesla V100-SXM2-32GB"),
)
GPUS["a100-40gb"] = replace(
    GPUS["a100"],
    name="A100-SXM4-40GB",
    memory=40441 * MIB,
    bandwidth=1555e9,
    source="NVIDIA A100 architecture whitepaper",
    identity=replace(GPUS["a100"].identity, name="NVIDIA A100-SXM4-40GB", memory_clock=1215e6),
)
GPUS["h200"] = replace(
    GPUS["h100"],
    name="H200-SXM-141GB",
    memory=143156 * MIB,
    bandwidth=4800e9,
    source="NVIDIA H200 product page, its sparse figures halved",
    identity=GPUIdentity("NVIDIA H200", (9, 0), 60 * MIB, 1980e6, 3201e6, 6144),
)
