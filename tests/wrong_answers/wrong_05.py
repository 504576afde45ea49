"""Plausible wrong answers to the exercises of chapter 05; helpers/exercises.py has the form."""

WRONG = r"""
## part-sizes
# the remainder is lost (1): The parts do not add up to 10
def part_sizes(b, k):
    return [b // k] * k
# the remainder to the last (1): Two parts differ by more than one
def part_sizes(b, k):
    return [b // k] * (k - 1) + [b - b // k * (k - 1)]
# parts of equal size, as chunk makes them (0): your answer calls torch, which the task rules out
def part_sizes(b, k):
    return [len(x) for x in torch.arange(b).chunk(k)]
# the lengths of arrays (0): your answer calls numpy, which the task rules out
import numpy
def part_sizes(b, k):
    return [len(x) for x in numpy.array_split(range(b), k)]
# the smaller parts first (1): expected [3, 3, 2, 2], got [2, 2, 3, 3]
def part_sizes(b, k):
    return [(b + i) // k for i in range(k)]

## predict-bytes
# the hub sends to itself (2): The hub does not send to itself
star_hub, ring_each, ring_total = 4_000_000, 1_500_000, 6_000_000
# the limit for many devices (1): With four there are 6 rounds
star_hub, ring_each, ring_total = 3_000_000, 2_000_000, 8_000_000
# the first half of the ring (1): holds one complete sum only
star_hub, ring_each, ring_total = 3_000_000, 750_000, 3_000_000
# nothing (0): not answered yet
star_hub = ring_each = ring_total = None

## mend-average
# back on the CPU (0): devices of the gradients: expected
- star_allreduce(grads)
-     return grads
+ return [sum(grad.cpu() for grad in grads)] * len(devices)
# every device computes everything (0): bytes from the host to vgpu:0: expected at most
def step(w, X, y, devices):
    return [gradient_of_one(w.to(d), X.to(d), y.to(d)) for d in devices]
# no device computes (0): Each device computes with its own part of the batch
def step(w, X, y, devices):
    return [gradient_of_one(w, X, y).to(device) for device in devices]
# the mean of the means (1): Does every example have the weight 1/b?
step = broken_step
# no division (0): the sum over the batch, not the mean
- / len(X)
# the sum of the means (0): The mean of each part was added up
def step(w, X, y, devices):
    return [grad * len(devices) for grad in broken_step(w, X, y, devices)]
# no sum (0): gradient on vgpu:0
- star_allreduce(grads)
# the sum on one device only (0): gradient on vgpu:1
- star_allreduce(grads)
+ for grad in grads[1:]:
+         grads[0] += grad.to(devices[0])

## largest-k
# one less (0): One k more does not move w away
def largest_k(lr, curvature):
    return int(2 / (lr * curvature)) - 1
# where w reaches 0 (0): overshoots less than it came
def largest_k(lr, curvature):
    return int(1 / (lr * curvature))
# the curvature is forgotten (1): expected 6, got 20
def largest_k(lr, curvature):
    return int(2 / lr)
# one too many (0): too long by one k
def largest_k(lr, curvature):
    return int(2 / (lr * curvature)) + 1

## spread-sum
# one hub (3): Cut the arrays
def spread_allreduce(arrays):
    for data in arrays:
        star_allreduce(data)
# the ring (3): A ring has no hubs
def spread_allreduce(arrays):
    for data in arrays:
        ring_allreduce(data)
# every device collects everything (2): are enough
def spread_allreduce(arrays):
    for data in arrays:
        total = [sum(x.to(y.device) for x in data) for y in data]
        for x, s in zip(data, total):
            x.copy_(s)
# the sum stays with the hub (0): array of 180 numbers on vgpu:0
def spread_allreduce(arrays):
    for data in arrays:
        for hub in range(len(data)):
            pieces = [x.tensor_split(len(data))[hub] for x in data]
            for i, piece in enumerate(pieces):
                if i != hub:
                    pieces[hub] += piece.to(pieces[hub].device)

## accuracy
# a wait in the loop (3): read one number from each in the end
- (y_hat == y_part).sum()
+ (y_hat == y_part).sum().item()
- c.item() for c in correct
+ correct
# fewer parts than devices (2): `chunk` may make fewer
= a wait in the loop
- X.tensor_split(len(devices))
+ X.chunk(4)
- y.tensor_split(len(devices))
+ y.chunk(4)
# one device does it all (3): expected [4, 4, 4, 4], got [4, 0, 0, 0]
def accuracy(replicas, batches, devices):
    correct, total = 0, 0
    for X, y in batches:
        X, y = (tensor.to(devices[0], non_blocking=True) for tensor in (X, y))
        correct = correct + (net(X, replicas[0]).argmax(dim=1) == y).sum()
        total += len(y)
    return correct.item() / total
# copies that block (3): waits of the host: expected at most 4, got 36
- X_part.to(devices[i], non_blocking=True)
+ X_part.to(devices[i])
- y_part.to(devices[i], non_blocking=True)
+ y_part.to(devices[i])
# a mean of means (2): A mean of means
def accuracy(replicas, batches, devices):
    means = []
    for X, y in batches:
        correct = 0
        parts = zip(X.tensor_split(len(devices)), y.tensor_split(len(devices)), devices, replicas)
        for X_i, y_i, device, params in parts:
            X_i, y_i = (tensor.to(device, non_blocking=True) for tensor in (X_i, y_i))
            right = net(X_i, params).argmax(dim=1) == y_i
            correct = correct + right.sum().to(devices[0])
        means.append(correct / len(y))
    return (sum(means) / len(means)).item()

## fast-ring
# the package's ring (0): d2lpar.collectives, which the task rules out
def fast_ring_allreduce(data):
    d2lpar.allreduce(data, 'ring')
# the chapter's ring (1): Do the copies of one round still wait
fast_ring_allreduce = ring_allreduce
# no wait at the start (0): Three things have to wait
- stream.wait_stream(main)
+ pass
# no wait between rounds (0): Three things have to wait
- sending[i].wait_stream(receiving[i])
+ pass
# no wait at the end (0): Three things have to wait
- main.wait_stream(stream)
+ pass
# everything is sent to everyone (0): expected [60,000,000, 60,000,000
def fast_ring_allreduce(data):
    copies = [[x.to(y.device) for x in data if x is not y] for y in data]
    for x, others in zip(data, copies):
        for other in others:
            x += other
"""
