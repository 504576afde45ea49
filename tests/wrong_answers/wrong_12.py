"""Plausible wrong answers to the exercises of chapter 12: source, points, a part of the message."""

ARROWS = "'arrows': ['upside down', 'half the light', 'swap red and green', 'shift by two']"
FRUIT = "'fruit': ['mirror', 'upside down', 'half turn', 'half the light', 'shift by two']"
SPOTS = "'spots': ['mirror', 'upside down', 'half turn', 'half the light', 'swap red and green']"

COMPARISON = """
def comparison(train, test, augment, num_epochs, seed):
    results = {}
%s    for name, change in (("not augmented", None), ("augmented", augment)):
%s        optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
        for _ in range(num_epochs):
            order = torch.randperm(len(train[0]), generator=generator)
            train_epoch(net, optimizer, *train, order, change)
        X_test = %s
        results[name] = net, shares(net, *train), shares(net, X_test, test[1])
    return results
"""
ONCE = """\
    torch.manual_seed(seed)
    net = make_net()
"""
GENERATOR = "generator = torch.Generator().manual_seed(seed)\n"
EACH = ONCE.replace("    ", "        ")

AT_ONCE = """
def at_once(X, mirrored, top, left, factor, reach=4):
    b, c, h, w = X.shape
    rows = top.view(b, 1, 1, 1) + torch.arange(h, device=X.device).view(h, 1) - reach
    columns = left.view(b, 1, 1, 1) + torch.arange(w, device=X.device) - reach
    %s
    image = torch.arange(b, device=X.device).view(b, 1, 1, 1)
    channel = torch.arange(c, device=X.device).view(1, c, 1, 1)
    %s
"""
CLAMPED = "rows, columns = rows.clamp(0, h - 1), columns.clamp(0, w - 1)"
MIRRORED = "columns = torch.where(mirrored.view(b, 1, 1, 1), w - 1 - columns, columns)"
IN_PLACE = """\
result = X[image, channel, rows, columns]
    return result.mul_(factor.view(b, c, 1, 1)).clamp_(0, 1)
"""

WRONG = {
    "how-many-workers": {
        "rounded down": (
            "def how_many_workers(load_us, b, step_us):\n    return load_us * b // step_us",
            0,
            "expected 2, got 1",
        ),
        "one image": (
            "def how_many_workers(load_us, b, step_us):\n    return -(-load_us // step_us)",
            0,
            "more than a step. Round up",
        ),
        "a part of a worker": (
            "def how_many_workers(load_us, b, step_us):\n    return load_us * b / step_us",
            0,
            "A worker cannot be divided",
        ),
        "always one more": (
            "def how_many_workers(load_us, b, step_us):\n    return load_us * b // step_us + 1",
            1,
            "so two workers keep up",
        ),
    },
    "keep-the-label": {
        "a task that does not exist": (
            """
keeps = {"arrow": ["upside down"], "fruit": "mirror", "spots": []}
""",
            0,
            "keeps['arrows'] should be a list of names, got None",
        ),
        "a mirror for every task": (
            f"keeps = {{{ARROWS.replace('[', '[' + repr('mirror') + ', ')}, {FRUIT}, {SPOTS}}}",
            2,
            "right becomes left",
        ),
        "colours and borders forgotten": (
            f"keeps = {{{ARROWS}, 'fruit': [*changes], 'spots': [*changes]}}",
            1,
            "ripe becomes green",
        ),
        "upside down is never allowed": (
            f"keeps = {{{ARROWS}, {FRUIT}, {SPOTS}}}\n"
            "keeps = {task: [n for n in v if n != 'upside down'] for task, v in keeps.items()}",
            0,
            "Another change keeps the label of every image",
        ),
        "a name that is not there": (
            f"keeps = {{{ARROWS}, {FRUIT}, 'spots': ['rotation']}}",
            2,
            "choose among mirror",
        ),
        "one task": (f"keeps = {{{ARROWS}}}", 1, "keeps['fruit'] should be a list of names"),
    },
    "predict-bytes": {
        "one device": (
            "as_float, as_bytes, as_rows = 786_944, 197_120, 512",
            0,
            "That is what one device gets",
        ),
        "everything to everyone": (
            "as_float, as_bytes, as_rows = 12_591_104, 3_153_920, 8_192",
            0,
            "not the whole of it",
        ),
        "without labels": (
            "as_float, as_bytes, as_rows = 3_145_728, 786_432, 2_048",
            1,
            "The labels travel, too",
        ),
        "floats of one byte, rows and labels": (
            "as_float, as_bytes, as_rows = 788_480, 788_480, 4_096",
            1,
            "has four bytes",
        ),
    },
    "fair-comparison": {
        "accuracies without the network": (
            """
def comparison(train, test, augment, num_epochs, seed):
    torch.manual_seed(seed)
    net = make_net()
    return {"not augmented": shares(net, *train), "augmented": shares(net, *test)}
""",
            0,
            "expected a tuple (net, accuracy, accuracy)",
        ),
        "the broken one": ("comparison = broken_comparison", 0, "images more than in training"),
        "one network for both": (
            COMPARISON % (ONCE, "        " + GENERATOR, "test[0]"),
            1,
            "The second run goes on where the first ended",
        ),
        "one generator for both": (
            COMPARISON % ("    " + GENERATOR, EACH, "test[0]"),
            3,
            "the runs differ",
        ),
        "the default generator": (
            COMPARISON.replace(", generator=generator", "") % ("", EACH, "test[0]"),
            3,
            "depend on what it draws",
        ),
        "tested on changed images": (
            COMPARISON
            % ("", EACH + "        " + GENERATOR, "change(test[0]) if change else test[0]"),
            2,
            "200 images more than in training",
        ),
        "another rate": (
            COMPARISON.replace("lr=0.2", "lr=0.1") % ("", EACH + "        " + GENERATOR, "test[0]"),
            3,
            "Is it a step of SGD with the rate 0.2?",
        ),
        "no seed": (
            COMPARISON % ("", "        net = make_net()\n        " + GENERATOR, "test[0]"),
            2,
            "the network is the one that make_net gives",
        ),
    },
    "set-seeds": {
        "the broken one": (
            "set_seeds = broken_seeds",
            1,
            "torch.manual_seed gives all devices the same seed",
        ),
        "seed plus number of the device": (
            """
def set_seeds(seed, devices):
    torch.manual_seed(seed)
    for i, device in enumerate(devices):
        accel.default_generators[device.index].manual_seed(seed + i)
""",
            2,
            "draws what device 0 draws with the next seed",
        ),
        "seed times number of the device": (
            """
def set_seeds(seed, devices):
    torch.manual_seed(seed)
    for i, device in enumerate(devices):
        accel.default_generators[device.index].manual_seed(seed * i)
""",
            2,
            "different draws: 8 seeds, 4 devices",
        ),
        "the devices only": (
            """
def set_seeds(seed, devices):
    for i, device in enumerate(devices):
        accel.default_generators[device.index].manual_seed(1000 * (i + 1) + seed)
""",
            2,
            "Seed the CPU with `seed` itself",
        ),
        "the CPU last, which seeds all devices": (
            """
def set_seeds(seed, devices):
    for i, device in enumerate(devices):
        accel.default_generators[device.index].manual_seed(1000 * (i + 1) + seed)
    torch.manual_seed(seed)
""",
            1,
            "torch.manual_seed gives all devices the same seed",
        ),
        "chance": (
            """
def set_seeds(seed, devices):
    torch.manual_seed(seed)
    for device in devices:
        accel.default_generators[device.index].seed()
""",
            2,
            "depends on `seed` only",
        ),
    },
    "at-once": {
        "one by one": ("at_once = one_by_one", 2, "Which operators return a whole batch?"),
        "not in place": (
            AT_ONCE
            % (
                CLAMPED + "\n    " + MIRRORED,
                "return (X[image, channel, rows, columns] * factor.view(b, c, 1, 1)).clamp_(0, 1)",
            ),
            3,
            "a second tensor as large as the batch",
        ),
        "the padding forgotten": (
            AT_ONCE % (MIRRORED, IN_PLACE),
            0,
            "wrong 0 of 2  the same result",
        ),
        "not mirrored": (AT_ONCE % (CLAMPED, IN_PLACE), 0, "Nothing is mirrored"),
        "shifted, then mirrored": (
            AT_ONCE
            % (
                "columns = torch.where(mirrored.view(b, 1, 1, 1), columns.flip(3), columns)"
                "\n    " + CLAMPED,
                IN_PLACE,
            ),
            0,
            "mirrored before it is shifted",
        ),
        "X overwritten": (
            """
def at_once(X, mirrored, top, left, factor, reach=4):
    return X.copy_(one_by_one(X, mirrored, top, left, factor, reach))
""",
            0,
            "X must stay as it is",
        ),
        "image by image": (
            """
def at_once(X, *changes):
    return torch.cat(
        [one_by_one(X[i : i + 1], *(x[i : i + 1] for x in changes)) for i in range(len(X))]
    )
""",
            0,
            "As many as for 4 images",
        ),
    },
    "epoch-ms": {
        "the slower side": (
            """
def epoch_ms(load_ms, step_ms, w, ahead):
    return max(sum(load_ms) / w, step_ms * len(load_ms))
""",
            0,
            "are prepared at 180 ms",
        ),
        "no overlap": (
            """
def epoch_ms(load_ms, step_ms, w, ahead):
    return sum(load_ms) / w + step_ms * len(load_ms)
""",
            0,
            "While the devices take a step",
        ),
        "workers never wait": (
            """
def epoch_ms(load_ms, step_ms, w, ahead):
    prepared, end = [], 0
    for i, load in enumerate(load_ms):
        prepared.append((prepared[i - w] if i >= w else 0) + load)
        end = max(prepared[i], end) + step_ms
    return end
""",
            3,
            "begins batch i when it has been asked for",
        ),
        "asked when the step has ended": (
            """
def epoch_ms(load_ms, step_ms, w, ahead):
    prepared, ends = [], []
    for i, load in enumerate(load_ms):
        asked = ends[i - w * ahead] if i >= w * ahead else 0
        prepared.append(max(asked, prepared[i - w] if i >= w else 0) + load)
        ends.append(max(prepared[i], ends[i - 1] if i else 0) + step_ms)
    return ends[-1]
""",
            2,
            "w = 1, ahead = 1",
        ),
        "in the order in which they are ready": (
            """
def epoch_ms(load_ms, step_ms, w, ahead):
    prepared, end = [], 0
    for i, load in enumerate(load_ms):
        prepared.append((prepared[i - w] if i >= w else 0) + load)
    for ready in sorted(prepared):
        end = max(ready, end) + step_ms
    return end
""",
            2,
            "waits for those before it",
        ),
    },
}
