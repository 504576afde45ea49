"""Plausible wrong answers to the exercises of chapter 08; helpers/exercises.py has the form."""

WRONG = r"""
## shard
# the last rank takes the rest (0): the same length, and together hold all numbers
def shard_of_rank(n, k, rank):
    size = n // k
    return rank * size, n if rank == k - 1 else (rank + 1) * size, 0
# rounded down (0): together hold all numbers
- -(-n // k)
+ n // k
# one number too many (1): as short as possible
- -(-n // k)
+ n // k + 1
# no end (0): The tensor ends at 10
- min(start + size, n)
+ start + size
# padding on the last rank only (1): start == stop == n
- start = min(rank * size, n)
+ start = rank * size
# sizes differ by at most one (0): Only what lies behind the last number is padding
def shard_of_rank(n, k, rank):
    part = torch.arange(n).tensor_split(k)[rank]
    start = int(part[0]) if len(part) else n
    return start, start + len(part), -(-n // k) - len(part)
# the padding is missing (0): Three numbers are needed
- start, stop, size - (stop - start)
+ start, stop

## sixteen-bytes
# without the master weight (1): has a float32 master weight
- [7 * 16, 7 * (4 + 12 / k), 7 * (2 + 14 / k), 7 * 16 / k]
+ [7 * 12, 7 * (4 + 8 / k), 7 * (2 + 10 / k), 7 * 12 / k]
# bytes (1): The unit is GB
- [7 * 16, 7 * (4 + 12 / k), 7 * (2 + 14 / k), 7 * 16 / k]
+ [7e9 * 16, 7e9 * (4 + 12 / k), 7e9 * (2 + 14 / k), 7e9 * 16 / k]
# ZeRO-1 divides Adam's averages only (1): ZeRO-1 divides 12 of the 16 bytes
- (4 + 12 / k)
+ (8 + 8 / k)
# ZeRO-2 divides the weights, too (1): ZeRO-2 divides 14 of the 16 bytes
- 7 * (2 + 14 / k)
+ 7 * 16 / k
# ZeRO-3 keeps a whole replica (1): ZeRO-3 divides all 16 bytes
- 7 * 16 / k
+ 7 * (2 + 14 / k)
# DDP divides (1): every rank holds all 16 bytes
- [7 * 16,
+ [7 * 16 / k,
# all ranks together (1): what all 8 ranks hold together
- [7 * 16, 7 * (4 + 12 / k), 7 * (2 + 14 / k), 7 * 16 / k]
+ [7 * 16 * k, 7 * (4 * k + 12), 7 * (2 * k + 14), 7 * 16]
# ranks for ZeRO-3 (2): the weights' 60 GB remain
- 30 * 14 // (80 - 30 * 2)
+ 30 * 16 // 80
# ranks for 7 billion (2): Here are 30 billion
- 30 * 16 // 80
+ 2
# half a rank (2): is a whole number
- 30 * 16 // 80
+ 5.9

## predict-traffic
# numbers instead of bytes (0): Each takes four bytes
- 7 * 4 * 4 * 1000
+ 7 * 4 * 1000
# a rank sends its own shard, too (0): 7/8 of the bytes leave it
- 7 * 4 * 4 * 1000 * 1000 // 8
+ 4 * 4 * 1000 * 1000
# an all-reduce sends once (1): An all-reduce is a reduce-scatter and an all-gather
- ddp = zero1 = kept = 2 * once
+ ddp = zero1 = kept = once
# ZeRO-1 beside DDP (3): there is no all-reduce
- resharded = 3 * once
+ zero1 = resharded = 3 * once
# gradients only (2): and then the weights are gathered
- resharded = 3 * once
+ zero1, kept, resharded = once, once, 3 * once
# gathered twice, though kept (3): they are gathered once
- resharded = 3 * once
+ kept = resharded = 3 * once
# no second gather (3): gathered again for the backward pass
- 3 * once
+ 2 * once
# scattered twice (3): gradients are scattered only once
- 3 * once
+ 4 * once
# all ranks together (0): what leaves all eight ranks together
- // 8
+

## sharded-step
# the program with its faults (0): One device has the mean over all examples
def train_sharded(net, batches, new_optimizer):
    return broken_train(net, batches, new_optimizer)
# only the mean is mended (1): still in `p.grad`
- net.zero_grad()  # the optimizer does not know these gradients
+ optimizer.zero_grad()
# only the gradients are cleared (0): One device has the mean over all examples
- shard.grad /= k  # one device has the mean over all examples
+
# divided by two (0): with the mean of this step's gradients
- shard.grad /= k
+ shard.grad /= 2
# the shard of the next rank (0): Does each rank update the shard that it gathers
- flat(params).chunk(k)[rank]
+ flat(params).chunk(k)[(rank + 1) % k]
# the weights before the update are gathered (0): These are the weights of the start
-         optimizer.step()
-         dist.all_gather(parts, shard)
+         dist.all_gather(parts, shard)
+         optimizer.step()
# nothing is gathered (0): The ranks hold different weights
-         dist.all_gather(parts, shard)
+         parts = list(flat(params).chunk(k))
+         parts[rank] = shard
# a whole replica (3): A shard has 18 of the 53 parameters
def train_sharded(net, batches, new_optimizer):
    optimizer = new_optimizer(list(net.parameters()))
    for X, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(net(X), y).backward()
        for p in net.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        optimizer.step()
    return optimizer
# one rank gathers by itself (0): the same collectives in the same order
- dist.all_gather(
+ if rank: dist.all_gather(

## tokens
# rounded down (0): round up
- math.ceil(gather * flops / (2 * params))
+ int(gather * flops / (2 * params))
# not rounded (0): is a whole number
- math.ceil(gather * flops / (2 * params))
+ gather * flops / (2 * params)
# the own shard, too (0): A rank has its own shard already
- (k - 1) * (latency + 2 * params / k / bandwidth)
+ (k - 1) * latency + 2 * params / bandwidth
# one byte for a weight (0): A weight takes two bytes
- 2 * params / k
+ params / k
# one operation for a weight (0): two operations for each token
- / (2 * params))
+ / params)
# without latency (2): Each step of the ring takes `latency`
- (latency + 2 * params / k / bandwidth)
+ (2 * params / k / bandwidth)
# one message (2): The ring has k - 1 steps
- (k - 1) * (latency + 2 * params / k / bandwidth)
+ latency + (k - 1) * 2 * params / k / bandwidth

## prefetch
# one after the other (1): the time if nothing overlaps
def finish_ms(gather, compute, limit):
    return sum(gather) + sum(compute)
def smallest_limit(gather, compute):
    return 1
# the layer that is computed is not counted (0): with more layers than the limit
- computed[i - limit] if i >= limit else 0
+ computed[i - limit - 1] if i > limit else 0
# no limit (0): A layer is held until it is computed
- computed[i - limit] if i >= limit else 0
+ 0
# one layer ahead at most (2): with memory for 2 layers
- def finish_ms(gather, compute, limit):
+ def finish_ms(gather, compute, limit):
+     limit = min(limit, 2)
# the link gathers several layers at a time (1): So early it cannot end
- max(gathered, free) + gather[i]
+ free + gather[i]
# computing waits for the next gather, too (1): It can end earlier
- max(gathered, before) + compute[i]
+ max(gathered + sum(gather[i + 1 : i + 2]) * (limit > 1), before) + compute[i]
# the layer ahead only (3): The layer that is being computed is held, too
- return limit
+ return limit - 1
# always two (3): With a larger limit the pass is shorter
-     limit, best = 1, finish_ms(gather, compute, len(gather))
-     while finish_ms(gather, compute, limit) > best:
-         limit += 1
-     return limit
+     return min(2, len(gather))
# all layers (3): A smaller limit is enough
= always two
- min(2, len(gather))
+ len(gather)
"""
