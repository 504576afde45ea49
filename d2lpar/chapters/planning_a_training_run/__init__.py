"""Chapter 13: combine tensor, pipeline and data parallelism.

layouts         tensor, pipeline and data parallelism at once
gpt             the network; Split and Sum, Megatron's f and g
gpt_stage       for the lab: a stage of it, the check of its gradients, its full size
program_costs   what a layer of it, its head and the rest of a step cost
layout_search   a step of GPT in each layout
plan_command    `d2lpar plan`, a table of text
measured_steps  steps of others, and how well two orders agree
plots           the figure of both
"""

from d2lpar.chapters.planning_a_training_run.gpt import GPT, Split, Sum
from d2lpar.chapters.planning_a_training_run.gpt_stage import (
    GPTStage,
    Methods,
    attend,
    cut_of,
    full_size,
    gradient_errors,
    group_of,
    named_gradients,
    own_numbers,
)
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
    "GPTStage",
    "Layout",
    "Methods",
    "Split",
    "Sum",
    "as_machine",
    "attend",
    "cut_of",
    "full_size",
    "gradient_errors",
    "group_of",
    "layouts",
    "named_gradients",
    "own_numbers",
    "plot_layouts",
    "rank_correlation",
    "receive",
    "send",
    "split_cross_entropy",
    "steps_on_64_a100s",
    "sweep",
]
