"""Programs that say `torch.cuda`, run on virtual GPUs, and what the command `d2lpar` does."""
