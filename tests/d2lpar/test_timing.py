import json
import time
from types import SimpleNamespace

import pytest
import torch
from gates import Gate
from held import held
from torch.utils.flop_counter import FlopCounterMode

import d2lpar
from d2lpar import timing
from d2lpar.plotting.figures import KINDS
from d2lpar.timelines import cuda_spans as cuda
from d2lpar.timelines import timeline as timeline_module
from d2lpar.timelines.timeline import Timeline
from d2lpar.timing import Benchmark, Timer, best_seconds, compare, product_flops, seconds_in_turn
from vgpu import Span, other_programs
from vgpu.recording.intervals import lanes, overlap, union

CPU, GPU0, GPU1 = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)


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
    for module in (timing, timeline_module):
        monkeypatch.setattr(module, "clock", lambda: clock.now)
    monkeypatch.setattr(timing, "synchronize", clock.synchronize)
    monkeypatch.setattr(timeline_module, "synchronize", clock.synchronize)
    return clock


@pytest.fixture(autouse=True)
def others(monkeypatch):
    """Other programs, which take the share of the cores that a test sets, and none before."""

    class Others:
        share, looks = 0.0, 0

        def read_cpu_times(self):
            self.looks += 1
            taken = 2 * self.share * self.looks
            return other_programs.CpuReading(float(self.looks), frozenset({0, 1}), taken, 0.0)

    others = Others()
    for module in (other_programs, timing, timeline_module):
        monkeypatch.setattr(module, "read_cpu_times", others.read_cpu_times)
    timing.while_timed.clear()
    yield others
    timing.while_timed.clear()


@pytest.fixture
def recorder(clock, monkeypatch):
    """What stands in for the virtual GPUs: two idle devices, and a list of records to fill."""

    class Recorder:
        open = []

        def start(self):
            records = []
            self.open.append(records)
            return [(self.stop, records)]

        def stop(self, records):
            self.open = [other for other in self.open if other is not records]

        def run(self, device, start, end, **fields):
            """Record a span that lies at these seconds after 101, when the timeline starts."""
            fields = {"name": "aten.mm", "kind": "kernel", "engine": "compute", **fields}
            issued = 101 + fields.pop("issued", start)
            times = {"start": 101 + start, "end": 101 + end, "issued": issued}
            for records in self.open:
                records.append(Span(device=device, **{"stream": 0, **times, **fields}))

        def copy(self, source, target, start, end, num_bytes, engine="p2p", stream=0, **more):
            fields = more | {"source": source, "target": target, "num_bytes": num_bytes}
            fields |= {"name": "copy", "kind": "copy", "engine": engine, "stream": stream}
            self.run(target if source == CPU else source, start, end, **fields)

    recorder = Recorder()
    monkeypatch.setattr(timeline_module, "start_recorders", recorder.start)
    monkeypatch.setattr(timeline_module, "try_all_gpus", lambda: [GPU0, GPU1])
    return recorder


def test_timer(clock):
    timer = Timer()
    clock.now += 2
    assert timer.stop() == 2
    timer.start()
    clock.now += 4
    assert timer.stop() == 4
    assert timer.times == [2, 4]
    assert (timer.sum(), timer.avg(), timer.cumsum()) == (6, 3, [2, 6])
    with pytest.raises(ValueError, match="no times yet"):
        Timer().avg()
    assert Timer().cumsum() == []


@pytest.mark.parametrize(
    ("arguments", "waits", "printed", "seconds"),
    [
        (("GPU1 time",), 1, "GPU1 time: 1.4660 sec\n", 1.46604),
        (("Done", False), 0, "Done: 0.4660 sec\n", 0.46604),
    ],
)
def test_benchmark_waits_before_it_starts_and_before_it_reads_the_clock(
    arguments, waits, printed, seconds, clock, capsys
):
    with Benchmark(*arguments) as benchmark:
        assert clock.num_synchronized == waits
        clock.now += 0.46604
    assert clock.num_synchronized == 2 * waits
    assert capsys.readouterr().out == printed
    assert benchmark.seconds == pytest.approx(seconds)


def test_benchmark_lets_errors_pass_and_prints_nothing(clock, capsys):
    benchmark = Benchmark()
    with benchmark:
        pass
    capsys.readouterr()
    with pytest.raises(KeyError), benchmark:
        raise KeyError("lost")
    assert capsys.readouterr().out == ""
    assert benchmark.seconds is None


def span(start, end):
    return Span("aten.mm", "kernel", GPU0, 0, "compute", start, end)


def test_best_seconds_warms_up_and_counts_what_is_left_on_the_devices(clock):
    durations = iter([50.0, 3.0, 2.0, 7.0])

    def work():
        clock.now += next(durations)

    assert best_seconds(work) == 2.0 + 1.0  # a synchronize takes a second of this clock
    assert clock.num_synchronized == 2 * 4
    with pytest.raises(ValueError, match="at least 1: got 0"):
        best_seconds(work, 0)


def test_rate_of_a_product_counts_its_multiplications_and_its_additions(monkeypatch):
    counted = []

    def best_seconds(work, repeats):
        with FlopCounterMode(display=False) as counter:
            work()
        counted.append(counter.get_total_flops())
        return 0.5

    monkeypatch.setattr(timing, "best_seconds", best_seconds)
    assert product_flops("cpu", 10) == 2 * 10**3 / 0.5
    assert counted == [2 * 10**3]


P3 = "8 x V100-SXM2-16GB in p3.16xlarge"
COMPARED = """\
at the same time: maximum predicted 0.3742 measured 0.3867 s  ratio 1.03
bubble                    predicted      8 measured  7.940    ratio 0.99
done                      predicted 14,744 measured 14,700 kB ratio 1.00
a step                    predicted  5.359 measured  9.352 µs ratio 1.75
many                  predicted 44,735 measured 1,000,000 kB ratio 22.35
               predicted 0.00002000 measured -0.000001000 s  ratio -0.05
nothing                   predicted      0 measured      3 bytes ratio -
SSP, s = 4: waiting, all workers
                          predicted 0.9120 measured 0.8789 s  ratio 0.96
independent first: maximum predicted 0.3742 measured 0.2873 s ratio 0.77
ring, 66 kB (8 x V100-SXM2-16GB in p3.16xlarge)
                        predicted 0.05139 modelled 0.05139 ms ratio 1.00
"""


def test_lines_of_compare_have_four_digits_and_align(capsys, monkeypatch):
    """A name that is too long for its line has one of its own; modelled hardware is named."""
    compare("at the same time: maximum", 0.3742, 0.38671)
    compare("bubble", 8, 7.94, "")
    compare("done", 14744.1, 14700, "kB")
    compare("a step", 5.359, 9.352, "µs")
    compare("many", 44735.348, 1e6, "kB")
    compare("", 2e-5, -1e-6)
    compare("nothing", 0, 3, "bytes")
    compare("SSP, s = 4: waiting, all workers", 0.912, 0.87894)
    compare("independent first: maximum", 0.3742, 0.2873)
    monkeypatch.setattr(timing, "hardware_name", lambda: P3)
    compare("ring, 66 kB", 0.05139, 0.05139, "ms")
    assert capsys.readouterr().out == COMPARED


NUMBERS = [0, 1, -1, 1 / 3, 1e-300, -1.2345e-7, 123456.7, 999_999_999, 1.5e300, 7e15, float("inf")]


@pytest.mark.parametrize("hardware", ["", P3])
@pytest.mark.parametrize("what", ["", "x", "  indented", "a long name of several words " * 4])
@pytest.mark.parametrize("unit", ["", "s", "GiB", "ms a step", "examples of a long kind a second"])
def test_no_line_of_compare_is_wider_than_72(what, unit, hardware, capsys, monkeypatch):
    monkeypatch.setattr(timing, "hardware_name", lambda: hardware)
    for predicted in NUMBERS:
        for measured in NUMBERS:
            compare(what, predicted, measured, unit)
            out = capsys.readouterr().out
            assert all(len(line) <= 72 for line in out.splitlines()), out
            words = ["predicted", "modelled" if hardware else "measured", "ratio"]
            assert [word for word in out.split() if word in words] == words
            assert what.split() == out.split()[: len(what.split())]


TIMED = {  # time nothing
    "Timer": lambda: Timer().stop(),
    "Benchmark": lambda: Benchmark().__enter__().__exit__(None, None, None),
    "best_seconds": lambda: best_seconds(lambda: None),
    "Timeline": lambda: Timeline.of(lambda: None, warmups=0),
}


def said_by_compare(capsys):
    capsys.readouterr()
    compare("what", 1, 1)
    return capsys.readouterr().out.splitlines()[1:]


@pytest.mark.parametrize("kind", TIMED)
def test_compare_tells_once_what_others_took_while_it_was_timed(kind, capsys, others, recorder):
    others.share = 0.6
    assert said_by_compare(capsys) == []
    TIMED[kind]()
    assert said_by_compare(capsys) == ["other programs took 60 % of the cores while this ran"]
    assert said_by_compare(capsys) == []
    others.share = 0.1
    TIMED[kind]()
    assert said_by_compare(capsys) == []


def test_an_untimed_stretch_does_not_count(capsys, others):
    timer = Timer()
    timer.stop()
    others.share = 0.9
    others.read_cpu_times()  # time passes
    assert said_by_compare(capsys) == []


def test_others_cannot_take_modelled_time(capsys, others, monkeypatch, recorder):
    others.share = 0.6
    timer = Timer()
    for module in (timing, timeline_module):
        monkeypatch.setattr(module, "hardware_name", lambda: "V100-SXM2-16GB")
    TIMED["Timer"](), TIMED["Timeline"]()
    assert others.looks == 1  # that of the first timer
    timer.stop()
    compare("what", 1, 1)
    assert "took" not in capsys.readouterr().out
    monkeypatch.setattr(timing, "hardware_name", lambda: "")
    assert said_by_compare(capsys) == []


def test_union_merges_what_touches():
    spans = [span(5, 6), span(0, 4), span(1, 2), span(4, 4.5)]
    assert union(spans) == [(0, 4.5), (5, 6)]
    assert union(spans, gap=0.5) == [(0, 6)]
    assert union([]) == []


def test_overlap_counts_no_moment_twice():
    a = [span(0, 2), span(1, 3), span(6, 10)]
    b = [span(2, 7), span(2.5, 2.6), span(9, 20)]
    assert overlap(a, b) == pytest.approx(1 + 1 + 1)
    assert overlap(b, a) == pytest.approx(3)
    assert overlap(a, []) == 0
    assert overlap([span(0, 1)], [span(1, 2)]) == 0


def test_lanes_hold_no_two_spans_at_once():
    dealt = lanes([span(0, 4), span(1, 2), span(2, 3), span(1.5, 5), span(4, 6)])
    assert [(lane, s.start) for lane, s in dealt] == [(0, 0), (1, 1), (2, 1.5), (1, 2), (0, 4)]
    assert [s.end for _, s in lanes([span(0, 1), span(0, 4)])] == [4, 1], "the longer is on top"


@pytest.fixture
def timeline(clock, recorder):
    """Two devices that compute at once for a while, three copies, and a host that waits."""
    with Timeline() as timeline:
        with timeline.mark("scatter"):
            recorder.copy(CPU, GPU0, 0, 1, 400, "h2d")
            clock.now += 1
        with timeline.mark("forward"):
            recorder.run(GPU0, 1, 3, name="aten.relu", issued=1.5)
            recorder.run(GPU0, 2, 4, issued=1.5)
            recorder.run(GPU1, 3, 8, issued=2)
            clock.now += 4
        recorder.copy(GPU1, GPU0, 5, 6, 100, stream=3, issued=5.5)
        recorder.copy(GPU1, GPU0, 7, 8, 100)
        recorder.run(GPU1, 5, 8, name="synchronize", kind="wait", engine="host", issued=5.5)
        clock.now += 4
    return timeline


def test_timeline_synchronizes_at_both_ends_and_counts_from_its_start(clock, timeline):
    assert clock.num_synchronized == 2
    assert timeline.seconds == 10  # 1 + 4 + 4 in the block, and 1 for the devices to finish
    assert [s.start for s in timeline.spans] == [0, 1, 2, 3, 5, 5, 7]
    assert timeline.spans[1].issued == 1.5
    assert timeline.spans[1].seconds == 2
    assert [tuple(mark) for mark in timeline.marks] == [("scatter", 0, 1), ("forward", 1, 5)]
    assert repr(timeline) == "Timeline(7 spans on 2 devices, 10.00 s)"


def test_select(timeline):
    assert timeline.select() == timeline.spans
    assert [s.start for s in timeline.select("cuda:0")] == [0, 1, 2]
    assert timeline.select(GPU0) == timeline.select("cuda:0") == timeline.select("cuda")
    assert [s.start for s in timeline.select(kind="wait")] == [5]
    assert [s.start for s in timeline.select(engine="p2p")] == [5, 7]
    assert [s.start for s in timeline.select(GPU1, "copy", stream=3)] == [5]
    assert [s.start for s in timeline.select(stream=SimpleNamespace(stream_id=3))] == [5]
    assert [s.name for s in timeline.select(name="relu")] == ["aten.relu"]
    assert [s.start for s in timeline.select(mark="forward")] == [1, 2, 3]
    assert timeline.select(GPU0, stream=3) == []


def test_what_is_issued_as_a_phase_ends_belongs_to_it(clock, recorder):
    """On modelled GPUs a launch ends when its phase does, and the next phase begins."""
    with Timeline() as timeline:
        for name, end in (("a", 2), ("b", 4), ("a", 6)):
            with timeline.mark(name):
                clock.now += 2
                recorder.run(GPU0, 5, 6, name=name, issued=end)
                recorder.run(GPU0, 5, 6, name=f"wait {name}", kind="wait", issued=end - 2)
        recorder.run(GPU0, 5, 6, name="last", kind="wait", issued=6)
    for name, times in (("a", 2), ("b", 1)):
        assert [s.name for s in timeline.select(mark=name)] == [name, f"wait {name}"] * times


def test_questions(timeline):
    assert timeline.busy(GPU0) == 3  # 1 to 4, though two kernels ran from 2 to 3
    assert timeline.busy("cuda:1") == 5
    assert timeline.busy(GPU1, "copy") == 2
    assert timeline.utilization(GPU1) == 0.5
    assert timeline.overlap(GPU0, "cuda:1") == 1
    assert timeline.overlap(timeline.select(engine="p2p"), GPU1) == 2
    assert timeline.bytes_by_link() == {(CPU, GPU0): 400, (GPU1, GPU0): 200}


@pytest.mark.parametrize(("arguments", "text"), [
    ({"device": "cuda:2"}, "no device cuda:2 on .*: choose one of cuda:0, cuda:1"),
    ({"kind": "kernels"}, "'kernels': choose one of kernel, copy, wait, collective"),
    ({"engine": "nic"}, "'nic': choose one of compute, h2d"),
    ({"mark": "backward"}, "'backward': choose one of forward, scatter"),
])  # fmt: skip
def test_errors_name_what_is_known(timeline, arguments, text):
    with pytest.raises(ValueError, match=text):
        timeline.select(**arguments)


def test_a_change_of_threads_is_no_work_of_a_device(devices):
    with Timeline() as timeline:
        d2lpar.virtual_gpus(len(devices), threads=2)
        torch.ones(3, device=devices[0]).exp()
    assert {span.kind for span in timeline.spans} - {"wait"} == {"kernel"}  # waits, if it is slow
    assert timeline.select(devices[0], "kernel", name="exp")


def test_an_idle_device_is_known_and_no_device_has_no_spans(monkeypatch, recorder):
    monkeypatch.setattr(timeline_module, "try_all_gpus", lambda: [GPU0])  # since then
    with Timeline() as timeline:
        recorder.run(GPU1, 0, 1)
    assert timeline.devices == [GPU0, GPU1]
    assert timeline.busy(GPU0) == 0
    monkeypatch.setattr(timeline_module, "try_all_gpus", lambda: [CPU])
    with Timeline() as timeline:
        pass
    assert timeline.devices == timeline.spans == []
    with pytest.raises(ValueError, match="choose one of none"):
        timeline.busy("cuda:0")


def test_answers_wait_for_the_end(recorder):
    timeline = Timeline()
    assert repr(timeline) == "Timeline(not started)"
    with pytest.raises(RuntimeError, match="not started"), timeline.mark("early"):
        pass
    with timeline:
        with pytest.raises(RuntimeError, match="recording: the with block must have ended"):
            timeline.busy(GPU0)
        with pytest.raises(RuntimeError, match="recording already"):
            timeline.__enter__()
    assert timeline.busy(GPU0) == 0


def test_nested_timelines(clock, recorder):
    with Timeline() as outer:
        recorder.run(GPU0, 0, 1)
        with Timeline() as inner:
            recorder.run(GPU0, 2, 3)
        recorder.run(GPU0, 4, 5)
    assert [s.start for s in outer.spans] == [0, 2, 4]
    assert [s.start for s in inner.spans] == [1]  # the inner one started a second later
    assert recorder.open == []


def test_a_timeline_can_be_used_again(clock, recorder):
    timeline = Timeline()
    for _ in range(2):
        with timeline:
            with timeline.mark("once"):
                recorder.run(GPU0, 0, 1)
        assert len(timeline.spans) == len(timeline.marks) == 1
        assert recorder.open == []


@pytest.mark.parametrize("fails", ["block", "both", "synchronize"])
def test_errors_pass_through_and_end_the_recording(monkeypatch, recorder, fails):
    def fail(*devices):
        raise RuntimeError("a deferred error")

    expected = "a deferred error" if fails == "synchronize" else "in the block"
    timeline = Timeline()
    with pytest.raises((KeyError, RuntimeError), match=expected):
        with timeline, timeline.mark("all"):
            recorder.run(GPU0, 0, 1)
            if fails != "block":
                monkeypatch.setattr(timeline_module, "synchronize", fail)
            if fails != "synchronize":
                raise KeyError("in the block")
    assert recorder.open == []
    assert timeline.busy(GPU0) == len(timeline.marks) == 1


def test_a_recorder_that_does_not_start_leaves_none_on(monkeypatch):
    def fail():
        raise KeyboardInterrupt("while the profiler starts")

    stopped = []
    source = SimpleNamespace(
        start_recording=list, stop_recording=stopped.append, devices_in_use=lambda ever: []
    )
    monkeypatch.setattr(timeline_module, "vgpu", source)
    monkeypatch.setattr(cuda, "start_recording", fail)
    monkeypatch.setattr(timeline_module, "try_all_gpus", lambda: [GPU0])
    with pytest.raises(KeyboardInterrupt):
        timeline_module.start_recorders()
    assert stopped == [[]]


def test_chrome_trace(timeline, tmp_path):
    path = tmp_path / "trace.json"
    timeline.export(path)
    trace = json.loads(path.read_text())
    events = trace["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "host", 1: "cuda:0", 2: "cuda:1"}
    threads = {
        (names[e["pid"]], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"
    }
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) + len([e for e in events if e["ph"] == "M"]) == len(events)
    assert len(complete) == len(timeline.spans) + len(timeline.marks)
    rows = {}
    for event in complete:
        assert {"name", "cat", "ts", "dur", "pid", "tid", "args"} <= set(event)
        rows.setdefault((names[event["pid"]], event["tid"]), []).append(event)
    assert set(rows) == set(threads)
    for row in rows.values():
        row.sort(key=lambda event: event["ts"])
        assert all(event["dur"] >= 0 for event in row)
        for before, after in zip(row, row[1:], strict=False):
            assert before["ts"] + before["dur"] <= after["ts"]
    [copy] = [e for e in complete if threads[names[e["pid"]], e["tid"]] == "p2p, stream 3"]
    assert (copy["ts"], copy["dur"], copy["cat"]) == (5e6, 1e6, "copy")
    arguments = {"issued_us": 5.5e6, "bytes": 100, "source": "cuda:1", "target": "cuda:0"}
    assert copy["args"] == arguments
    others = ["h2d, stream 0", "p2p, stream 0", "p2p, stream 3", "phases", "waits"]
    computing = ["compute, stream 0"] * 2 + ["compute, stream 0 (2)"]
    assert sorted(threads.values()) == [*computing, *others]


def event(category, name, ts, dur, pid=0, **arguments):
    fields = {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur}
    return fields | {"pid": pid, "tid": 7, "args": arguments}


def test_trace_of_the_cuda_profiler():
    """The fields are those that Kineto writes; see the docstring of cuda.parse."""
    on0, on1 = {"device": 0, "stream": 7}, {"device": 1, "stream": 20}
    peer = {"fromDevice": 1, "inDevice": 1, "toDevice": 0, "stream": 7}
    nccl, waited = "ncclDevKernel_AllReduce_Sum_f32_RING_LL", ("Device", "Event", "Stream")
    events = [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "ts": 1, "args": {"name": "x"}},
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 5, "pid": 9, "tid": 9, "ts": 1010},
        event("user_annotation", cuda.ANCHOR, 1000.0, 3, pid=99),
        event("cpu_op", "aten::mm", 1005, 9, pid=99),
        event("cuda_runtime", "cudaLaunchKernel", 1010, 5, pid=99, cbid=211, correlation=5),
        event("kernel", "sgemm_128", 1020, 100.5, correlation=5, **on0),
        event("kernel", nccl, 1020, 2, correlation=8, **on1),
        event("gpu_memset", "Memset (Device)", 1130, 1, bytes=8, **on0),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 1140, 10, bytes=64, **on1),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 1150, 10, bytes=8, **on0),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 1160, 10, bytes=16, **on0),
        event("gpu_memcpy", "Memcpy PtoP (Device -> Device)", 1170, 10, pid=1, bytes=32, **peer),
        *(event("cuda_runtime", f"cuda{on}Synchronize", 1180, 20, pid=99) for on in waited),
        event("cuda_driver", "cuLaunchKernelEx", 1015, 2, pid=99, correlation=8),
    ]
    spans = cuda.parse({"displayTimeUnit": "ms", "traceEvents": events}, anchored=50.0)
    kernel, collective, memset, *_, wait = spans
    assert [(s.kind, s.engine, s.device, s.stream) for s in spans] == [
        ("kernel", "compute", GPU0, 0),
        ("collective", "collectives", GPU1, 20),
        ("kernel", "compute", GPU0, 0),
        ("copy", "h2d", GPU1, 20),
        ("copy", "d2h", GPU0, 0),
        ("kernel", "compute", GPU0, 0),
        ("copy", "p2p", GPU1, 0),
        *[("wait", "host", CPU, 0)] * 3,
    ]
    copies = [(s.source, s.target, s.num_bytes) for s in spans if s.kind == "copy"]
    assert copies == [(CPU, GPU1, 64), (GPU0, CPU, 8), (GPU1, GPU0, 32)]
    assert kernel.name == "sgemm_128" and collective.issued == pytest.approx(50.000015)
    times = kernel.issued, kernel.start, kernel.seconds
    assert times == pytest.approx((50.00001, 50.00002, 100.5e-6))
    assert memset.issued is None and wait.seconds == pytest.approx(20e-6)


def test_profiler_runs_and_shares_our_clock(monkeypatch):
    """On a machine without CUDA the profiler still writes a trace with the mark."""
    anchors = []

    def parse(trace, anchored):
        anchors.append(anchored)
        events = [e for e in trace["traceEvents"] if e["name"] in (cuda.ANCHOR, "aten::mm")]
        first, *ops = sorted(events, key=lambda event: event["ts"])
        assert first["name"] == cuda.ANCHOR
        return ops

    monkeypatch.setattr(cuda, "parse", parse)
    X = torch.ones(8, 8)
    outer = cuda.start_recording()
    X @ X
    before = time.perf_counter()
    inner = cuda.start_recording()
    after = time.perf_counter()
    X @ X
    cuda.stop_recording(inner)
    X @ X
    cuda.stop_recording(outer)
    X @ X
    assert (len(outer), len(inner)) == (3, 1)
    assert len(anchors) == 3 and before <= anchors[1] <= after


@pytest.fixture
def devices():
    """Two virtual GPUs whose links are slow enough to see."""
    yield d2lpar.virtual_gpus(2, link=1e6)
    d2lpar.virtual_gpus(2)


def test_timeline_of_virtual_gpus(devices):
    accel = torch.get_device_module(devices[0])
    X = torch.ones(25_000).pin_memory()
    side = accel.Stream(devices[0])
    with Timeline() as timeline:
        with held(2):
            with timeline.mark("scatter"):
                parts = [X.to(device, non_blocking=True) for device in devices]
            with timeline.mark("forward"):
                sums = [part.exp() for part in parts]
            with accel.stream(side):
                side.wait_stream(accel.default_stream(devices[0]))
                sums[0].to("cpu", non_blocking=True)
        sums[1].to(devices[0])
        with Gate(devices[0]) as gate, gate.opened_later():
            d2lpar.synchronize()
    assert timeline.devices == devices
    one, two = devices
    links = [(CPU, one), (CPU, two), (one, CPU), (two, one)]
    assert timeline.bytes_by_link() == dict.fromkeys(links, 100_000)
    for device in devices:
        [h2d] = timeline.select(device, "copy", engine="h2d", mark="scatter")
        [exp] = timeline.select(device, "kernel", name="exp", mark="forward")
        assert h2d.stream == exp.stream == 0 and exp.engine == "compute"
        assert h2d.issued <= h2d.start and h2d.end <= exp.start
    [d2h] = timeline.select(engine="d2h")
    assert timeline.select(stream=side, kind="copy") == [d2h]
    copies = timeline.select(stream=accel.default_stream(one), kind="copy")
    assert [copy.engine for copy in copies] == ["h2d"], "not those of the other device"
    assert timeline.overlap(*(timeline.select(d, engine="h2d") for d in devices)) > 0
    assert timeline.select(devices[0], kind="wait", engine="stream")
    assert timeline.select(kind="wait", engine="host")
    assert max(span.end for span in timeline.spans) <= timeline.seconds


def test_a_stream_waits_from_when_it_has_nothing_else_to_do(devices):
    side = torch.vgpu.Stream(devices[0])
    with Timeline() as timeline:
        with Gate(devices[1]):
            with Gate(devices[0], side):
                side.wait_stream(torch.vgpu.default_stream(devices[1]))
                with torch.vgpu.stream(side):
                    torch.zeros(1, device=devices[0])
    [own], [other] = (timeline.select(device, name="gate") for device in devices)
    [wait] = timeline.select(devices[0], "wait", engine="stream", stream=side)
    assert wait.issued < own.end <= wait.start < other.end <= wait.end


def test_benchmark_waits_for_every_virtual_gpu(devices, capsys):
    for device in devices:
        with Gate(device), Benchmark("issued", sync=False):
            pass
        with Gate(device) as gate, gate.opened_later():  # it waits for what is still under way
            benchmark = Benchmark("all").__enter__()
        with Gate(device) as gate, gate.opened_later():
            benchmark.__exit__(None, None, None)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["issued", "all"] * 2


@pytest.mark.parametrize(
    ("engines", "kinds", "rows"),
    [
        (["send 1", "collectives"], KINDS, ["compute", "collectives", "send 1"]),
        (["h2d", "stream"], KINDS, ["compute", "copy from host", "stream waits"]),
        (["h2d", "stream"], ("kernel", "copy"), ["compute", "copy from host"]),
    ],
)
def test_a_figure_has_rows_of_its_engines_and_kinds(engines, kinds, rows, recorder):
    of_engine = {"h2d": "copy", "stream": "wait"}
    with Timeline() as timeline:
        for engine in engines:
            recorder.run(GPU0, 1, 2, kind=of_engine.get(engine, "collective"), engine=engine)
    assert len(timeline.select(engine=engines[0])) == 1
    labels = [label.get_text() for label in timeline.plot(kinds=kinds).axes[0].get_yticklabels()]
    assert labels == [*(f"cuda:0 {row}" for row in rows), "cuda:1 compute"]
    with pytest.raises(ValueError, match="unknown kind 'kernels'"):
        timeline.plot(kinds=["kernels"])


def test_ways_take_turns_and_the_median_of_their_rounds_counts(clock, capsys, monkeypatch):
    durations = {"one": iter([70.0, 2.0, 9.0, 3.0]), "two": iter([70.0, 1.0, 1.5, 50.0])}
    called = []

    def way(name):
        def work():
            called.append(name)
            clock.now += next(durations[name])

        return work

    monkeypatch.setattr(timing, "hardware_name", lambda: "T4")
    medians = seconds_in_turn({"one": way("one"), "two": way("two")}, rounds=3)
    assert called == ["one", "two"] * 4  # a round to warm up, and three
    assert medians == {"one": 3.0 + 1.0, "two": 1.5 + 1.0}  # a synchronize takes a second
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["seconds,", "3", "rounds", "median", "least", "most", "(modelled:", "T4)"],
        ["one", "4", "3", "10"],
        ["two", "2.500", "2", "51"],
    ]
    with pytest.raises(ValueError, match="at least 1: got 0"):
        seconds_in_turn({"one": way("one")}, rounds=0)


def test_a_timeline_of_a_function_records_its_last_call(devices):
    calls = []
    d2lpar.virtual_gpus(2, model="v100")  # which simulates earlier calls when it is asked

    def work():
        calls.append(torch.ones(3, device=devices[0]).exp())

    timeline = Timeline.of(work, warmups=2)
    assert len(calls) == 3 and len(timeline.select(name="exp")) == 1
