"""Record spans of CUDA GPUs with torch's profiler (Kineto)."""

import json
import os
import re
import tempfile
import time

import torch

from vgpu.recording import Span

ANCHOR = "d2lpar.timelines.anchor"
_HOST = torch.device("cpu")
_HOST_CALLS = ("cuda_runtime", "cuda_driver")
_HOST_WAITS = ("cudaDeviceSynchronize", "cudaEventSynchronize", "cudaStreamSynchronize")
_CUPTI_DEFAULT_STREAM = 7

_recordings = []
_profile = None
_anchored = 0.0


def start_recording():
    """Start recording CUDA GPUs.

    Only one profiler can run at a time. If recordings nest, it restarts at the ends of the inner
    one and adds its spans to every recording; the devices should be idle then.

    Returns:
        A list that collects spans, in seconds of `time.perf_counter`, until `stop_recording`.
    """
    _collect()
    recording = []
    _recordings.append(recording)
    _start_profile()
    return recording


def stop_recording(recording):
    """Stop a recording of `start_recording`, which is complete then."""
    try:
        _collect()
    finally:
        _recordings[:] = [other for other in _recordings if other is not recording]
    if _recordings:
        _start_profile()


def _start_profile():
    """Start the profiler and record an event that aligns its clock with `time.perf_counter`."""
    global _profile, _anchored
    from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

    wanted = {ProfilerActivity.CPU, ProfilerActivity.CUDA}
    _profile = profile(activities=wanted & set(supported_activities()))
    _profile.start()
    _anchored = time.perf_counter()
    with record_function(ANCHOR):
        pass


def _collect():
    """Stop the profiler if it is running, and add its spans to every recording."""
    global _profile
    if _profile is None:
        return
    stopped, _profile = _profile, None
    stopped.stop()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        stopped.export_chrome_trace(path)
        with open(path, encoding="utf-8") as file:
            trace = json.load(file)
    spans = parse(trace, _anchored)
    for recording in _recordings:
        recording.extend(spans)


def parse(trace, anchored=0.0):
    """Return the spans of CUDA GPUs in a trace of torch's profiler.

    A memset counts as a kernel, and so does a copy within one device, which uses no link. CUDA
    records no waits of streams for events.

    Args:
        trace: the output of `torch.profiler.profile.export_chrome_trace`, as a dict. The fields are
            those of libkineto/src/CuptiActivity.cpp in https://github.com/pytorch/kineto.
        anchored: the time of the anchor event, in seconds; spans are on this clock.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    mark = next((float(event["ts"]) for event in events if event["name"] == ANCHOR), 0.0)

    def seconds(microseconds):
        return anchored + (float(microseconds) - mark) / 1e6

    issued = {
        event["args"]["correlation"]: seconds(event["ts"])
        for event in events
        if event.get("cat") in _HOST_CALLS and "correlation" in event["args"]
    }
    spans = []
    for event in events:
        place = _place(event)
        if place:
            start = seconds(event["ts"])
            issue = issued.get(event["args"].get("correlation"))
            end = start + float(event["dur"]) / 1e6
            spans.append(Span(event["name"], start=start, end=end, issued=issue, **place))
    return spans


def _place(event):
    """Return kind, device, stream and engine of an event, or None if it is no span."""
    category, arguments = event.get("cat"), event.get("args", {})
    if category in _HOST_CALLS:
        if event["name"] not in _HOST_WAITS:
            return None
        return {"kind": "wait", "device": _HOST, "stream": 0, "engine": "host"}
    if category not in ("kernel", "gpu_memcpy", "gpu_memset"):
        return None
    stream = arguments["stream"]
    index = arguments.get("device", arguments.get("inDevice"))
    device = torch.device("cuda", int(event["pid"] if index is None else index))
    place = {"device": device, "stream": 0 if stream == _CUPTI_DEFAULT_STREAM else stream}
    if event["name"].startswith("nccl"):
        return place | {"kind": "collective", "engine": "collectives"}
    kernel = place | {"kind": "kernel", "engine": "compute"}
    if category != "gpu_memcpy":
        return kernel
    direction = re.match(r"Memcpy (\w)to(\w)", event["name"])
    source = target = device
    if "fromDevice" in arguments:
        source = torch.device("cuda", arguments["fromDevice"])
        target = torch.device("cuda", arguments["toDevice"])
    elif direction and direction[1] == "H":
        source = _HOST
    elif direction and direction[2] == "H":
        target = _HOST
    if source == target:
        return kernel
    engine = "h2d" if source == _HOST else "d2h" if target == _HOST else "p2p"
    place |= {"kind": "copy", "engine": engine, "num_bytes": arguments["bytes"]}
    return place | {"source": source, "target": target}
