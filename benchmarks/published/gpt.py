"""1,549 measured steps of GPT with t x d x p parallelism on A100s, from VIA-Research/vTrain.

The rows are data/ground_truth_single.csv and ground_truth_multi.csv of that repository at f8dda84
(MIT licence); they come from Megatron-DeepSpeed on A100-SXM4 in machines of 8 with 800 Gbit/s.
All of them recompute their layers. The step that predicts them is `step_of` in
`d2lpar.chapters.planning_a_training_run.layout_search`.
"""

import csv
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from d2lpar.chapters.planning_a_training_run.gpt import GPT
from d2lpar.chapters.planning_a_training_run.layout_search import MEGATRON_HOST, step_of
from d2lpar.chapters.planning_a_training_run.layouts import Layout
from vgpu.modelled.hardware import MACHINES

# eight A100 with four network cards of 200 Gbit/s
MACHINE = replace(
    MACHINES["dgxa100"], network_cards=4, host=MEGATRON_HOST, name="eight A100, 800 Gbit/s"
)
FOLDER = Path(__file__).parent / "vtrain"
FILES = ("gpt_on_a100s_8.csv", "gpt_on_a100s_512.csv")
COLUMNS = {
    "# GPUs": "gpus",
    "global batch": "batch",
    "micro batch": "micro",
    "hidden size": "width",
    "attention heads": "heads",
    "# layers": "layers",
    "sequence length": "length",
    "tensor parallelism": "t",
    "data parallelism": "d",
    "pipeline parallelism": "p",
    "iteration time (ms)": "milliseconds",
}


class Step(NamedTuple):
    """A row: the sizes of a step, and the milliseconds that it took."""

    gpus: int
    batch: int
    micro: int
    width: int
    heads: int
    layers: int
    length: int
    t: int
    d: int
    p: int
    milliseconds: float

    @property
    def task(self):
        """What a choice of layouts is for: network, GPUs and batch."""
        return GPT(self.layers, self.width, self.heads, self.length), self.gpus, self.batch

    @property
    def layout(self):
        """The `Layout`."""
        return Layout(self.t, self.p, self.d, self.micro, recompute=True)


def read():
    """Return all `Step`s."""
    steps = []
    for name in FILES:
        with open(FOLDER / name, encoding="utf-8-sig", newline="") as file:
            for row in csv.DictReader(file):
                *sizes, milliseconds = (float(row[column]) for column in COLUMNS)
                steps.append(Step(*map(int, sizes), milliseconds))
    return steps


def step_seconds(step, machine=MACHINE):
    """Return what a `Step` takes."""
    gpt, _, batch = step.task
    return step_of(gpt, step.layout, batch, machine).seconds
