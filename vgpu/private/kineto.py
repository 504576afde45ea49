"""torch's profiler: where a recording of virtual GPUs begins and ends, and what it adds."""

import contextlib
import functools
import gzip
import importlib
import json
import warnings

import torch
from torch.autograd.profiler import profile
from torch.profiler import ProfilerActivity

_NEEDED = "__init__ __exit__ _start_trace _parse_kineto_results export_chrome_trace".split()


def patch_profiler(record):
    """Let `torch.profiler` and `torch.autograd.profiler` record virtual GPUs as "cuda".

    Kineto, which records for them, knows GPUs of their makers only. Here it records the host.

    Args:
        record: function that begins a recording of GPUs, with the names of the activities of Kineto
            to record, or None for all; it returns an object with the methods `stop`, `with_events`
            and `add_to`, see `recording.profiling`.
    """
    if not all(callable(getattr(profile, name, None)) for name in _NEEDED):
        warnings.warn(
            "torch's profiler shows the host only, because this version of it is not known: "
            "vgpu run --trace shows the GPUs",
            stacklevel=2,
        )
        return
    # torch imports this module while it records Python functions, and reads the name of its code
    # when that is gone: with_stack=True then fails now and again, seen with Python 3.12.
    with contextlib.suppress(ImportError):  # not in torch 2.11
        importlib.import_module("torch.profiler._cupti_monitor")
    for name, change in (
        ("__init__", _with_gpus),
        ("_start_trace", functools.partial(_starting, record)),
        ("__exit__", _stopping),
        ("_parse_kineto_results", _adding_events),
        ("export_chrome_trace", _adding_to_trace),
    ):
        function = getattr(profile, name)
        setattr(profile, name, functools.wraps(function)(change(function)))
    supported = torch.profiler.supported_activities
    for module in (torch.profiler, torch.profiler.profiler):
        module.supported_activities = lambda: {*supported(), ProfilerActivity.CUDA}


def _with_gpus(init):
    def __init__(self, *args, use_cuda=False, use_device=None, use_cpu=True, **options):
        gpus = use_cuda or use_device == "cuda"
        if gpus and options.get("profile_memory"):
            warnings.warn(
                "profile_memory=True shows the memory of the host only on virtual GPUs: "
                "torch.cuda.memory._record_memory_history() records theirs",
                stacklevel=2,
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

    return __init__


def _starting(record, start):
    def _start_trace(self):
        start(self)
        if self.shows_gpus:
            self.gpu_work = record(self.gpu_activities)

    return _start_trace


def _stopping(exit):
    def __exit__(self, *exception):
        if self.enabled and self.gpu_work is not None:
            self.gpu_work.stop()
        return exit(self, *exception)

    return __exit__


def _adding_events(parse):
    def _parse_kineto_results(self, result, timeout_s=None):
        events = parse(self, result, timeout_s=timeout_s)
        if self.gpu_work is None:
            return events
        return self.gpu_work.with_events(events, result.trace_start_ns(), self.shows_host)

    return _parse_kineto_results


def _adding_to_trace(export):
    def export_chrome_trace(self, path, *args, **options):
        export(self, path, *args, **options)
        if self.gpu_work is None:
            return
        opened = gzip.open if str(path).endswith(".gz") else open
        with opened(path, "rt", encoding="utf-8") as file:
            trace = json.load(file)
        self.gpu_work.add_to(trace, self.shows_host)
        with opened(path, "wt", encoding="utf-8") as file:
            json.dump(trace, file)

    return export_chrome_trace
