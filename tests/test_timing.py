import pytest

from d2lpar import timing
from d2lpar.timing import Benchmark, Timer


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until a test moves it, and counts the synchronizations."""

    class Clock:
        now = 100.0
        num_synchronized = 0

        def synchronize(self, *devices):
            self.num_synchronized += 1
            self.now += 1.0  # what the devices still had to do

    clock = Clock()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(timing, "synchronize", clock.synchronize)
    return clock


def test_timer(clock):
    timer = Timer()
    clock.now += 2
    assert timer.stop() == 2
    timer.start()
    clock.now += 4
    assert timer.stop() == 4
    assert timer.times == [2, 4]
    assert (timer.sum(), timer.avg(), timer.cumsum()) == (6, 3, [2, 6])


def test_timer_without_times(clock):
    with pytest.raises(ValueError, match="no times yet"):
        Timer().avg()
    assert Timer().cumsum() == []


def test_benchmark_waits_before_it_starts_and_before_it_reads_the_clock(clock, capsys):
    with Benchmark("GPU1 time") as benchmark:
        assert clock.num_synchronized == 1
        clock.now += 0.46604
    assert clock.num_synchronized == 2
    assert capsys.readouterr().out == "GPU1 time: 1.4660 sec\n"
    assert benchmark.seconds == pytest.approx(1.46604)


def test_benchmark_without_waiting(clock, capsys):
    with Benchmark(sync=False) as benchmark:
        clock.now += 0.25
    assert clock.num_synchronized == 0
    assert capsys.readouterr().out == "Done: 0.2500 sec\n"
    assert benchmark.seconds == 0.25


def test_benchmark_lets_errors_pass_and_prints_nothing(clock, capsys):
    benchmark = Benchmark()
    with benchmark:
        pass
    capsys.readouterr()
    with pytest.raises(KeyError), benchmark:
        raise KeyError("lost")
    assert capsys.readouterr().out == ""
    assert benchmark.seconds is None
