"""Chapter 10: split layers over devices.

differentiable_collectives  sums with a backward pass: f and g of split layers
cross_entropy               the loss of logits that are split by classes over ranks
modelled_steps              record a step of several modelled H100s
"""

from d2lpar.chapters.tensor_parallelism.cross_entropy import split_cross_entropy
from d2lpar.chapters.tensor_parallelism.differentiable_collectives import copied, summed
from d2lpar.chapters.tensor_parallelism.modelled_steps import record_pipeline_step, record_step
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
