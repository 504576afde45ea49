"""CUDA programs on virtual GPUs: the command `vgpu run`.

run            the command: starts a program; summary: the table at its end
doctor         the command `vgpu doctor`: checks this machine and installation
autoload       runs in each process of the program at the end of `import torch`
cuda_device    makes "cuda" devices virtual GPUs
torch_cuda     replaces the functions of torch.cuda, and "nccl"; nvtx: those of NVTX
only_cuda      errors for features that need a real GPU
report         writes each process's figures to a file, for the summary
"""
