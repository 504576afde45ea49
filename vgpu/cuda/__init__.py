"""Programs that say "cuda", on virtual GPUs: the command `vgpu run`.

run            the command: starts a program; summary: the table at its end
doctor         the command `vgpu doctor`: what would run where here, and what is wrong
autoload       what a process of the program does at the end of `import torch`
as_cuda        lets "cuda" mean virtual GPUs
cuda_names     the functions of torch.cuda; nccl, nvtx: those of NCCL and NVTX
only_cuda      refuses, by name, what only real GPUs can do
program_clock  what `time.time` and its kin tell such programs while GPUs are modelled
report         what a process did, written to a file for the summary
"""
