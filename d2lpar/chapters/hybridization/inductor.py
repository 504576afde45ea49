"""Choose a backend of torch.compile, and show the code that inductor generates."""

import functools
import re

import torch

from vgpu import defer_interrupts
from vgpu.torch_internals import compile_in_this_process, generated_code

_LOAD_ARITHMETIC_STORE = re.compile(r"= .*\btmp\d+ [-+*/] |load|_ptr\d+\[|\bstore\(")


def compile_backend(device="cpu"):
    """Return the best backend of torch.compile that works on a device, and print which.

    The first call per device type compiles a small program as a test. It sets
    `torch._inductor.config.compile_threads` to 1, so that the compiler leaves no process pool
    behind, and delays interrupts meanwhile.

    Args:
        device: a CPU or a CUDA device.

    Returns:
        "inductor", which fuses operators and generates kernels, or, if it cannot build kernels (no
        C++ compiler for a CPU, no Triton for a GPU), "aot_eager", which runs the captured operators
        one by one.
    """
    failure = failure_of_inductor(torch.device(device).type)
    if failure is None:
        print(f"torch.compile generates kernels for {torch.device(device)}, with inductor")
        return "inductor"
    print(f"torch.compile cannot generate kernels here: {failure}")
    print("with aot_eager it captures graphs all the same, but runs them operator by operator")
    return "aot_eager"


@functools.cache
def failure_of_inductor(device_type):
    """Return why torch's compiler fails for this device type, or None if it works."""
    with defer_interrupts():  # an interrupt would leave the compiler half initialized
        compile_in_this_process()
        try:
            torch.compile(lambda x: x @ x + 1)(torch.ones(8, 8, device=device_type))
        except Exception as error:  # a missing compiler raises many types of errors
            return str(error).strip().partition("\n")[0]
    return None


def kernel_text(function, *args):
    """Return the loads, arithmetic and stores of the kernels that inductor generates.

    Args:
        function: a function that `torch.compile` captures as one graph.
        *args: its arguments; it is compiled for them and called once.

    Returns:
        Lines of C++ for a CPU or of Triton for a GPU, without constants, declarations and loops.

    Raises:
        torch._dynamo.exc.Unsupported: the function cannot be captured as one graph.
    """
    sources = generated_code(torch.compile(function, fullgraph=True), *args)
    lines = [line.strip() for line in "\n".join(sources).splitlines()]
    return "\n".join(filter(_LOAD_ARITHMETIC_STORE.search, lines))
