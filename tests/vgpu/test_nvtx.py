"""Ranges of `torch.cuda.nvtx` in the trace of `vgpu run`."""

import json
import sys

import pytest
from programs import vgpu, written
from test_torch_cuda import run

from vgpu.modelled.host import EAGER

OPERATOR = EAGER.operator * 1e6  # microseconds of the host, on modelled GPUs


def ranges(tmp_path, program):
    """Return the events of ranges and marks in the trace of a program, and its summary."""
    trace = tmp_path / "trace.json"
    options = "--gpus", "1", "--model", "v100", "--trace", str(trace)
    done = vgpu(tmp_path, "run", *options, sys.executable, written(tmp_path, program))
    assert done.returncode == 0, done.stderr
    events = json.loads(trace.read_text())["traceEvents"]
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found = [event for event in events if event.get("cat") in ("range", "mark")]
    for event in found:
        event["row"] = rows[event["pid"], event["tid"]]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert {processes[event["pid"]] for event in found} <= {"host"}, processes
    return found, done.stderr


@pytest.mark.slow
def test_ranges_of_all_kinds_are_in_the_trace_and_count_as_no_work(tmp_path):
    """The times are those of the model: each operator takes what the host's figures say."""
    found, said = ranges(tmp_path, """
        import threading, torch
        from torch.cuda import nvtx

        nvtx.range_push("before the first operator")
        nvtx.range_pop()
        x = torch.ones(3).cuda()

        @nvtx.range("step {}", 7)
        def step():
            with nvtx.range("forward"):
                x + 1
                assert nvtx.range_push("layer") == 2
                x + 1
                assert nvtx.range_pop() == 2
            nvtx.mark("between")
            x + 1

        number = nvtx.range_start("long")
        step()
        other = nvtx.range_start("longer")
        x + 1
        nvtx.range_end(number)
        x + 1
        nvtx.range_end(number)  # it has ended
        nvtx.range_end(other)
        thread = threading.Thread(target=step, name="worker")
        thread.start()
        thread.join()
        assert nvtx.range_pop() == -1
        """)  # fmt: skip
    complete = [event for event in found if event["ph"] == "X"]
    taken = [(e["row"], e["name"], round(e["dur"] / OPERATOR, 6)) for e in complete]
    for row in ("ranges, MainThread", "ranges, worker"):
        assert (row, "step 7", 3.0) in taken, (taken, said)
        assert (row, "forward", 2.0) in taken and (row, "layer", 1.0) in taken
    assert ("ranges, MainThread", "before the first operator", 0.0) in taken
    assert ("ranges, any thread", "long", 4.0) in taken
    assert ("ranges, any thread (2)", "longer", 2.0) in taken and len(taken) == 9
    begun = {event["name"]: event["ts"] for event in found if "Main" in event["row"]}
    marks = [event for event in found if event["ph"] == "i" and "Main" in event["row"]]
    assert [mark["name"] for mark in marks] == ["between"]
    assert marks[0]["ts"] - begun["forward"] == pytest.approx(2 * OPERATOR)
    assert begun["step 7"] == begun["forward"], "within, and no earlier"
    lines = [line for line in said.splitlines() if "cuda:0 " in line]
    (figures,) = [line.split() for line in lines if "->" not in line]
    assert figures[2] == "9", "eight operators and a copy: " + said


def test_a_thread_ends_its_own_ranges_only_and_emit_nvtx_says_what_shows_all():
    run("""
    import threading, warnings
    from torch.cuda import nvtx

    assert nvtx.range_push("of the main thread") == 0
    depths = []
    thread = threading.Thread(target=lambda: depths.append(nvtx.range_push("of another")))
    thread.start()
    thread.join()
    assert depths == [0] and nvtx.range_pop() == 0
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with torch.autograd.profiler.emit_nvtx(enabled=False), torch.cuda.profiler.profile():
            pass
        assert not said
        with torch.autograd.profiler.emit_nvtx(record_shapes=True):
            assert (torch.ones(2, device="cuda") + 1).tolist() == [2, 2]
    assert "emit_nvtx" in str(said[0].message) and "--trace" in str(said[0].message)
    """)
