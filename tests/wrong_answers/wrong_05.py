"""Plausible wrong answers to the exercises of chapter 05: source, points, a part of the message."""

RING = """
def fast_ring_allreduce(data):
    k, devices = len(data), [x.device for x in data]
    chunks = [x.tensor_split(k) for x in data]
    sending, receiving = ([accel.Stream(device) for device in devices] for _ in range(2))
    current = [accel.current_stream(device) for device in devices]
%s    for r in range(2 * (k - 1)):
        for i in range(k):
            j = (i + 1) %% k
            source, target = chunks[i][(i - r) %% k], chunks[j][(i - r) %% k]
            with accel.stream(sending[i]), accel.stream(receiving[j]):
                if r < k - 1:
                    target += source.to(target.device, non_blocking=True)
                else:
                    target.copy_(source, non_blocking=True)
%s%s"""
START = """\
    for stream, main in zip(sending + receiving, current * 2):
        stream.wait_stream(main)
"""
ROUND = """\
        for i in range(k):
            sending[i].wait_stream(receiving[i])
"""
END = """\
    for stream, main in zip(sending + receiving, current * 2):
        main.wait_stream(stream)
"""

WRONG = {
    "part-sizes": {
        "the remainder is lost": (
            "def part_sizes(b, k):\n    return [b // k] * k",
            1,
            "The parts do not add up to 10",
        ),
        "the remainder to the last": (
            "def part_sizes(b, k):\n    return [b // k] * (k - 1) + [b - b // k * (k - 1)]",
            1,
            "Two parts differ by more than one",
        ),
        "parts of equal size, as chunk makes them": (
            "def part_sizes(b, k):\n    return [len(x) for x in torch.arange(b).chunk(k)]",
            0,
            "your answer calls torch, which the task rules out",
        ),
        "the lengths of tensors": (
            "def part_sizes(b, k):\n    return [len(x) for x in torch.ones(b).tensor_split(k)]",
            0,
            "your answer calls torch, which the task rules out",
        ),
        "the lengths of arrays": (
            "import numpy\ndef part_sizes(b, k):\n"
            "    return [len(x) for x in numpy.array_split(range(b), k)]",
            0,
            "your answer calls numpy, which the task rules out",
        ),
        "the smaller parts first": (
            "def part_sizes(b, k):\n    return [(b + i) // k for i in range(k)]",
            1,
            "expected [3, 3, 2, 2], got [2, 2, 3, 3]",
        ),
    },
    "predict-bytes": {
        "the hub sends to itself": (
            "star_hub, ring_each, ring_total = 4_000_000, 1_500_000, 6_000_000",
            2,
            "The hub does not send to itself",
        ),
        "the limit for many devices": (
            "star_hub, ring_each, ring_total = 3_000_000, 2_000_000, 8_000_000",
            1,
            "With four there are 6 rounds",
        ),
        "the first half of the ring": (
            "star_hub, ring_each, ring_total = 3_000_000, 750_000, 3_000_000",
            1,
            "holds one complete sum only",
        ),
        "nothing": ("star_hub = ring_each = ring_total = None", 0, "not answered yet"),
    },
    "mend-average": {
        "back on the CPU": (
            """
def step(w, X, y, devices):
    total = 0
    for X_i, y_i, device in zip(X.tensor_split(4), y.tensor_split(4), devices):
        X_i, y_i = X_i.to(device), y_i.to(device)
        total += (2 * X_i.T @ (X_i @ w.to(device) - y_i) / len(X)).cpu()
    return [total] * len(devices)
""",
            0,
            "devices of the gradients: expected",
        ),
        "every device computes everything": (
            """
def step(w, X, y, devices):
    return [gradient_of_one(w.to(d), X.to(d), y.to(d)) for d in devices]
""",
            0,
            "bytes from the host to vgpu:0: expected at most",
        ),
        "no device computes": (
            """
def step(w, X, y, devices):
    return [gradient_of_one(w, X, y).to(device) for device in devices]
""",
            0,
            "Each device computes with its own part of the batch",
        ),
        "the mean of the means": (
            "step = broken_step",
            1,
            "Does every example have the weight 1/b?",
        ),
        "no division": (
            """
def step(w, X, y, devices):
    parts = zip(X.tensor_split(len(devices)), y.tensor_split(len(devices)), devices)
    grads = []
    for X_i, y_i, device in parts:
        w_i = w.detach().to(device, copy=True).requires_grad_()
        ((X_i.to(device) @ w_i - y_i.to(device)) ** 2).sum().backward()
        grads.append(w_i.grad)
    star_allreduce(grads)
    return grads
""",
            0,
            "the sum over the batch, not the mean",
        ),
        "the sum of the means": (
            """
def step(w, X, y, devices):
    return [grad * len(devices) for grad in broken_step(w, X, y, devices)]
""",
            0,
            "The mean of each part was added up",
        ),
        "no sum": (
            """
def step(w, X, y, devices):
    parts = zip(X.tensor_split(len(devices)), y.tensor_split(len(devices)), devices)
    grads = []
    for X_i, y_i, device in parts:
        w_i = w.detach().to(device, copy=True).requires_grad_()
        (((X_i.to(device) @ w_i - y_i.to(device)) ** 2).sum() / len(X)).backward()
        grads.append(w_i.grad)
    return grads
""",
            0,
            "gradient on vgpu:0",
        ),
        "the sum on one device only": (
            """
def step(w, X, y, devices):
    parts = zip(X.tensor_split(len(devices)), y.tensor_split(len(devices)), devices)
    grads = []
    for X_i, y_i, device in parts:
        w_i = w.detach().to(device, copy=True).requires_grad_()
        (((X_i.to(device) @ w_i - y_i.to(device)) ** 2).sum() / len(X)).backward()
        grads.append(w_i.grad)
    for grad in grads[1:]:
        grads[0] += grad.to(devices[0])
    return grads
""",
            0,
            "gradient on vgpu:1",
        ),
    },
    "largest-k": {
        "one less": (
            """
def largest_k(lr, curvature):
    return int(2 / (lr * curvature)) - 1
""",
            0,
            "One k more does not move w away",
        ),
        "where w reaches 0": (
            "def largest_k(lr, curvature):\n    return int(1 / (lr * curvature))",
            0,
            "overshoots less than it came",
        ),
        "the curvature is forgotten": (
            "def largest_k(lr, curvature):\n    return int(2 / lr)",
            1,
            "expected 6, got 20",
        ),
        "one too many": (
            "def largest_k(lr, curvature):\n    return int(2 / (lr * curvature)) + 1",
            0,
            "too long by one k",
        ),
    },
    "spread-sum": {
        "one hub": (
            "def spread_allreduce(arrays):\n    for data in arrays:\n        star_allreduce(data)",
            3,
            "Cut the arrays",
        ),
        "the ring": (
            "def spread_allreduce(arrays):\n    for data in arrays:\n        ring_allreduce(data)",
            3,
            "A ring has no hubs",
        ),
        "a hub for each array": (
            """
def spread_allreduce(arrays):
    for i, data in enumerate(arrays):
        hub = i % len(data)
        star_allreduce(data[hub:] + data[:hub])
""",
            3,
            "Cut the arrays",
        ),
        "every device collects everything": (
            """
def spread_allreduce(arrays):
    for data in arrays:
        total = [sum(x.to(y.device) for x in data) for y in data]
        for x, s in zip(data, total):
            x.copy_(s)
""",
            2,
            "are enough",
        ),
        "the sum stays with the hub": (
            """
def spread_allreduce(arrays):
    for data in arrays:
        for hub in range(len(data)):
            pieces = [x.tensor_split(len(data))[hub] for x in data]
            for i, piece in enumerate(pieces):
                if i != hub:
                    pieces[hub] += piece.to(pieces[hub].device)
""",
            0,
            "array of 180 numbers on vgpu:0",
        ),
    },
    "accuracy": {
        "fewer parts than devices": (
            """
def accuracy(replicas, batches, devices):
    correct = total = 0
    for X, y in batches:
        for X_i, y_i, device, params in zip(X.chunk(4), y.chunk(4), devices, replicas):
            y_hat = net(X_i.to(device), params).argmax(dim=1)
            correct += (y_hat == y_i.to(device)).sum().item()
        total += len(y)
    return correct / total
""",
            2,
            "`chunk` may make fewer",
        ),
        "a wait in the loop": (
            """
def accuracy(replicas, batches, devices):
    correct = total = 0
    for X, y in batches:
        parts = zip(X.tensor_split(len(devices)), y.tensor_split(len(devices)), devices, replicas)
        for X_i, y_i, device, params in parts:
            y_hat = net(X_i.to(device), params).argmax(dim=1)
            correct += (y_hat == y_i.to(device)).sum().item()
        total += len(y)
    return correct / total
""",
            3,
            "read one number from each in the end",
        ),
        "one device does it all": (
            """
def accuracy(replicas, batches, devices):
    correct, total = 0, 0
    for X, y in batches:
        X, y = (tensor.to(devices[0], non_blocking=True) for tensor in (X, y))
        correct = correct + (net(X, replicas[0]).argmax(dim=1) == y).sum()
        total += len(y)
    return correct.item() / total
""",
            3,
            "products of matrices on each device: expected [4, 4, 4, 4], got [4, 0, 0, 0]",
        ),
        "copies that block": (
            """
def accuracy(replicas, batches, devices):
    correct, total = [0] * len(devices), 0
    for X, y in batches:
        parts = zip(X.tensor_split(len(devices)), y.tensor_split(len(devices)))
        for i, (X_i, y_i) in enumerate(parts):
            y_hat = net(X_i.to(devices[i]), replicas[i]).argmax(dim=1)
            correct[i] = correct[i] + (y_hat == y_i.to(devices[i])).sum()
        total += len(y)
    return sum(c.item() for c in correct) / total
""",
            3,
            "waits of the host: expected at most 4, got 36",
        ),
        "a mean of means": (
            """
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
""",
            2,
            "A mean of means",
        ),
    },
    "fast-ring": {
        "the package's ring": (
            "def fast_ring_allreduce(data):\n    d2lpar.allreduce(data, 'ring')",
            0,
            "d2lpar.collectives, which the task rules out",
        ),
        "the chapter's ring": (
            "fast_ring_allreduce = ring_allreduce",
            1,
            "Do the copies of one round still wait",
        ),
        "no wait at the start": (
            RING % ("", ROUND, END),
            0,
            "Three things have to wait",
        ),
        "no wait between rounds": (RING % (START, "", END), 0, "Three things have to wait"),
        "no wait at the end": (RING % (START, ROUND, ""), 0, "Three things have to wait"),
        "everything is sent to everyone": (
            """
def fast_ring_allreduce(data):
    copies = [[x.to(y.device) for x in data if x is not y] for y in data]
    for x, others in zip(data, copies):
        for other in others:
            x += other
""",
            0,
            "expected [60,000,000, 60,000,000",
        ),
    },
}
