"""Plausible wrong answers to the exercises of chapter 11; helpers/exercises.py has the form."""

WRONG = r"""
## owner
# like cards (0): the keys are cut into ranges
def owner(key, K, P):
    return key % P, key // P
# ranges of equal size (1): Server 1 has 2 to 4
def owner(key, K, P):
    size = -(-K // P)
    return key // size, key % size
# the nearest formula (1): owner of key 2 of 10 on 4 servers: expected [1, 0], got [0, 2]
def owner(key, K, P):
    i = key * P // K
    return i, key - i * K // P
# the key itself (0): The position counts from the first key of the server
def owner(key, K, P):
    return next(i for i in range(P) if key < (i + 1) * K // P), key

## predict-bytes
# all servers together (1): There are two servers, and each gets its share only
dense, sparse, on_the_link = 16_000_000, 2_400_000, 6_000_000
# one worker (0): Pushes arrive at its server, and pulled values at its worker
dense, sparse, on_the_link = 2_000_000, 300_000, 3_000_000
# keys only once (1): The keys are sent twice
dense, sparse, on_the_link = 8_000_000, 800_000, 8_000_000
# what leaves counts, too (1): The values of a pull go out of the server
dense, sparse, on_the_link = 8_000_000, 1_600_000, 12_000_000

## stale
# no delay (2): Worker 1 still has the weight of the start
path = [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625]
most_workers, most_with_curvature = 5, 1
# with the weight of the start (0): Leave out the weight of the start
path = [1, 0.5, 0, -0.25, -0.25, -0.125]
most_workers, most_with_curvature = 6, 6
# one over k (1): it is larger than 1 / k
path = [0.5, 0, -0.25, -0.25, -0.125, 0]
most_workers, most_with_curvature = 3, 0
# the delay is k (1): k workers have a delay of k - 1
path = [0.5, 0, -0.25, -0.25, -0.125, 0]
most_workers, most_with_curvature = 4, 5

## mend-step
# a tick without a number (0): worker 1: 'tick' needs a value behind it
- yield "barrier"
+
- yield "tick", 0
+ yield "tick"
# the race (0): pushes before all have pulled
worker = broken_worker
# only a tick (1): pushes before all have pulled
- yield "barrier"
# only a barrier (0): pulls for step 1 before all have pushed in step 0
- yield "tick", 0
# it does not compute (0): how often each worker asks for compute: expected [8, 8, 8], got [4, 4, 4]
-         yield "compute", compute
# the barrier in the wrong place (1): pushes before all have pulled
-         w = yield "pull"
-         yield "barrier"
+         yield "barrier"
+         w = yield "pull"
# a staleness of one (0): before all have pushed
- yield "tick", 0
+ yield "tick", 1
# two barriers (0): calls of barrier in a step: expected at most 1, got 2
- yield "tick", 0
+ yield "barrier"
# a barrier that not all call (0): wait for ever
- yield "barrier"
+ if rank: yield "barrier"

## clock
# one step less (0): nobody may start, not even the slowest
- <= self.s
+ < self.s
# against the fastest (0): not even the slowest worker
- self.finished[rank] - min(self.finished.values())
+ max(self.finished.values()) - self.finished[rank]
# the one who left is remembered (2): Worker 1 has left, and nobody waits for it
- del self.finished[rank]
+ pass
# a newcomer begins with 0 (3): stops all others
- self.finished[rank] = min(self.finished.values())
+ self.finished[rank] = 0
# a newcomer is where the fastest is (3): not ahead of all
- = min(self.finished.values())
+ = max(self.finished.values())
# everybody may start (0): It starts a step too early
- self.finished[rank] - min(self.finished.values()) <= self.s
+ True

## both-ways
# one ring (2): 4 of 8 directions are in use
two_way_allreduce = ring_allreduce
# a star (1): links between devices that are no neighbours
def two_way_allreduce(data):
    for x in data[1:]:
        data[0] += x.to(data[0].device)
    for x in data[1:]:
        x.copy_(data[0])
# the second half is lost (0): numbers on device 0 are wrong
def two_way_allreduce(data):
    ring_allreduce([x[: len(x) // 2] for x in data])

## prefetch
# nothing is hidden (0): No gradient is old
prefetching_worker = plain_worker
# asked after computing (2): Nothing but the first pull should be waited for
-         if t < num_steps - 1:
-             answer = yield "ask"
-         yield "compute", compute
+         yield "compute", compute
+         if t < num_steps - 1:
+             answer = yield "ask"
# one pull too many (2): weights that nobody uses
- if t < num_steps - 1
+ if True
# all at the start (0): All gradients are those of the start
def prefetching_worker(compute, lr, num_steps):
    answers = []
    for _ in range(num_steps):
        answers.append((yield "ask"))
    for answer in answers:
        w = yield "wait", answer
        yield "compute", compute
        yield "push", -lr * w

## exactly-once
# its own tensor (4): `pull` has to return a copy
- return self.values.clone()
+ return self.values
# numbers are ignored (2): An update was added twice
- if number > self.last.get(worker, 0)
+ if True
# the replica hears it once (4): acknowledged that did not reach the replica
-         if (
-             self.replica is not None
-         ):  # also when we have it: perhaps the replica has not
-             self.replica.push(worker, number, update)
-         if number
+         if number
-             self.last[worker] = number
+             self.last[worker] = number
+             if self.replica is not None:
+                 self.replica.push(worker, number, update)
# numbers are not restored (4): An update was added twice
- , dict(other.last)
+ , self.last
# acknowledged without the replica (3): acknowledged that did not reach the replica
-             self.replica.push(worker, number, update)
+             try:
+                 self.replica.push(worker, number, update)
+             except ConnectionError:
+                 pass
# all numbers are kept (4): what has to be remembered
- replica, {}
+ replica, set()
- number > self.last.get(worker, 0)
+ (worker, number) not in self.last
- self.last[worker] = number
+ self.last.add((worker, number))
- dict(other.last)
+ set(other.last)
# one count for all workers (2): An update is missing
- self.last.get(worker, 0)
+ self.last.get(0, 0)
- self.last[worker]
+ self.last[0]
# the first values are not copied (4): Copy the tensor
- = values.clone()
+ = values
"""
