"""Plausible wrong answers to the exercises of chapter 06; helpers/exercises.py has the form."""

WRONG = r"""
## what-it-remembers
# the same as on one device (1): Whose running mean is kept?
mean_on_one, mean_on_four, variance_on_four = 1.425, 1.425, 1.425
# one pass (0): That is the mean after one pass
mean_on_one, mean_on_four, variance_on_four = 0.75, 0.15, 1.0666666666666667
# the biased variance (2): The denominator is 3
mean_on_one, mean_on_four, variance_on_four = 1.425, 0.285, 1.0475
# all devices update the mean (0): Each replica starts from the running mean of the network
mean_on_one, mean_on_four, variance_on_four = 7.5, 0.8542991849999999, 0.31666666666666665

## links-of-0
# parameters only (2): What else does a replica need
N, B, outputs = 22_640, 408, 640
out_of_0, into_0, held_by_0 = 3 * N, 3 * N + 3 * outputs, 2 * N + B
# no gradients (2): What has the backward pass left?
N, B, outputs = 22_640, 408, 640
out_of_0, into_0, held_by_0 = 3 * (N + B + outputs), 3 * N + 3 * outputs, N
# no buffers (1): Buffers are copied, too
N, B, outputs = 22_640, 0, 640
out_of_0, into_0, held_by_0 = 3 * (N + outputs), 3 * (N + outputs), 2 * N
# no outputs (1): is needed where the output was computed
N, B, outputs = 22_640, 408, 640
out_of_0, into_0, held_by_0 = 3 * (N + B), 3 * N, 2 * N + B
# one other device (0): There are three other devices
N, B, outputs = 22_640, 408, 640
out_of_0, into_0, held_by_0 = N + B + outputs, N + outputs, N + B
# the gradients of buffers (1): so nothing comes back for them
N, B, outputs = 22_640, 408, 640
out_of_0, into_0, held_by_0 = 3 * (N + B + outputs), 3 * (N + B + outputs), 2 * N + 2 * B
# four copies (0): Device 0 sends nothing to itself
N, B, outputs = 22_640, 408, 640
out_of_0, into_0, held_by_0 = 4 * (N + B + outputs), 4 * (N + outputs), 3 * N + B

## sixteen-gpus
# one way (1): The network goes out and the gradients come back
same_batch, large_batch, rate = 235 * (3.25e-3 + 15 * 2.84e-3), 15 * (52e-3 + 15 * 2.84e-3), 1.6
def best_k(T_1, copy_seconds):
    return round((T_1 / copy_seconds / 2) ** 0.5)
# no copies, the square-root rule (0): The copies are missing
same_batch, large_batch, rate = 12.22 / 16, 12.22 / 16, 0.4
def best_k(T_1, copy_seconds):
    return max(1, int((T_1 / copy_seconds / 2) ** 0.5))
# the same step for the larger batch (1): Each device has 256 images
same_batch, large_batch, rate = 235 * 0.08845, 15 * 0.08845, 0.1
def best_k(T_1, copy_seconds):
    return max(1, round((T_1 / copy_seconds / 2) ** 0.5))
# the same number of steps (2): A larger batch takes fewer steps
same_batch, large_batch, rate = 235 * 0.08845, 235 * 0.1372, 1.6
def best_k(T_1, copy_seconds):
    return (T_1 / copy_seconds / 2) ** 0.5
# rounded (3): the better neighbour of that is not always the nearer one
-     k = 1
+     return max(1, round((T_1 / copy_seconds / 2) ** 0.5))

## fair-parts
# equal parts (0): Equal parts wait for the slowest device
def fair_parts(b, seconds, fixed):
    return [b // len(seconds) + (i < b % len(seconds)) for i in range(len(seconds))]
# rounded down, the rest to the last (1): Rounding is not enough
def fair_parts(b, seconds, fixed):
    speed = sum(1 / t for t in seconds)
    parts = [int(b / t / speed + 1e-9) for t in seconds]
    parts[-1] += b - sum(parts)
    return parts
# an example is lost (1): No example may be lost or added
def fair_parts(b, seconds, fixed):
    speed = sum(1 / t for t in seconds)
    return [round(b / t / speed - 0.1) for t in seconds]
# fixed times left out (2): only if it gets an example
- f + t
+ t
# in proportion to the seconds (0): A device that is faster should not get fewer
def fair_parts(b, seconds, fixed):
    parts = [int(b * t / sum(seconds)) for t in seconds]
    return [parts[0] + b - sum(parts), *parts[1:]]

## device-0-is-full
# as it was (2): OutOfMemoryError
step = gathered_step
# a mean of means (3): the weight 1/b
- reduction="sum"
+ reduction="mean"
- .sum() / len(X)
+ .mean()
# a sum of means (0): The means of the parts were added
- reduction="sum"
+ reduction="mean"
- / len(X)
# a sum (0): the sum over the examples, not the mean
- / len(X)
# the gradients of before are lost (3): Add to the gradients that are there
-     loss.backward
+     net.zero_grad()
+     loss.backward

## norm-of-all
# each part by itself (0): Those are the part's own statistics
def norm_of_all(parts):
    return [F.batch_norm(part, None, None, training=True) for part in parts]
# a mean of means (4): A mean of means gives
- sum(part.sum(0).to(home) for part in parts) / b
+ sum(part.mean(0).to(home) for part in parts) / len(parts)
# the squares of the numbers (4): First the mean, then the squares
- for part in centred) / b
+ for part in parts) / b - mean**2
# the mean is sent twice (4): once there and once back
- part.square().sum(0).to(home) for part in centred
+ (part - mean.to(part.device)).square().sum(0).to(home) for part in parts
# statistics without a gradient (4): So do not detach them
- mean = sum(part.sum(0).to(home) for part in parts) / b
+ mean = (sum(part.sum(0).to(home) for part in parts) / b).detach()
- variance = sum(part.square().sum(0).to(home) for part in centred) / b
+ variance = (sum(part.square().sum(0).to(home) for part in centred) / b).detach()
# all examples on one device (4): Send sums over examples
def norm_of_all(parts):
    X = torch.cat([part.to(parts[0].device) for part in parts])
    X = F.batch_norm(X, None, None, training=True)
    pieces = X.split([len(part) for part in parts])
    return [piece.to(part.device) for piece, part in zip(pieces, parts)]
# the unbiased variance (0): The variance is the biased one
- centred) / b
+ centred) / (b - 1)
"""
