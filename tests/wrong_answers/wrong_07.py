"""Plausible wrong answers to the exercises of chapter 07; helpers/exercises.py has the form."""

WRONG = r"""
## indices
# the sampler (0): calls torch.utils.data, which the task rules out
def indices_of_rank(n, k, rank):
    return list(torch.utils.data.DistributedSampler(range(n), k, rank, shuffle=False))
# neighbours (0): These are neighbours
def indices_of_rank(n, k, rank):
    size = -(-n // k)
    return [i % n for i in range(rank * size, (rank + 1) * size)]
# without the second deal (1): All ranks must get equally many examples
def indices_of_rank(n, k, rank):
    return list(range(rank, n, k))
# the last example again (1): expected [2, 6, 0], got [2, 6, 9]
def indices_of_rank(n, k, rank):
    return [min(rank + i * k, n - 1) for i in range(-(-n // k))]
# one round too many (1): These are too many examples
def indices_of_rank(n, k, rank):
    return [(rank + i * k) % n for i in range(n // k + 1)]

## predict-bytes
# numbers instead of bytes (0): Each takes four bytes
always, skipping, on_the_link, in_16_bits = 4e6, 1e6, 1.5e6, 1e6
# the parts are smaller (0): Without no_sync every backward pass sums all gradients
always, skipping, on_the_link, in_16_bits = 4e6, 1e6, 1.5e6, 5e5
# twice the bytes on the link (3): That is the limit for many ranks
always, skipping, on_the_link, in_16_bits = 16e6, 4e6, 8e6, 2e6
# compressed parts (3): no_sync still holds
always, skipping, on_the_link, in_16_bits = 16e6, 4e6, 6e6, 8e6

## token-mean
# a number (0): a tensor was expected, because `backward()` is called on it
def loss_of_rank(losses, mask):
    return (losses * mask).sum().item()
# the number of tokens on the CPU (0): line 8 of your answer: `return dist.get_world_size() *
- mask.sum()
+ torch.tensor([mask.sum().item()])
# the mean of the means (1): Does every real token have
loss_of_rank = broken_loss
# the factor is forgotten (0): DDP divides the sum of the gradients by the number of ranks
- dist.get_world_size() * (losses
+ (losses
# made for two ranks (0): There are three here
- dist.get_world_size()
+ 2
# padding counts (0): Padding counts among the tokens
def loss_of_rank(losses, mask):
    return (losses * mask).mean()
# a plain sum (0): the sum over the tokens, not their mean
def loss_of_rank(losses, mask):
    return (losses * mask).sum()
# one rank asks the others (0): the ranks do not call the same collectives
- dist.all_reduce
+ if dist.get_rank() == 0: dist.all_reduce

## ordered-buckets
# started when full (1): started before one in front of it
-         while self.next < len(self.missing) and self.missing[self.next] == 0:
-             self.start(self.next)
-             self.next += 1
+         if self.missing[j] == 0:
+             self.start(j)
-         for j in range(self.next, len(self.sizes)):
-             self.start(j)
# one start for each gradient (3): A sum could have started, and did not
- while self.next
+ if self.next
# all at the end (0): could have started
- and self.missing[self.next] == 0
+ and False
# a skipped layer is forgotten (2): at the end
-         for j in range(self.next, len(self.sizes)):
-             self.start(j)
# not ready for the next pass (3): not full yet
-         self.missing, self.next = list(self.sizes), 0

## uneven
# the loop that hangs (1): waits for ever: another rank has returned
def train(w, batches, lr, all_reduce):
    return broken_train(w, batches, lr, all_reduce)
# the first rank that is done ends it (1): In each round every example should have the weight 1/b
def train(w, batches, lr, all_reduce):
    for r in range(10):
        left = torch.tensor([0.0 if r < len(batches) else 1.0])
        all_reduce(left)
        if left > 0:
            return w
        X, y = batches[r]
        total = torch.cat([gradient(w, X, y), torch.tensor([float(len(X))])])
        all_reduce(total)
        w = w - lr / total[-1] * total[:-1]
# the mean over all ranks (1): In each round every example should have the weight 1/b
- / total[-1] *
+ / 12 *
# a rank without a batch sums only the number (1): the ranks sum tensors of shapes [(1,), (5,)]
- len(w) + 1
+ len(w) + 1 if r < len(batches) else 1
# a number is summed (0): all_reduce takes a tensor, not 2
def train(w, batches, lr, all_reduce):
    all_reduce(len(batches))
    return broken_train(w, batches, lr, all_reduce)
# no end (0): and no end
- if total[-1] == 0:
-             return w
+ total[-1] = max(total[-1], 1)

## overlap
# a sum for each parameter (3): expected at most 40, got
def step(net, X, y, lr):
    params, sums = list(net.parameters()), []

    def arrived(p):
        sums.append(dist.all_reduce(p.grad, async_op=True))


    hooks = [p.register_post_accumulate_grad_hook(arrived) for p in params]
    F.cross_entropy(net(X), y).backward()
    for hook in hooks:
        hook.remove()
    for work in sums:
        work.wait()
    with torch.no_grad():
        for p in params:
            p -= lr / dist.get_world_size() * p.grad
            p.grad = None
# the chapter's first step (1): 0.0 ms of them run beside kernels
def step(net, X, y, lr):
    F.cross_entropy(net(X), y).backward()
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.data -= lr / dist.get_world_size() * p.grad
        p.grad = None
# DDP (0): calls torch.nn.parallel.distributed, which the task rules out
def step(net, X, y, lr):
    F.cross_entropy(DDP(net)(X), y).backward()
    with torch.no_grad():
        for p in net.parameters():
            p -= lr * p.grad
            p.grad = None
# no wait (0): Does the update wait
= a sum for each parameter
- work.wait()
+ pass
# the sum, not the mean (0): divided by the number of ranks
- / dist.get_world_size()
# hooks that stay (0): each of them once
= a sum for each parameter
- hook.remove()
+ pass

## best-buckets
# a fixed size (1): need not be the best for all
def best_buckets(ready, num_bytes, sum_seconds):
    plan, filled, size = [], 0, 0
    for n in num_bytes:
        filled, size = filled + n, size + 1
        if filled >= 10 * 2**20:
            plan.append(size)
            filled = size = 0
    return plan + [size] * (size > 0)
# one bucket (0): these two plans take
def best_buckets(ready, num_bytes, sum_seconds):
    return [len(ready)]
# a fixed size of 25 (0): milliseconds: expected
= a fixed size
- 10 * 2**20
+ 25 * 2**20
# waits while the link is busy (1): need not be the best for all
def best_buckets(ready, num_bytes, sum_seconds):
    plan, end, filled, size = [], 0.0, 0, 0
    for i, n in enumerate(num_bytes):
        filled, size = filled + n, size + 1
        if ready[i] >= end or i == len(ready) - 1:
            plan.append(size)
            end, filled, size = max(ready[i], end) + sum_seconds(filled), 0, 0
    return plan
# all plans (3): Try fewer plans
def best_buckets(ready, num_bytes, sum_seconds):
    def plans(q):
        yield [q]
        for size in range(1, q):
            for rest in plans(q - size):
                yield [size, *rest]
    key = lambda plan: end_of(plan, ready, num_bytes, sum_seconds)
    return min(plans(len(ready)), key=key)
# a gradient is lost (0): expected 9, got 8
def best_buckets(ready, num_bytes, sum_seconds):
    return [1] * (len(ready) - 1)
"""
