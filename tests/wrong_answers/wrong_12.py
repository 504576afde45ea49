"""Plausible wrong answers to the exercises of chapter 12; helpers/exercises.py has the form."""

WRONG = r"""
## break-even
# half of the batch (1): saves only half of t b
- return t0, t, 2 * T_sum / t
+ return t0, t, T_sum / t
# t0 does not cancel (1): so it cancels
- return t0, t, 2 * T_sum / t
+ return t0, t, 2 * (t0 + T_sum) / t
# the other way round (1): First t0, then t
- return t0, t, 2 * T_sum / t
+ return t, t0, 2 * T_sum / t
# two of three (0): t0, t and b*: expected 3, got 2
- return t0, t, 2 * T_sum / t
+ return t0, t
# no line (0): t0 and t: expected
def break_even(b1, T1, b2, T2, T_sum):
    t = T2 / b2
    return 0.0, t, 2 * T_sum / t

## sixteen
# one way only (0): The sum has to come back from the hub
star_ms, ring_ms, speed_up, efficiency = 42.6, 2.66, 8.8, 0.95
# seconds and percent (1): Milliseconds, not seconds
star_ms, ring_ms, speed_up, efficiency = 0.0851, 0.00532, 6.06, 90.7
# as a maximum (3): the times add up
star_ms, ring_ms, speed_up, efficiency = 85.1, 5.32, 9.75, 0.907
# strong and weak confused (2): Each GPU has 256 images here
star_ms, ring_ms, speed_up, efficiency = 85.1, 5.32, 14.5, 0.379
# without the sum (2): That is without the sum
star_ms, ring_ms, speed_up, efficiency = 85.1, 5.32, 16, 1

## best-k
# as many as there are (0): 4,096 take
- return min(range(1, 4097), key=seconds)
+ return 4096
# without the latency (0): devices: expected
- (L + N / (k * B))
+ (N / (k * B))
# at least two (1): expected 1, got
- range(1
+ range(2

## mend-clock
# another clock (0): Python's own does not
def seconds_of(step, devices):
    step()
    return 1.0
# the check's instrument (0): your answer calls d2lpar.timelines, which the task rules out
def seconds_of(step, devices):
    with d2lpar.Timeline() as timeline:
        step()
    return timeline.seconds
# the clock as it was (0): Some work has not ended when the clock stops
def seconds_of(step, devices):
    return broken_seconds(step, devices)
# milliseconds (0): Events count in milliseconds
- / 1000
# one device is forgotten (0): Some work has not ended when the clock stops
-         for device in devices:
-             accel.synchronize(device)  # on all streams
+         accel.synchronize()
# what came before (2): should be idle when the clock starts
- accel.synchronize(device)  # nothing is left of before
+ pass
# only the current streams (2): Some work has not ended when the clock stops
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
# the best of several (0): calls of step: expected 1
def seconds_of(step, devices):
    return d2lpar.timing.best_seconds(step)

## warm-up
# no warm-up (1): The warm-up is not over yet
def rate(step, b, eta, b0, warm_up):
    full = eta * b / b0
    return full
# counted in steps (0): warm_up counts images, not steps
def rate(step, b, eta, b0, warm_up):
    full = eta * b / b0
    return full * min(1, step / warm_up) if warm_up else full
# counted from 0 (1): Steps are counted from 1
def rate(step, b, eta, b0, warm_up):
    full = eta * b / b0
    return full * min(1, (step - 1) * b / warm_up) if warm_up else full
# no end (1): stops growing
def rate(step, b, eta, b0, warm_up):
    full = eta * b / b0
    return full * step * b / warm_up if warm_up else full
# the fixed rate (0): The rate grows with the batch
def rate(step, b, eta, b0, warm_up):
    return eta * min(1, step * b / warm_up)

## halving
# a ring (3): messages of each device of 4: expected [4, 4, 4, 4], got [6, 6, 6, 6]
def halving_allreduce(data):
    d2lpar.allreduce(data, "ring")
# a star (2): bytes out of device 0
def halving_allreduce(data):
    d2lpar.allreduce(data)
# whole tensors (2): Each round needs half of what the round before needed
def halving_allreduce(data):
    distance = len(data) // 2
    while distance:
        arrived = [data[i ^ distance].to(x.device) for i, x in enumerate(data)]
        for x, other in zip(data, arrived):
            x += other
        distance //= 2
# always the first half (0): are wrong; number
- parts = [halves[i][bool(i & distance)] for i in range(k)]
+ parts = [halves[i][0] for i in range(k)]
# back in the same order (0): numbers on device 0 of 4 are wrong
- reversed(rounds)
+ rounds
# never back (0): numbers on device 0 of 2
- reversed(rounds)
+ []

## all-cards
# through one card (2): Which device should sum which part
all_cards = two_levels
# a flat ring (1): Sum inside the machines first
def all_cards(data, g):
    ring_allreduce(data)
# everything inside first (3): Does every device need the whole sum of its machine
= every device its whole tensor
- [machine[j] for machine in machines])
+ [machine[j].tensor_split(g)[j] for machine in machines])
+     for machine in machines:
+         for i in range(g):
+             for j in range(g):
+                 if i != j:
+                     machine[i].tensor_split(g)[j].copy_(machine[j].tensor_split(g)[j])
# every device its whole tensor (2): Sum inside the machines first
def all_cards(data, g):
    machines = [data[i : i + g] for i in range(0, len(data), g)]
    for machine in machines:
        ring_allreduce(machine)
    for j in range(g):
        ring_allreduce([machine[j] for machine in machines])
# only inside (0): are wrong; number
def all_cards(data, g):
    for i in range(0, len(data), g):
        ring_allreduce(data[i : i + g])

## rent
# a name without a batch (3): cheapest: (name of the offer, batch) expected, got '
- [1:]
+ [1]
# without the sum (3): Is the sum of the gradients in the step?
- (T_1 / 3 + max(2 / 3 * T_1, T_sum))
+ T_1
# everything beside the sum (4): Nothing hides behind the forward pass
- (T_1 / 3 + max(2 / 3 * T_1, T_sum))
+ max(T_1, T_sum)
# nothing hidden (3): The sum runs beside the backward pass
- (T_1 / 3 + max(2 / 3 * T_1, T_sum))
+ (T_1 + T_sum)
# one machine's GPUs (3): k counts all GPUs
- t * b / k
+ t * b / offer["gpus"]
# every plan is possible (4): 512 images fit into the memory of a GPU
- if b % k or b // k > 512:
+ if False:
# the fastest (3): expected ['one GPU', 128]
- seconds / 3600 * offer["price"]
+ seconds
# the lowest price per hour (3): deadline of
- seconds / 3600 * offer["price"]
+ offer["price"]
# no plan is an error (4): ValueError: min()
- if plans else None
"""
