"""Chapter 13: combine tensor, pipeline and data parallelism.

layouts        tensor, pipeline and data parallelism at once
gpt            the network; program_costs: what its layer, its head and the rest of a step cost
layout_search  a step of GPT in each layout; plan_command: `d2lpar plan`, a table of text
measured_steps steps of others, and how well two orders agree; plots: the figure
"""

from d2lpar.chapters.planning_a_training_run.gpt import GPT, Split, Sum
from d2lpar.chapters.planning_a_training_run.layouts import Layout, layouts, sweep
from d2lpar.chapters.planning_a_training_run.measured_steps import (
    rank_correlation,
    steps_on_64_a100s,
)
from d2lpar.chapters.planning_a_training_run.plots import plot_layouts
from d2lpar.chapters.tensor_parallelism import split_cross_entropy
from d2lpar.side_streams import receive, send
from vgpu import as_machine

__all__ = [
    "GPT",
    "Layout",
    "Split",
    "Sum",
    "as_machine",
    "layouts",
    "plot_layouts",
    "rank_correlation",
    "receive",
    "send",
    "split_cross_entropy",
    "steps_on_64_a100s",
    "sweep",
]
