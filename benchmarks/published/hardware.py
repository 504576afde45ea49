"""The GPUs and machines of `hardware.toml`, beside those of vgpu, by their names."""

import tomllib
from dataclasses import replace
from pathlib import Path

from vgpu import GPUS as OURS
from vgpu import MACHINES as OUR_MACHINES
from vgpu import PRESETS, Link, Machine
from vgpu.modelled.datasheets import MIB
from vgpu.modelled.links import BESIDE_GPUS, FOR_ALL_GPUS
from vgpu.modelled.modelled_gpu import GPU

FILE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def link_of(given):
    """Return a `Link`: a preset, None for "none", or one that is described."""
    if isinstance(given, str):
        return None if given == "none" else PRESETS[given]
    return Link(**given)


def gpu_of(figures):
    """Return the `GPU` of an entry."""
    figures = dict(figures)
    base = figures.pop("base", None)
    if "memory" in figures:
        figures["memory"] *= MIB
    figures |= {name: link_of(figures[name]) for name in ("link", "peer_link") if name in figures}
    return replace(GPUS[base], **figures) if base else GPU(**figures)


def machine_of(name, figures):
    """Return the `Machine` of an entry."""
    figures = dict(figures)
    gpu, gbits = GPUS[figures.pop("gpu")], figures.pop("gbits", None)
    latency = figures.pop("latency", 10e-6)
    if gbits is not None:
        reached = BESIDE_GPUS if "network_cards" in figures else FOR_ALL_GPUS
        rate = reached * gbits * 1e9 / 8
        figures["network"] = Link(rate, latency, name=f"{gbits} Gbit/s", startup=20e-6)
    return Machine(gpu, name=name, **figures)


def machine_named(name, gpus):
    """Return the machine of a name, or one that has only `gpus` GPUs of that name."""
    return MACHINES[name] if name in MACHINES else Machine(GPUS[name], gpus=gpus)


GPUS = dict(OURS)
for _name, _figures in FILE["gpu"].items():
    GPUS[_name] = gpu_of(_figures)
MACHINES = OUR_MACHINES | {name: machine_of(name, each) for name, each in FILE["machine"].items()}
