"""Chapter 01: programs as graphs.

operator_graph  OperatorGraph, recorded while a program runs
compiling       torch.compile: backends, captured graphs, generated code
"""

from d2lpar.chapters.hybridization.compiling import compile_backend, kernel_text
from d2lpar.chapters.hybridization.operator_graph import OperatorGraph

__all__ = ["OperatorGraph", "compile_backend", "kernel_text"]
