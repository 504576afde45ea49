"""Parameter servers: what travels, who waits for whom, what faults leave behind."""

import asyncio
import logging
import math
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from torch.nn import functional as F
from waiting import is_alive, wait_until

import d2lpar
from d2lpar.chapters.parameter_server import ray_setup
from d2lpar.chapters.parameter_server.actors import TickCounter
from d2lpar.chapters.parameter_server.store import parameter_servers

pytestmark = [pytest.mark.slow, pytest.mark.waits]

pytest.importorskip("ray")


@pytest.fixture(scope="module")
def ray():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", "/dev/null/home")  # where nothing can be written
        patch.delenv("RAY_AUTH_TOKEN", raising=False)
        ray = ray_setup.start_ray()
        yield ray
        ray.shutdown()


@pytest.fixture
def store(ray):
    values = {"w": torch.zeros(2, 5), "b": torch.zeros(2), "n": torch.tensor(0)}
    with parameter_servers(values, num_servers=2) as store:
        yield store


def pid_of(ray, actor):
    return ray.get(actor.__ray_call__.remote(lambda self: os.getpid()))


@pytest.fixture(scope="module", autouse=True)
def program(tmp_path_factory):
    """Start a program with a Ray and a store of its own, which takes as long as some tests.

    It works when there is a file "go" in its folder.
    """
    folder = tmp_path_factory.mktemp("program")
    code = f"""
    import os, time, torch
    from d2lpar.chapters.parameter_server.store import parameter_servers
    from pathlib import Path
    folder = Path({str(folder)!r})

    def work(worker, attempt):
        Path(folder, f"{{attempt}}-{{worker.rank}}-{{os.getpid()}}").touch()
        while True:
            worker.push("w", torch.ones(4))
            worker.tick()

    def main():
        with parameter_servers({{"w": torch.zeros(4)}}, replicas=1) as store:
            while not Path(folder, "go").exists():
                time.sleep(0.05)
            try:
                store.run(work, 0)
            except KeyboardInterrupt:
                print("interrupted", store.pull("w").std().item(), flush=True)
            store.run(work, 1)

    try:
        main()
    except KeyboardInterrupt:
        import ray
        print("left", ray.is_initialized(), flush=True)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    yield process, folder
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


# Push, pull, and what travels


def test_a_store_adds_what_is_pushed_and_has_tensors_of_its_own(ray):
    """Each of three servers has some of w, b and its one number."""
    w = torch.arange(10.0).reshape(2, 5)
    values = {"w": w, "b": torch.ones(2), "n": torch.tensor(7)}
    with parameter_servers(values, num_servers=3) as store:
        pulled = store.pull("w")
        pulled += 1
        assert torch.equal(store.pull("w"), torch.arange(10.0).reshape(2, 5))
        store.push("w", pulled.double())
        store.push("n", torch.tensor(2))
        assert torch.equal(store.pull("w"), 2 * w + 1) and store.pull("w").dtype == torch.float32
        assert store.pull("n") == 9 and store.pull("n").shape == ()
        assert store.pull("b").tolist() == [1, 1]
        assert torch.equal(w, torch.arange(10.0).reshape(2, 5))  # not written to
        assert store.num_updates() == [2, 2, 2]


def test_synchronous_steps_equal_allreduce(store):
    torch.manual_seed(0)
    X, y, lr = torch.randn(12, 5), torch.randint(2, (12,)), 0.5
    params = {"w": torch.randn(2, 5), "b": torch.zeros(2)}

    def gradients(params, X, y):
        leaves = [p.clone().requires_grad_() for p in params.values()]
        loss = F.cross_entropy(F.linear(X, *leaves), y, reduction="sum")
        return dict(zip(params, torch.autograd.grad(loss, leaves), strict=True))

    def train(worker, num_steps):
        part, ahead = slice(4 * worker.rank, 4 * worker.rank + 4), []
        for _ in range(num_steps):
            pulled = {name: worker.pull(name) for name in params}
            ahead.append(worker.tick())
            if worker.rank == 1:
                time.sleep(0.02)
            for name, gradient in gradients(pulled, X[part], y[part]).items():
                worker.push(name, -lr / 12 * gradient)
            ahead.append(worker.tick())
        return ahead

    for name, value in params.items():
        store.push(name, value)
    ahead = store.run(train, 5, num_workers=3)
    trained = {name: store.pull(name) for name in params}
    assert all(max(ticks) == 0 for ticks in ahead)
    for _ in range(5):
        parts = [gradients(params, X[i : i + 4], y[i : i + 4]) for i in (0, 4, 8)]
        for name in params:
            d2lpar.allreduce([part[name] for part in parts])
            params[name] = params[name] - lr / 12 * parts[0][name]
    for name, value in trained.items():
        # numbers of about 1: the rounding of float32 for each of 12 examples in 5 steps, and more
        torch.testing.assert_close(value, params[name], rtol=0, atol=2e-5)


# Who waits for whom


@pytest.mark.parametrize("staleness", [1, 3])
def test_staleness_is_bounded(store, staleness):
    """Worker 0 starts when the others have gone as far as they may, and are held up."""

    def step(worker):
        if worker.rank == 0:
            while worker.pull("n") < 2 * (staleness + 1):
                time.sleep(0.01)
            time.sleep(0.1)  # time for a worker that is not held up
        ahead = []
        for _ in range(12):
            worker.push("n", torch.tensor(1))
            ahead.append(worker.tick(staleness))
        return ahead

    run = store.start(step, num_workers=3)
    wait_until(run.done)
    results = run.results()
    assert store.pull("n") == 36
    for ahead in results[1:]:
        assert max(ahead) == staleness and len(ahead) == 12


def test_without_a_bound_nobody_waits_and_leavers_hold_nobody_up(store):
    """Of workers 1 to 3 each makes as many steps as its rank; worker 0 makes none, and returns."""

    def step(worker):
        ahead = [0]
        for _ in range(worker.rank):
            ahead.append(worker.tick(math.inf))
            worker.push("n", torch.tensor(1))
        if worker.rank == 0:
            while worker.pull("n") < 6:  # all steps have been counted
                time.sleep(0.01)
        if worker.rank == 1:
            worker.tick(0)
        return max(ahead)

    run = store.start(step, num_workers=4)
    wait_until(run.done)
    assert run.results()[2:] == [2, 3]


def test_who_was_stopped_holds_nobody_up(store):
    """It had made no step, and a worker that was stopped cannot say that it leaves."""
    run = store.start(lambda worker: time.sleep(1000))
    run.stop()
    later = store.start(lambda worker: worker.tick())
    wait_until(later.done)
    assert later.results() == [0]


def test_who_joins_starts_where_the_slowest_is():
    async def story():
        clock = TickCounter()
        for worker in (0, 1):
            await clock.join(worker)
        for _ in range(3):
            await clock.tick(0, 10)
        await clock.tick(1, 10)
        await clock.join(2)
        return clock.ticks, await clock.tick(2, 1)

    assert asyncio.run(story()) == ({0: 3, 1: 1, 2: 2}, 1)


def test_workers_that_have_returned_are_not_cancelled(ray, store, monkeypatch):
    cancelled = []
    monkeypatch.setattr(ray, "cancel", lambda ref, **_: cancelled.append(ref))
    run = store.start(lambda worker: worker.rank, num_workers=2)
    assert run.results() == [0, 1]
    run.stop()
    assert cancelled == []


def test_a_cancellation_that_ray_drops_is_repeated(ray, store, monkeypatch):
    cancel, calls = ray.cancel, []

    def cancel_from_the_second_call_on(ref, **options):
        calls.append(ref)
        if len(calls) > 1:
            cancel(ref, **options)

    monkeypatch.setattr(ray, "cancel", cancel_from_the_second_call_on)
    run = store.start(lambda worker: time.sleep(1000))
    run.stop()
    assert run.done() and len(calls) > 1


# Faults


@pytest.mark.parametrize("victim", ["server", "replica"])
def test_server_killed_and_no_acknowledged_push_is_lost_or_doubled(ray, victim):
    def count_up(worker, num_pushes):
        for _ in range(num_pushes):
            worker.push("w", torch.ones(1000))

    with parameter_servers({"w": torch.zeros(1000)}, replicas=1) as pair:
        name = f"{victim}{' 1 of server' * (victim == 'replica')} 0 "
        [named] = [n for n in ray.util.list_named_actors() if n.startswith(name)]
        actor = ray.get_actor(named)
        run = pair.start(count_up, 150, num_workers=2)
        wait_until(lambda: pair.num_updates()[0] > 25)
        os.kill(pid_of(ray, actor), signal.SIGKILL)
        run.results()
        assert pair.num_updates() == [300]
        assert (pair.pull("w") == 300).all()
        # And the other one of the pair has them too: at the latest from the next push on.
        pair.push("w", torch.zeros(1000))
        os.kill(pid_of(ray, pair.servers[0]), signal.SIGKILL)
        assert (pair.pull("w") == 300).all()


def test_a_push_that_is_repeated_is_not_added_again(ray, store):
    message = ("worker 0", 1, "w", torch.ones(5).numpy())
    assert ray.get([store.servers[0].push.remote(message) for _ in range(3)]) == [1, 1, 1]
    assert store.pull("w").tolist() == [[1.0] * 5, [0.0] * 5]


def test_error_of_a_worker_comes_back_and_stops_the_others(ray, store):
    class Trouble(Exception):
        pass

    def work(worker):
        if worker.rank == 1:
            raise Trouble("worker trouble", 3)
        worker.tick(0)
        time.sleep(1000)

    run = store.start(work, num_workers=2)
    wait_until(run.done)
    with pytest.raises(Trouble, match="worker trouble") as caught:
        run.results()
    assert caught.value.args == ("worker trouble", 3)
    refs = list(run.tasks.values())
    assert len(ray.wait(refs, num_returns=2, timeout=0)[0]) == 2  # the other one, too
    assert "raised in worker 1" in caught.value.__notes__[0]
    assert 'raise Trouble("worker trouble", 3)' in caught.value.__notes__[0]
    assert store.run(lambda worker: worker.rank, num_workers=2) == [2, 3]


def test_killed_worker_is_named(store):
    def work(worker):
        if worker.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        worker.tick(0)

    with pytest.raises(RuntimeError, match="worker 1 was killed"):
        store.run(work, num_workers=2)


def test_interrupt_leaves_nothing(program):
    """Ctrl-C reaches all processes of a terminal, as Jupyter's interrupt does."""
    process, folder = program
    (folder / "go").touch()
    for attempt in range(2):
        wait_until(lambda: len(list(folder.glob(f"{attempt}-*"))) == 1, 60)  # noqa: B023
        os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert out.splitlines() == ["interrupted 0.0", "left False"]
    pids = [int(path.name.split("-")[2]) for path in folder.glob("?-*")]
    assert len(pids) == 2
    wait_until(lambda: not any(is_alive(pid) for pid in pids))
    group = f" {process.pid} "
    wait_until(lambda: group not in subprocess.check_output(["ps", "-eo", "pgid,stat"], text=True))


# Bad input


@pytest.mark.parametrize("arguments, error, message", [
    (({},), ValueError, "values must be a dict from names to tensors: got none"),
    (({"w": [1, 2]},), TypeError, "tensor 'w' must be a tensor of a type that NumPy has"),
    (({"w": torch.zeros(2, dtype=torch.bfloat16)},), TypeError, "tensor 'w' .*BFloat16"),
    (({"w": torch.zeros(2)}, 0), ValueError, "num_servers must be an integer, 1 or more: got 0"),
    (({"w": torch.zeros(2)}, 1, -1), ValueError, "replicas must be an integer, 0 or more: got -1"),
])  # fmt: skip
def test_bad_stores(arguments, error, message):
    with pytest.raises(error, match=message), parameter_servers(*arguments):
        pass


def test_bad_pushes(store):
    with pytest.raises(KeyError, match="no tensor 'v' in the store: choose w, b, n"):
        store.push("v", torch.zeros(1))
    with pytest.raises(ValueError, match=r"push to 'w' .* shape \(2, 5\): got \(3,\)"):
        store.push("w", torch.zeros(3))
    with pytest.raises(ValueError, match="num_workers must be an integer, 1 or more: got 0"):
        store.run(print, num_workers=0)
    assert store.num_updates() == [0, 0]


def test_without_ray_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(logging.root.manager, "disable", logging.DEBUG)
    ray_setup.ray_module.cache_clear()
    with pytest.raises(ModuleNotFoundError, match="pip install ray"):
        ray_setup.start_ray()
    ray_setup.ray_module.cache_clear()
    assert logging.root.manager.disable == logging.DEBUG  # as the user has set it


def test_address_of_a_cluster_is_taken(monkeypatch, ray):
    """An address comes from RAY_ADDRESS; without one, Ray starts here."""
    asked = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda address, **options: asked.append((address, options)))
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    ray_setup.start_ray()
    monkeypatch.delenv("RAY_ADDRESS")
    ray_setup.start_ray()
    assert [address for address, _ in asked] == ["head:6379", "local"]
    assert "num_cpus" not in asked[0][1] and asked[1][1]["include_dashboard"] is False


def test_server_without_replica_is_lost_with_an_error(ray, store):
    ray.kill(store.servers[1])
    with pytest.raises(RuntimeError, match="a parameter server died, and no replica"):
        wait_until(lambda: store.pull("w") is None)  # Ray kills it later than `kill` returns
