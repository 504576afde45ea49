"""Name, compute capability and properties that a GPU reports to programs.

Programs depend on them: DeepSpeed uses float16 from compute capability 7 on, for example.
"""

import uuid
from dataclasses import dataclass, replace

KIB, MIB = 2**10, 2**20

# By compute capability: threads and KiB of shared memory of a multiprocessor, and the KiB that a
# block may request. Source: "Technical Specifications per Compute Capability" in NVIDIA's CUDA C++
# Programming Guide; the rest of that table is equal for all of them.
_MULTIPROCESSORS = {
    (6, 0): (2048, 64, 48),
    (7, 0): (2048, 96, 96),
    (7, 5): (1024, 64, 64),
    (8, 0): (2048, 164, 163),
    (8, 9): (1536, 100, 99),
    (9, 0): (2048, 228, 227),
}


@dataclass(frozen=True)
class GPUIdentity:
    """What the driver reports for a real GPU."""

    name: str  # the result of `torch.cuda.get_device_name`
    capability: tuple  # the compute capability, such as (7, 0)
    l2_cache: int  # bytes
    clock: float  # maximum clock rate of the multiprocessors, Hz
    memory_clock: float  # clock rate of the memory, with two transfers per cycle, Hz
    bus_width: int  # width of the memory bus, bits


V100 = GPUIdentity("Tesla V100-SXM2-16GB", (7, 0), 6 * MIB, 1530e6, 877e6, 4096)


class DeviceProperties:
    """The result of `get_device_properties`, with torch's names and units.

    Memory is in bytes, clock rates in kHz, the bus width in bits. `uuid` is equal for the same
    device in every process.
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
        threads, shared, of_a_block = _MULTIPROCESSORS[identity.capability]
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
    """Return the `GPUIdentity` of a `Device`.

    By default it is a V100's, with the CPU threads or the model as its name, and compute capability
    7.0, or 8.0 if the model has rates for bfloat16.
    """
    if device.model is None:
        threads = f"{device.threads} CPU thread{'s' if device.threads > 1 else ''}"
        return replace(V100, name=f"Virtual GPU ({threads})")
    gpu = device.model.gpu
    if gpu.identity is not None:
        return gpu.identity
    capability = (8, 0) if "bfloat16" in gpu.peaks else (7, 0)
    return replace(V100, name=gpu.name, capability=capability)


def properties_of(device):
    processors = device.threads if device.model is None else device.model.gpu.multiprocessors
    return DeviceProperties(identity_of(device), device.index, device.memory.limit, processors)
