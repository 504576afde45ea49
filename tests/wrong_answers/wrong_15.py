"""Plausible wrong answers to the exercises of chapter 15; helpers/exercises.py has the form."""

WRONG = r"""
## training-bytes
# everything is trained (0): A frozen parameter has no gradient and no state
def training_bytes(net):
    return 4 * total_bytes(net.parameters())
# trained parameters only (0): A frozen parameter is stored, too
def training_bytes(net):
    return 4 * total_bytes(p for p in net.parameters() if p.requires_grad)
# one number of Adam (0): or one of Adam's two numbers, is missing
- 3 * total
+ 2 * total
# always four bytes (1): A number in bfloat16 has two bytes
def training_bytes(net):
    return sum(4 * p.numel() * (1 + 3 * p.requires_grad) for p in net.parameters())
# numbers (0): Those are numbers, not bytes
def training_bytes(net):
    return sum(p.numel() * (1 + 3 * p.requires_grad) for p in net.parameters())

## predict-adapter
# no whole rank (2): A rank is a whole number
adapter_weights, largest_rank, ring_bytes = 40_960, 819.2, 245_760
# W counts (0): W is frozen and has no gradient
adapter_weights, largest_rank, ring_bytes = 33_554_432, 1024, 25_165_824
# one matrix (0): There is B, too
adapter_weights, largest_rank, ring_bytes = 8_192, 820, 163_840
# numbers in the ring (2): each has four bytes
adapter_weights, largest_rank, ring_bytes = 40_960, 819, 61_440
# a square matrix, once round (1): A ring goes round twice
adapter_weights, largest_rank, ring_bytes = 40_960, 512, 122_880

## train-head
# the broken one (0): Look at the gradients that the network brings with it
train_head = broken_head_training
# the optimizer of the head, in training mode (1): in training mode
- net.eval()
+ net.train()
# evaluation mode, but all parameters (1): what the optimizer steps
- net[1].parameters()
+ net.parameters()
- optimizer.zero_grad()
+ net[1].zero_grad()
# no momentum (2): Is the momentum 0.9?
- 0.9
+ 0.0
# gradients add up (2): Are its gradients set to zero
-         optimizer.zero_grad()
# nothing (0): has not learned anything
def train_head(net, batches, lr):
    pass

## head-from
# rows of weights only (0): head_from: a Linear was expected, got a tensor of shape
def head_from(old, rows):
    return old.weight[rows]
# no biases (2): What about the biases
- new.bias[i] = old.bias[row]
# zeros for new classes (2): row 1 is zero
-     with torch.no_grad():
+     with torch.no_grad():
+         new.weight.zero_(), new.bias.zero_()
# None as an index (1): by itself: line 10 of your answer: `new.weight[i]
- if row is not None
+ if True
# on the CPU (1): That of the old head
- .to(old.weight.device)
# views of the old rows (2): Copy them
def head_from(old, rows):
    new = nn.Linear(old.in_features, len(rows)).to(old.weight.device)
    if len(rows) == 1:
        new.weight = nn.Parameter(old.weight[rows[0] : rows[0] + 1])
        new.bias = nn.Parameter(old.bias[rows[0] : rows[0] + 1])
        return new
    for i, row in enumerate(rows):
        if row is not None:
            new.weight.data[i] = old.weight.data[row]
            new.bias.data[i] = old.bias.data[row]
    return new
# a frozen copy (2): a copy of a frozen one has not
def head_from(old, rows):
    new = copy.deepcopy(old)
    fresh = nn.Linear(old.in_features, len(rows)).to(old.weight.device)
    for p, q, r in zip(new.parameters(), fresh.parameters(), old.parameters()):
        data = [q.data[i] if row is None else r.data[row] for i, row in enumerate(rows)]
        p.data = torch.stack(data)
    return new

## rates
# every part counts (1): Which parts count?
-             lr *= factor
+         lr *= factor
# frozen ones, too (2): frozen parts
- if p.requires_grad
# from the front (0): Does the last part get lr?
- reversed(net)
+ net
- [::-1]
# in the wrong order (0): rate of ['3.weight', '3.bias']: expected 0.0125, got 0.1
- [::-1]
# a generator of parameters (1): frozen parts
def rates(net, lr, factor):
    n = len(net)
    return [{"params": net[i].parameters(), "lr": lr * factor ** (n - 1 - i)} for i in range(n)]

## step-flop
# the chapter's estimate (0): The first trained part need not compute the gradient of its input
def step_flop(forward, trained):
    return sum(f * (1 + 2 * t) for f, t in zip(forward, trained))
# weights only (0): The gradients of inputs are missing
def step_flop(forward, trained):
    return sum(f * (1 + t) for f, t in zip(forward, trained))
# frozen parts hand nothing on (1): trained = [True, False, False, False]
def step_flop(forward, trained):
    total = 0
    for i, (f, t) in enumerate(zip(forward, trained)):
        total += f * (1 + t + (t and any(trained[:i])))
    return total
# back to the images (0): expected
def step_flop(forward, trained):
    return sum(f * (1 + t) for f, t in zip(forward, trained)) + sum(forward) * any(trained)

## unfreezing
# the broken one (2): DDP fills the places of all parameters
unfreezing = broken_unfreezing
# wrapped before it is frozen (0): RuntimeError
-         for i, part in enumerate(net):
+         parallel_net = DDP(net)
+         for i, part in enumerate(net):
-         parallel_net = DDP(net)
-         for _
+         for _
# a new optimizer in each phase (2): keep its momentum
- optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
+
- for trained, num_steps in phases:
+ for trained, num_steps in phases:
+         optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
- del parallel_net
# unused parameters looked for (2): four bytes for each parameter tensor
- DDP(net)
+ DDP(net, find_unused_parameters=True)
# not wrapped (2): Is net wrapped?
- DDP(net)
+ net
# everything in every phase (0): Which parts were trained in which phase
- i in trained
+ True

## features-once
# one head for all (0): `to` moves the one head: make a copy for each device.
def features_once(body, head, images, y, batches, devices, lr):
    return [head.to(device) for device in devices]
# the mean over a device's rows (0): Does every row of a batch have the weight
- reduction="sum"
+ reduction="mean"
- / len(rows)
# training mode (0): Is the body in evaluation mode?
- .eval()
+ .train()
# gradients are not summed (0): on vgpu:0
- d2lpar.allreduce(list(grads), "ring")
+ pass
# autograd keeps the pass (4): Use torch.no_grad()
-         with torch.no_grad():
-             features.append(replica(X_part.to(device)))
+         features.append(replica(X_part.to(device)).detach())
# a check in the end (4): copies to the host
- return heads
+ assert heads[0].weight.isfinite().all()
+     return heads
# features on one device (4): bytes between devices
def features_once(body, head, images, y, batches, devices, lr):
    with torch.no_grad():
        parts = [
            copy.deepcopy(body).to(d).eval()(part.to(d))
            for d, part in zip(devices, images.tensor_split(len(devices)))
        ]
        features = torch.cat([part.to(devices[0]) for part in parts])
    new, y = copy.deepcopy(head).to(devices[0]), y.to(devices[0])
    for rows in batches:
        rows = rows.to(devices[0])
        new.zero_grad()
        F.cross_entropy(new(features[rows]), y[rows]).backward()
        with torch.no_grad():
            for p in new.parameters():
                p -= lr * p.grad
    return [copy.deepcopy(new).to(d) for d in devices]
# the body in every step (4): images in all
def features_once(body, head, images, y, batches, devices, lr):
    heads = [copy.deepcopy(head).to(d) for d in devices]
    bodies = [copy.deepcopy(body).to(d).eval() for d in devices]
    for rows in batches:
        parts = zip(rows.tensor_split(len(devices)), devices, bodies, heads)
        for mine, d, replica, h in parts:
            with torch.no_grad():
                features = replica(images[mine].to(d))
            h.zero_grad()
            loss = F.cross_entropy(h(features), y[mine].to(d), reduction="sum") / len(rows)
            loss.backward()
        for grads in zip(*([p.grad for p in h.parameters()] for h in heads)):
            d2lpar.allreduce(list(grads), "ring")
        with torch.no_grad():
            for h in heads:
                for p in h.parameters():
                    p -= lr * p.grad
    return heads
"""
