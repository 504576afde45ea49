"""Plausible wrong answers to the exercises of chapter 03: source, points, a part of the message."""

STEPS = """
def fast_program(x_gpu1, x_gpu2, num_steps=20):
    means = []
    for i in range(num_steps):
        %s
        b = chain(x_gpu2)
        %s
        mean = (a + both).mean()
        x_gpu1, x_gpu2 = x_gpu1 / mean, x_gpu2 / mean.to(x_gpu2.device)
        %s
        means.append(mean%s)
    %s
"""
DEPENDENT_FIRST = "both = b.to(x_gpu1.device) + 1\n        a = chain(x_gpu1)"
INDEPENDENT_FIRST = "a = chain(x_gpu1)\n        both = b.to(x_gpu1.device) + 1"
READ = "return [mean.item() for mean in means]"

BY_RULE = """
def best_order(program):
    numbers = range(len(program))

    def depends(i, j):
        a, b = program[i], program[j]
        return i < j and bool(%s)

    path = {}
    for i in reversed(numbers):
        behind = [path[j] for j in numbers if depends(i, j)]
        path[i] = program[i].time + max(behind, default=0)
    order, free = [], dict.fromkeys(range(8), 0)
    while len(order) < len(program):
        rest = [i for i in numbers if i not in order]
        ready = [j for j in rest if not any(depends(i, j) for i in rest)]
        start = {i: max(free[queue] for queue in program[i].queues) for i in ready}
        chosen = min(ready, key=lambda i: %s)
        free.update(dict.fromkeys(program[chosen].queues, start[chosen] + program[chosen].time))
        order.append(chosen)
    return order
"""
BERNSTEIN = "set(a.writes) & set(b.reads + b.writes) | set(a.reads) & set(b.writes)"

WRONG = {
    "sum-or-max": {
        "always the maximum": ("a, b, c, d, e, f = 6, 6, 5, 5, 7, 7", 0, "Python waits for the"),
        "always the sum": (
            "a, b, c, d, e, f = 10, 10, 10, 10, 10, 10",
            0,
            "Nothing makes Python wait before both have their work",
        ),
        "a scheduler": (
            "a, b, c, d, e, f = 6, 10, 10, 5, 7, 7",
            2,
            "waits, needed or not",
        ),
        "every item costs": (
            "a, b, c, d, e, f = 6, 10, 10, 10, 10, 7",
            2,
            "Both devices have their product before",
        ),
    },
    "at-once": {
        "neighbours only": (
            """
def most_at_once(spans):
    pairs = zip(spans, spans[1:])
    return 1 + sum(a.end > b.start for a, b in pairs)
""",
            0,
            "The first and the third do not meet",
        ),
        "touching counts": (
            """
def most_at_once(spans):
    return max((sum(a.start <= b.start <= a.end for a in spans) for b in spans), default=0)
""",
            1,
            "A span that ends when the next one starts is over",
        ),
        "the most that one span meets": (
            """
def most_at_once(spans):
    return max((sum(a.start < b.end and b.start < a.end for a in spans) for b in spans), default=0)
""",
            1,
            "expected 2, got 3",
        ),
        "no spans": (
            """
def most_at_once(spans):
    return max(sum(a.start <= b.start < a.end for a in spans) for b in spans)
""",
            2,
            "ValueError",
        ),
        "all of them": ("def most_at_once(spans):\n    return len(spans)", 0, "do not meet"),
    },
    "stopwatch": {
        "another clock": (
            "def stopwatch(work):\n    work()\n    return 1.0",
            0,
            "Does `clock()` tell both times?",
        ),
        "the hasty one": ("stopwatch = hasty_stopwatch", 0, "waits for the current one"),
        "leftovers are counted": (
            """
def stopwatch(work):
    start = clock()
    work()
    for i in range(torch.vgpu.device_count()):
        torch.vgpu.synchronize(i)
    return clock() - start
""",
            2,
            "Wait for all devices before the clock starts, too",
        ),
        "the last device only": (
            """
def stopwatch(work):
    for i in range(torch.vgpu.device_count()):
        torch.vgpu.synchronize(i)
    start = clock()
    work()
    torch.vgpu.synchronize(torch.vgpu.device_count() - 1)
    return clock() - start
""",
            1,
            "in products: expected 9, got 1",
        ),
        "no wait": (
            """
def stopwatch(work):
    start = clock()
    work()
    return clock() - start
""",
            0,
            "in products: expected 9, got 0",
        ),
        "nothing returned": ("def stopwatch(work):\n    work()", 0, "is `return` missing?"),
    },
    "devices-worth": {
        "rounded down": (
            """
def devices_worth(t_comp, t_launch, available):
    return min(available, max(1, int(t_comp / t_launch)))
""",
            1,
            "One more device still helps",
        ),
        "one more than the ratio": (
            """
def devices_worth(t_comp, t_launch, available):
    return min(available, int(t_comp / t_launch) + 1)
""",
            2,
            "The last device brings nothing",
        ),
        "no bounds": (
            """
def devices_worth(t_comp, t_launch, available):
    return -(-t_comp // t_launch)
""",
            1,
            "There are only 4",
        ),
        "all of them": (
            "def devices_worth(t_comp, t_launch, available):\n    return available",
            0,
            "one device is enough",
        ),
    },
    "mend-flaws": {
        "nothing mended": ("fast_program = slow_program", 1, "not needed yet?"),
        "the order only": (
            STEPS % ("write_log(i)", INDEPENDENT_FIRST, "mean = mean.item()", "", "return means"),
            3,
            "Do the devices have work while the host",
        ),
        "numbers read late, in the old order": (
            STEPS % ("write_log(i)", DEPENDENT_FIRST, "pass", "", READ),
            2,
            "Does the first device wait for b",
        ),
        "the numbers stay on the device": (
            STEPS % ("write_log(i)", INDEPENDENT_FIRST, "pass", "", "return means"),
            0,
            "a list of numbers was expected, got a list of tensors",
        ),
        "the log is lost": (
            STEPS % ("pass", INDEPENDENT_FIRST, "pass", "", READ),
            0,
            "Each step writes its line once",
        ),
    },
    "schedule": {
        "the order of the program": (
            "def best_order(program):\n    return list(range(len(program)))",
            1,
            "end of three_lines: expected 7, got 13",
        ),
        "list scheduling": (
            BY_RULE % (BERNSTEIN, "(start[i], -path[i])"),
            3,
            "end of micro_batches: expected 14, got 18",
        ),
        "what can start first": (
            BY_RULE % (BERNSTEIN, "start[i]"),
            1,
            "end of long_tail: expected 12, got 18",
        ),
        "reads only": (
            BY_RULE % ("set(a.writes) & set(b.reads)", "(start[i], -path[i])"),
            0,
            "because of w",
        ),
        "kernels before copies": (
            """
def best_order(program):
    return sorted(range(len(program)), key=lambda i: len(program[i].queues))
""",
            0,
            "has to stay behind",
        ),
    },
}
