"""What a process does at the end of `import torch` under `vgpu run`."""

import os

GPUS = "VGPU_CUDA"  # which GPUs there are, "vgpu:4" or "v100:4"; `vgpu run` sets it
CLOCK = "VGPU_CLOCK"  # "model" or "wall": what time.time and timeit tell on modelled GPUs
VALUES = "VGPU_VALUES"  # "0" if modelled GPUs compute no values; `vgpu run` sets both
TRACE = "VGPU_TRACE"  # "1" if each process records every op, too; `vgpu run` sets it
REPORTS = "VGPU_REPORTS"  # the folder for a report of each process; `vgpu run` sets it


def autoload():
    """Make virtual GPUs stand for CUDA's, as VGPU_CUDA says.

    Raises ValueError if it names no GPUs, RuntimeError if this machine or this torch cannot do it.
    """
    from vgpu.cuda.cuda_names import switch_on

    values = os.environ.get(VALUES) != "0"
    switch_on(os.environ[GPUS], os.environ.get("CUDA_VISIBLE_DEVICES"), values)
    if os.environ.get(CLOCK) != "wall":
        from vgpu.cuda import program_clock

        program_clock.tell_programs()
    folder = os.environ.get(REPORTS)
    if folder:
        from vgpu.cuda.report import report_to

        report_to(folder, os.environ.get(TRACE) == "1")
