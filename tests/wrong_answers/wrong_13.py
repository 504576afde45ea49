"""Plausible wrong answers to the exercises of chapter 13: source, points, a part of the message."""

HEAD = """
def train_head(net, batches, lr):
%s    optimizer = torch.optim.SGD(%s.parameters(), lr, momentum=%s)
    for X, y in batches:
        net.%s()
        %s.zero_grad()
        F.cross_entropy(net(X), y).backward()
        optimizer.step()
"""
FREEZE = "    net[0].requires_grad_(False)\n"

RATES = """
def rates(net, lr, factor):
    groups = []
    for part in reversed(net):
        %s
        %s
            groups.append({"params": trained, "lr": lr})
        %slr *= factor
    return groups[::-1]
"""

UNFREEZING = """
def unfreezing(net, phases):
%s    for trained, num_steps in phases:
%s        for i, part in enumerate(net):
            part.requires_grad_(i in trained)
%s        for _ in range(num_steps):
            one_step(%s, optimizer)
"""
OPTIMIZER = "    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)\n"
WRAP = "    parallel_net = DDP(net)\n"

ONCE = """
def features_once(body, head, images, y, batches, devices, lr):
    heads = [copy.deepcopy(head).to(device) for device in devices]
    features, labels, first_rows, first = [], [], [], 0
    for X_part, y_part, device in zip(
        images.tensor_split(len(devices)), y.tensor_split(len(devices)), devices, strict=True
    ):
        replica = copy.deepcopy(body).to(device).%s()
        with %s:
            features.append(replica(X_part.to(device)).detach())
        labels.append(y_part.to(device))
        first_rows.append(first)
        first += len(X_part)
    for rows in batches:
        for i, device in enumerate(devices):
            mine = rows - first_rows[i]
            mine = mine[(mine >= 0) & (mine < len(labels[i]))].to(device)
            y_hat = heads[i](features[i][mine])
            loss = %s
            heads[i].zero_grad()
            loss.backward()
        for grads in zip(*([p.grad for p in h.parameters()] for h in heads), strict=True):
            %s
        with torch.no_grad():
            for h in heads:
                for p in h.parameters():
                    p -= lr * p.grad
%s    return heads
"""
NO_GRAD = "torch.no_grad()"
LOSS = "F.cross_entropy(y_hat, labels[i][mine], reduction='sum') / len(rows)"
RING = "d2lpar.allreduce(list(grads), 'ring')"

WRONG = {
    "training-bytes": {
        "everything is trained": (
            "def training_bytes(net):\n    return 4 * total_bytes(net.parameters())",
            0,
            "A frozen parameter has no gradient and no state",
        ),
        "trained parameters only": (
            """
def training_bytes(net):
    return 4 * total_bytes(p for p in net.parameters() if p.requires_grad)
""",
            0,
            "A frozen parameter is stored, too",
        ),
        "one number of Adam": (
            """
def training_bytes(net):
    return total_bytes(net.parameters()) + 2 * total_bytes(
        p for p in net.parameters() if p.requires_grad
    )
""",
            0,
            "or one of Adam's two numbers, is missing",
        ),
        "always four bytes": (
            """
def training_bytes(net):
    return sum(4 * p.numel() * (1 + 3 * p.requires_grad) for p in net.parameters())
""",
            1,
            "A number in bfloat16 has two bytes",
        ),
        "numbers": (
            """
def training_bytes(net):
    return sum(p.numel() * (1 + 3 * p.requires_grad) for p in net.parameters())
""",
            0,
            "Those are numbers, not bytes",
        ),
    },
    "predict-adapter": {
        "no whole rank": (
            "adapter_weights, largest_rank, ring_bytes = 40_960, 819.2, 245_760",
            2,
            "A rank is a whole number",
        ),
        "W counts": (
            "adapter_weights, largest_rank, ring_bytes = 33_554_432, 1024, 25_165_824",
            0,
            "W is frozen and has no gradient",
        ),
        "one matrix": (
            "adapter_weights, largest_rank, ring_bytes = 8_192, 820, 163_840",
            0,
            "There is B, too",
        ),
        "numbers in the ring": (
            "adapter_weights, largest_rank, ring_bytes = 40_960, 819, 61_440",
            2,
            "each has four bytes",
        ),
        "a square matrix, once round": (
            "adapter_weights, largest_rank, ring_bytes = 40_960, 512, 122_880",
            1,
            "A ring goes round twice",
        ),
    },
    "train-head": {
        "the broken one": (
            "train_head = broken_head_training",
            0,
            "Look at the gradients that the network brings with it",
        ),
        "the optimizer of the head, in training mode": (
            HEAD % (FREEZE, "net[1]", "0.9", "train", "net"),
            1,
            "in training mode",
        ),
        "evaluation mode, but all parameters": (
            HEAD % (FREEZE, "net", "0.9", "eval", "net[1]"),
            1,
            "what the optimizer steps",
        ),
        "no momentum": (
            HEAD % (FREEZE, "net[1]", "0.0", "eval", "net"),
            2,
            "Is the momentum 0.9?",
        ),
        "gradients add up": (
            HEAD % (FREEZE, "net[1]", "0.9", "eval", "net[0]"),
            2,
            "Are its gradients set to zero",
        ),
        "nothing": ("def train_head(net, batches, lr):\n    pass", 0, "has not learned anything"),
    },
    "head-from": {
        "rows of weights only": (
            """
def head_from(old, rows):
    return old.weight[rows]
""",
            0,
            "head_from: a Linear was expected, got a tensor of shape",
        ),
        "no biases": (
            """
def head_from(old, rows):
    new = nn.Linear(old.in_features, len(rows)).to(old.weight.device)
    for i, row in enumerate(rows):
        if row is not None:
            new.weight.data[i] = old.weight.data[row]
    return new
""",
            2,
            "What about the biases",
        ),
        "zeros for new classes": (
            """
def head_from(old, rows):
    new = nn.Linear(old.in_features, len(rows)).to(old.weight.device)
    for p, q in zip(new.parameters(), old.parameters()):
        p.data.zero_()
        for i, row in enumerate(rows):
            if row is not None:
                p.data[i] = q.data[row]
    return new
""",
            2,
            "row 1 is zero",
        ),
        "None as an index": (
            """
def head_from(old, rows):
    new = nn.Linear(old.in_features, len(rows)).to(old.weight.device)
    for i, row in enumerate(rows):
        new.weight.data[i] = old.weight.data[row]
        new.bias.data[i] = old.bias.data[row]
    return new
""",
            1,
            "a head that can be trained by itself: line 5 of your answer: `new.weight.data[i]",
        ),
        "on the CPU": (
            """
def head_from(old, rows):
    new = nn.Linear(old.in_features, len(rows))
    for i, row in enumerate(rows):
        if row is not None:
            new.weight.data[i] = old.weight.data[row].cpu()
            new.bias.data[i] = old.bias.data[row].cpu()
    return new
""",
            1,
            "That of the old head",
        ),
        "views of the old rows": (
            """
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
""",
            2,
            "Copy them",
        ),
        "a frozen copy": (
            """
def head_from(old, rows):
    new = copy.deepcopy(old)
    fresh = nn.Linear(old.in_features, len(rows)).to(old.weight.device)
    for p, q, r in zip(new.parameters(), fresh.parameters(), old.parameters()):
        data = [q.data[i] if row is None else r.data[row] for i, row in enumerate(rows)]
        p.data = torch.stack(data)
    return new
""",
            2,
            "a copy of a frozen one has not",
        ),
    },
    "rates": {
        "every part counts": (
            RATES
            % ("trained = [p for p in part.parameters() if p.requires_grad]", "if trained:", ""),
            1,
            "Which parts count?",
        ),
        "frozen ones, too": (
            RATES % ("trained = [*part.parameters()]", "if trained:", "    "),
            2,
            "frozen parts",
        ),
        "from the front": (
            """
def rates(net, lr, factor):
    groups = []
    for part in net:
        trained = [p for p in part.parameters() if p.requires_grad]
        if trained:
            groups.append({"params": trained, "lr": lr})
            lr *= factor
    return groups
""",
            0,
            "Does the last part get lr?",
        ),
        "in the wrong order": (
            """
def rates(net, lr, factor):
    groups = []
    for part in reversed(net):
        trained = [p for p in part.parameters() if p.requires_grad]
        if trained:
            groups.append({"params": trained, "lr": lr})
            lr *= factor
    return groups
""",
            0,
            "rate of ['3.weight', '3.bias']: expected 0.0125, got 0.1",
        ),
        "a generator of parameters": (
            """
def rates(net, lr, factor):
    n = len(net)
    return [{"params": net[i].parameters(), "lr": lr * factor ** (n - 1 - i)} for i in range(n)]
""",
            1,
            "frozen parts",
        ),
    },
    "step-flop": {
        "the chapter's estimate": (
            """
def step_flop(forward, trained):
    return sum(f * (1 + 2 * t) for f, t in zip(forward, trained))
""",
            0,
            "The first trained part need not compute the gradient of its input",
        ),
        "weights only": (
            """
def step_flop(forward, trained):
    return sum(f * (1 + t) for f, t in zip(forward, trained))
""",
            0,
            "The gradients of inputs are missing",
        ),
        "frozen parts hand nothing on": (
            """
def step_flop(forward, trained):
    total = 0
    for i, (f, t) in enumerate(zip(forward, trained)):
        total += f * (1 + t + (t and any(trained[:i])))
    return total
""",
            1,
            "trained = [True, False, False, False]",
        ),
        "back to the images": (
            """
def step_flop(forward, trained):
    return sum(f * (1 + t) for f, t in zip(forward, trained)) + sum(forward) * any(trained)
""",
            0,
            "expected",
        ),
    },
    "unfreezing": {
        "the broken one": (
            "unfreezing = broken_unfreezing",
            2,
            "DDP fills the places of all parameters",
        ),
        "wrapped before it is frozen": (
            UNFREEZING % (OPTIMIZER, "    " + WRAP, "", "parallel_net"),
            0,
            "RuntimeError",
        ),
        "a new optimizer in each phase": (
            UNFREEZING % ("", "    " + OPTIMIZER, "    " + WRAP, "parallel_net"),
            2,
            "keep its momentum",
        ),
        "unused parameters looked for": (
            UNFREEZING
            % (
                OPTIMIZER,
                "",
                "        parallel_net = DDP(net, find_unused_parameters=True)\n",
                "parallel_net",
            ),
            2,
            "four bytes for each parameter tensor",
        ),
        "not wrapped": (
            UNFREEZING % (OPTIMIZER, "", "", "net"),
            2,
            "Is net wrapped?",
        ),
        "everything in every phase": (
            UNFREEZING.replace("i in trained", "True")
            % (OPTIMIZER, "", "    " + WRAP, "parallel_net"),
            0,
            "Which parts were trained in which phase",
        ),
    },
    "features-once": {
        "one head for all": (
            "def features_once(body, head, images, y, batches, devices, lr):\n"
            "    return [head.to(device) for device in devices]",
            0,
            "`to` moves the one head: make a copy for each device.",
        ),
        "the mean over a device's rows": (
            ONCE % ("eval", NO_GRAD, "F.cross_entropy(y_hat, labels[i][mine])", RING, ""),
            0,
            "Does every row of a batch have the weight",
        ),
        "training mode": (
            ONCE % ("train", NO_GRAD, LOSS, RING, ""),
            0,
            "Is the body in evaluation mode?",
        ),
        "gradients are not summed": (ONCE % ("eval", NO_GRAD, LOSS, "pass", ""), 0, "on vgpu:0"),
        "autograd keeps the pass": (
            ONCE % ("eval", "torch.enable_grad()", LOSS, RING, ""),
            4,
            "Use torch.no_grad()",
        ),
        "a check in the end": (
            ONCE % ("eval", NO_GRAD, LOSS, RING, "    assert heads[0].weight.isfinite().all()\n"),
            4,
            "copies to the host",
        ),
        "features on one device": (
            """
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
""",
            4,
            "bytes between devices",
        ),
        "the body in every step": (
            """
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
""",
            4,
            "images in all",
        ),
    },
}
