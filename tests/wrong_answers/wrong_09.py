"""Plausible wrong answers to the exercises of chapter 09; helpers/exercises.py has the form."""

WRONG = r"""
## enough-micro-batches
# lost time over work (0): A smaller number is enough
def enough_micro_batches(k, limit):
    return -int(-(k - 1) / limit // 1)
# rounded down (1): With 2 the bubble is still larger
def enough_micro_batches(k, limit):
    return max(1, int((k - 1) * (1 - limit) / limit))
# not rounded (0): That is no whole number of micro-batches
def enough_micro_batches(k, limit):
    return (k - 1) / limit - (k - 1)
# no micro-batch at all (1): A batch is at least one micro-batch
import math
def enough_micro_batches(k, limit):
    return math.ceil((k - 1) * (1 - limit) / limit)

## what-crosses
# one way (0): Activations go there, and their gradients come back
bytes_early, bytes_late, messages = 4 * 64 * 32 * 784, 4 * 64 * 64 * 196, 24
# the pooling behind the cut (2): The pooling belongs to the layer in front of the cut
bytes_early, bytes_late, messages = 8 * 64 * 32 * 784, 8 * 64 * 64 * 784, 48
# parameters (0): Parameters never cross
bytes_early, bytes_late, messages = 4 * (32 * 9 + 32), 0, 64
# one message for the whole batch (2): is sent by itself
bytes_early, bytes_late, messages = 8 * 64 * 32 * 784, 8 * 64 * 64 * 196, 6
# four cuts (0): Four stages have three cuts
bytes_early, bytes_late, messages = 8 * 32 * 784, 2 * 64 * 64 * 196, 64

## mend-pipeline
# as it was (1): expected at most 1, got 8
step = slow_step
# the whole batch at once (2): Does the batch go through the stages in eight micro-batches?
- zip(X.chunk(m), y.chunk(m), strict=True)
+ [(X, y)]
- / m)
+ )
# read at the end, but backward inside (2): behind a backward pass that has to wait
-     for loss in losses:
-         loss.backward()
+         losses[-1].backward()
# backward at the end, but read inside (1): Does the host wait for a loss
-     for loss in losses:
+         losses[-1].item()
+     for loss in losses:
# the sum of the means (0): the sum over the micro-batches, not the mean
- / m)
+ )
# the mean of the losses, the sum of the gradients (0): 8 times too much
- / m)
+ )
- .item()
+ .item() / m

## best-cuts
# equal numbers of layers (0): Count seconds, and not layers
def best_cuts(seconds, num_bytes, k, bandwidth):
    return [len(seconds) * s // k for s in range(1, k)]
# filled up to the average (0): expected a pace of
def best_cuts(seconds, num_bytes, k, bandwidth):
    cuts, filled, n = [], 0, len(seconds)
    for i, t in enumerate(seconds):
        if i and filled + t > sum(seconds) / k and len(cuts) < k - 1:
            cuts, filled = cuts + [i], 0
        filled += t
    return cuts + list(range(n - (k - 1 - len(cuts)), n))
# links forgotten (2): A link is as slow as its bytes divided by the bandwidth
- *(num_bytes[i - 1] / bandwidth for i in cuts),
# bytes in front of the layer behind the cut (2): A link is as slow
- num_bytes[i - 1]
+ num_bytes[i]
# an empty stage (0): a stage without layers
def best_cuts(seconds, num_bytes, k, bandwidth):
    return [0] * (k - 1)

## limited-schedule
# 1F1B (1): expected at most 3, got [4, 3, 2, 1]
def limited_schedule(k, m, u):
    return one_forward_one_backward(k, m)
# u forward passes ahead (1): so does the one that follows it
- ahead = min(k - s - 1, u - 1, m)
+ ahead = min(k - s - 1, u, m)
# one after the other (3): units: expected at most 48, got 96
- ahead = min(k - s - 1, u - 1, m)
+ ahead = min(0, u - 1, m)
# stages counted from the wrong end (0): wait for each other
- ahead = min(k - s - 1, u - 1, m)
+ ahead = min(s, u - 1, m)
# a task is missing (0): stage 0 is without ('backward', 7)
def limited_schedule(k, m, u):
    return [tasks[:-1] for tasks in one_forward_one_backward(k, m)]

## both-ways
# two 1F1B, merged by time (4): which one do other devices wait for
def both_ways(k, m):
    marks, rows = predict_schedule(one_forward_one_backward(k, m // 2), [1.0] * k, [2.0] * k), []
    for j in range(k):
        tasks = []
        for way, s in enumerate((j, k - 1 - j)):
            for mark in marks[s]:
                kind, i = mark.name.split()
                tasks.append((mark.start, kind, s, 2 * int(i) + way))
        rows.append([task for _, *task in sorted(tasks, key=lambda t: (t[0], t[1] == 'forward'))])
    return rows
# all forward passes first (1): expected at most 17, got
= two 1F1B, merged by time
- (t[0], t[1] == 'forward')
+ (t[1] == 'backward', t[3])
# four devices and micro-batches only (2): AssertionError: not drawn yet
= two 1F1B, merged by time
-     for j
+     assert k == m == 4, "not drawn yet"
+     for j
# one way after the other (1): No device should wait while it has a task
= two 1F1B, merged by time
- sorted(tasks, key=lambda t: (t[0], t[1] == 'forward'))
+ tasks
# both ways in the same direction (0): belongs to another device
= two 1F1B, merged by time
- k - 1 - j
+ j
"""
