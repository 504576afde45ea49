"""Plausible wrong answers to the exercises of chapter 03; helpers/exercises.py has the form."""

WRONG = r"""
## sum-or-max
# always the maximum (0): Python waits for the
a, b, c, d, e, f = 6, 6, 5, 5, 7, 7
# always the sum (0): Nothing makes Python wait before both have their work
a, b, c, d, e, f = 10, 10, 10, 10, 10, 10
# a scheduler (2): waits, needed or not
a, b, c, d, e, f = 6, 10, 10, 5, 7, 7
# every item costs (2): Both devices have their product before
a, b, c, d, e, f = 6, 10, 10, 10, 10, 7

## at-once
# neighbours only (0): The first and the third do not meet
def most_at_once(spans):
    pairs = zip(spans, spans[1:])
    return 1 + sum(a.end > b.start for a, b in pairs)
# touching counts (1): A span that ends when the next one starts is over
def most_at_once(spans):
    return max((sum(a.start <= b.start <= a.end for a in spans) for b in spans), default=0)
# the most that one span meets (1): expected 2, got 3
def most_at_once(spans):
    return max((sum(a.start < b.end and b.start < a.end for a in spans) for b in spans), default=0)
# no spans (2): ValueError
def most_at_once(spans):
    return max(sum(a.start <= b.start < a.end for a in spans) for b in spans)
# all of them (0): do not meet
def most_at_once(spans):
    return len(spans)

## stopwatch
# another clock (0): Does `clock()` tell both times?
def stopwatch(work):
    work()
    return 1.0
# the hasty one (0): waits for the current one
stopwatch = hasty_stopwatch
# leftovers are counted (2): Wait for all devices before the clock starts, too
-     wait_for_all()
-     start
+     start
# the last device only (1): in products: expected 9, got 1
-     work()
-     wait_for_all()
+     work()
+     torch.vgpu.synchronize(torch.vgpu.device_count() - 1)
# no wait (0): in products: expected 9, got 0
- torch.vgpu.synchronize(i)
+ pass

## devices-worth
# rounded down (1): One more device still helps
def devices_worth(t_comp, t_launch, available):
    return min(available, max(1, int(t_comp / t_launch)))
# one more than the ratio (2): The last device brings nothing
def devices_worth(t_comp, t_launch, available):
    return min(available, int(t_comp / t_launch) + 1)
# no bounds (1): There are only 4
def devices_worth(t_comp, t_launch, available):
    return -(-t_comp // t_launch)
# all of them (0): one device is enough
def devices_worth(t_comp, t_launch, available):
    return available

## mend-flaws
# nothing mended (1): not needed yet?
fast_program = slow_program
# the order only (3): Do the devices have work while the host
-         b =
+         write_log(i)
+         b =
-         write_log(i)  # while the devices work
+         means[-1] = means[-1].item()
- mean.item() for
+ mean for
# numbers read late, in the old order (2): Does the first device wait for b
-         a = chain(x_gpu1)
-         both = b.to(x_gpu1.device) + 1
+         both = b.to(x_gpu1.device) + 1
+         a = chain(x_gpu1)
# the numbers stay on the device (0): a list of numbers was expected, got a list of tensors
- mean.item() for
+ mean for
# the log is lost (0): Each step writes its line once
- write_log(i)

## schedule
# list scheduling (3): end of micro_batches: expected 14, got 18
def best_order(program):
    numbers = range(len(program))

    def depends(i, j):
        a, b = program[i], program[j]
        both = set(a.writes) & set(b.reads + b.writes) | set(a.reads) & set(b.writes)
        return i < j and bool(both)

    path = {}
    for i in reversed(numbers):
        behind = [path[j] for j in numbers if depends(i, j)]
        path[i] = program[i].time + max(behind, default=0)
    order, free = [], dict.fromkeys(range(8), 0)
    while len(order) < len(program):
        rest = [i for i in numbers if i not in order]
        ready = [j for j in rest if not any(depends(i, j) for i in rest)]
        start = {i: max(free[queue] for queue in program[i].queues) for i in ready}
        chosen = min(ready, key=lambda i: (start[i], -path[i]))
        free.update(dict.fromkeys(program[chosen].queues, start[chosen] + program[chosen].time))
        order.append(chosen)
    return order
# the order of the program (1): end of three_lines: expected 7, got 13
def best_order(program):
    return list(range(len(program)))
# what can start first (1): end of long_tail: expected 12, got 18
= list scheduling
- (start[i], -path[i])
+ start[i]
# reads only (0): because of w
= list scheduling
- set(b.reads + b.writes) | set(a.reads) & set(b.writes)
+ set(b.reads)
# kernels before copies (0): has to stay behind
def best_order(program):
    return sorted(range(len(program)), key=lambda i: len(program[i].queues))
"""
