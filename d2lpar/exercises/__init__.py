"""Checks of the exercise notebooks: the points, the answers, and what they are compared with.

There is a module for each notebook, with the functions that its checks compare answers with.
"""

from d2lpar.exercises.answers import at_most, expect
from d2lpar.exercises.marks import Answer, Marks

__all__ = ["Answer", "Marks", "at_most", "expect"]
