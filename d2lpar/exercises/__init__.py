"""Checks of the exercise notebooks: points, comparisons, and reference solutions per notebook."""

from d2lpar.exercises.answers import at_most, expect
from d2lpar.exercises.marks import Answer, Marks

__all__ = ["Answer", "Marks", "at_most", "expect"]
