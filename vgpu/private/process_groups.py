"""torch.distributed: backends, stores, reductions and the hooks of DistributedDataParallel."""

import functools
import inspect
from operator import methodcaller

import torch


def patch_process_groups(translate):
    """Replace the backends of programs' process groups by `translate(requested backend)`."""
    from torch.distributed import constants
    from torch.distributed import distributed_c10d as c10d

    torch.distributed.is_nccl_available = lambda: True

    helper = c10d._new_process_group_helper
    signature = inspect.signature(helper)

    @functools.wraps(helper)
    def _new_process_group_helper(*args, **kwargs):
        call = signature.bind(*args, **kwargs)
        given = call.arguments["backend"]
        call.arguments["backend"] = c10d.Backend(translate(str(given)))
        device, call.arguments["device_id"] = call.arguments.get("device_id"), None
        call.arguments["backend_options"] = None  # for NCCL only
        group, store = helper(*call.args, **call.kwargs)
        if group in c10d._world.pg_map:  # this rank is in the group
            c10d._world.pg_map[group] = given, c10d._world.pg_map[group][1]
            if hasattr(group, "bound_device"):  # torch's own would split the group, as NCCL can
                group.bound_device = device
        return group, store

    c10d._new_process_group_helper = _new_process_group_helper
    if c10d.default_pg_nccl_timeout is None:  # in a build without NCCL
        c10d.default_pg_nccl_timeout = constants.default_pg_timeout


start_counting = methodcaller("_set_sequence_number_for_group")  # of collectives, by a group
if torch.distributed.is_available():
    resolve_process_group = torch._C._distributed_c10d._resolve_process_group  # by its name
    default_store = torch.distributed.distributed_c10d._get_default_store


def register_process_groups(name, create, is_virtual):
    """Register `create(general options, backend options)` as the backend `name` for vgpu."""
    if torch.distributed.is_available():
        register = torch.distributed.Backend.register_backend
        register(name, create, extended_api=True, devices=["vgpu"])
        logger = torch.distributed.Logger
        logger.set_runtime_stats_and_log = _without_timers(logger.set_runtime_stats_and_log, name)

        patch_hooks(is_virtual)
        _leave_out_flight_recorder()


def _without_timers(log, backend):
    """Return a method of DDP's logger that skips a backend without timers, and so its warning."""

    @functools.wraps(log)
    def set_runtime_stats_and_log(self):
        if self._get_ddp_logging_data().strs_map["backend_name"] != backend:
            log(self)

    return set_runtime_stats_and_log


def _leave_out_flight_recorder():
    """Disable torch 2.15's flight recorder for groups in Python, which it cannot record."""
    c10d = torch.distributed.distributed_c10d
    attach = getattr(c10d, "_maybe_attach_flight_recorder", None)
    if attach is not None:

        @functools.wraps(attach)
        def _maybe_attach_flight_recorder(pg, *args, **kwargs):
            if type(pg) is torch.distributed.ProcessGroup:
                attach(pg, *args, **kwargs)

        c10d._maybe_attach_flight_recorder = _maybe_attach_flight_recorder


def patch_hooks(is_virtual):
    """Allow DDP's hooks for bfloat16, replace its C++ hooks, whose futures Python cannot create."""
    ddp = torch.nn.parallel.DistributedDataParallel
    register, check = ddp._register_builtin_comm_hook, ddp._check_comm_hook

    @functools.wraps(register)
    def _register_builtin_comm_hook(self, comm_hook_type):
        if not is_virtual(torch.device(self.device_type)):
            return register(self, comm_hook_type)
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        is_fp16 = comm_hook_type == torch.distributed.BuiltinCommHookType.FP16_COMPRESS
        hook = default_hooks.fp16_compress_hook if is_fp16 else default_hooks.allreduce_hook
        return self.register_comm_hook(self.process_group, hook)

    @functools.wraps(check)
    def _check_comm_hook(self, hook):
        ours = is_virtual(torch.device(self.device_type))
        if not (ours and hook.__name__.startswith("bf16_")):
            check(self, hook)

    join = torch.distributed.algorithms.join.Join
    notify = join.notify_join_context

    def notify_join_context(joinable):
        joinable.work_of_join = notify(joinable)  # DDP's C++ calls its Python part later
        return joinable.work_of_join

    join.notify_join_context = staticmethod(notify_join_context)
    ddp._register_builtin_comm_hook = _register_builtin_comm_hook
    ddp._check_comm_hook = _check_comm_hook


def wait_on_first_use(tensor):
    """Return a tensor that waits, on first use, for the collective that writes `tensor`."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return AsyncCollectiveTensor(tensor)


def options(kind, **values):
    """Return torch's options of a collective with attributes set."""
    made = kind()
    for name, value in values.items():
        setattr(made, name, value)
    return made


def add_gloo(group, gloo):
    """Make a gloo process group the only backend of a plain `ProcessGroup`."""
    group._register_backend(torch.device("cpu"), group.BackendType.GLOO, gloo)
    group._set_default_backend(group.BackendType.GLOO)


def num_collectives(group=None):
    """Return the number of collectives started by this rank in a group, by default the default."""
    return (group or torch.distributed.group.WORLD)._get_sequence_number_for_group()


def fake_store():
    """Return a store of torch's fake process group, in which one rank represents all."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def fake_store_of(store):
    """Return the `FakeStore` behind a store, or None; torch does not keep a reference to it."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store if type(store).__name__ == "FakeStore" else None
