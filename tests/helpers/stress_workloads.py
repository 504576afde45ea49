"""What `stress.py` interrupts: programs on two devices, each a step that is repeated for ever.

A workload is a function of `accel`, which is `torch.vgpu`, two devices and a seeded
`random.Random`, which draws sizes, so that new shapes come each round. It returns `step` and
`verify`. An interrupt may end `step` anywhere; a step that is not interrupted asserts what it
computed. `verify` is called after the interrupt and asserts that nothing was left half done.
"""

import contextlib
import threading

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

MEMORY = 64 * 2**20  # bytes of a device


def nothing():
    pass


def operators(accel, devices, random):
    """Operators in a loop: new tensors, in place, views, other shapes, `out=`, lists."""
    n = random.randrange(4, 64)
    ticks = [torch.zeros(n, n, device=device) for device in devices]
    shaped = [torch.ones(n, n + 1, device=device) for device in devices]
    outs = [torch.empty(0, device=device) for device in devices]
    done = [0, 0]

    def step():
        for i, (tick, shape, out) in enumerate(zip(ticks, shaped, outs, strict=True)):
            tick.add_(1)
            done[i] += 1
            x = torch.ones_like(tick) * 2 + 1
            x.t()[1:, ::2].mul_(2)
            torch.mm(x, tick, out=out)
            out.resize_(0)
            shape.t_()
            shape.resize_(n, n).fill_(1)
            shape.resize_(n, n + 1)
            a, b = torch.cat([x, x.view(-1).view(n, n)]).chunk(2)
            torch._foreach_add_([a, b], 1)
            F.softmax(a - b, dim=0).sum(dim=1)

    def verify():
        for tick, shape, out, count in zip(ticks, shaped, outs, done, strict=True):
            values = tick.cpu().unique().tolist()
            assert values in ([count], [count + 1]), f"{values} after {count} times add_(1)"
            for each in (shape, out):
                assert each.cpu().shape == each.shape

    return step, verify


def copies(accel, devices, random):
    """Copies between the devices, to the CPU and from it, pinned and pageable."""
    a, b = random.sample(devices, 2)
    source = torch.arange(random.choice((1, 100, 10_000, 300_000)), dtype=torch.float32)
    pinned = source.pin_memory()

    def step():
        there = pinned.to(a, non_blocking=True)
        across = there.to(b, non_blocking=True)
        back = across.to("cpu", non_blocking=True)
        accel.synchronize(b)
        assert torch.equal(back, source)
        pageable = source.to(b)
        into = torch.empty_like(there)
        into.copy_(pageable, non_blocking=True)
        host = torch.empty_like(source).pin_memory()
        host.copy_(into, non_blocking=True)
        accel.current_stream(a).synchronize()
        assert torch.equal(host, source)
        assert torch.equal(into.cpu(), source)

    return step, nothing


def streams(accel, devices, random):
    """Side streams and events: what waits for what, from the host and from streams."""
    a, b = random.sample(devices, 2)
    n = random.randrange(4, 128)
    side = accel.Stream(a)

    def step():
        main = accel.current_stream(a)
        begin, end = accel.Event(enable_timing=True), accel.Event(enable_timing=True)
        x = torch.ones(n, n, device=a)
        begin.record(main)
        side.wait_stream(main)
        with accel.stream(side):
            y = x @ x
            x.record_stream(side)
            end.record(side)
        event = side.record_event()
        main.wait_event(event)
        y.record_stream(main)
        z = y.to(b, non_blocking=True)
        with accel.device(b):
            accel.current_stream().wait_event(event)
            z.add_(1)
        end.synchronize()
        assert event.query() and begin.elapsed_time(end) >= 0
        side.synchronize()
        accel.synchronize(b)
        assert z.min().item() == z.max().item() == n + 1

    return step, nothing


def memory(accel, devices, random):
    """Memory allocated and freed under a limit, and asked for when there is no more."""

    def step():
        for device in devices:
            kept = []
            with contextlib.suppress(torch.OutOfMemoryError):
                for _ in range(100):
                    kept.append(torch.empty(random.randrange(2**20), device=device))
            kept = [each.add_(1) for each in kept[::2]]
            with contextlib.suppress(torch.OutOfMemoryError):
                torch.empty(2 * MEMORY, dtype=torch.uint8, device=device)

    return step, nothing


def training(accel, devices, random):
    """A training loop on one device, or with `nn.DataParallel` on two."""
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(36, 10)
    ).to(devices[0])
    if random.random() < 0.6:
        net = nn.DataParallel(net, device_ids=devices)
    x = torch.rand(random.randrange(4, 32), 1, 8, 8, device=devices[0])
    y = torch.arange(len(x), device=x.device) % 10
    if random.random() < 0.5:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    else:
        optimizer = torch.optim.Adam(net.parameters(), lr=0.001)

    def step():
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()

    def verify():
        assert net(x).isfinite().all().item()

    return step, verify


def waiting(accel, devices, random):
    """The host waits for a long kernel."""
    device = random.choice(devices)
    x = torch.ones(3, device=device)

    def step():
        with accel.device(device):
            accel._sleep(0.05)
        assert x.sum().item() == 3

    return step, nothing


def random_numbers(accel, devices, random):
    """Random numbers, dropout, and a DataLoader that pins its batches."""
    n = random.randrange(2, 40)
    data = TensorDataset(torch.arange(4.0 * n).reshape(n, 4))
    loader = DataLoader(data, batch_size=4, shuffle=True, pin_memory=True)

    def step():
        torch.manual_seed(n)
        for device in devices:
            x = torch.rand(n, n, device=device)
            F.dropout(x, 0.3).add_(torch.randn(n, n, device=device))
            assert torch.randperm(n, device=device).sum().item() == n * (n - 1) // 2
        for (batch,) in loader:
            assert (batch.to(devices[0], non_blocking=True) >= 0).all().item()

    return step, nothing


def threads(accel, devices, random):
    """Threads that issue, wait and fail while the main thread, interrupted, does the same."""
    a, b = random.sample(devices, 2)
    n = random.randrange(4, 64)
    expected = (torch.AcceleratorError, torch.OutOfMemoryError, IndexError)
    stop, unexpected = threading.Event(), []

    def issue():
        x = torch.ones(n, n, device=a)
        for _ in range(20):
            x = (x @ x).tanh().to(b).to(a)

    def wait():
        assert torch.ones(n, device=b).sum().item() == n
        accel.synchronize(a)

    def fail():
        torch.embedding(torch.ones(3, 4, device=a), torch.tensor([7]).to(a)).sum().item()

    def fill():
        torch.empty(2 * MEMORY, dtype=torch.uint8, device=b)

    def repeat(work):
        while not stop.is_set():
            try:
                work()
            except expected:
                pass
            except BaseException as error:
                unexpected.append(f"{work.__name__}: {type(error).__name__}: {error}")
                return

    running = [threading.Thread(target=repeat, args=[work]) for work in (issue, wait, fail, fill)]
    for thread in running:
        thread.start()

    def step():
        for work in (issue, wait, fail, fill):
            with contextlib.suppress(*expected):
                work()

    def verify():
        stop.set()
        for thread in running:
            thread.join()
        for device in devices:
            with contextlib.suppress(*expected):  # what failed and was not reported yet
                accel.synchronize(device)
        assert not unexpected, unexpected

    return step, verify


WORKLOADS = {
    each.__name__: each
    for each in (operators, copies, streams, memory, training, waiting, random_numbers, threads)
}
