"""Checks of the exercise notebooks: points and comparisons; and what their checks compare with.

`marks` and `answers` serve all notebooks. Each other module has the references of the notebook of
its name: `pipeline_parallelism` those of notebooks/exercises/09_pipeline_parallelism.ipynb.
"""

from d2lpar.exercises.answers import at_most, expect
from d2lpar.exercises.marks import Answer, Marks

__all__ = ["Answer", "Marks", "at_most", "expect"]
