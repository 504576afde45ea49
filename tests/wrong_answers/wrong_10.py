"""Plausible wrong answers to the exercises of chapter 10; helpers/exercises.py has the form."""

WRONG = r"""
## by-hand
# device 0 (0): That is what device 0 computes
output_part, input_term, gradient_term = [1201, 2013], [1, 13, 20, 11], [4, 1, 2, 3]
# the cuts exchanged (1): A term has as many numbers as y
output_part, input_term, gradient_term = [1200, 2000, 1100, 100], [1120, 111], [1, 3, 2, 1]
# the gradient after f (2): Device 1 knows only its own rows of W
output_part, input_term, gradient_term = [1120, 111], [1200, 2000, 1100, 100], [5, 4, 4, 4]
# everything whole (0): and so some of the outputs
output_part = input_term = [1201, 2013, 1120, 111]
gradient_term = [4, 3]

## sort-by-head
# no bias (2): The bias is a vector: sort it, too.
def sort_by_head(weight, num_heads, size):
    rows = weight.view(3, num_heads, size, -1).transpose(0, 1)
    return rows.reshape(3 * num_heads * size, -1)
# as it was (0): The order has not changed
def sort_by_head(weight, num_heads, size):
    return weight
# heads and sizes exchanged (1): The rows of one head and kind stay together
def sort_by_head(weight, num_heads, size):
    return weight.unflatten(0, (3, size, num_heads)).transpose(0, 2).flatten(0, 2)
# for matrices only (2): size, weight.shape[1])`: IndexError: tuple index
def sort_by_head(weight, num_heads, size):
    parts = weight.view(3, num_heads, size, weight.shape[1])
    return parts.transpose(0, 1).reshape(weight.shape)
# the way back (0): Do all three rows of head 0 come before
def sort_by_head(weight, num_heads, size):
    return weight.unflatten(0, (num_heads, 3, size)).transpose(0, 1).flatten(0, 2)

## mend-pair
# as it was (0): so it counts k times
pair = broken_pair
# without f (1): Which of f and g sums a gradient
- copied(parts)
+ parts
# a part of the bias in each term (1): Divided by k, the bias gets a part of its gradient
- zip(H, Vs, strict=True)
+ zip(H, Vs, [e / len(es) for e in es])
- Y + e for
+ Y for
# the bias in the first term only (1): Add it on every device
- zip(H, Vs, strict=True)
+ zip(H, Vs, [es[0], *[None] * (len(es) - 1)])
- Y + e for
+ Y for
# no bias (0): The second bias is missing
- Y + e for
+ Y for
# f behind every layer (1): gradient of the input on vgpu:0
- summed(terms)
+ copied(summed(terms))

## channels-that-pay
# not rounded (2): That is no whole number of channels
def least_channels(kernel, flops, bandwidth, itemsize):
    return itemsize * flops / (3 * bandwidth * kernel**2)
pays_pcie3, pays_nvlink = [256], [64, 128, 256]
# that of a linear layer (1): at every position of its kernel
def least_channels(kernel, flops, bandwidth, itemsize):
    return int(itemsize * flops / (3 * bandwidth)) + 1
pays_pcie3, pays_nvlink = [], []
# a side in place of the area (2): A kernel has two sides
def least_channels(kernel, flops, bandwidth, itemsize):
    return int(itemsize * flops / (3 * bandwidth * kernel)) + 1
pays_pcie3, pays_nvlink = [256], [256]
# rounded down (0): At that number both are equally fast
def least_channels(kernel, flops, bandwidth, itemsize):
    return int(itemsize * flops / (3 * bandwidth * kernel**2))
pays_pcie3, pays_nvlink = [256, 128], [256, 128, 64, 32]
# one ring (0): Compare each number of channels with the least
def least_channels(kernel, flops, bandwidth, itemsize):
    return int(itemsize * flops / (6 * bandwidth * kernel**2)) + 1
pays_pcie3, pays_nvlink = [128, 256], [32, 64, 128, 256]

## split-loss
# all logits gathered (2): k losses were counted
def split_cross_entropy(parts, labels):
    whole = [torch.cat([x.to(y.device) for x in parts], dim=1) for y in labels]
    return [F.cross_entropy(z, y) for z, y in zip(whole, labels)]
# no maximum (3): exp of a large number is infinite
- largest([part.detach().max(dim=1).values for part in parts])
+ [0 * y for y in labels]
# a maximum on each device (0): Is the sum over all words
- largest([part.detach().max(dim=1).values for part in parts])
+ [part.detach().max(dim=1).values for part in parts]
# labels not looked up (0): Which device has the logit of the label
- [:, 0] * here
+ [:, 0]
# equal widths (0): Which device has the logit of the label
- part.shape[1] for part in parts
+ parts[-1].shape[1] for _ in parts
# not a mean (0): the sum over the examples, not the mean
- .mean() for
+ .sum() for
# a sum that autograd does not see (3): the gradients: RuntimeError
- summed(terms)
+ plain_sum(terms)
-     top =
+     def plain_sum(terms):
+         data = [x.detach() for x in terms]
+         d2lpar.allreduce(data)
+         return data
+
+     top =

## split-by-tokens
# no functions of its own (3): write it as a subclass of torch.autograd.Function
def gather_tokens(parts):
    return [torch.cat([part.to(own.device) for part in parts]) for own in parts]

def scatter_sum(parts):
    pieces = zip(*(part.chunk(len(parts)) for part in parts))
    return [sum(x.to(own.device) for x in piece) for own, piece in zip(parts, pieces)]

def block(parts, ws, Us, Vs):
    weighted = [normalize(X) * w for X, w in zip(parts, copied(ws))]
    hidden = [F.relu(X @ U.T) for X, U in zip(gather_tokens(weighted), Us)]
    return scatter_sum([H @ V.T for H, V in zip(hidden, Vs)])
# an all-reduce, of which a part is kept (4): That is an all-reduce, twice as much as needed
-     k = len(parts)
-     pieces = [part.chunk(k) for part in parts]
-     return tuple(
-         sum(pieces[j][i].to(parts[i].device) for j in range(k))
-         for i in range(k)
-     )
+     sums = [part.clone() for part in parts]
+     d2lpar.allreduce(sums, "ring")
+     return tuple(x.chunk(len(parts))[i].clone() for i, x in enumerate(sums))
# the weight without f (3): Each device has the terms of its own tokens
- copied(ws)
+ ws
# the gradient is only cut (1): they have to be summed
- scatter_now(gradients)
+ tuple(x.chunk(len(gradients))[i] for i, x in enumerate(gradients))
# the whole sum (0): each device keeps a k-th of the tokens
- return scatter_now(parts)
+ return tuple(sum(x.to(y.device) for x in parts) for y in parts)
- return gather_now(gradients)
+ return gradients
"""
