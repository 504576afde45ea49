"""Plausible wrong answers to the exercises of chapter 08: source, points, a part of the message."""

STEP = """
def step(stages, X, y, m):
    losses = []
    for X_part, y_part in zip(X.chunk(m), y.chunk(m), strict=True):
        H = X_part
        for stage in stages:
            H = stage(H.to(next(stage.parameters()).device))
        losses.append(F.cross_entropy(H, y_part)%s)
%s
    return %s
"""
AT_THE_END = "    for loss in losses:\n        loss.backward()"
INSIDE = "        losses[-1].backward()"

LIMITED = """
def limited_schedule(k, m, u):
    schedule = []
    for s in range(k):
        ahead = min(%s, m)
        tasks = [Task("forward", i) for i in range(ahead)]
        for i in range(m):
            if i + ahead < m:
                tasks.append(Task("forward", i + ahead))
            tasks.append(Task("backward", i))
        schedule.append(tasks)
    return schedule
"""

BOTH = """
def both_ways(k, m):
    marks, rows = predict_schedule(one_forward_one_backward(k, m // 2), [1.0] * k, [2.0] * k), []
    for j in range(k):
        tasks = []
        for way, s in enumerate(%s):
            for mark in marks[s]:
                kind, i = mark.name.split()
                tasks.append((mark.start, kind, s, 2 * int(i) + way))
        rows.append([task for _, *task in %s])
    return rows
"""

WRONG = {
    "enough-micro-batches": {
        "lost time over work": (
            "def enough_micro_batches(k, limit):\n    return -int(-(k - 1) / limit // 1)",
            0,
            "A smaller number is enough",
        ),
        "rounded down": (
            "def enough_micro_batches(k, limit):\n"
            "    return max(1, int((k - 1) * (1 - limit) / limit))",
            1,
            "With 2 the bubble is still larger",
        ),
        "not rounded": (
            "def enough_micro_batches(k, limit):\n    return (k - 1) / limit - (k - 1)",
            0,
            "That is no whole number of micro-batches",
        ),
        "no micro-batch at all": (
            "import math\ndef enough_micro_batches(k, limit):\n"
            "    return math.ceil((k - 1) * (1 - limit) / limit)",
            1,
            "A batch is at least one micro-batch",
        ),
        "a stage too many": (
            "import math\ndef enough_micro_batches(k, limit):\n"
            "    return max(1, math.ceil(k * (1 - limit) / limit))",
            0,
            "A smaller number is enough",
        ),
    },
    "what-crosses": {
        "one way": (
            "bytes_early, bytes_late, messages = 4 * 64 * 32 * 784, 4 * 64 * 64 * 196, 24",
            0,
            "Activations go there, and their gradients come back",
        ),
        "the pooling behind the cut": (
            "bytes_early, bytes_late, messages = 8 * 64 * 32 * 784, 8 * 64 * 64 * 784, 48",
            2,
            "The pooling belongs to the layer in front of the cut",
        ),
        "parameters": (
            "bytes_early, bytes_late, messages = 4 * (32 * 9 + 32), 0, 64",
            0,
            "Parameters never cross",
        ),
        "one message for the whole batch": (
            "bytes_early, bytes_late, messages = 8 * 64 * 32 * 784, 8 * 64 * 64 * 196, 6",
            2,
            "is sent by itself",
        ),
        "four cuts": (
            "bytes_early, bytes_late, messages = 8 * 32 * 784, 2 * 64 * 64 * 196, 64",
            0,
            "Four stages have three cuts",
        ),
    },
    "mend-pipeline": {
        "as it was": ("step = slow_step", 1, "expected at most 1, got 8"),
        "the whole batch at once": (
            STEP.replace("chunk(m)", "chunk(1)") % (" / 1", AT_THE_END, "sum(losses).item()"),
            2,
            "Does the batch go through the stages in eight micro-batches?",
        ),
        "read at the end, but backward inside": (
            STEP % (" / m", INSIDE, "sum(loss.detach() for loss in losses).item()"),
            2,
            "behind a backward pass that has to wait",
        ),
        "backward at the end, but read inside": (
            STEP % (" / m", "        losses[-1].item()\n" + AT_THE_END, "sum(losses).item()"),
            1,
            "Does the host wait for a loss",
        ),
        "the sum of the means": (
            STEP % ("", AT_THE_END, "sum(losses).item()"),
            0,
            "the sum over the micro-batches, not the mean",
        ),
        "the mean of the losses, the sum of the gradients": (
            STEP % ("", AT_THE_END, "sum(losses).item() / m"),
            0,
            "8 times too much",
        ),
    },
    "best-cuts": {
        "equal numbers of layers": (
            "def best_cuts(seconds, num_bytes, k, bandwidth):\n"
            "    return [len(seconds) * s // k for s in range(1, k)]",
            0,
            "Count seconds, and not layers",
        ),
        "filled up to the average": (
            """
def best_cuts(seconds, num_bytes, k, bandwidth):
    cuts, filled, n = [], 0, len(seconds)
    for i, t in enumerate(seconds):
        if i and filled + t > sum(seconds) / k and len(cuts) < k - 1:
            cuts, filled = cuts + [i], 0
        filled += t
    return cuts + list(range(n - (k - 1 - len(cuts)), n))
""",
            0,
            "expected a pace of",
        ),
        "links forgotten": (
            """
def best_cuts(seconds, num_bytes, k, bandwidth):
    def pace(cuts):
        return max(sum(seconds[i:j]) for i, j in itertools.pairwise([0, *cuts, len(seconds)]))
    return list(min(itertools.combinations(range(1, len(seconds)), k - 1), key=pace))
""",
            2,
            "A link is as slow as its bytes divided by the bandwidth",
        ),
        "bytes in front of the layer behind the cut": (
            """
def best_cuts(seconds, num_bytes, k, bandwidth):
    def pace(cuts):
        stages = [sum(seconds[i:j]) for i, j in itertools.pairwise([0, *cuts, len(seconds)])]
        return max(stages + [num_bytes[i] / bandwidth for i in cuts])
    return list(min(itertools.combinations(range(1, len(seconds)), k - 1), key=pace))
""",
            2,
            "A link is as slow",
        ),
        "an empty stage": (
            "def best_cuts(seconds, num_bytes, k, bandwidth):\n    return [0] * (k - 1)",
            0,
            "a stage without layers",
        ),
    },
    "limited-schedule": {
        "1F1B": (
            "def limited_schedule(k, m, u):\n    return one_forward_one_backward(k, m)",
            1,
            "expected at most 3, got [4, 3, 2, 1]",
        ),
        "u forward passes ahead": (LIMITED % "k - s - 1, u", 1, "so does the one that follows it"),
        "one after the other": (LIMITED % "0, u - 1", 3, "units: expected at most 48, got 96"),
        "stages counted from the wrong end": (LIMITED % "s, u - 1", 0, "wait for each other"),
        "a task is missing": (
            "def limited_schedule(k, m, u):\n"
            "    return [tasks[:-1] for tasks in one_forward_one_backward(k, m)]",
            0,
            "stage 0 is without ('backward', 7)",
        ),
    },
    "both-ways": {
        "all forward passes first": (
            BOTH % ("(j, k - 1 - j)", "sorted(tasks, key=lambda t: (t[1] == 'backward', t[3]))"),
            1,
            "expected at most 17, got",
        ),
        "two 1F1B, merged by time": (
            BOTH % ("(j, k - 1 - j)", "sorted(tasks, key=lambda t: (t[0], t[1] == 'forward'))"),
            4,
            "which one do other devices wait for",
        ),
        "four devices and micro-batches only": (
            BOTH.replace("    for j", "    assert k == m == 4, 'not drawn yet'\n    for j")
            % ("(j, k - 1 - j)", "sorted(tasks, key=lambda t: (t[0], t[1] == 'forward'))"),
            2,
            "AssertionError: not drawn yet",
        ),
        "one way after the other": (
            BOTH % ("(j, k - 1 - j)", "tasks"),
            1,
            "No device should wait while it has a task",
        ),
        "both ways in the same direction": (
            BOTH % ("(j, j)", "sorted(tasks)"),
            0,
            "belongs to another device",
        ),
    },
}
