"""Links: bandwidth and latency to, from and between devices."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Link:
    """A link that moves `bandwidth` bytes per second after `latency` seconds.

    Args:
        bandwidth: bytes per second.
        latency: seconds.
        pageable: bytes per second of copies with CPU memory that is not pinned, which a driver
            stages through a pinned buffer. By default `bandwidth`.
        name: the name to print.
        source: the source of the figures.
        startup: seconds before the first step of a collective; copies have none.

    Raises:
        ValueError: a bandwidth is not positive, or the latency or the start-up is negative.
    """

    bandwidth: float
    latency: float = 0.0
    pageable: float | None = None
    name: str = "link"
    source: str = ""
    startup: float = 0.0

    def __post_init__(self):
        for field in ("bandwidth", "pageable"):
            value = getattr(self, field)
            if value is not None and not value > 0:
                raise ValueError(f"{field} of a link must be positive, in bytes/s: got {value}")
        for field in ("latency", "startup"):
            value = getattr(self, field)
            if not value >= 0:
                raise ValueError(f"{field} of a link must not be negative, in seconds: got {value}")

    def seconds(self, num_bytes, pinned=True):
        """Return the seconds of a copy: bytes / bandwidth + latency; `pageable` unless `pinned`."""
        bandwidth = self.bandwidth if pinned or self.pageable is None else self.pageable
        return num_bytes / bandwidth + self.latency

    def scaled(self, factor):
        """Return this link slowed by `factor`, for use with a device slowed as much.

        The latency stays: it compares with the launch time of an operator, which is not scaled on a
        virtual GPU either.

        Raises:
            ValueError: `factor` is not positive.
        """
        if not factor > 0:
            raise ValueError(f"the factor of a scaled link must be positive: got {factor}")
        pageable = None if self.pageable is None else self.pageable / factor
        name = f"{self.name} slowed {factor:.4g}x"
        return replace(self, bandwidth=self.bandwidth / factor, pageable=pageable, name=name)

    def __str__(self):
        text = f"{self.name} ({format_bytes(self.bandwidth)}/s"
        if self.latency:
            factor, unit = (1e3, "ms") if self.latency >= 1e-3 else (1e6, "µs")
            text += f", latency {self.latency * factor:.3g} {unit}"
        return text + ")"


def format_bytes(num_bytes):
    """Return `num_bytes` with a decimal unit, such as "15.75 GB"."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(num_bytes) < 1000 or unit == "TB":
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1000


# Nominal bandwidths, and typical latencies.
_WIRES = (
    Link(
        15.75e9,
        10e-6,
        6e9,
        "pcie3",
        "PCIe 3.0 x16: 16 lanes of 8 GT/s, 128b/130b coded (PCI-SIG); "
        "latency and the pageable figure are typical of CUDA's bandwidthTest",
    ),
    Link(31.5e9, 10e-6, 12e9, "pcie4", "PCIe 4.0 x16: 16 lanes of 16 GT/s (PCI-SIG)"),
    Link(63e9, 10e-6, None, "pcie5", "PCIe 5.0 x16: 16 lanes of 32 GT/s (PCI-SIG)"),
    Link(1.25e9, 50e-6, None, "10gbe", "10 Gbit Ethernet: 10e9 bits/s over 8"),
    Link(3.125e9, 50e-6, None, "25gbe", "25 Gbit Ethernet: 25e9 bits/s over 8"),
    Link(6.25e9, 50e-6, None, "50gbe", "50 Gbit Ethernet: 50e9 bits/s over 8"),
    Link(12.5e9, 50e-6, None, "100gbe", "100 Gbit Ethernet: 100e9 bits/s over 8"),
    Link(12.5e9, 2e-6, None, "infiniband-edr", "InfiniBand EDR: 100e9 bits/s over 8"),
    Link(25e9, 2e-6, None, "infiniband-hdr", "InfiniBand HDR: 200e9 bits/s over 8"),
    Link(50e9, 2e-6, None, "infiniband-ndr", "InfiniBand NDR: 400e9 bits/s over 8"),
    Link(150e9, 5e-6, None, "nvlink2", "V100: six NVLink 2 links of 25 GB/s a direction"),
    Link(300e9, 5e-6, None, "nvlink3", "A100: 12 NVLink 3 links of 25 GB/s a direction"),
    Link(450e9, 5e-6, None, "nvlink4", "H100: 18 NVLink 4 links of 25 GB/s a direction"),
)
# Measured bandwidths of copies, always less than nominal. The GPUs of datasheets.py have these.
_MEASURED = {
    "pcie3-measured": Link(
        12.1e9,
        5e-6,
        5.2e9,
        "PCIe 3.0 x16",
        "bandwidthTest, nvprof on a V100-SXM2; latency d2l 13.4",
    ),
    "pcie4-measured": Link(
        25.7e9, 5e-6, 10e9, "PCIe 4.0 x16", "bandwidthTest on a DGX A100; latency d2l 13.4"
    ),
    "pcie5-measured": Link(
        54.3e9, 5e-6, None, "PCIe 5.0 x16", "p2pmark: 86 % of 63 GB/s; latency d2l 13.4"
    ),
    "pcie4-through-host-measured": Link(
        20.9e9, 12e-6, None, "PCIe 4.0 through the host", "p2pBandwidthLatencyTest with P2P off"
    ),
    "2xnvlink1-measured": Link(
        36.4e9, 2e-6, None, "NVLink 1, 2 links", "Dell HPC: 91 % of 2 x 20 GB/s, as on P100"
    ),
    "2xnvlink2-measured": Link(
        47.9e9, 2e-6, None, "NVLink 2, 2 links", "Dell HPC: 96 % of 2 x 25 GB/s on V100"
    ),
    "nvlink3-measured": Link(
        240e9, 2.7e-6, None, "NVLink 3, 12 links", "20 of 25 GB/s a link (nccl-tests issue 149)"
    ),
    "nvlink4-measured": Link(
        374e9, 2.7e-6, None, "NVLink 4, 18 links", "p2pBandwidthLatencyTest (NCCL issue 1264)"
    ),
}
# Measured in NCCL's collectives: bus bandwidth, seconds of a step and before the first step.
_VTRAIN = "all-reduce of 1 MB to 1 GB on 2, 4 and 8 GPUs, trace/{} of VIA-Research/vTrain"
_COLLECTIVES = {
    "nvlink2-collectives": Link(
        134e9, 3e-6, None, "NVLink 2, rings of NCCL", _VTRAIN.format("v100"), 18e-6
    ),
    "nvlink3-collectives": Link(
        220e9, 4.6e-6, None, "NVLink 3, rings of NCCL", _VTRAIN.format("a100"), 20e-6
    ),
    "nvlink4-collectives": Link(
        360e9, 4.6e-6, None, "NVLink 4, rings of NCCL", "0.8 of the wire; steps as on A100", 20e-6
    ),
    "pcie4-through-host-collectives": Link(
        2.25e9, 5e-6, None, "PCIe 4.0 through the host", "d2l-neu: 4.5 GB/s of both ways", 20e-6
    ),
}
# A network card next to its GPUs reads their memory directly, and NCCL reaches 0.92 of the nominal
# bandwidth. One card for all GPUs of a machine receives most bytes through CPU memory: less.
BESIDE_GPUS, FOR_ALL_GPUS = 0.92, 0.6
_OF_THE_WIRE = "{} of the wire; steps of NCCL's tuning.cc"
_NETWORKS = {
    f"{name}-collectives": Link(
        reached * rate, step, None, f"{text}, NCCL", _OF_THE_WIRE.format(reached), 20e-6
    )
    for name, rate, step, text, reached in (
        ("25gbe", 3.125e9, 50e-6, "25 Gbit Ethernet", FOR_ALL_GPUS),
        ("50gbe", 6.25e9, 50e-6, "50 Gbit Ethernet", FOR_ALL_GPUS),
        ("infiniband-edr", 12.5e9, 10e-6, "InfiniBand EDR", BESIDE_GPUS),
        ("infiniband-hdr", 25e9, 10e-6, "InfiniBand HDR", BESIDE_GPUS),
        ("infiniband-ndr", 50e9, 10e-6, "InfiniBand NDR", BESIDE_GPUS),
    )
}


class LinkPresets(dict):
    """Links by name, nominal and measured: `PRESETS["pcie3"]`."""


PRESETS = LinkPresets({link.name: link for link in _WIRES} | _MEASURED | _COLLECTIVES | _NETWORKS)


def as_link(link):
    """Return a `Link`, given as such, by a preset's name or bytes per second; None for no limit.

    Raises ValueError for an unknown name or bytes that are not positive, TypeError for other types.
    """
    if link is None or isinstance(link, Link):
        return link
    if isinstance(link, str):
        if link not in PRESETS:
            raise ValueError(f"no link named {link!r}; there are {', '.join(PRESETS)}")
        return PRESETS[link]
    if isinstance(link, (int, float)) and not isinstance(link, bool):
        return Link(float(link))
    raise TypeError(f"a link must be a Link, a preset's name, bytes/s or None: got {link!r}")
