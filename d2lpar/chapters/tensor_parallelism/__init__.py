"""Chapter 10: split layers over devices.

sharded_layers  what split layers exchange: sums, and a loss over parts
modelled_steps  record a step of several modelled H100s
"""

from d2lpar.chapters.tensor_parallelism.modelled_steps import record_pipeline_step, record_step
from d2lpar.chapters.tensor_parallelism.sharded_layers import copied, split_cross_entropy, summed
from d2lpar.collectives import CollectiveCounter, allgather

__all__ = [
    "CollectiveCounter",
    "allgather",
    "copied",
    "record_pipeline_step",
    "record_step",
    "split_cross_entropy",
    "summed",
]
