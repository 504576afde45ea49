"""What PyTorch calls at the end of `import torch`: the entry point of the group "torch.backends".

It does nothing unless the environment asks for it, and it imports nothing before.
"""

import os

GPUS = "D2LPAR_CUDA"  # what GPUs there are, "vgpu:4" or "v100:4"; `d2lpar run` sets it
TRACE = "D2LPAR_TRACE"  # "1" where a process shall leave each op, too; `d2lpar run` sets it
REPORTS = "D2LPAR_REPORTS"  # the folder in which a process leaves what it did; `d2lpar run` sets it


def autoload():
    """Let virtual GPUs stand for CUDA's where D2LPAR_CUDA says so.

    Raises:
        ValueError: D2LPAR_CUDA names no GPUs.
        RuntimeError: virtual GPUs cannot stand for CUDA's on this machine or this torch.
    """
    gpus = os.environ.get(GPUS)
    if gpus:
        from .cuda_names import switch_on

        switch_on(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
        folder = os.environ.get(REPORTS)
        if folder:
            from .report import report_to

            report_to(folder, os.environ.get(TRACE) == "1")
