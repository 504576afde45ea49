"""Chapter 09: split layers over devices.

sharded_layers  layers split by outputs ("column") or by inputs ("row")
modelled_steps  record a step of several modelled H100s
"""

from d2lpar.chapters.tensor_parallelism.modelled_steps import record_pipeline_step, record_step
from d2lpar.chapters.tensor_parallelism.sharded_layers import (
    ColumnParallel,
    RowParallel,
    copied,
    split_cross_entropy,
    summed,
)
from d2lpar.collectives import CollectiveCounter, allgather

__all__ = [
    "CollectiveCounter",
    "ColumnParallel",
    "RowParallel",
    "allgather",
    "copied",
    "record_pipeline_step",
    "record_step",
    "split_cross_entropy",
    "summed",
]
