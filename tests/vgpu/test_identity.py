"""What GPUs say that they are: names, compute capabilities and properties, as programs ask."""

import pytest
import torch
from modelling import fixed_gpus
from test_torch_cuda import run

from vgpu import virtual_gpus
from vgpu.modelled.datasheets import GPUS

MIB = 2**20
# What `print(torch.cuda.get_device_properties(0))` prints on such GPUs: outputs published with
# issues, benchmarks and courses; the A100's L2 cache is in its white paper.
PRINTED = {
    "v100": ("Tesla V100-SXM2-16GB", 7, 0, 16160, 80, 6),
    "rtx4090": ("NVIDIA GeForce RTX 4090", 8, 9, 24563, 128, 72),
    "a100": ("NVIDIA A100-SXM4-80GB", 8, 0, 81158, 108, 40),
}


@pytest.mark.parametrize("model", PRINTED)
def test_a_modelled_gpu_says_what_the_real_one_says(model):
    virtual_gpus(2, model=model)
    name, major, minor, memory, processors, l2 = PRINTED[model]
    known = torch.vgpu.get_device_properties(0)
    assert torch.vgpu.get_device_name() == known.name == name
    assert torch.vgpu.get_device_capability() == (known.major, known.minor) == (major, minor)
    assert (known.total_memory, known.L2_cache_size) == (memory * MIB, l2 * MIB)
    assert known.multi_processor_count == processors and known.warp_size == 32
    text = f"name='{name}', major={major}, minor={minor}, total_memory={memory}MB, multi"
    assert text in repr(known) and f"L2_cache_size={l2}MB)" in repr(known)
    found = [torch.vgpu.get_device_properties(i) for i in (0, 1, 0)]
    assert found[0].uuid == found[2].uuid != found[1].uuid and len(known.uuid.bytes) == 16
    assert [each.pci_bus_id for each in found] == [0, 1, 0]
    told = run("print(torch.cuda.get_device_properties(1).uuid)", f"{model}:2")
    assert told == [str(found[1].uuid)], "the same in another process"


@pytest.mark.parametrize("model", GPUS)
def test_clocks_and_bus_give_the_peaks_of_the_data_sheet(model):
    """A wrong digit in one of the figures shows, because the peaks were published by themselves."""
    virtual_gpus(1, model=model)
    known = torch.vgpu.get_device_properties(0)
    units = 128 if known.major >= 9 or known.minor == 9 else 64  # of float32 in a multiprocessor
    flops = 2 * units * known.multi_processor_count * known.clock_rate * 1e3
    assert flops == pytest.approx(GPUS[model].peaks["float32"], rel=0.01)
    bandwidth = 2 * known.memory_clock_rate * 1e3 * known.memory_bus_width / 8
    assert bandwidth == pytest.approx(GPUS[model].bandwidth, rel=0.03)


GUIDE = {  # threads and KiB of shared memory of a multiprocessor, KiB that a block may ask for
    "p100": (2048, 64, 48), "v100": (2048, 96, 96), "t4": (1024, 64, 64),
    "rtx4090": (1536, 100, 99), "a100": (2048, 164, 163), "h100": (2048, 228, 227),
}  # fmt: skip


@pytest.mark.parametrize("model", GUIDE)
def test_a_multiprocessor_has_what_the_programming_guide_says(model):
    virtual_gpus(1, model=model)
    known = torch.vgpu.get_device_properties(0)
    shared = known.shared_memory_per_multiprocessor, known.shared_memory_per_block_optin
    assert (known.max_threads_per_multi_processor, *(n / 1024 for n in shared)) == GUIDE[model]
    assert (known.shared_memory_per_block, known.regs_per_multiprocessor) == (49152, 65536)
    assert (known.max_threads_per_block, known.is_integrated) == (1024, 0)


def test_gpus_that_one_cannot_buy():
    fixed_gpus(1)
    assert torch.vgpu.get_device_name() == "fixed"
    assert torch.vgpu.get_device_capability() == (7, 0)
    virtual_gpus(1, model=GPUS["a100"].scaled(2))
    assert torch.vgpu.get_device_name() == "NVIDIA A100-SXM4-80GB"
    virtual_gpus(1, model=type(GPUS["a100"])(**vars(GPUS["a100"]) | {"identity": None}))
    assert torch.vgpu.get_device_capability() == (8, 0)  # it computes with bfloat16


@pytest.mark.parametrize(
    ("gpus", "natively"), [("vgpu:1", False), ("v100:1", False), ("a100:1", True)]
)
def test_what_programs_conclude_from_it(gpus, natively):
    """bfloat16 without emulation, and TF32, from compute capability 8 on: torch's own rule."""
    run(f"""
    assert torch.cuda.get_device_capability()[0] >= 7  # DeepSpeed takes float16 then
    assert torch.cuda.is_bf16_supported()
    assert torch.cuda.is_bf16_supported(including_emulation=False) == {natively}
    assert torch.cuda.is_tf32_supported() == {natively}
    assert torch.cuda.get_device_properties("cuda").gcnArchName == torch.cuda.get_device_name(0)
    """, gpus)  # fmt: skip
