"""torch's profiler: starts and stops a recording of virtual GPUs, and adds its events."""

import contextlib
import functools
import gzip
import importlib
import json
import warnings

import torch
from torch.autograd.profiler import profile
from torch.profiler import ProfilerActivity

_METHODS = "__init__ __exit__ _start_trace _parse_kineto_results export_chrome_trace".split()


def patch_profiler(record):
    """Let `torch.profiler` and `torch.autograd.profiler` record virtual GPUs as "cuda".

    Kineto, their recorder, supports real GPUs only. Here it records the host. `record(names of
    Kineto's activities, or None for all)` starts a recording of GPUs, an object like
    `vgpu.recording.profiling.ProfiledWork`.
    """
    if not all(callable(getattr(profile, name, None)) for name in _METHODS):
        warnings.warn(
            "torch's profiler shows the host only, because this version of it is unknown: "
            "vgpu run --trace shows the GPUs",
            stacklevel=2,
        )
        return
    # torch would import this module while recording Python functions, and read the name of its
    # code after that is freed: with_stack=True fails at times, seen with Python 3.12.
    with contextlib.suppress(ImportError):  # not in torch 2.11
        importlib.import_module("torch.profiler._cupti_monitor")
    changes = _init, _exit, functools.partial(_start, record), _parse, _export
    for name, change in zip(_METHODS, changes, strict=True):
        setattr(profile, name, _changed(getattr(profile, name), change))
    supported = torch.profiler.supported_activities
    for module in (torch.profiler, torch.profiler.profiler):
        module.supported_activities = lambda: {*supported(), ProfilerActivity.CUDA}


def _changed(method, change):
    """Return a method of the profiler that calls `change(method, self, ...)`."""

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        return change(method, self, *args, **kwargs)

    return call


def _init(init, self, *args, use_cuda=False, use_device=None, use_cpu=True, **options):
    gpus = use_cuda or use_device == "cuda"
    if gpus and options.get("profile_memory"):
        warnings.warn(
            "profile_memory=True records the memory of the host only: "
            "torch.cuda.memory._record_memory_history() records that of virtual GPUs",
            stacklevel=3,
        )
    filters = dict(options.pop("activity_filters", None) or {})
    self.shows_gpus, self.shows_host, self.gpu_work = gpus, use_cpu, None
    self.gpu_activities = filters.pop(ProfilerActivity.CUDA, None)
    device = None if gpus else use_device
    options |= {"use_device": device, "use_cpu": use_cpu or gpus}
    if filters:  # torch 2.11 has none
        options["activity_filters"] = filters
    init(self, *args, **options)
    if gpus and self.enabled:
        self.use_device = "cuda"


def _exit(exit, self, *exception):
    if self.enabled and self.gpu_work is not None:
        self.gpu_work.stop()
    return exit(self, *exception)


def _start(record, start, self):
    start(self)
    if self.shows_gpus:
        self.gpu_work = record(self.gpu_activities)


def _parse(parse, self, result, timeout_s=None):
    events = parse(self, result, timeout_s=timeout_s)
    if self.gpu_work is None:
        return events
    return self.gpu_work.with_events(events, result.trace_start_ns(), self.shows_host)


def _export(export, self, path, *args, **options):
    export(self, path, *args, **options)
    if self.gpu_work is None:
        return
    with open(path, "rb") as file:  # torch compresses in some ways to export only
        opened = gzip.open if file.read(2) == b"\x1f\x8b" else open
    with opened(path, "rt", encoding="utf-8") as file:
        trace = json.load(file)
    self.gpu_work.add_to(trace, self.shows_host)
    with opened(path, "wt", encoding="utf-8") as file:
        json.dump(trace, file)
