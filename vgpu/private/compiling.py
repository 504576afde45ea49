"""torch.compile: compiling in this process, the generated code, and torch._dynamo's import."""


def compile_in_this_process():
    """Keep torch's compiler from starting a pool of processes."""
    from torch._inductor import config

    config.compile_threads = 1


def generated_code(compiled, *args):
    """Call a compiled function; return a list of the sources that were generated for it."""
    from torch._inductor.utils import run_and_get_code

    return run_and_get_code(compiled, *args)[1]


def import_dynamo():
    """Import what the first use of torch.compile, or of virtual GPUs, imports."""
    import torch._dynamo  # noqa: F401
