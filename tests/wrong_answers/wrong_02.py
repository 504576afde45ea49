"""Plausible wrong answers to the exercises of chapter 02; helpers/exercises.py has the form."""

WRONG = r"""
## who-waits
# whatever is compared (2): Who needs a value on the host
waiting = "abcegjk"
# non_blocking is enough (2): Which copies lack non_blocking=True
waiting = "acegk"
# every copy (2): Which lines copy at all?
waiting = "acegijkl"
# all (0): Whose result has a shape
waiting = "abcdefghijkl"
# none (0): Who needs a value
waiting = ""

## predict-clock
# Python's time (3): The device needs longer
large, large_waiting, small, smallest_t_2 = 8000, 183_000, 8000, 8
# milliseconds (1): Give microseconds
large, large_waiting, small, smallest_t_2 = 175, 183, 8, 8
# launches are always hidden (1): so no launch is hidden
large, large_waiting, small, smallest_t_2 = 175_000, 175_000, 3000, 9
# never hidden (2): the device computes while Python launches
large, large_waiting, small, smallest_t_2 = 183_000, 183_000, 11_000, 8
# d2l's formula everywhere (2): who launches the next one?
large, large_waiting, small, smallest_t_2 = 175_008, 183_000, 3008, 1

## mend-waits
# nothing mended (1): expected at most 10, got 60
train = waiting_train
# copies that block (1): expected at most 10, got 21
- X, y = X.to(device, non_blocking=True), y.to(device, non_blocking=True)
+ X, y = X.to(device), y.to(device)
# a loss is read in each step (2): expected at most 1, got 10
- torch.zeros((), device=device)
+ 0
- (r**2).sum() / chosen.sum()
+ ((r**2).sum() / chosen.sum()).item()
- total.item() /
+ total /
# the error is lost (3): expected a ValueError
-     if mean != mean:
-         raise ValueError("a loss is NaN")
# a mean over everyone (0): mean loss: expected
- total += (r**2).sum() / chosen.sum()
+ total += (r**2).sum() / len(y)
-     if mean != mean:
-         raise ValueError("a loss is NaN")
# the mean stays on the device (0): mean loss: a number was expected, got a tensor
- total.item() /
+ total /

## failing-step
# a wait after each (1): One wait can tell for many steps
def failing_step(steps):
    for i, step in enumerate(steps):
        step()
        if fails():
            return i
# a wait after each eight (1): expected at most 7, got 1
def failing_step(steps):
    for i in range(0, len(steps), 8):
        for step in steps[i : i + 8]:
            step()
        if fails():
            for j in range(i, i + 8):
                steps[j]()
                if fails():
                    return j
# no wait (0): nobody asked whether step 0 had failed
def failing_step(steps):
    for i, step in enumerate(steps):
        try:
            step()
        except torch.AcceleratorError:
            return i
    return len(steps) - 1
# counted from 1 (0): Steps are counted from 0 on
def failing_step(steps):
    first, behind = 0, len(steps)
    while behind - first > 1:
        middle = (first + behind) // 2
        [step() for step in steps[first:middle]]
        first, behind = (first, middle) if fails() else (middle, behind)
    return behind

## one-late
# at once (1): Show a loss behind the launch of the next
one_late = at_once
# item (2): got 8
- copied.synchronize()
+ pass
- loss.to("cpu", non_blocking=True)
+ loss
# a wait for everything (2): and wait for that copy only
- copied.synchronize()
+ accel.synchronize(device)
# no wait (1): Has the copy of a loss arrived
- copied.synchronize()

## async-clock
# no launch is hidden (0): The time of the host is wrong
def end_times(program, t_launch, room=None):
    now = 0
    for what, *numbers in program:
        now += t_launch + numbers[0] if what == "launch" else 0
        now += numbers[0] if what == "python" else 0
    return now, now
# the device never waits for a launch (1): The time of the device is wrong
- max(now, ends[-1] if ends else 0) + numbers[0]
+ (ends[-1] if ends else now) + numbers[0]
- now = max(now, ends[-room])
+ pass
# waiting for everything (3): Event 0 stands behind the first kernel
- events[numbers[0]]
+ ends[-1]
# back in time (3): The time of the host is wrong
- max(now, events[numbers[0]])
+ events[numbers[0]]
# no end of the queue (4): `room` launches older has ended
- now = max(now, ends[-room])
+ pass
"""
