"""The part of torch's private interface for use outside of vgpu, by d2lpar and tests.

TorchDispatchMode        intercepts each call of an operator
schema_of, tree_leaves   the schema of an operator; the leaves of nested arguments
compile_in_this_process, generated_code    for torch.compile
"""

from vgpu.private.dispatch import TorchDispatchMode, schema_of, tree_leaves
from vgpu.private.torch_compile import compile_in_this_process, generated_code

__all__ = [
    "TorchDispatchMode",
    "compile_in_this_process",
    "generated_code",
    "schema_of",
    "tree_leaves",
]
