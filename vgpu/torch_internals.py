"""The part of torch's private interface for use outside of vgpu, by d2lpar and tests."""

from vgpu.private.dispatch import TorchDispatchMode, schema_of, tree_leaves  # noqa: F401
from vgpu.private.torch_compile import compile_in_this_process, generated_code  # noqa: F401
