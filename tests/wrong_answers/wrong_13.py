"""Plausible wrong answers to the exercises of chapter 13; helpers/exercises.py has the form."""

WRONG = r"""
## fits
# less than none (1): If not even one sequence fits, the answer is 0
def largest_micro_batch(num_parameters, t, p, sequence, memory):
    fit = int((memory - 16 * num_parameters / (t * p)) // sequence)
    return 2 ** (fit.bit_length() - 1)
# no power of two (0): A power of two
def largest_micro_batch(num_parameters, t, p, sequence, memory):
    return int((memory - 16 * num_parameters / (t * p)) // sequence)
# without the parameters (0): take memory, too
- memory - 16 * num_parameters / (t * p)
+ memory
# t alone (1): stages divide the parameters, too
- (t * p)
+ t
# at least one (1): Not even one sequence fits
- micro_batch // 2
+ max(1, micro_batch // 2)
# less than all (0): exactly the memory fits
- <= left
+ < left

## gpt3
# bytes (3): Gigabytes, not bytes
tensor_GB, data_GB, pipeline_GB, bubble = 1217.6, 9.57e9, 9.66, 0.0352
# percent (3): not percent
tensor_GB, data_GB, pipeline_GB, bubble = 1217.6, 9.57, 9.66, 3.52
# four sums in a layer (3): six sums in a layer
tensor_GB, data_GB, pipeline_GB, bubble = 811.7, 9.57, 9.66, 0.0352
# all of the network (0): A GPU has only a part of the parameters
tensor_GB, data_GB, pipeline_GB, bubble = 9741, 612.5, 77.3, 0.00454
# busy time (3): idle time over busy time
tensor_GB, data_GB, pipeline_GB, bubble = 1217.6, 9.57, 9.66, 0.0365
# no ring (1): A ring sends 2 (k - 1) / k
tensor_GB, data_GB, pipeline_GB, bubble = 695.8, 5.47, 1.21, 0.0352

## groups
# one group (0): number of groups: expected 3, got 1
def groups(rank, t, d, p):
    return [list(range(rank // t * t, rank // t * t + t))]
# pipeline before data (0): Replicas are t apart
- rank // t % d, rank // (t * d)
+ rank // (t * p), rank // t % p
# tensor last (0): neighbours
- rank % t, rank // t % d, rank // (t * d)
+ rank // (d * p), rank % d, rank // d % p
# of rank 0 (0): neighbours
- part, replica, stage = rank % t, rank // t % d, rank // (t * d)
+ part, replica, stage = 0, 0, 0
# with Layout (0):
def groups(rank, t, d, p):
    from d2lpar.chapters.planning_a_training_run.layouts import Layout
    layout = Layout(t, p, d)
    return [layout.ranks_of(rank, axis) for axis in ("tensor", "data", "pipeline")]

## choose
# what does not fit (0): Of those that fit into 72 GB, it is the fastest
- 0.9 * memory
+ float("inf")
# all memory (3): A tenth of 90 GB stays free
- 0.9 * memory
+ memory
# the fastest (3): within 5 %
- (row["num_bytes"], row["seconds"])
+ row["seconds"]
# the shortest of all (1): expected 't1 p2'
- for row in fits)
-     fast
+ for row in rows)
+     fast
- (1 + error) * shortest]
+ (1 + error) * shortest] or fits
# something in any case (3): 5 GB: expected None
- return None
+ return rows and rows[-1]["layout"]

## loss
# without the right word (0): and the output of the right word subtracted?
def losses(parts, words):
    sums = [part.exp().sum(1).to(words.device) for part in parts]
    return sum(sums).log()
# not stable (3): exp(10,000) is infinite
- torch.stack([part.amax(1).to(home) for part in parts]).amax(0)
+ torch.zeros_like(words)
# every part has the word (1): parts of [8, 8]: expected [
- * here).to
+ ).to
# equal parts (2): Parts may have different widths
- first += part.shape[1]
+ first += parts[0].shape[1]
# joined (3): Send what has n numbers
def losses(parts, words):
    z = torch.cat([part.to(words.device) for part in parts], 1)
    return torch.logsumexp(z, 1) - z.gather(1, words[:, None])[:, 0]

## mend
# the first step only (1): In every step, not only in the first
-             left = m * len(params)
# each micro-batch (0): not once for each micro-batch
-     for param
+     m, left = 1, len(params)
+     for param
# one parameter (0): Not all micro-batches have added to all parameters
- left -= 1
+ left -= len(params)
- for param in params
+ for param in params[-1:]
# as it was (0): Not all micro-batches have added
count_down = broken

## merge
# a mean (0): The larger score decides
- (out_a * total_a + out_b * total_b) / total
+ (out_a + out_b) / 2
# not divided (1): out of [4, 4] keys
- ) / total,
+ ),
# the first largest (0): largest of [4, 4] keys
- torch.maximum(largest_a, largest_b)
+ largest_a
# not stable (3): exp(10,000) is infinite
def merge(a, b):
    (out_a, largest_a, total_a), (out_b, largest_b, total_b) = a, b
    total_a, total_b = total_a * largest_a.exp(), total_b * largest_b.exp()
    largest, total = torch.maximum(largest_a, largest_b), total_a + total_b
    out = (out_a * total_a + out_b * total_b) / total
    return out, largest, total / largest.exp()
"""
