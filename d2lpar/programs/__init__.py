"""Running programs that say `torch.cuda` on virtual GPUs, and the command `d2lpar`."""
