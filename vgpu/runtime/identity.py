"""What a GPU tells programs about itself: its name, its compute capability, its properties.

Programs choose by these: DeepSpeed takes float16 from compute capability 7 on, for example.
"""

import platform
import uuid
from dataclasses import dataclass, replace

import torch

from vgpu.process_limits import cores_of_this_process, memory_of_this_process
from vgpu.runtime import registry

KIB, MIB = 2**10, 2**20

# By compute capability: threads and KiB of shared memory of a multiprocessor, and KiB of these that
# a block may ask for. "Technical Specifications per Compute Capability" in NVIDIA's CUDA C++
# Programming Guide; the rest of that table is the same for all of them.
_OF_A_MULTIPROCESSOR = {
    (6, 0): (2048, 64, 48),
    (7, 0): (2048, 96, 96),
    (7, 5): (1024, 64, 64),
    (8, 0): (2048, 164, 163),
    (8, 9): (1536, 100, 99),
    (9, 0): (2048, 228, 227),
}


@dataclass(frozen=True)
class GPUIdentity:
    """What the driver reports of a GPU that is sold.

    Args:
        name: what `torch.cuda.get_device_name` returns.
        capability: the compute capability, (7, 0) for example.
        l2_cache: bytes.
        clock: Hz of the multiprocessors at most.
        memory_clock: Hz of the memory, which transfers twice in each.
        bus_width: bits of the memory's bus.
    """

    name: str
    capability: tuple
    l2_cache: int
    clock: float
    memory_clock: float
    bus_width: int


V100 = GPUIdentity("Tesla V100-SXM2-16GB", (7, 0), 6 * MIB, 1530e6, 877e6, 4096)


class DeviceProperties:
    """What `get_device_properties` returns, with the names and units of torch's own.

    Attributes:
        name, gcnArchName: the name of the device.
        major, minor: its compute capability.
        total_memory, L2_cache_size: bytes.
        shared_memory_per_block, shared_memory_per_block_optin: bytes of shared memory that a block
            gets, and what it gets if it asks for more.
        shared_memory_per_multiprocessor: bytes.
        clock_rate, memory_clock_rate: kHz.
        memory_bus_width: bits.
        multi_processor_count, max_threads_per_multi_processor, max_threads_per_block, warp_size,
        regs_per_multiprocessor: numbers.
        uuid: the same for the same device in every process.
    """

    is_integrated = is_multi_gpu_board = pci_device_id = pci_domain_id = 0
    warp_size, max_threads_per_block = 32, 1024
    regs_per_multiprocessor = 64 * KIB
    shared_memory_per_block = 48 * KIB

    def __init__(self, identity, index, memory, processors):
        self.name = self.gcnArchName = identity.name
        self.major, self.minor = identity.capability
        self.total_memory = memory
        self.multi_processor_count = processors
        self.uuid = uuid.uuid5(uuid.NAMESPACE_OID, f"{identity.name} {index}")
        self.pci_bus_id = index
        threads, shared, of_a_block = _OF_A_MULTIPROCESSOR[identity.capability]
        self.max_threads_per_multi_processor = threads
        self.shared_memory_per_multiprocessor = shared * KIB
        self.shared_memory_per_block_optin = of_a_block * KIB
        self.L2_cache_size = identity.l2_cache
        self.clock_rate = round(identity.clock / 1e3)
        self.memory_clock_rate = round(identity.memory_clock / 1e3)
        self.memory_bus_width = identity.bus_width

    def __repr__(self):
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory // MIB}MB, "
            f"multi_processor_count={self.multi_processor_count}, uuid={self.uuid}, "
            f"pci_bus_id={self.pci_bus_id}, pci_device_id=0, pci_domain_id=0, "
            f"L2_cache_size={self.L2_cache_size // MIB}MB)"
        )


def identity_of(device):
    """Return the `GPUIdentity` that a `Device` says it is.

    A device without one is a V100 under another name: what it is made of. Its compute capability
    is 7.0, or 8.0 where its model has rates for bfloat16.
    """
    if device.model is None:
        threads = f"{device.threads} CPU thread{'s' if device.threads > 1 else ''}"
        return replace(V100, name=f"Virtual GPU ({threads})")
    gpu = device.model.gpu
    identity = getattr(gpu, "identity", None)
    if identity is not None:
        return identity
    capability = (8, 0) if "bfloat16" in getattr(gpu, "peaks", ()) else (7, 0)
    return replace(V100, name=gpu.name, capability=capability)


def properties_of(device):
    """Return the `DeviceProperties` of a `Device`."""
    processors = device.threads
    if device.model is not None:
        processors = getattr(device.model.gpu, "multiprocessors", processors)
    return DeviceProperties(identity_of(device), device.index, device.memory.limit, processors)


def describe_device(device):
    """Return what a device is, in words, and rows of a table on the machine that is modelled.

    Args:
        device: a virtual GPU, a real one or the CPU.

    Returns:
        A string, and a list of pairs of strings, empty where no machine is modelled.
    """
    device = torch.device(device)
    if device.type == "cpu":
        cores, memory = cores_of_this_process(), memory_of_this_process() / 2**30
        return f"{cpu_name()}, {cores} cores, {memory:.1f} GiB", []
    properties = torch.get_device_module(device).get_device_properties(device)
    found = registry.find(device) if registry.is_virtual(device) else None
    model = found.model if found else None
    name = f"Modelled {model.gpu.name}" if model else properties.name  # as sold, but modelled
    text = f"{name}, {properties.total_memory / 2**30:.1f} GiB"
    if found is not None:
        text += f", link to the CPU: {found.link or 'unlimited'}"
        if found.peer_link is not found.link:
            text += f", to other devices: {found.peer_link or 'unlimited'}"
    return text, model.machine.rows() if model else []


def cpu_name():
    """Return the name of the processor."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
