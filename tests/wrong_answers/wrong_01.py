"""Plausible wrong answers to the exercises of chapter 01: source, points, a part of the message."""

WHOLE = """
def whole(X, W):
    H = (%s) @ W
    H = H / H.norm().clamp(min=1)
    %s
"""
SAFE_ROOT = "return torch.where(H.min() > 0, torch.where(H.min() > 0, H, 1.0).sqrt(), H)"

WRONG = {
    "paid-after": {
        "one more than necessary": (
            """
def paid_after(t_compile, t_eager, t_compiled):
    return t_compile // (t_eager - t_compiled) + 1 if t_eager > t_compiled else None
""",
            1,
            "A call fewer is enough",
        ),
        "no return": (
            """
def paid_after(t_compile, t_eager, t_compiled):
    print(-(-t_compile // (t_eager - t_compiled)))
""",
            0,
            "is `return` missing?",
        ),
        "rounded down": (
            """
def paid_after(t_compile, t_eager, t_compiled):
    return t_compile // (t_eager - t_compiled) if t_eager > t_compiled else None
""",
            1,
            "is a part of a call left over?",
        ),
        "no whole number": (
            """
def paid_after(t_compile, t_eager, t_compiled):
    return t_compile / (t_eager - t_compiled) if t_eager > t_compiled else None
""",
            1,
            "no whole number of calls",
        ),
        "no thought of a loss": (
            """
def paid_after(t_compile, t_eager, t_compiled):
    return -(-t_compile // (t_eager - t_compiled))
""",
            1,
            "a division by zero",
        ),
        "compiled calls are free": (
            """
def paid_after(t_compile, t_eager, t_compiled):
    return -(-t_compile // t_eager) if t_eager > t_compiled else None
""",
            1,
            "The compiled calls take time, too",
        ),
    },
    "predict-bytes": {
        "an operand forgotten": (
            "num_kernels, eager_bytes, fused_bytes = 4, 8_000_000, 2_000_000",
            1,
            "reads both of them",
        ),
        "every operator has three tensors": (
            "num_kernels, eager_bytes, fused_bytes = 4, 12_000_000, 3_000_000",
            2,
            "The tanh has one operand only",
        ),
        "one kernel, and each use is a read": (
            "num_kernels, eager_bytes, fused_bytes = 1, 11_000_000, 5_000_000",
            1,
            "loads x and y once",
        ),
        "results only": (
            "num_kernels, eager_bytes, fused_bytes = 3, 4_000_000, 1_000_000",
            0,
            "have to be read as well",
        ),
    },
    "predict-programs": {
        "nothing is kept": (
            "epochs, lengths, modes = 6, 100, 4",
            1,
            "The programs of the first epoch are still there",
        ),
        "a symbol from the start": (
            "epochs, lengths, modes = 1, 1, 2",
            0,
            "compiled as if there were no other",
        ),
        "a symbol serves both modes": (
            "epochs, lengths, modes = 2, 2, 3",
            2,
            "cannot serve False",
        ),
        "the limit": ("epochs, lengths, modes = 2, 8, 4", 2, "The limit of eight programs"),
    },
    "fusing-bound": {
        "the fraction": (
            """
def fusing_bound(spans):
    fused = sum(s.end - s.start for s in spans if "conv" not in s.name and "mm" not in s.name)
    return fused / sum(s.end - s.start for s in spans)
""",
            0,
            "That is the fraction",
        ),
        "numbers of kernels": (
            """
def fusing_bound(spans):
    stays = sum("conv" in s.name or "mm" in s.name for s in spans)
    return len(spans) / stays if stays else float("inf")
""",
            1,
            "add up their times, not their number",
        ),
        "products forgotten": (
            """
def fusing_bound(spans):
    total = sum(s.end - s.start for s in spans)
    stays = sum(s.end - s.start for s in spans if "conv" in s.name)
    return total / stays if stays else float("inf")
""",
            0,
            "bound: expected",
        ),
        "a division by zero": (
            """
def fusing_bound(spans):
    total = sum(s.end - s.start for s in spans)
    return total / sum(s.end - s.start for s in spans if "conv" in s.name or "mm" in s.name)
""",
            2,
            "the bound of one relu: a division by zero",
        ),
    },
    "mend-breaks": {
        "nothing mended": ("whole = broken", 1, "expected at most 2, got 4"),
        "nothing compiled": (
            "def whole(X, W):\n    return torch.compiler.disable(broken)(X, W)",
            1,
            "torch.compile captures no graph of it",
        ),
        "one side is not safe": (
            WHOLE % ("X / X.max()", "return torch.where(H.min() > 0, H.sqrt(), H)"),
            3,
            "make the side that is not taken safe",
        ),
        "element by element": (
            WHOLE % ("X / X.max()", "return torch.where(H > 0, H.clamp(min=1e-30).sqrt(), H)"),
            0,
            "result (long, some negative)",
        ),
        "the number is still Python's": (
            WHOLE % ("X / float(X.numpy().max())", SAFE_ROOT),
            2,
            "float(), .item(), and an if on a value break a graph",
        ),
        "always divided": (
            "def whole(X, W):\n    H = (X / X.max()) @ W\n    H = H / H.norm()\n    " + SAFE_ROOT,
            0,
            "result (short, all positive)",
        ),
    },
    "pad-sizes": {
        "equal steps": (
            """
def pad_sizes(lengths, k):
    return [-(-max(lengths) * (i + 1) // k) for i in range(k)]
""",
            1,
            "padding (the example): expected 2",
        ),
        "equal numbers of texts": (
            """
def pad_sizes(lengths, k):
    ordered = sorted(lengths)
    return [ordered[-(-len(ordered) * (i + 1) // k) - 1] for i in range(k)]
""",
            1,
            "padding (the example): expected 2, got 6",
        ),
        "a size for each length": (
            "def pad_sizes(lengths, k):\n    return sorted(set(lengths))",
            0,
            "expected at most 2, got 3",
        ),
        "the commonest lengths": (
            """
def pad_sizes(lengths, k):
    return sorted(sorted(set(lengths), key=lengths.count)[-k:])
""",
            0,
            "fits into none of the sizes",
        ),
        "one size for all": ("def pad_sizes(lengths, k):\n    return [max(lengths)]", 1, "padding"),
    },
    "fuse": {
        "no fusing": (
            "def fuse(program):\n    return [[op.name] for op in program]",
            1,
            "kernels of horner: expected 1, got 5",
        ),
        "neighbours in the program": (
            """
def fuse(program):
    kernels, last = [], "product"
    for op in program:
        if op.kind == last == "elementwise":
            kernels[-1].append(op.name)
        else:
            kernels.append([op.name])
        last = op.kind
    return kernels
""",
            3,
            "kernels of two_branches: expected 4",
        ),
        "everything elementwise in one": (
            """
def fuse(program):
    kernels = [[op.name] for op in program if op.kind == "product"]
    return [*kernels, [op.name for op in program if op.kind == "elementwise"]]
""",
            0,
            "which no earlier kernel has computed",
        ),
        "as early as possible": (
            """
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
""",
            3,
            "kernels of late: expected 4",
        ),
        "products put together": (
            """
def fuse(program):
    return [[op.name for op in program]]
""",
            0,
            "a product is a kernel of its own",
        ),
    },
}
