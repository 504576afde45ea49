"""Plausible wrong answers to the exercises of chapter 04; helpers/exercises.py has the form."""

WRONG = r"""
## three-rules
# a copy belongs to its product (1): A product does not wait for the copy
one, two, copy_1, exchanged = 20, 20, 8, 20
# non_blocking overlaps (3): the next product waits for the copy before it
one, two, copy_1, exchanged = 14, 14, 6, 14
# the slower engine alone (1): But is item 1 computed?
one, two, copy_1, exchanged = 20, 12, 5, 12
# the formula with max and min mixed up (2): The slower engine sets the pace
one, two, copy_1, exchanged = 20, 11, 6, 11

## hidden-part
# the sum over all pairs (2): Count each moment once
def hidden_part(copies, kernels):
    if not copies:
        return 1.0
    both = sum(
        max(0, min(a.end, b.end) - max(a.start, b.start)) for a in copies for b in kernels
    )
    return both / sum(copy.end - copy.start for copy in copies)
# of the kernels' time (0): expected 0.5, got 1
= the sum over all pairs
- copy.end - copy.start for copy in copies
+ kernel.end - kernel.start for kernel in kernels
# no copies (2): ZeroDivisionError
- if copying else 1.0
# how many copies meet a kernel (1): expected 0.5, got 1
def hidden_part(copies, kernels):
    meet = [any(a.start < b.end and b.start < a.end for b in kernels) for a in copies]
    return sum(meet) / len(meet) if meet else 1.0

## mend-races
# nothing mended (0): a copy read an item before it was computed
collect = racy
# no event (0): a copy read an item before it was computed
- side.wait_event(compute.record_event())
# one buffer (0): That is the last item
-     for i in
+     buffer = torch.zeros(n, n).pin_memory()
+     for i in
- torch.empty(n, n).pin_memory()
+ buffer
# no wait at the end (0): Nothing has arrived
- torch.empty
+ torch.zeros
- side.synchronize()
# no wait behind a copy to new memory (0): arrived
- torch.empty(n, n).pin_memory()
+ None
- .copy_(y, non_blocking=True)
+  = y.to("cpu", non_blocking=True)
- side.synchronize()
# one stream (2): Does the copy of an item run while the next one is computed?
- accel.Stream(device),
+ accel.current_stream(device),
# pageable results (0): not in pinned memory
- .pin_memory()

## three-at-once
# no wait for the copy (0): before anything had arrived
- arrived[i].synchronize()
# a buffer is overwritten (1): before the host had read
- if i >= 2:
+ if i > 2:
# one item at a time (2): Is the device at work while the host reads
= all at the end
-         y =
+         if i:
+             read()
+         y =
# the product behind the read (3): Launch the next product before you wait
= all at the end
-         y =
+         if i >= 2: read()
+         y =
# all at the end (1): before the host had read
- if i >= 2:
+ if False:

## lean-prefetch
# the prefetcher as it is (1): at the peak: expected at most 3, got 10
lean_prefetch = prefetch
# no prefetching (2): Does the next copy run while a batch is used?
def lean_prefetch(batches, device):
    for batch in batches:
        yield batch.to(device, non_blocking=True)
# two batches exchanged (0): Each batch is to be handed out once, in order
def lean_prefetch(batches, device):
    for batch in [*batches[:8], batches[9], batches[8]]:
        yield batch.to(device, non_blocking=True)
# the host waits (1): Let streams wait for events, not the host
- side.wait_stream(compute)
+ compute.synchronize()
# nobody waits for the copy (0): Let the compute stream wait for the copy
- compute.wait_event(ahead[0][1])
+ pass
# no wait of the side stream (1): batches that overwrite one in use
- side.wait_stream(compute)

## three-engines
# memory without bound (4): Make two matrices for each direction
def in_compute_out(sources, targets):
    compute = accel.current_stream(device)
    incoming, outgoing = accel.Stream(device), accel.Stream(device)
    incoming.wait_stream(compute)
    for source, target in zip(sources, targets, strict=True):
        with accel.stream(incoming):
            x = source.to(device, non_blocking=True)
        compute.wait_stream(incoming)
        y = x @ x
        outgoing.wait_stream(compute)
        with accel.stream(outgoing):
            target.copy_(y, non_blocking=True)
        x.record_stream(compute)
        y.record_stream(outgoing)
    outgoing.synchronize()
# in turn (1): Does anything run at the same time?
in_compute_out = in_turn
# one side stream (1): Does anything run at the same time?
= memory without bound
- accel.Stream(device), accel.Stream(device)
+ [accel.Stream(device)] * 2
# the host waits (1): The host may only wait at the end
= memory without bound
- compute.wait_stream(incoming)
+ incoming.synchronize()
# no wait at the end (0): Nothing has arrived
- outgoing.synchronize()
# no wait for the product (0): a matrix was read too early
= memory without bound
- outgoing.wait_stream(compute)
# no wait for the way in (0): before it has arrived
- compute.wait_event(incoming.record_event())
"""
