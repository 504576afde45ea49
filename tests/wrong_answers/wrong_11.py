"""Plausible wrong answers to the exercises of chapter 11: source, points, a part of the message."""

LINE = """
def break_even(b1, T1, b2, T2, T_sum):
    t = (T2 - T1) / (b2 - b1)
    t0 = T1 - t * b1
    return %s
"""

BEST = """
def best_k(t0, t, b, N, B, L):
    return min(range(%s, 4097), key=lambda k: t0 + t * b / k + %s)
"""

CLOCK = """
def seconds_of(step, devices):
    start, end = accel.Event(enable_timing=True), accel.Event(enable_timing=True)
    with accel.device(devices[0]):
        %s
        start.record()
        step()
        %s
        end.record()
    end.synchronize()
    return start.elapsed_time(end)%s
"""
ALL = "[accel.synchronize(device) for device in devices]"

RATE = "def rate(step, b, eta, b0, warm_up):\n    full = eta * b / b0\n    return "

HALVING = """
def halving_allreduce(data):
    k, parts, rounds = len(data), list(data), []
    distance = k // 2
    while distance:
        halves = [part.tensor_split(2) for part in parts]
        rounds.append((distance, halves))
        arrived = [halves[i ^ distance][bool(i & distance)].to(data[i].device) for i in range(k)]
        parts = [halves[i][%s] for i in range(k)]
        for part, other in zip(parts, arrived, strict=True):
            part += other
        distance //= 2
    for distance, halves in %s:
        for i in range(k):
            partner = i ^ distance
            halves[i][not i & distance].copy_(halves[partner][not i & distance])
"""

SECONDS = """
def training_seconds(offer, b):
    k = offer["machines"] * offer["gpus"]
    %s
    T_1 = t0 + t * b / %s
    links = offer["inside"], offer["between"]
    T_sum = two_level_seconds(offer["machines"], offer["gpus"], num_bytes, *links)
    return num_steps(b) * (%s)
"""
FITS = "if b % k or b // k > 512: return math.inf"
TIME = "T_1 / 3 + max(2 / 3 * T_1, T_sum)"
CHEAPEST = """
def cheapest(deadline):
    plans = []
    for (name, offer), b in itertools.product(offers.items(), batches):
        seconds = training_seconds(offer, b)
        if seconds <= deadline:
            plans.append((%s, name, b))
    return min(plans)[1:] if plans else None
"""
BY_PRICE = CHEAPEST % "seconds / 3600 * offer['price']"

WRONG = {
    "break-even": {
        "half of the batch": (LINE % "t0, t, T_sum / t", 1, "saves only half of t b"),
        "t0 does not cancel": (LINE % "t0, t, 2 * (t0 + T_sum) / t", 1, "so it cancels"),
        "the other way round": (LINE % "t, t0, 2 * T_sum / t", 1, "First t0, then t"),
        "two of three": (LINE % "t0, t", 0, "t0, t and b*: expected 3, got 2"),
        "no line": (
            """
def break_even(b1, T1, b2, T2, T_sum):
    t = T2 / b2
    return 0.0, t, 2 * T_sum / t
""",
            0,
            "t0 and t: expected",
        ),
    },
    "sixteen": {
        "one way only": (
            "star_ms, ring_ms, speed_up, efficiency = 42.6, 2.66, 8.8, 0.95",
            0,
            "The sum has to come back from the hub",
        ),
        "seconds and percent": (
            "star_ms, ring_ms, speed_up, efficiency = 0.0851, 0.00532, 6.06, 90.7",
            1,
            "Milliseconds, not seconds",
        ),
        "as a maximum": (
            "star_ms, ring_ms, speed_up, efficiency = 85.1, 5.32, 9.75, 0.907",
            3,
            "the times add up",
        ),
        "strong and weak confused": (
            "star_ms, ring_ms, speed_up, efficiency = 85.1, 5.32, 14.5, 0.379",
            2,
            "Each GPU has 256 images here",
        ),
        "without the sum": (
            "star_ms, ring_ms, speed_up, efficiency = 85.1, 5.32, 16, 1",
            2,
            "That is without the sum",
        ),
    },
    "best-k": {
        "as many as there are": (BEST % (4096, "0"), 0, "4,096 take"),
        "without the latency": (BEST % (1, "2 * (k - 1) / k * N / B"), 0, "devices: expected"),
        "a star": (BEST % (1, "2 * (k - 1) * (L + N / B)"), 0, "devices: expected"),
        "at least two": (BEST % (2, "2 * (k - 1) * (L + N / (k * B))"), 1, "expected 1, got"),
        "from a formula that forgets the bytes": (
            "def best_k(t0, t, b, N, B, L):\n"
            "    return round((t * b / (2 * L)) ** 0.5) if L else 4096",
            0,
            "devices: expected",
        ),
    },
    "mend-clock": {
        "another clock": (
            "def seconds_of(step, devices):\n    step()\n    return 1.0",
            0,
            "Python's own does not",
        ),
        "the check's instrument": (
            """
def seconds_of(step, devices):
    with d2lpar.Timeline() as timeline:
        step()
    return timeline.seconds
""",
            0,
            "your answer calls d2lpar.timelines, which the task rules out",
        ),
        "the clock as it was": (
            "def seconds_of(step, devices):\n    return broken_seconds(step, devices)",
            0,
            "Some work has not ended when the clock stops",
        ),
        "milliseconds": (CLOCK % (ALL, ALL, ""), 0, "Events count in milliseconds"),
        "one device is forgotten": (
            CLOCK % ("accel.synchronize()", "accel.synchronize()", " / 1000"),
            0,
            "Some work has not ended when the clock stops",
        ),
        "what came before": (
            CLOCK % ("pass", ALL, " / 1000"),
            2,
            "should be idle when the clock starts",
        ),
        "only the current streams": (
            """
def seconds_of(step, devices):
    for device in devices:
        accel.synchronize(device)
    events = [[accel.Event(enable_timing=True) for _ in range(2)] for _ in devices]
    for (start, _), device in zip(events, devices):
        start.record(accel.current_stream(device))
    step()
    for (_, end), device in zip(events, devices):
        end.record(accel.current_stream(device))
    for device in devices:
        accel.synchronize(device)
    return max(start.elapsed_time(end) for start, end in events) / 1000
""",
            2,
            "Some work has not ended when the clock stops",
        ),
        "the best of several": (
            "def seconds_of(step, devices):\n    return d2lpar.timing.best_seconds(step)",
            0,
            "calls of step: expected 1",
        ),
    },
    "warm-up": {
        "no warm-up": (RATE + "full", 1, "The warm-up is not over yet"),
        "counted in steps": (
            RATE + "full * min(1, step / warm_up) if warm_up else full",
            0,
            "warm_up counts images, not steps",
        ),
        "counted from 0": (
            RATE + "full * min(1, (step - 1) * b / warm_up) if warm_up else full",
            1,
            "Steps are counted from 1",
        ),
        "no end": (RATE + "full * step * b / warm_up if warm_up else full", 1, "stops growing"),
        "the fixed rate": (
            "def rate(step, b, eta, b0, warm_up):\n    return eta * min(1, step * b / warm_up)",
            0,
            "The rate grows with the batch",
        ),
    },
    "halving": {
        "a ring": (
            'def halving_allreduce(data):\n    d2lpar.allreduce(data, "ring")',
            3,
            "messages of each device of 4: expected [4, 4, 4, 4], got [6, 6, 6, 6]",
        ),
        "a star": (
            "def halving_allreduce(data):\n    d2lpar.allreduce(data)",
            2,
            "bytes out of device 0",
        ),
        "whole tensors": (
            """
def halving_allreduce(data):
    distance = len(data) // 2
    while distance:
        arrived = [data[i ^ distance].to(x.device) for i, x in enumerate(data)]
        for x, other in zip(data, arrived):
            x += other
        distance //= 2
""",
            2,
            "Each round needs half of what the round before needed",
        ),
        "always the first half": (HALVING % ("0", "reversed(rounds)"), 0, "are wrong; number"),
        "back in the same order": (
            HALVING % ("bool(i & distance)", "rounds"),
            0,
            "numbers on device 0 of 4 are wrong",
        ),
        "never back": (HALVING % ("bool(i & distance)", "[]"), 0, "numbers on device 0 of 2"),
    },
    "all-cards": {
        "through one card": ("all_cards = two_levels", 2, "Which device should sum which part"),
        "a flat ring": (
            "def all_cards(data, g):\n    ring_allreduce(data)",
            1,
            "Sum inside the machines first",
        ),
        "everything inside first": (
            """
def all_cards(data, g):
    machines = [data[i : i + g] for i in range(0, len(data), g)]
    for machine in machines:
        ring_allreduce(machine)
    for j in range(g):
        ring_allreduce([machine[j].tensor_split(g)[j] for machine in machines])
    for machine in machines:
        for i in range(g):
            for j in range(g):
                if i != j:
                    machine[i].tensor_split(g)[j].copy_(machine[j].tensor_split(g)[j])
""",
            3,
            "Does every device need the whole sum of its machine",
        ),
        "every device its whole tensor": (
            """
def all_cards(data, g):
    machines = [data[i : i + g] for i in range(0, len(data), g)]
    for machine in machines:
        ring_allreduce(machine)
    for j in range(g):
        ring_allreduce([machine[j] for machine in machines])
""",
            2,
            "Sum inside the machines first",
        ),
        "only inside": (
            """
def all_cards(data, g):
    for i in range(0, len(data), g):
        ring_allreduce(data[i : i + g])
""",
            0,
            "are wrong; number",
        ),
    },
    "rent": {
        "a name without a batch": (
            SECONDS % (FITS, "k", TIME) + BY_PRICE.replace("[1:]", "[1]"),
            3,
            "cheapest: (name of the offer, batch) expected, got '",
        ),
        "without the sum": (
            SECONDS % (FITS, "k", "T_1") + BY_PRICE,
            3,
            "Is the sum of the gradients in the step?",
        ),
        "everything beside the sum": (
            SECONDS % (FITS, "k", "max(T_1, T_sum)") + BY_PRICE,
            4,
            "Nothing hides behind the forward pass",
        ),
        "nothing hidden": (
            SECONDS % (FITS, "k", "T_1 + T_sum") + BY_PRICE,
            3,
            "The sum runs beside the backward pass",
        ),
        "one machine's GPUs": (
            SECONDS % (FITS, 'offer["gpus"]', TIME) + BY_PRICE,
            3,
            "k counts all GPUs",
        ),
        "every plan is possible": (
            SECONDS % ("", "k", TIME) + BY_PRICE,
            4,
            "512 images fit into the memory of a GPU",
        ),
        "the fastest": (
            SECONDS % (FITS, "k", TIME) + CHEAPEST % "seconds",
            3,
            "expected ['one GPU', 128]",
        ),
        "the lowest price per hour": (
            SECONDS % (FITS, "k", TIME) + CHEAPEST % "offer['price']",
            3,
            "deadline of",
        ),
        "no plan is an error": (
            SECONDS % (FITS, "k", TIME) + BY_PRICE.replace(" if plans else None", ""),
            4,
            "ValueError: min() ",
        ),
    },
}
