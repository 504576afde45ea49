"""Plausible wrong answers to the exercises of chapter 09: source, points, a part of the message."""

PAIR = """
def pair(parts, Us, cs, Vs, es):
    H = [F.relu(F.linear(*args)) for args in zip(%s, Us, cs)]
    terms = [F.linear(*args) for args in zip(%s)]
    return [Y%s for Y, e in zip(%s, es)]
"""

CHANNELS = """
def least_channels(kernel, flops, bandwidth, itemsize):
    return %s

pays_pcie3, pays_nvlink = %s
"""
LEAST = "int(itemsize * flops / (3 * bandwidth * kernel**2)) + 1"

LOSS = """
def split_cross_entropy(parts, labels):
    top = %s
    losses, terms, start = [], [], 0
    for part, y, z_max in zip(parts, labels, top):
        z = part - z_max[:, None]
        here = (y >= start) & (y < start + part.shape[1])
        z_y = z.gather(1, torch.where(here, y - start, 0)[:, None])[:, 0]%s
        terms.append(torch.stack([z.exp().sum(dim=1), z_y]))
        start += %s
    return [%s for sums in %s]
"""
TOP = "largest([part.detach().max(dim=1).values for part in parts])"
MEAN = "(sums[0].log() - sums[1]).mean()"

TOKENS = """
def gather_tokens(parts):
    return GatherTokens.apply(*parts)

def scatter_sum(parts):
    return ScatterSum.apply(*parts)

def gather_now(parts):
    return tuple(torch.cat(pieces) for pieces in allgather([x.contiguous() for x in parts]))

def scatter_now(parts):
    k = len(parts)
    pieces = [part.chunk(k) for part in parts]
    return tuple(sum(pieces[j][i].to(parts[i].device) for j in range(k)) for i in range(k))

def scatter_after_allreduce(parts):
    sums = [part.clone() for part in parts]
    d2lpar.allreduce(sums, "ring")
    return tuple(x.chunk(len(parts))[i].clone() for i, x in enumerate(sums))

class GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *parts):
        return gather_now(parts)

    @staticmethod
    def backward(ctx, *gradients):
        return %s

class ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *parts):
        return %s

    @staticmethod
    def backward(ctx, *gradients):
        return %s

def block(parts, ws, Us, Vs):
    weighted = [normalize(X) * w for X, w in zip(parts, %s)]
    hidden = [F.relu(X @ U.T) for X, U in zip(gather_tokens(weighted), Us)]
    return scatter_sum([H @ V.T for H, V in zip(hidden, Vs)])
"""

WRONG = {
    "by-hand": {
        "device 0": (
            "output_part, input_term, gradient_term = [1201, 2013], [1, 13, 20, 11], [4, 1, 2, 3]",
            0,
            "That is what device 0 computes",
        ),
        "the cuts exchanged": (
            "output_part, input_term, gradient_term = "
            "[1200, 2000, 1100, 100], [1120, 111], [1, 3, 2, 1]",
            1,
            "A term has as many numbers as y",
        ),
        "the gradient after f": (
            "output_part, input_term, gradient_term = "
            "[1120, 111], [1200, 2000, 1100, 100], [5, 4, 4, 4]",
            2,
            "Device 1 knows only its own rows of W",
        ),
        "everything whole": (
            "output_part = input_term = [1201, 2013, 1120, 111]\ngradient_term = [4, 3]",
            0,
            "and so some of the outputs",
        ),
    },
    "sort-by-head": {
        "no bias": (
            "def sort_by_head(weight, num_heads, size):\n"
            "    rows = weight.view(3, num_heads, size, -1).transpose(0, 1)\n"
            "    return rows.reshape(3 * num_heads * size, -1)",
            2,
            "The bias is a vector: sort it, too.",
        ),
        "as it was": (
            "def sort_by_head(weight, num_heads, size):\n    return weight",
            0,
            "The order has not changed",
        ),
        "heads and sizes exchanged": (
            "def sort_by_head(weight, num_heads, size):\n"
            "    return weight.unflatten(0, (3, size, num_heads)).transpose(0, 2).flatten(0, 2)",
            1,
            "The rows of one head and kind stay together",
        ),
        "for matrices only": (
            "def sort_by_head(weight, num_heads, size):\n"
            "    parts = weight.view(3, num_heads, size, weight.shape[1])\n"
            "    return parts.transpose(0, 1).reshape(weight.shape)",
            2,
            "size, weight.shape[1])`: IndexError: tuple index",
        ),
        "the way back": (
            "def sort_by_head(weight, num_heads, size):\n"
            "    return weight.unflatten(0, (num_heads, 3, size)).transpose(0, 1).flatten(0, 2)",
            0,
            "Do all three rows of head 0 come before",
        ),
    },
    "mend-pair": {
        "as it was": ("pair = broken_pair", 0, "so it counts k times"),
        "without f": (
            PAIR % ("parts", "H, Vs", " + e", "summed(terms)"),
            1,
            "Which of f and g sums a gradient",
        ),
        "a part of the bias in each term": (
            PAIR % ("copied(parts)", "H, Vs, [e / len(es) for e in es]", "", "summed(terms)"),
            1,
            "Divided by k, the bias gets a part of its gradient",
        ),
        "the bias in the first term only": (
            PAIR
            % (
                "copied(parts)",
                "H, Vs, [es[0], *[None] * (len(es) - 1)]",
                *("", "summed(terms)"),
            ),
            1,
            "Add it on every device",
        ),
        "no bias": (
            PAIR % ("copied(parts)", "H, Vs", "", "summed(terms)"),
            0,
            "The second bias is missing",
        ),
        "f behind every layer": (
            PAIR % ("copied(parts)", "H, Vs", " + e", "copied(summed(terms))"),
            1,
            "gradient of the input on vgpu:0",
        ),
    },
    "channels-that-pay": {
        "not rounded": (
            CHANNELS % ("itemsize * flops / (3 * bandwidth * kernel**2)", "[256], [64, 128, 256]"),
            2,
            "That is no whole number of channels",
        ),
        "that of a linear layer": (
            CHANNELS % ("int(itemsize * flops / (3 * bandwidth)) + 1", "[], []"),
            1,
            "at every position of its kernel",
        ),
        "a side in place of the area": (
            CHANNELS % ("int(itemsize * flops / (3 * bandwidth * kernel)) + 1", "[256], [256]"),
            2,
            "A kernel has two sides",
        ),
        "rounded down": (
            CHANNELS % (LEAST.removesuffix(" + 1"), "[256, 128], [256, 128, 64, 32]"),
            0,
            "At that number both are equally fast",
        ),
        "one ring": (
            CHANNELS % (LEAST.replace("3 *", "6 *"), "[128, 256], [32, 64, 128, 256]"),
            0,
            "Compare each number of channels with the least",
        ),
    },
    "split-loss": {
        "all logits gathered": (
            """
def split_cross_entropy(parts, labels):
    whole = [torch.cat([x.to(y.device) for x in parts], dim=1) for y in labels]
    return [F.cross_entropy(z, y) for z, y in zip(whole, labels)]
""",
            2,
            "k losses were counted",
        ),
        "no maximum": (
            LOSS % ("[0 * y for y in labels]", " * here", "part.shape[1]", MEAN, "summed(terms)"),
            3,
            "exp of a large number is infinite",
        ),
        "a maximum on each device": (
            LOSS
            % (
                "[part.detach().max(dim=1).values for part in parts]",
                *(" * here", "part.shape[1]", MEAN, "summed(terms)"),
            ),
            0,
            "Is the sum over all words",
        ),
        "labels not looked up": (
            LOSS % (TOP, "", "part.shape[1]", MEAN, "summed(terms)"),
            0,
            "Which device has the logit of the label",
        ),
        "equal widths": (
            LOSS % (TOP, " * here", "parts[-1].shape[1]", MEAN, "summed(terms)"),
            0,
            "Which device has the logit of the label",
        ),
        "not a mean": (
            LOSS
            % (TOP, " * here", "part.shape[1]", "(sums[0].log() - sums[1]).sum()", "summed(terms)"),
            0,
            "the sum over the examples, not the mean",
        ),
        "a sum that autograd does not see": (
            "def plain_sum(terms):\n    data = [x.detach() for x in terms]\n"
            "    d2lpar.allreduce(data)\n    return data\n"
            + LOSS
            % (TOP, " * here", "part.shape[1]", MEAN, "plain_sum(terms)"),
            3,
            "the gradients: RuntimeError",
        ),
    },
    "split-by-tokens": {
        "no functions of its own": (
            """
def gather_tokens(parts):
    return [torch.cat([part.to(own.device) for part in parts]) for own in parts]

def scatter_sum(parts):
    pieces = zip(*(part.chunk(len(parts)) for part in parts))
    return [sum(x.to(own.device) for x in piece) for own, piece in zip(parts, pieces)]

def block(parts, ws, Us, Vs):
    weighted = [normalize(X) * w for X, w in zip(parts, copied(ws))]
    hidden = [F.relu(X @ U.T) for X, U in zip(gather_tokens(weighted), Us)]
    return scatter_sum([H @ V.T for H, V in zip(hidden, Vs)])
""",
            3,
            "write it as a subclass of torch.autograd.Function",
        ),
        "an all-reduce, of which a part is kept": (
            TOKENS
            % (
                "scatter_after_allreduce(gradients)",
                "scatter_after_allreduce(parts)",
                *("gather_now(gradients)", "copied(ws)"),
            ),
            4,
            "That is an all-reduce, twice as much as needed",
        ),
        "the weight without f": (
            TOKENS
            % ("scatter_now(gradients)", "scatter_now(parts)", "gather_now(gradients)", "ws"),
            3,
            "Each device has the terms of its own tokens",
        ),
        "the gradient is only cut": (
            TOKENS
            % (
                "tuple(x.chunk(len(gradients))[i] for i, x in enumerate(gradients))",
                *("scatter_now(parts)", "gather_now(gradients)", "copied(ws)"),
            ),
            1,
            "they have to be summed",
        ),
        "the whole sum": (
            TOKENS
            % (
                *(
                    "scatter_now(gradients)",
                    "tuple(sum(x.to(y.device) for x in parts) for y in parts)",
                ),
                *("gradients", "copied(ws)"),
            ),
            0,
            "each device keeps a k-th of the tokens",
        ),
    },
}
