"""Plausible wrong answers to the exercises of chapter 14; helpers/exercises.py has the form."""

WRONG = r"""
## how-many-workers
# rounded down (0): expected 2, got 1
def how_many_workers(load_us, b, step_us):
    return load_us * b // step_us
# one image (0): more than a step. Round up
def how_many_workers(load_us, b, step_us):
    return -(-load_us // step_us)
# a part of a worker (0): A worker cannot be divided
def how_many_workers(load_us, b, step_us):
    return load_us * b / step_us
# always one more (1): so two workers keep up
def how_many_workers(load_us, b, step_us):
    return load_us * b // step_us + 1

## keep-the-label
# a task that does not exist (0): keeps['arrows'] should be a list of names, got None
keeps = {"arrow": ["upside down"], "fruit": "mirror", "spots": []}
# a mirror for every task (2): right becomes left
- "arrows": [
+ "arrows": [
+         "mirror",
# colours and borders forgotten (1): ripe becomes green
- }
+ }
+ keeps |= {"fruit": [*changes], "spots": [*changes]}
# upside down is never allowed (0): Another change keeps the label of every image
- }
+ }
+ keeps = {task: [n for n in v if n != "upside down"] for task, v in keeps.items()}
# a name that is not there (2): choose among mirror
- }
+ }
+ keeps["spots"] = ["rotation"]
# one task (1): keeps['fruit'] should be a list of names
- }
+ }
+ keeps = {"arrows": keeps["arrows"]}

## predict-bytes
# one device (0): That is what one device gets
as_float, as_bytes, as_rows = 786_944, 197_120, 512
# everything to everyone (0): not the whole of it
as_float, as_bytes, as_rows = 12_591_104, 3_153_920, 8_192
# without labels (1): The labels travel, too
as_float, as_bytes, as_rows = 3_145_728, 786_432, 2_048
# floats of one byte, rows and labels (1): has four bytes
as_float, as_bytes, as_rows = 788_480, 788_480, 4_096

## fair-comparison
# accuracies without the network (0): expected a tuple (net, accuracy, accuracy)
def comparison(train, test, augment, num_epochs, seed):
    torch.manual_seed(seed)
    net = make_net()
    return {"not augmented": shares(net, *train), "augmented": shares(net, *test)}
# the broken one (0): images more than in training
comparison = broken_comparison
# one network for both (1): The second run goes on where the first ended
-         torch.manual_seed(seed)
-         net = make_net()
+
-     results = {}
+     results = {}
+     torch.manual_seed(seed)
+     net = make_net()
# one generator for both (3): the runs differ
- results = {}
+ results, generator = {}, torch.Generator().manual_seed(seed)
- torch.randperm(len(train[0]))
+ torch.randperm(len(train[0]), generator=generator)
# the default generator (3): depend on what it draws
-         orders = [torch.randperm(len(train[0])) for _ in range(num_epochs)]
+
- for order in orders
+ for _ in range(num_epochs)
- *train, order, change
+ *train, torch.randperm(len(train[0])), change
# tested on changed images (2): 200 images more than in training
- shares(net, *test)
+ shares(net, change(test[0]) if change else test[0], test[1])
# another rate (3): Is it a step of SGD with the rate 0.2?
- lr=0.2
+ lr=0.1
# no seed (2): the network is the one that make_net gives
- torch.manual_seed(seed)
+ generator = torch.Generator().manual_seed(seed)
- torch.randperm(len(train[0]))
+ torch.randperm(len(train[0]), generator=generator)

## set-seeds
# the broken one (1): torch.manual_seed gives all devices the same seed
set_seeds = broken_seeds
# seed plus number of the device (2): draws what device 0 draws with the next seed
def set_seeds(seed, devices):
    torch.manual_seed(seed)
    for i, device in enumerate(devices):
        accel.default_generators[device.index].manual_seed(seed + i)
# seed times number of the device (2): different draws: 8 seeds, 4 devices
= seed plus number of the device
- seed + i
+ seed * i
# the devices only (2): Seed the CPU with `seed` itself
def set_seeds(seed, devices):
    for i, device in enumerate(devices):
        accel.default_generators[device.index].manual_seed(1000 * (i + 1) + seed)
# the CPU last, which seeds all devices (1): torch.manual_seed gives all devices the same seed
def set_seeds(seed, devices):
    for i, device in enumerate(devices):
        accel.default_generators[device.index].manual_seed(1000 * (i + 1) + seed)
    torch.manual_seed(seed)
# chance (2): depends on `seed` only
def set_seeds(seed, devices):
    torch.manual_seed(seed)
    for device in devices:
        accel.default_generators[device.index].seed()

## at-once
# one by one (2): Which operators return a whole batch?
at_once = one_by_one
# not in place (3): a second tensor as large as the batch
- result.mul_(factor.view(b, c, 1, 1))
+ (result * factor.view(b, c, 1, 1))
# the padding forgotten (0): wrong 0 of 2  the same result
- rows, columns = rows.clamp(0, h - 1), columns.clamp(0, w - 1)
# not mirrored (0): Nothing is mirrored
- torch.where(mirrored.view(b, 1, 1, 1), w - 1 - columns, columns)
+ columns
# shifted, then mirrored (0): mirrored before it is shifted
- rows, columns = rows.clamp(0, h - 1), columns.clamp(0, w - 1)
+
- w - 1 - columns, columns)
+ columns.flip(3), columns)
+     rows, columns = rows.clamp(0, h - 1), columns.clamp(0, w - 1)
# X overwritten (0): X must stay as it is
def at_once(X, mirrored, top, left, factor, reach=4):
    return X.copy_(one_by_one(X, mirrored, top, left, factor, reach))
# image by image (0): As many as for 4 images
def at_once(X, *changes):
    return torch.cat(
        [one_by_one(X[i : i + 1], *(x[i : i + 1] for x in changes)) for i in range(len(X))]
    )

## epoch-ms
# the slower side (0): are prepared at 180 ms
def epoch_ms(load_ms, step_ms, w, ahead):
    return max(sum(load_ms) / w, step_ms * len(load_ms))
# no overlap (0): While the devices take a step
def epoch_ms(load_ms, step_ms, w, ahead):
    return sum(load_ms) / w + step_ms * len(load_ms)
# workers never wait (3): begins batch i when it has been asked for
def epoch_ms(load_ms, step_ms, w, ahead):
    prepared, end = [], 0
    for i, load in enumerate(load_ms):
        prepared.append((prepared[i - w] if i >= w else 0) + load)
        end = max(prepared[i], end) + step_ms
    return end
# asked when the step has ended (2): w = 1, ahead = 1
def epoch_ms(load_ms, step_ms, w, ahead):
    prepared, ends = [], []
    for i, load in enumerate(load_ms):
        asked = ends[i - w * ahead] if i >= w * ahead else 0
        prepared.append(max(asked, prepared[i - w] if i >= w else 0) + load)
        ends.append(max(prepared[i], ends[i - 1] if i else 0) + step_ms)
    return ends[-1]
# in the order in which they are ready (2): waits for those before it
= workers never wait
-         end = max(prepared[i], end) + step_ms
+     for ready in sorted(prepared):
+         end = max(ready, end) + step_ms
"""
