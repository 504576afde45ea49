"""Chapter 01: programs as graphs.

operator_graph  OperatorGraph, recorded while a program runs
inductor        torch.compile: the backend that works here, the generated code
"""

from d2lpar.chapters.hybridization.inductor import compile_backend, kernel_text
from d2lpar.chapters.hybridization.operator_graph import OperatorGraph

__all__ = ["OperatorGraph", "compile_backend", "kernel_text"]
