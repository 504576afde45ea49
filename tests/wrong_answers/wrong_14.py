"""Plausible wrong answers to the exercises of chapter 14: source, points, a part of the message."""

FITS = """
def largest_micro_batch(num_parameters, t, p, sequence, memory):
    left = memory - %s
    micro_batch = 1
    while micro_batch * sequence %s left:
        micro_batch *= 2
    return %s
"""
BYTES = "16 * num_parameters / (t * p)"

GROUPS = """
def groups(rank, t, d, p):
    %s
    return [
        [i + t * (replica + d * stage) for i in range(t)],
        [part + t * (i + d * stage) for i in range(d)],
        [part + t * (replica + d * i) for i in range(p)],
    ]
"""

CHOOSE = """
def choose(rows, memory, error):
    fits = [row for row in rows if row["num_bytes"] <= %s]
    if not fits:
        return %s
    shortest = min(row["seconds"] for row in %s)
    fast = [row for row in fits if row["seconds"] <= (1 + error) * shortest]
    return min(fast, key=lambda row: %s)["layout"]
"""
KEY = "(row['num_bytes'], row['seconds'])"

LOSSES = """
def losses(parts, words):
    home = words.device
    largest = %s
    total, chosen, first = 0, 0, 0
    for part in parts:
        z = part - largest.to(part.device)
        total = total + z.exp().sum(1).to(home)
        index = words.to(part.device) - first
        here = (index >= 0) & (index < part.shape[1])
        index = index.clamp(0, part.shape[1] - 1)
        chosen = chosen + (z.gather(1, index[:, None])[:, 0] %s).to(home)
        first += %s
    return total.log() - chosen
"""
LARGEST = "torch.stack([part.amax(1).to(home) for part in parts]).amax(0)[:, None]"

COUNT = """
def count_down(params, m, start):
    left = %s

    def hook(param):
        nonlocal left
        left -= 1
        if left == 0:
            %s
            start()

    for param in params:
        param.register_post_accumulate_grad_hook(hook)
"""

MERGE = """
def merge(a, b):
    (out_a, largest_a, total_a), (out_b, largest_b, total_b) = a, b
    largest = %s
    total_a = total_a * (largest_a - largest).exp()
    total_b = total_b * (largest_b - largest).exp()
    total = total_a + total_b
    return %s, largest, total
"""

WRONG = {
    "fits": {
        "less than none": (
            """
def largest_micro_batch(num_parameters, t, p, sequence, memory):
    fit = int((memory - 16 * num_parameters / (t * p)) // sequence)
    return 2 ** (fit.bit_length() - 1)
""",
            1,
            "If not even one sequence fits, the answer is 0",
        ),
        "no power of two": (
            """
def largest_micro_batch(num_parameters, t, p, sequence, memory):
    return int((memory - 16 * num_parameters / (t * p)) // sequence)
""",
            0,
            "A power of two",
        ),
        "without the parameters": (FITS % ("0", "<=", "micro_batch // 2"), 0, "take memory, too"),
        "t alone": (
            FITS % ("16 * num_parameters / t", "<=", "micro_batch // 2"),
            1,
            "stages divide the parameters, too",
        ),
        "at least one": (
            FITS % (BYTES, "<=", "max(1, micro_batch // 2)"),
            1,
            "Not even one sequence fits",
        ),
        "less than all": (FITS % (BYTES, "<", "micro_batch // 2"), 0, "exactly the memory fits"),
    },
    "gpt3": {
        "bytes": (
            "tensor_GB, data_GB, pipeline_GB, bubble = 1217.6, 9.57e9, 9.66, 0.0352",
            3,
            "Gigabytes, not bytes",
        ),
        "percent": (
            "tensor_GB, data_GB, pipeline_GB, bubble = 1217.6, 9.57, 9.66, 3.52",
            3,
            "not percent",
        ),
        "four sums in a layer": (
            "tensor_GB, data_GB, pipeline_GB, bubble = 811.7, 9.57, 9.66, 0.0352",
            3,
            "six sums in a layer",
        ),
        "all of the network": (
            "tensor_GB, data_GB, pipeline_GB, bubble = 9741, 612.5, 77.3, 0.00454",
            0,
            "A GPU has only a part of the parameters",
        ),
        "busy time": (
            "tensor_GB, data_GB, pipeline_GB, bubble = 1217.6, 9.57, 9.66, 0.0365",
            3,
            "idle time over busy time",
        ),
        "no ring": (
            "tensor_GB, data_GB, pipeline_GB, bubble = 695.8, 5.47, 1.21, 0.0352",
            1,
            "A ring sends 2 (k - 1) / k",
        ),
    },
    "groups": {
        "one group": (
            "def groups(rank, t, d, p):\n"
            "    return [list(range(rank // t * t, rank // t * t + t))]",
            0,
            "number of groups: expected 3, got 1",
        ),
        "pipeline before data": (
            GROUPS % "part, replica, stage = rank % t, rank // (t * p), rank // t % p",
            0,
            "Replicas are t apart",
        ),
        "tensor last": (
            GROUPS % "part, replica, stage = rank // (d * p), rank % d, rank // d % p",
            0,
            "neighbours",
        ),
        "of rank 0": (GROUPS % "part, replica, stage = 0, 0, 0", 0, "neighbours"),
        "with Layout": (
            """
def groups(rank, t, d, p):
    from d2lpar.chapters.planning_a_training_run.layouts import Layout
    layout = Layout(t, p, d)
    return [layout.ranks_of(rank, axis) for axis in ("tensor", "data", "pipeline")]
""",
            0,
            "",
        ),
    },
    "choose": {
        "what does not fit": (
            CHOOSE % ("float('inf')", "None", "fits", KEY),
            0,
            "Of those that fit into 72 GB, it is the fastest",
        ),
        "all memory": (CHOOSE % ("memory", "None", "fits", KEY), 3, "A tenth of 90 GB stays free"),
        "the fastest": (
            CHOOSE % ("0.9 * memory", "None", "fits", "row['seconds']"),
            3,
            "within 5 %",
        ),
        "the shortest of all": (
            """
def choose(rows, memory, error):
    fits = [row for row in rows if row["num_bytes"] <= 0.9 * memory]
    shortest = min((row["seconds"] for row in rows), default=0)
    fast = [row for row in fits if row["seconds"] <= (1 + error) * shortest] or fits
    if not fast:
        return None
    return min(fast, key=lambda row: (row["num_bytes"], row["seconds"]))["layout"]
""",
            1,
            "expected 't1 p2'",
        ),
        "something in any case": (
            CHOOSE % ("0.9 * memory", "rows and rows[-1]['layout']", "fits", KEY),
            3,
            "5 GB: expected None",
        ),
    },
    "loss": {
        "without the right word": (
            """
def losses(parts, words):
    sums = [part.exp().sum(1).to(words.device) for part in parts]
    return sum(sums).log()
""",
            0,
            "and the output of the right word subtracted?",
        ),
        "not stable": (
            LOSSES % ("torch.zeros(1)", "* here", "part.shape[1]"),
            3,
            "exp(10,000) is infinite",
        ),
        "every part has the word": (
            LOSSES % (LARGEST, "", "part.shape[1]"),
            1,
            "parts of [8, 8]: expected [",
        ),
        "equal parts": (
            LOSSES % (LARGEST, "* here", "parts[0].shape[1]"),
            2,
            "Parts may have different widths",
        ),
        "joined": (
            """
def losses(parts, words):
    z = torch.cat([part.to(words.device) for part in parts], 1)
    return torch.logsumexp(z, 1) - z.gather(1, words[:, None])[:, 0]
""",
            3,
            "Send what has n numbers",
        ),
    },
    "mend": {
        "the first step only": (
            COUNT % ("m * len(params)", "pass"),
            1,
            "In every step, not only in the first",
        ),
        "each micro-batch": (
            COUNT % ("len(params)", "left = len(params)"),
            0,
            "not once for each micro-batch",
        ),
        "one parameter": (
            """
def count_down(params, m, start):
    calls = 0

    def hook(param):
        nonlocal calls
        calls += 1
        if calls % m == 0:
            start()

    params[-1].register_post_accumulate_grad_hook(hook)
""",
            0,
            "Not all micro-batches have added to all parameters",
        ),
        "as it was": ("count_down = broken", 0, "Not all micro-batches have added"),
    },
    "merge": {
        "a mean": (
            MERGE % ("torch.maximum(largest_a, largest_b)", "(out_a + out_b) / 2"),
            0,
            "The larger score decides",
        ),
        "not divided": (
            MERGE % ("torch.maximum(largest_a, largest_b)", "out_a * total_a + out_b * total_b"),
            1,
            "out of [4, 4] keys",
        ),
        "the first largest": (
            MERGE % ("largest_a", "(out_a * total_a + out_b * total_b) / total"),
            0,
            "largest of [4, 4] keys",
        ),
        "not stable": (
            """
def merge(a, b):
    (out_a, largest_a, total_a), (out_b, largest_b, total_b) = a, b
    total_a, total_b = total_a * largest_a.exp(), total_b * largest_b.exp()
    largest, total = torch.maximum(largest_a, largest_b), total_a + total_b
    out = (out_a * total_a + out_b * total_b) / total
    return out, largest, total / largest.exp()
""",
            3,
            "exp(10,000) is infinite",
        ),
    },
}
