"""What a process does at the end of `import torch` under `d2lpar run`."""

import os

GPUS = "D2LPAR_CUDA"  # which GPUs there are, "vgpu:4" or "v100:4"; `d2lpar run` sets it
CLOCK = "D2LPAR_CLOCK"  # "model" or "wall": what time.time and timeit tell on modelled GPUs
VALUES = "D2LPAR_VALUES"  # "0" if modelled GPUs compute no values; `d2lpar run` sets both
TRACE = "D2LPAR_TRACE"  # "1" if each process records every op, too; `d2lpar run` sets it
REPORTS = "D2LPAR_REPORTS"  # the folder for a report of each process; `d2lpar run` sets it


def autoload():
    """Make virtual GPUs stand for CUDA's, as D2LPAR_CUDA says.

    Raises ValueError if it names no GPUs, RuntimeError if this machine or this torch cannot do it.
    """
    from .cuda_names import switch_on

    values = os.environ.get(VALUES) != "0"
    switch_on(os.environ[GPUS], os.environ.get("CUDA_VISIBLE_DEVICES"), values)
    if os.environ.get(CLOCK) != "wall":
        from d2lpar.virtual import program_clock

        program_clock.tell_programs()
    folder = os.environ.get(REPORTS)
    if folder:
        from .report import report_to

        report_to(folder, os.environ.get(TRACE) == "1")
