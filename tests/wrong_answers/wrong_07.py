"""Plausible wrong answers to the exercises of chapter 07: source, points, a part of the message."""

TRAIN = """
def train(w, batches, lr, all_reduce):
    r = 0
    while True:
        total = torch.zeros(len(w) + 1)
        if r < len(batches):
            X, y = batches[r]
            total[:-1], total[-1] = gradient(w, X, y), len(X)
        all_reduce(total)
        %s
        r += 1
"""

STEP = """
def step(net, X, y, lr):
    params, sums = list(net.parameters()), []

    def arrived(p):
        sums.append(dist.all_reduce(p.grad, async_op=True))
        %s

    hooks = [p.register_post_accumulate_grad_hook(arrived) for p in params]
    F.cross_entropy(net(X), y).backward()
    for hook in hooks:
        hook.remove()
    %s
    with torch.no_grad():
        for p in params:
            p -= lr / %s * p.grad
            p.grad = None
"""
WAIT = """for work in sums:
        work.wait()"""

BUCKETS = """
class OrderedBuckets:
    def __init__(self, sizes, start):
        self.sizes, self.start = list(sizes), start
        self.missing, self.next = list(sizes), 0

    def arrived(self, j):
        self.missing[j] -= 1
        %s

    def finish(self):
        %s
"""
IN_ORDER = """while self.next < len(self.sizes) and self.missing[self.next] == 0:
            self.start(self.next)
            self.next += 1"""
THE_REST = """for j in range(self.next, len(self.sizes)):
            self.start(j)
"""
AGAIN = "        self.missing, self.next = list(self.sizes), 0"

GREEDY = """
def best_buckets(ready, num_bytes, sum_seconds):
    plan, filled, size = [], 0, 0
    for n in num_bytes:
        filled, size = filled + n, size + 1
        if filled >= %s * 2**20:
            plan.append(size)
            filled = size = 0
    return plan + [size] * (size > 0)
"""

WRONG = {
    "indices": {
        "the sampler": (
            """
def indices_of_rank(n, k, rank):
    return list(torch.utils.data.DistributedSampler(range(n), k, rank, shuffle=False))
""",
            0,
            "calls torch.utils.data, which the task rules out",
        ),
        "neighbours": (
            """
def indices_of_rank(n, k, rank):
    size = -(-n // k)
    return [i % n for i in range(rank * size, (rank + 1) * size)]
""",
            0,
            "These are neighbours",
        ),
        "without the second deal": (
            "def indices_of_rank(n, k, rank):\n    return list(range(rank, n, k))",
            1,
            "All ranks must get equally many examples",
        ),
        "the rest is dropped": (
            "def indices_of_rank(n, k, rank):\n    return list(range(rank, n - n % k, k))",
            1,
            "All ranks must get equally many examples",
        ),
        "the last example again": (
            """
def indices_of_rank(n, k, rank):
    return [min(rank + i * k, n - 1) for i in range(-(-n // k))]
""",
            1,
            "expected [2, 6, 0], got [2, 6, 9]",
        ),
        "one round too many": (
            "def indices_of_rank(n, k, rank):\n"
            "    return [(rank + i * k) % n for i in range(n // k + 1)]",
            1,
            "These are too many examples",
        ),
    },
    "predict-bytes": {
        "numbers instead of bytes": (
            "always, skipping, on_the_link, in_16_bits = 4e6, 1e6, 1.5e6, 1e6",
            0,
            "Each takes four bytes",
        ),
        "the parts are smaller": (
            "always, skipping, on_the_link, in_16_bits = 4e6, 1e6, 1.5e6, 5e5",
            0,
            "Without no_sync every backward pass sums all gradients",
        ),
        "twice the bytes on the link": (
            "always, skipping, on_the_link, in_16_bits = 16e6, 4e6, 8e6, 2e6",
            3,
            "That is the limit for many ranks",
        ),
        "compressed parts": (
            "always, skipping, on_the_link, in_16_bits = 16e6, 4e6, 6e6, 8e6",
            3,
            "no_sync still holds",
        ),
    },
    "token-mean": {
        "no return": (
            "def loss_of_rank(losses, mask):\n    (losses * mask).sum() / mask.sum()",
            0,
            "8 tokens on each of three ranks: the function returned None: is `return` missing?",
        ),
        "a number": (
            "def loss_of_rank(losses, mask):\n    return (losses * mask).sum().item()",
            0,
            "a tensor was expected, because `backward()` is called on it",
        ),
        "the number of tokens on the CPU": (
            """
def loss_of_rank(losses, mask):
    total = torch.tensor([mask.sum().item()])
    dist.all_reduce(total)
    return (losses * mask).sum() * dist.get_world_size() / total
""",
            0,
            "line 5 of your answer: `return (losses * mask)",
        ),
        "the mean of the means": ("loss_of_rank = broken_loss", 1, "Does every real token have"),
        "the factor is forgotten": (
            """
def loss_of_rank(losses, mask):
    total = mask.sum()
    dist.all_reduce(total)
    return (losses * mask).sum() / total
""",
            0,
            "DDP divides the sum of the gradients by the number of ranks",
        ),
        "made for two ranks": (
            """
def loss_of_rank(losses, mask):
    total = mask.sum()
    dist.all_reduce(total)
    return 2 * (losses * mask).sum() / total
""",
            0,
            "There are three here",
        ),
        "padding counts": (
            "def loss_of_rank(losses, mask):\n    return (losses * mask).mean()",
            0,
            "Padding counts among the tokens",
        ),
        "a plain sum": (
            "def loss_of_rank(losses, mask):\n    return (losses * mask).sum()",
            0,
            "the sum over the tokens, not their mean",
        ),
        "one rank asks the others": (
            """
def loss_of_rank(losses, mask):
    total = mask.sum()
    if dist.get_rank() == 0:
        dist.all_reduce(total)
    return (losses * mask).sum() / total
""",
            0,
            "the ranks do not call the same collectives",
        ),
        "never divides by 0": (
            """
def loss_of_rank(losses, mask):
    return (losses * mask).sum() / mask.sum().clamp(min=1)
""",
            1,
            "Does every real token have",
        ),
    },
    "ordered-buckets": {
        "started when full": (
            BUCKETS
            % (
                "self.start(j) if self.missing[j] == 0 else None",
                "self.missing = list(self.sizes)",
            ),
            1,
            "started before one in front of it",
        ),
        "one start for each gradient": (
            BUCKETS
            % (
                "if self.next < len(self.sizes) and self.missing[self.next] == 0:\n"
                "            self.start(self.next)\n            self.next += 1",
                THE_REST + AGAIN,
            ),
            3,
            "A sum could have started, and did not",
        ),
        "all at the end": (BUCKETS % ("pass", THE_REST + AGAIN), 0, "could have started"),
        "a skipped layer is forgotten": (BUCKETS % (IN_ORDER, AGAIN.strip()), 2, "at the end"),
        "not ready for the next pass": (BUCKETS % (IN_ORDER, THE_REST), 3, "not full yet"),
    },
    "uneven": {
        "the loop that hangs": (
            "def train(w, batches, lr, all_reduce):\n"
            "    return broken_train(w, batches, lr, all_reduce)",
            1,
            "waits for ever: another rank has returned",
        ),
        "the first rank that is done ends it": (
            """
def train(w, batches, lr, all_reduce):
    for r in range(10):
        left = torch.tensor([0.0 if r < len(batches) else 1.0])
        all_reduce(left)
        if left > 0:
            return w
        X, y = batches[r]
        total = torch.cat([gradient(w, X, y), torch.tensor([float(len(X))])])
        all_reduce(total)
        w = w - lr / total[-1] * total[:-1]
""",
            1,
            "In each round every example should have the weight 1/b",
        ),
        "the mean over all ranks": (
            TRAIN
            % "if total[-1] == 0:\n            return w\n        w = w - lr / 12 * total[:-1]",
            1,
            "In each round every example should have the weight 1/b",
        ),
        "a rank without a batch sums only the number": (
            """
def train(w, batches, lr, all_reduce):
    for r in range(10):
        total = torch.zeros(1)
        if r < len(batches):
            X, y = batches[r]
            total = torch.cat([gradient(w, X, y), torch.tensor([float(len(X))])])
        all_reduce(total)
        if total[-1] == 0:
            return w
        w = w - lr / total[-1] * total[:-1]
""",
            1,
            "the ranks sum tensors of shapes [(1,), (5,)]",
        ),
        "a number is summed": (
            """
def train(w, batches, lr, all_reduce):
    all_reduce(len(batches))
    return broken_train(w, batches, lr, all_reduce)
""",
            0,
            "all_reduce takes a tensor, not 2",
        ),
        "no end": (TRAIN % "w = w - lr / max(total[-1], 1) * total[:-1]", 0, "and no end"),
        "no result": (
            TRAIN
            % "if total[-1] == 0:\n            return\n        w = w - lr / total[-1] * total[:-1]",
            0,
            "is `return` missing?",
        ),
    },
    "overlap": {
        "the chapter's first step": (
            """
def step(net, X, y, lr):
    F.cross_entropy(net(X), y).backward()
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.data -= lr / dist.get_world_size() * p.grad
        p.grad = None
""",
            1,
            "0.0 ms of them run beside kernels",
        ),
        "a wait in the hook": (
            STEP % ("sums[-1].wait()", "", "dist.get_world_size()"),
            1,
            "0.0 ms of them run beside kernels",
        ),
        "DDP": (
            """
def step(net, X, y, lr):
    F.cross_entropy(DDP(net)(X), y).backward()
    with torch.no_grad():
        for p in net.parameters():
            p -= lr * p.grad
            p.grad = None
""",
            0,
            "calls torch.nn.parallel.distributed, which the task rules out",
        ),
        "no wait": (STEP % ("", "", "dist.get_world_size()"), 0, "Does the update wait"),
        "the sum, not the mean": (STEP % ("", WAIT, "1"), 0, "divided by the number of ranks"),
        "a sum for each parameter": (
            STEP % ("", WAIT, "dist.get_world_size()"),
            3,
            "expected at most 40, got",
        ),
        "hooks that stay": (
            (STEP % ("", WAIT, "dist.get_world_size()")).replace("hook.remove()", "pass"),
            0,
            "each of them once",
        ),
    },
    "best-buckets": {
        "one bucket": (
            "def best_buckets(ready, num_bytes, sum_seconds):\n    return [len(ready)]",
            0,
            "these two plans take",
        ),
        "a fixed size": (GREEDY % 10, 1, "need not be the best for all"),
        "a fixed size of 25": (GREEDY % 25, 0, "milliseconds: expected"),
        "waits while the link is busy": (
            """
def best_buckets(ready, num_bytes, sum_seconds):
    plan, end, filled, size = [], 0.0, 0, 0
    for i, n in enumerate(num_bytes):
        filled, size = filled + n, size + 1
        if ready[i] >= end or i == len(ready) - 1:
            plan.append(size)
            end, filled, size = max(ready[i], end) + sum_seconds(filled), 0, 0
    return plan
""",
            1,
            "need not be the best for all",
        ),
        "all plans": (
            """
def best_buckets(ready, num_bytes, sum_seconds):
    def plans(q):
        yield [q]
        for size in range(1, q):
            for rest in plans(q - size):
                yield [size, *rest]
    key = lambda plan: end_of(plan, ready, num_bytes, sum_seconds)
    return min(plans(len(ready)), key=key)
""",
            3,
            "Try fewer plans",
        ),
        "a gradient is lost": (
            "def best_buckets(ready, num_bytes, sum_seconds):\n    return [1] * (len(ready) - 1)",
            0,
            "expected 9, got 8",
        ),
    },
}
