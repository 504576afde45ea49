"""Plausible wrong answers to the exercises of chapter 04: source, points, a part of the message."""

COLLECT = """
def collect(x, num_items):
    compute, side, results = accel.current_stream(device), accel.Stream(device), []
    buffer = torch.zeros(n, n).pin_memory()
    for i in range(num_items):
        y = (x + i) @ x
        %s
        results.append(%s)
        with accel.stream(%s):
            results[-1].copy_(y, non_blocking=True)
        y.record_stream(side)
    %s
    return results
"""
EVENT = "side.wait_event(compute.record_event())"
OWN = "torch.zeros(n, n).pin_memory()"

SUMS = """
def item_sums(x, buffers, num_items):
    compute, side = accel.current_stream(device), accel.Stream(device)
    arrived, sums = [], []

    def read():
        i = len(sums)
        %s
        sums.append(host_sum(buffers[i %% 2]))

    for i in range(num_items):
        %s
        y = (x + i) @ x
        side.wait_event(compute.record_event())
        %s
        with accel.stream(side):
            buffers[i %% 2].copy_(y, non_blocking=True)
        arrived.append(side.record_event())
        y.record_stream(side)
    while len(sums) < num_items:
        read()
    return sums
"""
READ = "if i >= 2: read()"

LEAN = """
def lean_prefetch(batches, device):
    compute, side, ahead = accel.current_stream(device), accel.Stream(device), []
    for batch in batches:
        %s
        with accel.stream(side):
            batch = batch.to(device, non_blocking=True)
        ahead.append((batch, side.record_event()))
        del batch
        if len(ahead) == 2:
            %s
            yield ahead.pop(0)[0]
    for batch, copied in ahead:
        compute.wait_event(copied)
        yield batch
"""

ENGINES = """
def in_compute_out(sources, targets):
    compute = accel.current_stream(device)
    incoming, outgoing = %s
    incoming.wait_stream(compute)
    for source, target in zip(sources, targets, strict=True):
        with accel.stream(incoming):
            x = source.to(device, non_blocking=True)
        %s
        y = x @ x
        %s
        with accel.stream(outgoing):
            target.copy_(y, non_blocking=True)
        x.record_stream(compute)
        y.record_stream(outgoing)
    %s
"""
TWO_SIDES = "accel.Stream(device), accel.Stream(device)"
ONE_SIDE = "[accel.Stream(device)] * 2"
IN, OUT = "compute.wait_stream(incoming)", "outgoing.wait_stream(compute)"

WRONG = {
    "three-rules": {
        "a copy belongs to its product": (
            "one, two, copy_1, exchanged = 20, 20, 8, 20",
            1,
            "A product does not wait for the copy",
        ),
        "non_blocking overlaps": (
            "one, two, copy_1, exchanged = 14, 14, 6, 14",
            3,
            "the next product waits for the copy before it",
        ),
        "the slower engine alone": (
            "one, two, copy_1, exchanged = 20, 12, 5, 12",
            1,
            "But is item 1 computed?",
        ),
        "the formula with max and min mixed up": (
            "one, two, copy_1, exchanged = 20, 11, 6, 11",
            2,
            "The slower engine sets the pace",
        ),
    },
    "hidden-part": {
        "the sum over all pairs": (
            """
def hidden_part(copies, kernels):
    if not copies:
        return 1.0
    both = sum(
        max(0, min(a.end, b.end) - max(a.start, b.start)) for a in copies for b in kernels
    )
    return both / sum(copy.end - copy.start for copy in copies)
""",
            2,
            "Count each moment once",
        ),
        "of the kernels' time": (
            """
def hidden_part(copies, kernels):
    both = sum(
        max(0, min(a.end, b.end) - max(a.start, b.start)) for a in copies for b in kernels
    )
    return both / sum(kernel.end - kernel.start for kernel in kernels)
""",
            0,
            "expected 0.5, got 1",
        ),
        "no copies": (
            """
def hidden_part(copies, kernels):
    edges = sorted({edge for span in [*copies, *kernels] for edge in (span.start, span.end)})
    copying = hidden = 0.0
    for a, b in zip(edges, edges[1:]):
        if any(span.start <= a and b <= span.end for span in copies):
            copying += b - a
            if any(span.start <= a and b <= span.end for span in kernels):
                hidden += b - a
    return hidden / copying
""",
            2,
            "ZeroDivisionError",
        ),
        "how many copies meet a kernel": (
            """
def hidden_part(copies, kernels):
    meet = [any(a.start < b.end and b.start < a.end for b in kernels) for a in copies]
    return sum(meet) / len(meet) if meet else 1.0
""",
            1,
            "expected 0.5, got 1",
        ),
    },
    "mend-races": {
        "nothing mended": ("collect = racy", 0, "a copy read an item before it was computed"),
        "no event": (
            COLLECT % ("pass", OWN, "side", "side.synchronize()"),
            0,
            "a copy read an item before it was computed",
        ),
        "one buffer": (
            COLLECT % (EVENT, "buffer", "side", "side.synchronize()"),
            0,
            "That is the last item",
        ),
        "no wait at the end": (COLLECT % (EVENT, OWN, "side", "pass"), 0, "Nothing has arrived"),
        "no wait behind a copy to new memory": (
            COLLECT.replace(".copy_(y", " = y.to('cpu'") % (EVENT, "None", "side", "pass"),
            0,
            " arrived",  # new memory may hold zeros, and then "Nothing has arrived"
        ),
        "one stream": (
            COLLECT % ("pass", OWN, "compute", "compute.synchronize()"),
            2,
            "Does the copy of an item run while the next one is computed?",
        ),
        "pageable results": (
            COLLECT % (EVENT, "torch.zeros(n, n)", "side", "side.synchronize()"),
            0,
            "not in pinned memory",
        ),
    },
    "three-at-once": {
        "no wait for the copy": (SUMS % ("pass", "pass", READ), 0, "before anything had arrived"),
        "a buffer is overwritten": (
            SUMS % ("arrived[i].synchronize()", "pass", "if i > 2: read()"),
            1,
            "before the host had read",
        ),
        "one item at a time": (
            SUMS % ("arrived[i].synchronize()", "if i: read()", "pass"),
            2,
            "Is the device at work while the host reads",
        ),
        "the product behind the read": (
            SUMS % ("arrived[i].synchronize()", READ, "pass"),
            3,
            "Launch the next product before you wait",
        ),
        "all at the end": (
            SUMS % ("arrived[i].synchronize()", "pass", "pass"),
            1,
            "before the host had read",
        ),
    },
    "lean-prefetch": {
        "the prefetcher as it is": (
            "lean_prefetch = prefetch",
            1,
            "at the peak: expected at most 3, got 10",
        ),
        "no prefetching": (
            """
def lean_prefetch(batches, device):
    for batch in batches:
        yield batch.to(device, non_blocking=True)
""",
            2,
            "Does the next copy run while a batch is used?",
        ),
        "two batches exchanged": (
            """
def lean_prefetch(batches, device):
    for batch in [*batches[:8], batches[9], batches[8]]:
        yield batch.to(device, non_blocking=True)
""",
            0,
            "Each batch is to be handed out once, in order",
        ),
        "the host waits": (
            LEAN % ("compute.synchronize()", "compute.wait_event(ahead[0][1])"),
            1,
            "Let streams wait for events, not the host",
        ),
        "nobody waits for the copy": (
            LEAN % ("side.wait_stream(compute)", "pass"),
            0,
            "Let the compute stream wait for the copy",
        ),
        "no wait of the side stream": (
            LEAN % ("pass", "compute.wait_event(ahead[0][1])"),
            1,
            "batches that overwrite one in use",
        ),
    },
    "three-engines": {
        "in turn": ("in_compute_out = in_turn", 1, "Does anything run at the same time?"),
        "one side stream": (
            ENGINES % (ONE_SIDE, IN, OUT, "outgoing.synchronize()"),
            1,
            "Does anything run at the same time?",
        ),
        "memory without bound": (
            ENGINES % (TWO_SIDES, IN, OUT, "outgoing.synchronize()"),
            4,
            "Make two matrices for each direction",
        ),
        "the host waits": (
            ENGINES % (TWO_SIDES, "incoming.synchronize()", OUT, "outgoing.synchronize()"),
            1,
            "The host may only wait at the end",
        ),
        "no wait at the end": (ENGINES % (TWO_SIDES, IN, OUT, "pass"), 0, "Nothing has arrived"),
        "no wait for the product": (
            ENGINES % (TWO_SIDES, IN, "pass", "outgoing.synchronize()"),
            0,
            "a matrix was read too early",
        ),
        "no wait for the way in": (
            ENGINES % (TWO_SIDES, "pass", OUT, "outgoing.synchronize()"),
            0,
            "before it has arrived",
        ),
    },
}
