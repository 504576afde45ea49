"""Chapter 09: split a network over devices.

sharded_layers  layers split by outputs ("column") or by inputs ("row")
strategies      compare data, pipeline and tensor parallelism of one network
"""

from d2lpar.chapters.tensor_parallelism.modelled_steps import record_pipeline_step, record_step
from d2lpar.chapters.tensor_parallelism.sharded_layers import (
    ColumnParallel,
    OnEveryDevice,
    RowParallel,
    copied,
    split_cross_entropy,
    summed,
    tensor_parallel,
    unsplit,
)
from d2lpar.chapters.tensor_parallelism.strategies import (
    split_by_data,
    split_by_layers,
    split_inside_layers,
    step_cost,
)
from d2lpar.collectives import CollectiveCounter, allgather

__all__ = [
    "CollectiveCounter",
    "ColumnParallel",
    "OnEveryDevice",
    "RowParallel",
    "allgather",
    "copied",
    "record_pipeline_step",
    "record_step",
    "split_by_data",
    "split_by_layers",
    "split_cross_entropy",
    "split_inside_layers",
    "step_cost",
    "summed",
    "tensor_parallel",
    "unsplit",
]
