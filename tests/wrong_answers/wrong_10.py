"""Plausible wrong answers to the exercises of chapter 10: source, points, a part of the message."""

WORKER = """
def worker(rank, read, compute, lr, num_steps):
    for _ in range(num_steps):
        yield "compute", read
        %s
        w = yield "pull"
        %s
        yield "compute", compute
        yield "push", -lr * gradient(rank, w)
        %s
"""

CLOCK = """
class Clock:
    def __init__(self, num_workers, s):
        self.finished, self.s = dict.fromkeys(range(num_workers), 0), s

    def tick(self, rank):
        self.finished[rank] += 1

    def may_start(self, rank):
        return %s

    def leave(self, rank):
        %s

    def join(self, rank):
        self.finished[rank] = %s
"""
RULE = "self.finished[rank] - min(self.finished.values()) <= self.s"
LEAVE, JOIN = "del self.finished[rank]", "min(self.finished.values())"

PREFETCH = """
def prefetching_worker(compute, lr, num_steps):
    answer = yield "ask"
    for t in range(num_steps):
        w = yield "wait", answer
        %s
        yield "compute", compute
        %s
        yield "push", -lr * w
        %s
"""

SERVER = """
class Server:
    def __init__(self, values, replica=None):
        self.values, self.replica, self.last = values.clone(), replica, {}

    def push(self, worker, number, update):
        %s

    def pull(self):
        return self.values%s

    def restore(self, other):
        %s
"""
PASS_ON = """if self.replica is not None:
            self.replica.push(worker, number, update)
"""
ADD = """        if number > self.last.get(worker, 0):
            self.values += update
            self.last[worker] = number"""
RESTORE = "self.values, self.last = other.values.clone(), dict(other.last)"

WRONG = {
    "owner": {
        "like cards": (
            "def owner(key, K, P):\n    return key % P, key // P",
            0,
            "the keys are cut into ranges",
        ),
        "ranges of equal size": (
            "def owner(key, K, P):\n    size = -(-K // P)\n    return key // size, key % size",
            1,
            "Server 1 has 2 to 4",
        ),
        "the nearest formula": (
            "def owner(key, K, P):\n    i = key * P // K\n    return i, key - i * K // P",
            1,
            "owner of key 2 of 10 on 4 servers: expected [1, 0], got [0, 2]",
        ),
        "the key itself": (
            """
def owner(key, K, P):
    return next(i for i in range(P) if key < (i + 1) * K // P), key
""",
            0,
            "The position counts from the first key of the server",
        ),
    },
    "predict-bytes": {
        "all servers together": (
            "dense, sparse, on_the_link = 16_000_000, 2_400_000, 6_000_000",
            1,
            "There are two servers, and each gets its share only",
        ),
        "one worker": (
            "dense, sparse, on_the_link = 2_000_000, 300_000, 3_000_000",
            0,
            "Pushes arrive at its server, and pulled values at its worker",
        ),
        "keys only once": (
            "dense, sparse, on_the_link = 8_000_000, 800_000, 8_000_000",
            1,
            "The keys are sent twice",
        ),
        "what leaves counts, too": (
            "dense, sparse, on_the_link = 8_000_000, 1_600_000, 12_000_000",
            1,
            "The values of a pull go out of the server",
        ),
    },
    "stale": {
        "no delay": (
            "path = [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625]\n"
            "most_workers, most_with_curvature = 5, 1",
            2,
            "Worker 1 still has the weight of the start",
        ),
        "with the weight of the start": (
            "path = [1, 0.5, 0, -0.25, -0.25, -0.125]\nmost_workers, most_with_curvature = 6, 6",
            0,
            "Leave out the weight of the start",
        ),
        "one over k": (
            "path = [0.5, 0, -0.25, -0.25, -0.125, 0]\nmost_workers, most_with_curvature = 3, 0",
            1,
            "it is larger than 1 / k",
        ),
        "the delay is k": (
            "path = [0.5, 0, -0.25, -0.25, -0.125, 0]\nmost_workers, most_with_curvature = 4, 5",
            1,
            "k workers have a delay of k - 1",
        ),
    },
    "mend-step": {
        "a tick without a number": (
            WORKER % ("", "", 'yield "tick"'),
            0,
            "worker 1: 'tick' needs a value behind it",
        ),
        "the race": ("worker = broken_worker", 0, "pushes before all have pulled"),
        "only a tick": (WORKER % ("", "", 'yield "tick", 0'), 1, "pushes before all have pulled"),
        "only a barrier": (
            WORKER % ("", 'yield "barrier"', ""),
            0,
            "pulls for step 1 before all have pushed in step 0",
        ),
        "it does not compute": (
            (WORKER % ("", 'yield "barrier"', 'yield "tick", 0')).replace(
                '        yield "compute", compute\n', ""
            ),
            0,
            "how often each worker asks for compute: expected [8, 8, 8], got [4, 4, 4]",
        ),
        "the barrier in the wrong place": (
            WORKER % ('yield "barrier"', "", 'yield "tick", 0'),
            1,
            "pushes before all have pulled",
        ),
        "a staleness of one": (
            WORKER % ("", 'yield "barrier"', 'yield "tick", 1'),
            0,
            "before all have pushed",
        ),
        "two barriers": (
            WORKER % ("", 'yield "barrier"', 'yield "barrier"'),
            0,
            "calls of barrier in a step: expected at most 1, got 2",
        ),
        "a barrier that not all call": (
            WORKER % ("", 'if rank: yield "barrier"', 'yield "tick", 0'),
            0,
            "wait for ever",
        ),
    },
    "clock": {
        "no return": (
            """
class Clock:
    def __init__(self, num_workers, s):
        self.counts, self.s = [0] * num_workers, s

    def tick(self, rank):
        self.counts[rank] += 1

    def may_start(self, rank):
        self.counts[rank] - min(self.counts) <= self.s
""",
            0,
            "`may_start` returned None: is `return` missing?",
        ),
        "one step less": (
            CLOCK % (RULE.replace("<=", "<"), LEAVE, JOIN),
            0,
            "nobody may start, not even the slowest",
        ),
        "against the fastest": (
            CLOCK % ("max(self.finished.values()) - self.finished[rank] <= self.s", LEAVE, JOIN),
            0,
            "not even the slowest worker",
        ),
        "the one who left is remembered": (
            CLOCK % (RULE, "pass", JOIN),
            2,
            "Worker 1 has left, and nobody waits for it",
        ),
        "a newcomer begins with 0": (CLOCK % (RULE, LEAVE, "0"), 3, "stops all others"),
        "a newcomer is where the fastest is": (
            CLOCK % (RULE, LEAVE, "max(self.finished.values())"),
            3,
            "not ahead of all",
        ),
        "everybody may start": (CLOCK % ("True", LEAVE, JOIN), 0, "It starts a step too early"),
    },
    "both-ways": {
        "one ring": ("two_way_allreduce = ring_allreduce", 2, "4 of 8 directions are in use"),
        "the whole tensor twice": (
            """
def two_way_allreduce(data):
    ring_allreduce(data)
    ring_allreduce(data[::-1])
""",
            0,
            "numbers on device 0 are wrong",
        ),
        "both halves the same way": (
            """
def two_way_allreduce(data):
    for half in zip(*(x.tensor_split(2) for x in data)):
        ring_allreduce(list(half))
""",
            2,
            "4 of 8 directions are in use",
        ),
        "a star": (
            """
def two_way_allreduce(data):
    for x in data[1:]:
        data[0] += x.to(data[0].device)
    for x in data[1:]:
        x.copy_(data[0])
""",
            1,
            "links between devices that are no neighbours",
        ),
        "the second half is lost": (
            """
def two_way_allreduce(data):
    ring_allreduce([x[: len(x) // 2] for x in data])
""",
            0,
            "numbers on device 0 are wrong",
        ),
    },
    "prefetch": {
        "nothing is hidden": ("prefetching_worker = plain_worker", 0, "No gradient is old"),
        "asked after computing": (
            PREFETCH % ("", 'if t < num_steps - 1: answer = yield "ask"', ""),
            2,
            "Nothing but the first pull should be waited for",
        ),
        "asked after the push": (
            PREFETCH % ("", "", 'if t < num_steps - 1: answer = yield "ask"'),
            0,
            "No gradient is old",
        ),
        "one pull too many": (
            PREFETCH % ('answer = yield "ask"', "", ""),
            2,
            "weights that nobody uses",
        ),
        "all at the start": (
            """
def prefetching_worker(compute, lr, num_steps):
    answers = []
    for _ in range(num_steps):
        answers.append((yield "ask"))
    for answer in answers:
        w = yield "wait", answer
        yield "compute", compute
        yield "push", -lr * w
""",
            0,
            "All gradients are those of the start",
        ),
    },
    "exactly-once": {
        "its own tensor": (
            SERVER % (PASS_ON + ADD, "", RESTORE),
            4,
            "`pull` has to return a copy",
        ),
        "numbers are ignored": (
            SERVER % (PASS_ON + "        self.values += update", ".clone()", RESTORE),
            2,
            "An update was added twice",
        ),
        "the replica hears it once": (
            SERVER
            % (
                "if number > self.last.get(worker, 0):\n"
                "            self.values += update\n"
                "            self.last[worker] = number\n"
                "            if self.replica is not None:\n"
                "                self.replica.push(worker, number, update)",
                ".clone()",
                RESTORE,
            ),
            4,
            "acknowledged that did not reach the replica",
        ),
        "numbers are not restored": (
            SERVER % (PASS_ON + ADD, ".clone()", "self.values = other.values.clone()"),
            4,
            "An update was added twice",
        ),
        "acknowledged without the replica": (
            SERVER
            % (
                "try:\n            self.replica and self.replica.push(worker, number, update)\n"
                "        except ConnectionError:\n            pass\n" + ADD,
                ".clone()",
                RESTORE,
            ),
            3,
            "acknowledged that did not reach the replica",
        ),
        "all numbers are kept": (
            (SERVER % (PASS_ON + ADD, ".clone()", "self.values = other.values.clone()"))
            .replace(
                "self.last = values.clone(), replica, {}",
                "self.seen = values.clone(), replica, set()",
            )
            .replace("number > self.last.get(worker, 0)", "(worker, number) not in self.seen")
            .replace("self.last[worker] = number", "self.seen.add((worker, number))")
            .replace(
                "= other.values.clone()", "= other.values.clone(); self.seen = set(other.seen)"
            ),
            4,
            "what has to be remembered",
        ),
        "one count for all workers": (
            (SERVER % (PASS_ON + ADD, ".clone()", RESTORE))
            .replace("worker, 0", "0, 0")
            .replace("self.last[worker]", "self.last[0]"),
            2,
            "An update is missing",
        ),
        "the first values are not copied": (
            (SERVER % (PASS_ON + ADD, ".clone()", RESTORE)).replace(
                "last = values.clone()", "last = values"
            ),
            4,
            "Copy the tensor",
        ),
        "values are not copied": (
            SERVER % (PASS_ON + ADD, "", RESTORE),
            4,
            "after a worker changed the copy",
        ),
    },
}
