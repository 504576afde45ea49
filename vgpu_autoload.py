"""What PyTorch calls at the end of `import torch`: the entry point of the group "torch.backends".

torch cannot be imported where an entry point fails. So this module stands beside the package, and
an editable install has a copy: it is there when the folder of the package is not.
"""

import os


def autoload():
    """Call `vgpu.cuda.autoload` if VGPU_CUDA asks for GPUs and the package is there."""
    if os.environ.get("VGPU_CUDA"):
        try:
            from vgpu.cuda.autoload import autoload
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "vgpu":
                raise
        else:
            autoload()
