"""The history of a device's memory, read by torch's own tools for it."""

import gc
import time

import pytest
import torch
from test_torch_cuda import run

from vgpu import clock, virtual_gpus
from vgpu.recording import history
from vgpu.runtime import registry

KEYS = {  # of torch/csrc/cuda/memory_snapshot.cpp
    "segment": "device address total_size allocated_size active_size requested_size stream "
    "segment_type segment_pool_id is_expandable frames blocks",
    "block": "address size requested_size state frames",
    "entry": "action addr size stream time_us frames",
}


@pytest.fixture(autouse=True)
def as_before():
    gc.collect()  # what other tests have left in a cycle is in use until then
    yield
    history.record_memory_history(None)
    virtual_gpus(2)


def freed(size):
    return [("free_requested", size), ("free_completed", size)]


def recorded(program, **options):
    """Return the actions and sizes that the history of device 0 has of a program."""
    history.record_memory_history(**options)
    program()
    entries = history.snapshot()["device_traces"][0]
    return [(entry["action"], entry["size"]) for entry in entries]


@pytest.mark.parametrize("gpus", ["vgpu:2", "v100:2"])
def test_the_files_are_read_by_the_tools_of_torch(gpus):
    """The program is that of torch's documentation, "Understanding CUDA Memory Usage"."""
    run("""
    import pickle, tempfile
    from torch.cuda import _memory_viz as viz

    first = [torch.ones(3, device=f"cuda:{i}") for i in (0, 1)]
    assert len({s["address"] for s in torch.cuda.memory_snapshot()}) == 2, "in one address space"
    del first
    torch.cuda.memory._record_memory_history()
    net = nn.Linear(512, 1024).cuda()

    def step():
        net(torch.ones(64, 512, device="cuda")).sum().backward()

    step()
    path = tempfile.mktemp(suffix=".pickle")
    torch.cuda.memory._dump_snapshot(path)
    torch.cuda.memory._record_memory_history(enabled=None)
    with open(path, "rb") as file:
        seen = pickle.load(file)
    text = viz.trace(seen)
    assert "2.0MiB" in text and "del " in text and "Device 0" in text, text
    viz.segsum(seen)  # checks that blocks fill each segment
    allocated = torch.cuda.memory_allocated()
    requested = sum(
        b["requested_size"] for s in seen["segments"] for b in s["blocks"]
        if b["state"] == "active_allocated"
    )
    assert requested == allocated == 2 * (512 * 1024 + 1024) * 4, (requested, allocated)
    flames = viz.memory(seen, format_flamegraph=lambda lines: lines)
    assert "<string>" in flames and str(512 * 1024 * 4) in flames, flames
    assert "snapshot.pickle" in viz.trace_plot(seen) and "Allocator" in viz.segment_plot(seen)
    assert len(seen["device_traces"]) == 2 and not seen["device_traces"][1]
    names = {f["name"] for e in seen["device_traces"][0] for f in e["frames"]}
    assert "step" in names and "forward" in names, names
    assert not any("vgpu" in f["filename"] for e in seen["device_traces"][0]
                   for f in e["frames"])
    assert torch.cuda.memory_snapshot() == torch.cuda.memory._snapshot()["segments"]
    assert torch.cuda.memory._snapshot()["device_traces"] == [[], []]
    older = lambda: torch.cuda.memory._record_memory_history(True)
    assert "give 'all' or None" in error(older, NotImplementedError)
    """, gpus)  # fmt: skip


def test_what_a_program_does_is_there_in_order():
    (gpu, _) = virtual_gpus(2)
    kept = torch.ones(256, device=gpu)
    torch.empty(10**6, device=gpu)  # below its peak, a device need not look for what was freed

    def program():
        x = torch.empty(1000, device=gpu)
        y = torch.empty(3, device=gpu)
        del x
        torch.empty(500, device=gpu)
        del y

    begun = int(time.time() * 1e6)
    expected = [("alloc", 4000), ("alloc", 12), *freed(4000), ("alloc", 2000), *freed(2000)]
    assert recorded(program) == [*expected, *freed(12)]
    seen = history.snapshot()
    entry, (segment, *_) = seen["device_traces"][0][0], seen["segments"]
    assert set(entry) == {*KEYS["entry"].split()} and set(segment) == {*KEYS["segment"].split()}
    assert set(segment["blocks"][0]) == {*KEYS["block"].split()}
    assert segment["total_size"] == kept.nbytes, "it was there before, and has no entry"
    assert begun <= entry["time_us"] <= time.time() * 1e6
    frame = entry["frames"][0]
    assert (frame["name"], frame["filename"]) == ("program", __file__)
    assert frame["line"] == program.__code__.co_firstlineno + 1
    assert seen["device_traces"][0][-1]["action"] == "snapshot"
    history.record_memory_history()
    assert history.snapshot()["device_traces"][0][0] == entry, "kept unless it is cleared"
    virtual_gpus(1)
    assert len(history.snapshot()["device_traces"]) == 1
    history.record_memory_history(None)
    torch.empty(3, device=virtual_gpus(2)[1])
    assert history.snapshot()["device_traces"][1] == [], "it ends on GPUs out of use, too"
    assert recorded(lambda: torch.empty(3, device=virtual_gpus(1, model="v100")[0])) == []


@pytest.mark.parametrize(
    ("options", "entries", "frames"),
    [
        ({}, 4, (True, True)),
        ({"context": "state"}, 4, (False, True)),
        ({"context": "alloc"}, 4, (True, True)),
        ({"context": None}, 4, (False, False)),
        ({"enabled": "state"}, 0, (False, True)),
        ({"record_cuda": False}, 0, (False, False)),
        ({"max_entries": 2}, 2, (True, True)),
        ({"skip_actions": ["free_requested", "free_completed"]}, 2, (True, True)),
    ],
)
def test_what_is_kept_can_be_chosen(options, entries, frames):
    (gpu, _) = virtual_gpus(2)
    made = []

    def program():
        torch.empty(5, device=gpu)
        made.append(torch.empty(7, device=gpu))

    found = recorded(program, **options)
    assert len(found) == entries and found[-1:] == [("alloc", 28)][:entries], found
    seen = history.snapshot()
    blocks = [b for s in seen["segments"] for b in s["blocks"] if b["requested_size"] == 28]
    in_trace = any(entry["frames"] for entry in seen["device_traces"][0])
    assert (in_trace, bool(blocks[0]["frames"])) == frames
    history.record_memory_history(clear_history=True)
    assert history.snapshot()["device_traces"][0] == []


def test_memory_that_a_stream_holds_and_memory_that_there_is_not():
    gpu, other = virtual_gpus(2, model="v100")
    history.record_memory_history()
    side, x = torch.vgpu.Stream(gpu), torch.empty(2**20, device=gpu)
    with side:
        torch.vgpu._sleep(1)
        y = torch.empty(2**18, device=gpu)
        torch.empty(5, device=gpu)
        z = torch.empty(2**18 + 1, device=other)
    x.record_stream(side)
    del x
    seen = history.snapshot()
    trace = seen["device_traces"][0]
    streams = {(2**22, 0), (y.nbytes, side.stream_id), (20, side.stream_id)}
    assert {(entry["size"], entry["stream"]) for entry in trace} == streams
    assert seen["device_traces"][1][0]["stream"] == 0 != len(z)
    (held,) = [segment for segment in seen["segments"] if segment["total_size"] == 2**22]
    assert held["blocks"][0]["state"] == "active_pending_free"
    assert held["allocated_size"] == 0 and held["address"] == trace[0]["addr"]
    assert trace[-1]["action"] == "free_requested"
    kinds = {s["total_size"]: (s["stream"], s["segment_type"]) for s in seen["segments"]}
    assert (kinds[y.nbytes], kinds[z.nbytes]) == ((side.stream_id, "small"), (0, "large"))
    side.synchronize()
    with side, pytest.raises(torch.OutOfMemoryError):
        torch.empty(2**40, device=gpu)
    *before, completed, failed = history.snapshot()["device_traces"][0]
    assert before[:-1] == trace and before[-1]["action"] == "snapshot"
    active = sum(each["active_size"] for each in seen["segments"] if each["device"] == 0)
    assert before[-1]["size"] == active
    assert (completed["action"], completed["size"]) == ("free_completed", 2**22)
    assert (failed["action"], failed["size"]) == ("oom", 2**42)
    assert (failed["time_us"], failed["stream"]) == (int(clock() * 1e6), side.stream_id)
    assert failed["frames"][0]["name"].startswith("test_memory_that_a_stream_holds")
    assert failed["device_free"] == registry.devices[0].memory.limit - y.nbytes
    assert "addr" not in failed


@pytest.mark.parametrize(
    "options",
    [{"enabled": "some"}, {"context": "free"}, {"stacks": "c++"}, {"skip_actions": ["alloc", "x"]}],
)
def test_what_cannot_be_kept(options):
    with pytest.raises(RuntimeError, match="got|unknown"):
        history.record_memory_history(**options)
