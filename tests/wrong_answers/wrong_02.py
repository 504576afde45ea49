"""Plausible wrong answers to the exercises of chapter 02: source, points, a part of the message."""

TRAIN = """
def train(w, batches, lr=0.05):
    total = torch.zeros((), device=device)
    for X, y in batches:
        X, y = X.to(device%s), y.to(device%s)
        chosen = (y > 0).float()
        r = (X @ w - y) * chosen
        total += (r**2).sum() / %s
        w = w - lr * 2 / chosen.sum() * (X.t() @ r)
    mean = %s
%s    return w, mean
"""
CHECK = """\
    if mean != mean:
        raise ValueError("a loss is NaN")
"""
FREE = ", non_blocking=True"

LATE = """
def one_late(step, show, num_steps):
    last = None
    for i in range(num_steps):
        loss = step(i)
        %s
        if i:
            %s
            show(i - 1, last.item())
        last = value
    accel.synchronize(device)
    show(num_steps - 1, last.item())
"""

CLOCK = """
def end_times(program, t_launch, room=None):
    now, ends, events = 0, [], []
    for what, *numbers in program:
        if what == "launch":
%s
            now += t_launch
            ends.append(%s + numbers[0])
        elif what == "python":
            now += numbers[0]
        elif what == "record":
            events.append(ends[-1] if ends else 0)
        elif what == "wait":
            now = %s
        else:
            now = max(now, ends[-1] if ends else 0)
    return now, ends[-1] if ends else 0
"""
NO_ROOM = "            pass"
ROOM = """\
            if room and len(ends) >= room:
                now = max(now, ends[-room])"""

WRONG = {
    "who-waits": {
        "whatever is compared": ('waiting = "abcegjk"', 2, "Who needs a value on the host"),
        "non_blocking is enough": ('waiting = "acegk"', 2, "Which copies lack non_blocking=True"),
        "every copy": ('waiting = "acegijkl"', 2, "Which lines copy at all?"),
        "all": ('waiting = "abcdefghijkl"', 0, "Whose result has a shape"),
        "none": ('waiting = ""', 0, "Who needs a value"),
    },
    "predict-clock": {
        "Python's time": (
            "large, large_waiting, small, smallest_t_2 = 8000, 183_000, 8000, 8",
            3,
            "The device needs longer",
        ),
        "milliseconds": (
            "large, large_waiting, small, smallest_t_2 = 175, 183, 8, 8",
            1,
            "Give microseconds",
        ),
        "launches are always hidden": (
            "large, large_waiting, small, smallest_t_2 = 175_000, 175_000, 3000, 9",
            1,
            "so no launch is hidden",
        ),
        "never hidden": (
            "large, large_waiting, small, smallest_t_2 = 183_000, 183_000, 11_000, 8",
            2,
            "the device computes while Python launches",
        ),
        "d2l's formula everywhere": (
            "large, large_waiting, small, smallest_t_2 = 175_008, 183_000, 3008, 1",
            2,
            "who launches the next one?",
        ),
    },
    "mend-waits": {
        "nothing mended": ("train = waiting_train", 1, "expected at most 10, got 60"),
        "copies that block": (
            TRAIN % ("", "", "chosen.sum()", "total.item() / len(batches)", CHECK),
            1,
            "expected at most 10, got 21",
        ),
        "a loss is read in each step": (
            (TRAIN % (FREE, FREE, "chosen.sum()", "total / len(batches)", CHECK))
            .replace("total = torch.zeros((), device=device)", "total = 0")
            .replace(
                "chosen.sum()\n        w", "chosen.sum()\n        total = total.item()\n        w"
            ),
            2,
            "expected at most 1, got 10",
        ),
        "the error is lost": (
            TRAIN % (FREE, FREE, "chosen.sum()", "total.item() / len(batches)", ""),
            3,
            "expected a ValueError",
        ),
        "a mean over everyone": (
            TRAIN % (FREE, FREE, "len(y)", "total.item() / len(batches)", CHECK),
            0,
            "mean loss: expected",
        ),
        "the mean stays on the device": (
            TRAIN % (FREE, FREE, "chosen.sum()", "total / len(batches)", CHECK),
            0,
            "mean loss: a number was expected, got a tensor",
        ),
    },
    "failing-step": {
        "a wait after each": (
            """
def failing_step(steps):
    for i, step in enumerate(steps):
        step()
        if fails():
            return i
""",
            1,
            "One wait can tell for many steps",
        ),
        "a wait after each eight": (
            """
def failing_step(steps):
    for i in range(0, len(steps), 8):
        for step in steps[i : i + 8]:
            step()
        if fails():
            for j in range(i, i + 8):
                steps[j]()
                if fails():
                    return j
""",
            1,
            "expected at most 7, got 1",
        ),
        "no wait": (
            """
def failing_step(steps):
    for i, step in enumerate(steps):
        try:
            step()
        except torch.AcceleratorError:
            return i
    return len(steps) - 1
""",
            0,
            "nobody asked whether step 0 had failed",
        ),
        "counted from 1": (
            """
def failing_step(steps):
    first, behind = 0, len(steps)
    while behind - first > 1:
        middle = (first + behind) // 2
        [step() for step in steps[first:middle]]
        first, behind = (first, middle) if fails() else (middle, behind)
    return behind
""",
            0,
            "Steps are counted from 0 on",
        ),
    },
    "one-late": {
        "at once": ("one_late = at_once", 1, "Show a loss behind the launch of the next"),
        "item": (
            LATE % ("value = loss", "pass"),
            2,
            "got 8",
        ),
        "a wait for everything": (
            LATE % ("value = loss.to('cpu', non_blocking=True)", "accel.synchronize(device)"),
            2,
            "and wait for that copy only",
        ),
        "no wait": (
            LATE % ("value = loss.to('cpu', non_blocking=True)", "pass"),
            1,
            "Has the copy of a loss arrived",
        ),
        "all at the end": (
            """
def one_late(step, show, num_steps):
    losses = [step(i) for i in range(num_steps)]
    for i, loss in enumerate(losses):
        show(i, loss.item())
""",
            1,
            "Show a loss behind the launch of the next",
        ),
    },
    "async-clock": {
        "no launch is hidden": (
            """
def end_times(program, t_launch, room=None):
    now = 0
    for what, *numbers in program:
        now += t_launch + numbers[0] if what == "launch" else 0
        now += numbers[0] if what == "python" else 0
    return now, now
""",
            0,
            "The time of the host is wrong",
        ),
        "the device never waits for a launch": (
            CLOCK % (NO_ROOM, "(ends[-1] if ends else now)", "max(now, events[numbers[0]])"),
            1,
            "The time of the device is wrong",
        ),
        "waiting for everything": (
            CLOCK % (ROOM, "max(now, ends[-1] if ends else 0)", "max(now, ends[-1])"),
            3,
            "Event 0 stands behind the first kernel",
        ),
        "back in time": (
            CLOCK % (ROOM, "max(now, ends[-1] if ends else 0)", "events[numbers[0]]"),
            3,
            "The time of the host is wrong",
        ),
        "no end of the queue": (
            CLOCK % (NO_ROOM, "max(now, ends[-1] if ends else 0)", "max(now, events[numbers[0]])"),
            4,
            "`room` launches older has ended",
        ),
    },
}
