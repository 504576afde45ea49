"""Set-up of a process under `vgpu run`, at the end of `import torch`."""

import os

# Environment variables, set by `vgpu run`.
GPUS = "VGPU_CUDA"  # the GPUs, "vgpu:4" or "v100:4"
CLOCK = "VGPU_CLOCK"  # "model" or "wall": the time of time.time and timeit on modelled GPUs
VALUES = "VGPU_VALUES"  # "0" if modelled GPUs compute no values
TRACE = "VGPU_TRACE"  # "1" if each process records every op
REPORTS = "VGPU_REPORTS"  # the folder for the reports of processes


def autoload():
    """Replace CUDA's GPUs by the virtual ones of VGPU_CUDA.

    Raises ValueError if that is malformed, RuntimeError if this machine or torch is unsupported.
    """
    from vgpu.cuda.torch_cuda import switch_on

    values = os.environ.get(VALUES) != "0"
    switch_on(os.environ[GPUS], os.environ.get("CUDA_VISIBLE_DEVICES"), values)
    if os.environ.get(CLOCK) != "wall":
        from vgpu.modelled import program_clock

        program_clock.enable()
    folder = os.environ.get(REPORTS)
    if folder:
        from vgpu.cuda.report import report_to

        report_to(folder, os.environ.get(TRACE) == "1")
