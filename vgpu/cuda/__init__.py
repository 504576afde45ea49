"""CUDA programs on virtual GPUs: the command `vgpu run`.

run            the command: starts a program; summary: the table at its end
doctor         the command `vgpu doctor`: checks this machine and installation
autoload       runs in each process of the program at the end of `import torch`
as_cuda        makes "cuda" devices virtual GPUs
cuda_names     replaces the functions of torch.cuda, and "nccl"; nvtx: those of NVTX
only_cuda      errors for features that need a real GPU
report         writes each process's figures to a file, for the summary
"""
