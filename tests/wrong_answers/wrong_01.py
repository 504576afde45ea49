"""Plausible wrong answers to the exercises of chapter 01; helpers/exercises.py has the form."""

WRONG = r"""
## paid-after
# one more than necessary (1): A call fewer is enough
def paid_after(t_compile, t_eager, t_compiled):
    return t_compile // (t_eager - t_compiled) + 1 if t_eager > t_compiled else None
# rounded down (1): is a part of a call left over?
def paid_after(t_compile, t_eager, t_compiled):
    return t_compile // (t_eager - t_compiled) if t_eager > t_compiled else None
# no whole number (1): no whole number of calls
def paid_after(t_compile, t_eager, t_compiled):
    return t_compile / (t_eager - t_compiled) if t_eager > t_compiled else None
# no thought of a loss (1): a division by zero
def paid_after(t_compile, t_eager, t_compiled):
    return -(-t_compile // (t_eager - t_compiled))
# compiled calls are free (1): The compiled calls take time, too
def paid_after(t_compile, t_eager, t_compiled):
    return -(-t_compile // t_eager) if t_eager > t_compiled else None

## predict-bytes
# an operand forgotten (1): reads both of them
num_kernels, eager_bytes, fused_bytes = 4, 8_000_000, 2_000_000
# every operator has three tensors (2): The tanh has one operand only
num_kernels, eager_bytes, fused_bytes = 4, 12_000_000, 3_000_000
# one kernel, and each use is a read (1): loads x and y once
num_kernels, eager_bytes, fused_bytes = 1, 11_000_000, 5_000_000
# results only (0): have to be read as well
num_kernels, eager_bytes, fused_bytes = 3, 4_000_000, 1_000_000

## predict-programs
# nothing is kept (1): The programs of the first epoch are still there
epochs, lengths, modes = 6, 100, 4
# a symbol from the start (0): compiled as if there were no other
epochs, lengths, modes = 1, 1, 2
# a symbol serves both modes (2): cannot serve False
epochs, lengths, modes = 2, 2, 3
# the limit (2): The limit of eight programs
epochs, lengths, modes = 2, 8, 4

## fusing-bound
# the fraction (0): That is the fraction
def fusing_bound(spans):
    fused = sum(s.end - s.start for s in spans if "conv" not in s.name and "mm" not in s.name)
    return fused / sum(s.end - s.start for s in spans)
# numbers of kernels (1): add up their times, not their number
def fusing_bound(spans):
    stays = sum("conv" in s.name or "mm" in s.name for s in spans)
    return len(spans) / stays if stays else float("inf")
# products forgotten (0): bound: expected
- ("conv", "mm", "matmul")
+ ("conv",)
# a division by zero (2): the bound of one relu: a division by zero
- if stays else float("inf")

## mend-breaks
# nothing mended (1): expected at most 2, got 4
whole = broken
# nothing compiled (1): torch.compile captures no graph of it
def whole(X, W):
    return torch.compiler.disable(broken)(X, W)
# one side is not safe (3): make the side that is not taken safe
- torch.where(positive, H, 1.0).sqrt()
+ H.sqrt()
# element by element (0): result (long, some negative)
def whole(X, W):
    H = (X / X.max()) @ W
    H = H / H.norm().clamp(min=1)
    return torch.where(H > 0, H.clamp(min=1e-30).sqrt(), H)
# the number is still Python's (2): float(), .item(), and an if on a value break a graph
- X.max()
+ float(X.numpy().max())
# always divided (0): result (short, all positive)
- .clamp(min=1)

## pad-sizes
# equal steps (1): padding (the example): expected 2
def pad_sizes(lengths, k):
    return [-(-max(lengths) * (i + 1) // k) for i in range(k)]
# equal numbers of texts (1): padding (the example): expected 2, got 6
def pad_sizes(lengths, k):
    ordered = sorted(lengths)
    return [ordered[-(-len(ordered) * (i + 1) // k) - 1] for i in range(k)]
# a size for each length (0): expected at most 2, got 3
def pad_sizes(lengths, k):
    return sorted(set(lengths))
# the commonest lengths (0): fits into none of the sizes
def pad_sizes(lengths, k):
    return sorted(sorted(set(lengths), key=lengths.count)[-k:])
# one size for all (1): padding
def pad_sizes(lengths, k):
    return [max(lengths)]

## fuse
# no fusing (1): kernels of horner: expected 1, got 5
def fuse(program):
    return [[op.name] for op in program]
# neighbours in the program (3): kernels of two_branches: expected 4
def fuse(program):
    kernels, last = [], "product"
    for op in program:
        if op.kind == last == "elementwise":
            kernels[-1].append(op.name)
        else:
            kernels.append([op.name])
        last = op.kind
    return kernels
# everything elementwise in one (0): which no earlier kernel has computed
def fuse(program):
    kernels = [[op.name] for op in program if op.kind == "product"]
    return [*kernels, [op.name for op in program if op.kind == "elementwise"]]
# as early as possible (3): kernels of late: expected 4
def fuse(program):
    kinds, level, kernels = {op.name: op.kind for op in program}, {}, {}
    for op in program:
        before = [level[r] + (kinds[r] == "product") for r in op.reads if r in kinds]
        level[op.name] = max(before, default=0)
        kernels.setdefault((level[op.name], op.kind), []).append(op.name)
    ordered = []
    for (_, kind), names in sorted(kernels.items()):
        ordered += [names] if kind == "elementwise" else [[name] for name in names]
    return ordered
# products put together (0): a product is a kernel of its own
def fuse(program):
    return [[op.name for op in program]]
"""
