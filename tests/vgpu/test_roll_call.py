"""Where the ranks of a launch are when it is stopped. Time-outs are in test_launch.py."""

import contextlib
import json
import os
import signal
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gates import error_of, frame_in, in_thread
from waiting import note_when_in, wait_until

import d2lpar
from vgpu.distributed.timekeeper import KeeperConnection, Post
from vgpu.processes import launcher, roll_call
from vgpu.runtime.threads import current_frames

pytestmark = pytest.mark.waits


WAITS, BUSY = True, False


@pytest.fixture(autouse=True)
def on_cpus(monkeypatch):
    monkeypatch.setenv("VGPU_DEVICES", "vgpu")


@contextlib.contextmanager
def interrupted_when(*conditions):
    """Interrupt this process, as Ctrl-C does, when the first condition holds, then the second, ...

    The block has to raise KeyboardInterrupt.
    """
    over = threading.Event()

    def watch():
        for holds in conditions:
            while not holds():
                if over.wait(0.01):
                    return
            os.kill(os.getpid(), signal.SIGINT)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            yield caught
    finally:
        over.set()
        watcher.join()


def all_in(folder, *names):
    return lambda: all((folder / name).exists() for name in names)


@pytest.mark.parametrize(
    "device, inside, line",
    [("cpu", "all_reduce", "dist.all_reduce(x)  # waits"), ("vgpu", "gather", "x.item()  # waits")],
)
def test_an_interrupt_says_where_each_rank_is_and_for_which_others_wait(
    tmp_path, monkeypatch, device, inside, line
):
    """On a virtual GPU an engine waits for the others, and the host for the engine."""
    monkeypatch.setattr(roll_call, "ANSWER", 30)  # here, not in the ranks

    def asleep():
        time.sleep(1000)

    def computing():
        while True:
            torch.ones(9).sum()

    def work(folder):
        assert os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"  # these are the ranks to ask
        rank, x = dist.get_rank(), torch.ones(1, device=device)
        dist.all_reduce(x)
        x.item()
        name, count = [(inside, 2), ("asleep", 1), ("_wait_for", 1), ("computing", 1)][rank]
        note_when_in(folder / str(rank), name, count)
        if rank == 0:
            dist.all_reduce(x)  # waits
            x.item()  # waits
        elif rank != 2:
            asleep() if rank == 1 else computing()

    with interrupted_when(all_in(tmp_path, *"0123")) as caught:
        d2lpar.launch(work, tmp_path, nproc=4, max_restarts=2)  # stopped
    lines = [line.strip() for line in Path(__file__).read_text().splitlines()]
    number = {line: str(lines.index(line) + 1) for line in lines}
    sleeps, loop, body = "time.sleep(1000)", "while True:", "torch.ones(9).sum()"
    verdict, *texts, last = str(caught.value).splitlines()
    assert verdict == "ranks 1, 2, 3 had not arrived"
    assert texts == [
        "  rank 0 had started 2 collectives, waited for another rank and was at "
        f"line {number[line]} of work: {line}",
        f"  rank 1 had started 1 collective and was at line {number[sleeps]} of asleep: {sleeps}",
        "  rank 2 had returned",
    ]
    assert last in [
        f"  rank 3 had started 1 collective and was at line {number[text]} of computing: {text}"
        for text in (loop, body)
    ]
    # The reader's line, and that of `launch`, which raises: no frames of torch.
    frames = traceback.extract_tb(caught.tb)
    assert {frame.filename for frame in frames} == {__file__, launcher.__file__}
    assert any("# stopped" in frame.line for frame in frames)
    assert caught.value.__context__ is None


def test_a_second_interrupt_does_not_wait_for_ranks_that_are_silent(tmp_path, monkeypatch):
    def work(folder):
        roll_call.num_collectives = lambda: time.sleep(1000)  # the answer takes for ever
        (folder / "0").touch()
        time.sleep(1000)

    main = threading.get_ident()

    def is_asked():
        stack = traceback.extract_stack(current_frames()[main])
        return any(frame.name == "ask_ranks" for frame in stack)

    with interrupted_when(all_in(tmp_path, "0")) as caught:
        d2lpar.launch(work, tmp_path, nproc=1)
    assert str(caught.value) == "rank 0 had not arrived\n  rank 0 is silent"
    (tmp_path / "0").unlink()
    monkeypatch.setattr(roll_call, "ANSWER", 30)
    with interrupted_when(all_in(tmp_path, "0"), is_asked) as caught:
        d2lpar.launch(work, tmp_path, nproc=1)
    assert str(caught.value) == ""


def test_a_rank_that_has_timed_out_answers_with_where_it_waited(monkeypatch):
    """It asks for others itself at that moment, in lines that say nothing to the reader."""
    monkeypatch.setattr(roll_call, "num_collectives", lambda: 2)
    monkeypatch.setattr(roll_call, "ANSWER", 5.0)
    store, answers = dist.HashStore(), []
    store.set("here 1", "")
    call = roll_call.RollCall(store, 0, 2)

    def other():
        store.wait(["ask 1"])
        answers.extend(roll_call.ask_ranks(store, [0]).values())
        store.set("answer 1", json.dumps([1, "line 7 of f", False]))

    def waits():
        raise RuntimeError("too late")

    with in_thread(other):
        call.report(error_of(waits), 1.5)
    call.close()
    ((count, place, is_waiting),) = answers
    assert (count, is_waiting) == (2, True)
    assert place.endswith('of waits: raise RuntimeError("too late")')


def test_a_rank_that_has_timed_out_names_whom_it_waited_for(monkeypatch):
    monkeypatch.setattr(roll_call, "ANSWER", 0.1)
    monkeypatch.setattr(roll_call, "num_collectives", lambda: 2)
    for key, answer, verdict in (
        ("end", None, "rank 1 had not arrived"),
        ("answer", [2, "line 7 of f", BUSY], "rank 1 had not arrived"),  # it was to send, perhaps
        ("answer", [2, "line 7 of f", WAITS], "the ranks wait for different operations"),
    ):
        store = dist.HashStore()
        store.set("here 1", ""), store.set(f"{key} 1", json.dumps(answer))
        call = roll_call.RollCall(store, 0, 2)
        assert f"; {verdict}\n" in call.report(error_of(int, "too late"), 1.5)
        call.close()
    late = error_of(call.arrive_at_end, 0.0)
    assert "waited 1.5 s at the end; rank 1 had not arrived" in call.report(late, 1.5)
    for text in "Timed out waiting 1500ms for recv", "Application timeout caused pair closure":
        assert roll_call.is_timeout(RuntimeError(f"[../gloo/transport/tcp/pair.cc:1] {text}"))


def test_a_rank_that_waits_for_the_simulated_clock_says_that_it_waits(monkeypatch):
    monkeypatch.setattr(roll_call, "num_collectives", lambda: 1)
    limit, way = timedelta(seconds=60), (1.0, 0.0, 0.0)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=limit)
    member = KeeperConnection(store, 1, 2, limit, print)
    member.post(1.0, "a", (0, 1), Post("all_reduce", 1.0, ("here",), way, way, True))
    roll_call.RollCall(store, 0, 1)
    other = store.clone()  # its connection is free, whoever waits at the store
    with in_thread(lambda: member.ask(5.0)) as asks, in_thread(lambda: store.wait(["asked"])):
        wait_until(lambda: frame_in(asks.ident, KeeperConnection.ask))  # rank 0 does not come
        ((_, _, waits),) = roll_call.ask_ranks(other, [0]).values()
        other.set("asked", ""), member.send("end")
    assert waits


@pytest.mark.parametrize(
    "states, verdict",
    [
        ([(2, WAITS), (1, BUSY)], "rank 1 had not arrived"),
        # Its host is ahead of its virtual GPU, or behind: whoever waits is not missing.
        ([(5, WAITS), (2, WAITS), (0, BUSY)], "rank 2 had not arrived"),
        # Rank 1 has issued more than what rank 0 waits for.
        ([(2, WAITS), (3, BUSY)], "rank 0 had not arrived"),
        ([(2, WAITS), (1, WAITS)], "rank 1 had not arrived"),
        ([(2, WAITS), (2, BUSY)], "rank 1 had not arrived"),
        ([(2, WAITS), (2, WAITS)], "no rank was missing"),
        ([(2, BUSY), (2, BUSY)], "no rank was missing"),
        # In the backward pass of DDP a rank waits unseen.
        ([(2, BUSY), (1, BUSY)], "rank 1 had not arrived"),
        ([(2, WAITS), "end"], "rank 1 had not arrived"),
        ([(2, BUSY), "end"], "rank 0 had not arrived"),
        (["end", "end"], "no rank was missing"),
        (["end", "starting"], "rank 1 had not arrived"),
        ([(2, WAITS), "starting"], "rank 1 had not arrived"),
        (["starting", "starting"], "no rank was missing"),
        ([(2, BUSY), "silent"], "rank 1 had not arrived"),
    ],
)
def test_whoever_keeps_another_rank_waiting_is_missing(states, verdict, monkeypatch):
    monkeypatch.setattr(roll_call, "ANSWER", 0.0)
    store = dist.HashStore()
    for rank, state in enumerate(states):
        if state != "starting":
            store.set(f"here {rank}", "")
        if state == "end":
            store.set(f"end {rank}", "")
        if type(state) is tuple:
            count, waits = state
            store.set(f"answer {rank}", json.dumps([count, "line 7 of f", waits]))
    first, *lines = roll_call.locate_ranks(store, len(states), lambda: False).splitlines()
    assert first == verdict
    assert len(lines) == len(states)
    words = {"end": "had returned", "starting": "was starting", "silent": "is silent"}
    for rank, (line, state) in enumerate(zip(lines, states, strict=True)):
        assert line.startswith(f"  rank {rank} {words.get(state, 'had started')}")
