"""The clock of modelled GPUs: schedules by hand, by formula, and against a naive simulation.

What `Naive` knows is compared with it only: kernels, copies, streams, events, waits of the host.
"""

import random
from collections import defaultdict
from functools import partialmethod
from types import SimpleNamespace

import fresh
import pytest
import torch
from gates import recorded
from modelling import BYTE_A_SECOND, fixed_gpus, room, schedule, sleep, times

from vgpu import Link, clock, host_takes, virtual_gpus
from vgpu.modelled import program_clock, simulation
from vgpu.runtime import engines, registry, scheduler

# -- kernels and streams


def test_ties_are_broken_by_device_and_stream_and_each_machine_has_its_own_switches():
    devices = fixed_gpus(6, link=BYTE_A_SECOND, gpus=3, gpus_per_switch=2, network=BYTE_A_SECOND)
    streams = [torch.vgpu.Stream(devices[0]) for _ in range(2)]
    with schedule() as found:
        for stream in streams[::-1]:
            sleep(devices[0], 1, stream)
        for device in devices[::-1]:
            room(3, device).copy_(room(3), non_blocking=True)
    assert times(found) == [(1, 2), (0, 1)] + [(0, 3), (3, 6), (0, 3)] * 2


def test_what_a_stream_waited_for_by_an_earlier_clock_holds_up_nothing():
    devices = fixed_gpus(2)
    sleep(devices[0], 10)
    torch.vgpu.current_stream(devices[1]).wait_stream(torch.vgpu.current_stream(devices[0]))
    fixed_gpus(2)
    with schedule() as found:
        sleep(devices[1], 1)
    assert times(found) == [(0, 1)]


# -- copies


def test_copies_through_the_host_take_the_link_to_the_cpu():
    devices = fixed_gpus(2, link=BYTE_A_SECOND, peer_link="pcie4-through-host-measured")
    x, y = (room(3, device) for device in devices)
    with schedule() as found:
        room(3).copy_(x, non_blocking=True)
        with torch.vgpu.stream(torch.vgpu.Stream(devices[0])):
            y.copy_(x, non_blocking=True)
    assert [start for start, _ in times(found)] == [0, 3]


def test_the_host_waits_for_pageable_memory_which_is_slower():
    (device,) = fixed_gpus(1, link=Link(4.0, 1.0, pageable=2.0))
    there = room(8, device)
    there.copy_(torch.zeros(8, dtype=torch.uint8), non_blocking=True)
    assert clock() == 5
    there.copy_(room(8))
    assert clock() == 8
    there.copy_(room(8), non_blocking=True)
    assert clock() == 8
    assert len(there.cpu()) == 8  # waits for the copy into it, too
    assert clock() == 8 + 3 + 5


@pytest.mark.parametrize(
    ("gpus", "cards", "copies"),
    [
        (2, 1, {(0, 2): (0, 7), (1, 4): (7, 14)}),  # out of one machine
        (2, 1, {(0, 4): (0, 7), (2, 5): (7, 14)}),  # into one
        (4, 2, {(0, 4): (0, 7), (1, 6): (7, 14)}),  # out of one card, into two
        (4, 2, {(0, 4): (0, 7), (2, 6): (0, 7)}),
    ],
)
def test_gpus_of_a_machine_share_its_network_and_neighbours_a_card(gpus, cards, copies):
    figures = {"gpus": gpus, "network": Link(0.5, 1.0), "network_cards": cards}
    devices = fixed_gpus(8, peer_link=BYTE_A_SECOND, **figures)
    here, there = ([room(3, device) for device in devices] for _ in range(2))
    with schedule() as found:
        for source, target in copies:
            there[target].copy_(here[source], non_blocking=True)
    assert times(found) == [*copies.values()]


# -- the host


def test_copies_into_new_memory_take_as_long_as_d2l_measured():
    """d2l 13.3: 50 matrices of 4000 x 4000 are copied from a V100 to the CPU in 2.3125 s."""
    number = 5  # of the 50
    (device,) = virtual_gpus(1, model="v100", values=False)
    x = torch.empty(4000, 4000, device=device)
    for _ in range(number):
        x.to("cpu")
    assert clock() == pytest.approx(2.3125 * number / 50, rel=0.05)
    (device,) = fixed_gpus(1)
    x = torch.empty(2**22, device=device)  # 16 MiB, of what the process has already
    x.to("cpu")
    assert clock() == 0


def test_a_stream_that_is_asked_again_and_again_is_done_in_the_end():
    (device,) = fixed_gpus(1, launch=0.5)
    stream, event = torch.vgpu.current_stream(device), torch.vgpu.Event()
    sleep(device, 2.25)  # from 0.5 to 2.75
    sleep(device, 0.25)  # to 3
    event.record(stream)
    polls = 0
    while not stream.query():
        polls += 1
    assert (polls, clock()) == (3, 3)
    assert event.query() and clock() == 3.5
    assert torch.vgpu.Event().query()
    (device,) = fixed_gpus(1)  # where nothing takes time but the question
    torch.ones(3, device=device)
    assert torch.vgpu.current_stream(device).query()
    assert clock() == program_clock.SECONDS_OF_A_READING


def test_elapsed_time_is_between_the_ends_of_what_came_before():
    devices = fixed_gpus(2)
    first, second, unrecorded = (torch.vgpu.Event(enable_timing=True) for _ in range(3))
    sleep(devices[0], 2)
    first.record(torch.vgpu.current_stream(devices[0]))
    sleep(devices[1], 5)
    second.record(torch.vgpu.current_stream(devices[1]))
    with pytest.raises(RuntimeError, match="not been reached yet"):
        first.elapsed_time(second)
    first.synchronize()
    assert clock() == 2
    with pytest.raises(RuntimeError, match="not been reached yet"):
        first.elapsed_time(second)
    second.synchronize()
    assert clock() == 5
    assert first.elapsed_time(second) == 3000
    sleep(devices[1], 3)
    second.record(torch.vgpu.current_stream(devices[1]))
    host_takes(4)  # for so long that the second is reached, though nobody has asked
    first.record(torch.vgpu.current_stream(devices[0]))
    assert second.elapsed_time(first) == 1000
    with pytest.raises(ValueError, match="recorded"):
        first.elapsed_time(unrecorded)


def test_an_event_that_is_recorded_again_is_of_the_clock_in_force():
    (device,) = virtual_gpus(1)
    start, end = (torch.vgpu.Event(enable_timing=True) for _ in range(2))
    start.record()
    fixed_gpus(1)
    start.record()
    sleep(device, 2)
    end.record()
    torch.vgpu.synchronize()
    assert start.elapsed_time(end) == 2000


def test_who_comes_when_another_thread_has_waited_for_room_goes_on():
    (device,) = fixed_gpus(1)
    for _ in range(scheduler.QUEUE_LIMIT + 1):
        sleep(device, 1e-3)
    arrived = clock()
    for _ in range(2):
        registry.find(device).compute.wait_for_room()
    assert clock() == arrived


def test_waits_of_the_host_and_of_streams_are_recorded():
    devices = fixed_gpus(2)
    stream = torch.vgpu.current_stream(devices[1])
    with recorded() as spans:
        sleep(devices[0], 3)
        event = torch.vgpu.current_stream(devices[0]).record_event()
        host_takes(1)
        for _ in range(2):  # the second time the event is reached
            stream.wait_event(event)
            sleep(devices[1], 1)
            stream.wait_stream(stream)
            torch.vgpu.synchronize(devices[1])
        room(1, devices[1]).to(devices[0])  # for which the stream that it goes to waits
        sleep(devices[0], 1)
    waits = [(op.device.index, op.engine, op.start, op.end) for op in spans if op.kind == "wait"]
    hosts = [(1, "host", 1, 4), (1, "host", 4, 5), (0, "host", 5, 6)]
    assert waits == [(1, "stream", 1, 3), *hosts[:2], (0, "stream", 5, 5), *hosts[2:]]


# -- a second, naive simulation


def test_a_host_alone_is_the_only_one_and_its_questions_start_no_thread(monkeypatch):
    """Neither the thread that simulates nor what it starts counts as a host."""
    (device,) = virtual_gpus(1, model="v100")
    x = torch.ones(4, device=device)
    assert x.sum().item() == 4
    started = []
    threads = SimpleNamespace(start_new_thread=lambda *arguments: started.append(arguments))
    monkeypatch.setattr(engines, "_thread", threads)
    assert [x.sum().item() for _ in range(3)] == [4] * 3
    torch.vgpu.synchronize(device)
    assert not started
    assert scheduler.clock.num_hosts == 1


class Naive:
    """Modelled GPUs, one second after the other: in each, ops end, the host goes on, ops start.

    It shares no code with `simulation.py`. An op starts when all that it needs is free and no op
    that became ready before it waits for one of these.
    """

    def __init__(self, launch, limit, per_machine, per_switch, over_link):
        self.launch, self.limit, self.over_link = launch, limit, over_link
        self.per_machine, self.per_switch = per_machine, per_switch
        self.now = 0
        self.ops = []
        self.last, self.told = {}, defaultdict(list)  # by stream
        self.events = []
        self.answers = []

    def run(self, program):
        host = self.host(program)
        until = next(host)
        while until or any(op["end"] is None for op in self.ops):
            if until and until():
                until = next(host, None)  # the host goes on in the same second
                continue
            self.start_what_can()
            self.now += 1

    def start_what_can(self):
        waiting = []
        for op in self.ops:
            if op["start"] is None and op["issued"] <= self.now:
                if all(self.ended(other) for other in op["after"]):
                    ready = max([op["issued"], *(other["end"] for other in op["after"])])
                    waiting.append((ready, op["issued"], op))
        taken = set()
        for op in self.ops:
            if op["start"] is not None and not self.ended(op):
                taken |= op["needs"]
        for *_, op in sorted(waiting, key=lambda each: each[:2]):
            if not taken & op["needs"]:
                op["start"], op["end"] = self.now, self.now + op["seconds"]
            taken |= op["needs"]

    def ended(self, op):
        return op["end"] is not None and op["end"] <= self.now

    def under_way(self, engine):
        return sum(op["engine"] == engine and not self.ended(op) for op in self.ops)

    def is_past(self, moment):
        return lambda: self.now >= moment

    def have_ended(self, ops):
        return lambda: all(map(self.ended, ops))

    def host(self, program):
        """Yield functions that tell whether the host can go on."""
        for name, *what in program:
            if name in ("kernel", "h2d", "d2h", "p2p"):
                yield from self.issue(name, *what)
            elif name == "wait_stream":
                waiting, other = what
                self.told[waiting] += self.tail(other)
            elif name == "record":
                self.events.append(self.tail(*what))
            elif name == "wait_event":
                stream, number = what
                self.told[stream] += self.events[number % len(self.events)] if self.events else []
            elif name == "synchronize":
                yield self.have_ended(self.tail(*what))
            elif name == "query":
                yield self.is_past(self.now + self.launch)
                self.answers.append(all(map(self.ended, self.tail(*what))))
            elif name == "host_takes":
                yield self.is_past(self.now + what[0])

    def tail(self, stream):
        return [op for op in (self.last.get(stream), *self.told[stream]) if op]

    def issue(self, name, stream, seconds, target=None, blocking=False):
        device, engine = stream[0], (name, stream[0])
        if self.under_way(engine) >= self.limit:
            yield lambda: self.under_way(engine) <= self.limit // 2
        issued = self.now + self.launch
        after = self.tail(stream)
        if target:
            after = after + self.tail(target)
        op = {"engine": engine, "needs": self.needs(name, device, target), "seconds": seconds}
        op |= {"issued": issued, "after": after, "start": None, "end": None}
        yield self.is_past(issued)
        self.ops.append(op)
        self.last[stream], self.told[stream] = op, []
        if target:
            self.told[target].append(op)
        if blocking:
            yield self.have_ended([op])

    def needs(self, name, device, target):
        machine, switch = self.place(device)
        needs = {(name, device)}
        if name == "h2d":
            needs |= {("down", device), ("down", machine, switch)}
        elif name == "d2h":
            needs |= {("up", device), ("up", machine, switch)}
        elif name == "p2p":
            other_machine, other_switch = self.place(target[0])
            up, down = ("up", "down") if self.over_link else ("out", "in")
            needs |= {(up, device), (down, target[0])}
            if machine != other_machine:
                needs |= {("network out", machine), ("network in", other_machine)}
            if self.over_link and (machine, switch) != (other_machine, other_switch):
                needs |= {("up", machine, switch), ("down", other_machine, other_switch)}
        return needs

    def place(self, device):
        machine, number = divmod(device, self.per_machine)
        return machine, number // self.per_switch


def random_program(rng, num_devices):
    """Return instructions; a stream is a pair of numbers, of its device and of itself."""
    streams = [(device, number) for device in range(num_devices) for number in range(3)]
    names = ["kernel"] * 6 + ["h2d", "d2h"] * 2 + ["wait_stream"] * 3 + ["record", "wait_event"]
    names += ["synchronize", "query", "host_takes"] + ["p2p"] * 4 * (num_devices > 1)
    program = []
    for _ in range(rng.randint(5, 40)):
        name, stream, seconds = rng.choice(names), rng.choice(streams), rng.randint(1, 9)
        if name == "kernel":
            program.append((name, stream, seconds))
        elif name in ("h2d", "d2h"):
            program.append((name, stream, seconds, None, rng.random() < 0.2))
        elif name == "p2p":
            others = [other for other in streams if other[0] != stream[0]]
            program.append((name, stream, seconds, rng.choice(others)))
        elif name == "wait_stream":
            program.append((name, stream, rng.choice(streams)))
        elif name == "wait_event":
            program.append((name, stream, rng.randint(0, 9)))
        elif name == "host_takes":
            program.append((name, seconds))
        else:
            program.append((name, stream))
    return program


class Player:
    def __init__(self, devices):
        self.memory = [room(16, device) for device in devices]
        self.streams = {}
        for device in devices:
            streams = [torch.vgpu.Stream(device) for _ in range(2)]
            for number, stream in enumerate([torch.vgpu.default_stream(device), *streams]):
                self.streams[device.index, number] = stream
        self.events, self.answers = [], []

    def run(self, program):
        for name, *what in program:
            getattr(self, name)(*what)

    def kernel(self, stream, seconds):
        sleep(stream[0], seconds, self.streams[stream])

    def copy(self, to_device, stream, seconds, target, blocking):
        ends = self.memory[stream[0]][:seconds], room(seconds)
        to, source = ends if to_device else ends[::-1]
        with torch.vgpu.stream(self.streams[stream]):
            to.copy_(source, non_blocking=not blocking)

    h2d, d2h = partialmethod(copy, True), partialmethod(copy, False)

    def p2p(self, stream, seconds, target):
        with torch.vgpu.stream(self.streams[stream]), torch.vgpu.stream(self.streams[target]):
            there, here = self.memory[target[0]], self.memory[stream[0]]
            there[:seconds].copy_(here[:seconds], non_blocking=True)

    def wait_stream(self, stream, other):
        self.streams[stream].wait_stream(self.streams[other])

    def record(self, stream):
        self.events.append(self.streams[stream].record_event())

    def wait_event(self, stream, number):
        if self.events:
            self.streams[stream].wait_event(self.events[number % len(self.events)])

    def synchronize(self, stream):
        self.streams[stream].synchronize()

    def query(self, stream):
        self.answers.append(self.streams[stream].query())

    def host_takes(self, seconds):
        host_takes(seconds)


@pytest.mark.parametrize("seed", range(10))
def test_random_programs_run_as_in_a_naive_simulation(seed, monkeypatch):
    rng = random.Random(seed)
    limit = rng.choice([4, 1024])
    for module in (scheduler, simulation):
        monkeypatch.setattr(module, "QUEUE_LIMIT", limit)
    for _ in range(25):
        num_devices, launch = rng.randint(1, 4), rng.randint(1, 3)
        over_link, per_switch = rng.random() < 0.5, rng.randint(1, 2)
        per_machine = rng.choice([None, 2, 3])
        program = random_program(rng, num_devices)
        naive = Naive(launch, limit, per_machine or num_devices, per_switch, over_link)
        naive.run(program)
        devices = fixed_gpus(
            num_devices,
            link=BYTE_A_SECOND,
            peer_link=None if over_link else Link(1.0, name="another"),
            launch=launch,
            gpus=per_machine,
            gpus_per_switch=per_switch,
            network=Link(1.0, name="network"),
        )
        player = Player(devices)
        with recorded() as spans:
            player.run(program)
        found = [
            (op.engine, op.device.index, op.issued, op.start, op.end)
            for op in sorted(spans, key=lambda op: op.issued)
            if op.kind != "wait"
        ]
        expected = [
            (op["engine"][0].replace("kernel", "compute"), op["engine"][1])
            + (op["issued"], op["start"], op["end"])
            for op in naive.ops
        ]
        assert found == expected, program
        assert player.answers == naive.answers, program


# -- threads that die


DEATH = """
import threading, torch, d2lpar
from vgpu.runtime import scheduler
from vgpu.modelled import simulation

def fail(*_):
    raise ZeroDivisionError("on purpose")

def attempt(name, function):
    try:
        function()
        print(name, "worked", flush=True)
    except RuntimeError as error:
        print(name, type(error.__cause__).__name__, "died" in str(error), flush=True)

scheduler.LIVENESS_SECONDS = 0.01
scheduler.QUEUE_LIMIT = simulation.QUEUE_LIMIT = 4
a, b = d2lpar.virtual_gpus(2, model={model!r})
x = torch.ones(3, device=a)
y = (torch.ones(3, device=b) + 1).sum()
d2lpar.synchronize()
{broken} = fail
attempt("now", lambda: (x + 1).cpu())
attempt("later", lambda: d2lpar.synchronize(a))
attempt("room", lambda: [x + 1 for _ in range(8)])
attempt("set-up", lambda: d2lpar.virtual_gpus(2))
other = threading.Thread(target=attempt, args=("thread", lambda: (x + 1).cpu()))
other.start()
other.join()
"""


@pytest.mark.parametrize(
    "model, broken",
    [
        ("v100", "simulation.Simulation.admit"),
        ("v100", "simulation.Simulation._run_next"),
        ("v100", "simulation.scheduler.complete"),
        (None, "scheduler.ReadyQueue._admit"),
        (None, "scheduler.ReadyQueue.take"),
        (None, "scheduler.ReadyQueue.finish"),
        (None, "scheduler.complete"),
    ],
)
def test_when_a_thread_dies_every_host_that_waits_hears_of_it(model, broken):
    result = fresh.run(DEATH.format(model=model, broken=broken), fresh.SET_UP, timeout=60)
    names = ("now", "later", "room", "set-up", "thread")
    expected = [f"{name} ZeroDivisionError True" for name in names]
    assert result.stdout.splitlines() == expected, result.stderr
    assert result.returncode == 0, result.stderr
