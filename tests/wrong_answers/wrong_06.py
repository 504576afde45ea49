"""Plausible wrong answers to the exercises of chapter 06: source, points, a part of the message."""

REMEMBERS = "mean_on_one, mean_on_four, variance_on_four = %s, %s, %s"
LINKS = "N, B, outputs = 22_640, %s, %s\nout_of_0, into_0, held_by_0 = %s, %s, %s"
SIXTEEN = """
same_batch, large_batch, rate = %s, %s, %s

def best_k(T_1, copy_seconds):
    root = (T_1 / copy_seconds / 2) ** 0.5
    return %s
"""

WITH_LOSS = """
class WithLoss(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, X, y):
        return F.cross_entropy(self.net(X), y, reduction="%s").view(1)

def step(net, X, y, devices):
    loss = nn.DataParallel(WithLoss(net), devices)(X, y)%s
    loss.backward()
    return loss.detach()
"""

NORM = """
def norm_of_all(parts):
    b, home = sum(len(part) for part in parts), parts[0].device
    mean = %s
    centred = [part - mean.to(part.device) for part in parts]
    variance = %s
    scale = (variance + 1e-5).rsqrt()
    return [part * scale.to(part.device) for part in centred]
"""
MEAN = "sum(part.sum(0).to(home) for part in parts) / b"
VARIANCE = "sum(part.square().sum(0).to(home) for part in centred) / b"
TWICE = "sum((part - mean.to(part.device)).square().sum(0).to(home) for part in parts) / b"

WRONG = {
    "what-it-remembers": {
        "the same as on one device": (
            REMEMBERS % (1.425, 1.425, 1.425),
            1,
            "Whose running mean is kept?",
        ),
        "one pass": (
            REMEMBERS % (0.75, 0.15, 0.9 + 0.5 / 3),
            0,
            "That is the mean after one pass",
        ),
        "the biased variance": (
            REMEMBERS % (1.425, 0.285, 0.81 + 0.19 * 1.25),
            2,
            "The denominator is 3",
        ),
        "all devices update the mean": (
            REMEMBERS % (7.5, 1.5 * (1 - 0.9**8), 0.19 * 5 / 3),
            0,
            "Each replica starts from the running mean of the network",
        ),
    },
    "links-of-0": {
        "parameters only": (
            LINKS % (408, 640, "3 * N", "3 * N + 3 * outputs", "2 * N + B"),
            2,
            "What else does a replica need",
        ),
        "no gradients": (
            LINKS % (408, 640, "3 * (N + B + outputs)", "3 * N + 3 * outputs", "N"),
            2,
            "What has the backward pass left?",
        ),
        "no buffers": (
            LINKS % (0, 640, "3 * (N + outputs)", "3 * (N + outputs)", "2 * N"),
            1,
            "Buffers are copied, too",
        ),
        "no outputs": (
            LINKS % (408, 640, "3 * (N + B)", "3 * N", "2 * N + B"),
            1,
            "is needed where the output was computed",
        ),
        "one other device": (
            LINKS % (408, 640, "N + B + outputs", "N + outputs", "N + B"),
            0,
            "There are three other devices",
        ),
        "the gradients of buffers": (
            LINKS % (408, 640, *["3 * (N + B + outputs)"] * 2, "2 * N + 2 * B"),
            1,
            "so nothing comes back for them",
        ),
        "four copies": (
            LINKS % (408, 640, "4 * (N + B + outputs)", "4 * (N + outputs)", "3 * N + B"),
            0,
            "Device 0 sends nothing to itself",
        ),
    },
    "sixteen-gpus": {
        "one way": (
            SIXTEEN
            % ("235 * (3.25e-3 + 15 * 2.84e-3)", "15 * (52e-3 + 15 * 2.84e-3)", 1.6, "round(root)"),
            1,
            "The network goes out and the gradients come back",
        ),
        "no copies, the square-root rule": (
            SIXTEEN % ("12.22 / 16", "12.22 / 16", 0.4, "max(1, int(root))"),
            0,
            "The copies are missing",
        ),
        "the same step for the larger batch": (
            SIXTEEN % ("235 * 0.08845", "15 * 0.08845", 0.1, "max(1, round(root))"),
            1,
            "Each device has 256 images",
        ),
        "the same number of steps": (
            SIXTEEN % ("235 * 0.08845", "235 * 0.1372", 1.6, "root"),
            2,
            "A larger batch takes fewer steps",
        ),
        "rounded": (
            SIXTEEN % ("235 * 0.08845", "15 * 0.1372", 1.6, "max(1, round(root))"),
            3,
            "the better neighbour of that is not always the nearer one",
        ),
    },
    "fair-parts": {
        "equal parts": (
            "def fair_parts(b, seconds, fixed):\n"
            "    return [b // len(seconds) + (i < b % len(seconds)) for i in range(len(seconds))]",
            0,
            "Equal parts wait for the slowest device",
        ),
        "rounded down, the rest to the last": (
            """
def fair_parts(b, seconds, fixed):
    speed = sum(1 / t for t in seconds)
    parts = [int(b / t / speed + 1e-9) for t in seconds]
    parts[-1] += b - sum(parts)
    return parts
""",
            1,
            "Rounding is not enough",
        ),
        "an example is lost": (
            """
def fair_parts(b, seconds, fixed):
    speed = sum(1 / t for t in seconds)
    return [round(b / t / speed - 0.1) for t in seconds]
""",
            1,
            "No example may be lost or added",
        ),
        "fixed times left out": (
            """
def fair_parts(b, seconds, fixed):
    parts = [0] * len(seconds)
    for _ in range(b):
        ends = [t * (n + 1) for n, t in zip(parts, seconds)]
        parts[ends.index(min(ends))] += 1
    return parts
""",
            2,
            "only if it gets an example",
        ),
        "in proportion to the seconds": (
            "def fair_parts(b, seconds, fixed):\n"
            "    parts = [int(b * t / sum(seconds)) for t in seconds]\n"
            "    return [parts[0] + b - sum(parts), *parts[1:]]",
            0,
            "A device that is faster should not get fewer",
        ),
    },
    "device-0-is-full": {
        "as it was": ("step = gathered_step", 2, "OutOfMemoryError"),
        "a mean of means": (WITH_LOSS % ("mean", ".mean()"), 3, "the weight 1/b"),
        "a sum of means": (WITH_LOSS % ("mean", ".sum()"), 0, "The means of the parts were added"),
        "a sum": (WITH_LOSS % ("sum", ".sum()"), 0, "the sum over the examples, not the mean"),
        "the gradients of before are lost": (
            WITH_LOSS.replace("    loss.back", "    net.zero_grad()\n    loss.back")
            % ("sum", ".sum() / len(X)"),
            3,
            "Add to the gradients that are there",
        ),
        "one device does it all": (
            "def step(net, X, y, devices):\n"
            "    loss = F.cross_entropy(net(X.to(devices[0])), y.to(devices[0]))\n"
            "    loss.backward()\n    return loss.detach()",
            2,
            "OutOfMemoryError",
        ),
    },
    "norm-of-all": {
        "each part by itself": (
            "def norm_of_all(parts):\n"
            "    return [F.batch_norm(part, None, None, training=True) for part in parts]",
            0,
            "Those are the part's own statistics",
        ),
        "a mean of means": (
            NORM
            % (
                "sum(part.mean(0).to(home) for part in parts) / len(parts)",
                VARIANCE,
            ),
            4,
            "A mean of means gives",
        ),
        "the squares of the numbers": (
            NORM
            % (
                MEAN,
                "sum(part.square().sum(0).to(home) for part in parts) / b - mean**2",
            ),
            4,
            "First the mean, then the squares",
        ),
        "the mean is sent twice": (NORM % (MEAN, TWICE), 4, "once there and once back"),
        "statistics without a gradient": (
            NORM % (f"({MEAN}).detach()", f"({VARIANCE}).detach()"),
            4,
            "So do not detach them",
        ),
        "all examples on one device": (
            """
def norm_of_all(parts):
    X = torch.cat([part.to(parts[0].device) for part in parts])
    X = F.batch_norm(X, None, None, training=True)
    pieces = X.split([len(part) for part in parts])
    return [piece.to(part.device) for piece, part in zip(pieces, parts)]
""",
            4,
            "Send sums over examples",
        ),
        "the unbiased variance": (
            NORM % (MEAN, VARIANCE.removesuffix("b") + "(b - 1)"),
            0,
            "The variance is the biased one",
        ),
    },
}
