"""torch.distributed on virtual GPUs by the wall clock: values, order, links and errors.

Most tests run in every rank of a job; see `ranks.in_group`.
"""

import gc
import os
import time
import warnings
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from gates import Gate, held_collectives, named, recorded, run_what_can
from ranks import (
    LIMIT,
    a_group,
    everywhere,
    failure_of,
    hear,
    in_group,
    in_groups,
    in_ranks,
    job_of,
    set_up,
    tell,
)
from waiting import wait_until

from vgpu import Link, virtual_gpus
from vgpu.distributed import collective_costs as costs
from vgpu.distributed.agreement import Agreement
from vgpu.distributed.collective import Collective
from vgpu.distributed.routes import Route
from vgpu.runtime import registry

pytestmark = pytest.mark.waits

Op = dist.ReduceOp
OPS = [Op.SUM, Op.AVG, Op.MIN, Op.MAX, Op.PRODUCT]
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTS = [torch.int8, torch.uint8, torch.int32, torch.int64]


def numbers(rank, *shape, dtype=torch.float32):
    """Return small whole numbers that differ from rank to rank and from place to place."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 7 + 3 * rank) % 5 + 1).reshape(shape).to(dtype)


def of_all(*shape, dtype=torch.float32):
    """Return the `numbers` of all ranks, stacked."""
    return torch.stack([numbers(r, *shape, dtype=dtype) for r in range(dist.get_world_size())])


def combined(op, values):
    """Return what `op` makes of values that are stacked."""
    if op == Op.SUM:
        return values.sum(0).to(values.dtype)
    if op == Op.AVG:
        if values.dtype.is_floating_point:
            return (values / len(values)).sum(0).to(values.dtype)
        return (values.sum(0) / len(values)).trunc().to(values.dtype)
    if op == Op.PRODUCT:
        return values.prod(0).to(values.dtype)
    return values.amin(0) if op == Op.MIN else values.amax(0)


def assert_same(actual, expected):
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual.cpu(), expected, check_device=False)


def as_on_gloo(call, rank, device, group):
    """Assert that `call` returns the same tensors as on CPU tensors with gloo."""
    gloo = a_group(dist.get_process_group_ranks(group), backend="gloo")
    expected = call(rank, torch.device("cpu"), gloo)
    actual = call(rank, device, group)
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.device == device
        assert_same(ours, theirs)


def raises(kind, text, function, *args, **kwargs):
    with pytest.raises(kind, match=text):
        function(*args, **kwargs)


# -- values


@in_groups(1, 2, 3)
def test_all_reduce_of_every_number_by_every_operation(rank, device, group):
    for dtype in (*FLOATS, *INTS):
        for op in OPS:
            x = numbers(rank, 2, 5, dtype=dtype).to(device)
            dist.all_reduce(x, op, group=group)
            assert_same(x, combined(op, of_all(2, 5, dtype=dtype)))


@in_groups(2)
def test_an_average_of_integers_is_rounded_towards_zero_as_in_nccl(rank, device, group):
    """FuncSumPostDiv::divide in NCCL's reduce_kernel.h divides the magnitude."""
    for dtype in (torch.int8, torch.int32, torch.int64):
        mine = torch.tensor([[-3, 5, -1, 3], [-2, -8, 0, 4]][rank], dtype=dtype)  # -5, -3, -1, 7
        x = mine.to(device)
        dist.all_reduce(x, Op.AVG, group=group)
        assert x.tolist() == [-2, -1, 0, 3]
        part = torch.zeros(2, dtype=dtype, device=device)
        dist.reduce_scatter_tensor(part, mine.to(device), Op.AVG, group=group)
        assert part.tolist() == [[-2, -1], [0, 3]][rank]


@in_groups(2, 3)
def test_all_reduce_of_truth_values_is_any_or_all(rank, device, group):
    either, both = [True, True, False], [True, False, False]
    for op, expected in (Op.SUM, either), (Op.MAX, either), (Op.MIN, both), (Op.PRODUCT, both):
        x = torch.tensor([True, rank == 1, False], device=device)
        dist.all_reduce(x, op, group=group)
        assert x.tolist() == expected
    raises(TypeError, "AVG with boolean inputs", dist.all_reduce, x, Op.AVG, group=group)


@in_groups(1, 3)
def test_complex_numbers_are_reduced_as_pairs_of_real_ones(rank, device, group):
    k = dist.get_world_size()
    every = torch.stack([torch.complex(numbers(r, 4), numbers(r + 1, 4)) for r in range(k)])
    half = dist._make_nccl_premul_sum(0.5)
    for op, expected in (Op.SUM, every.sum(0)), (Op.AVG, every.mean(0)), (half, every.sum(0) / 2):
        x, y = every[rank].to(device), every[rank].to(device)
        dist.all_reduce(x, op, group=group), dist.reduce(y, op=op, group=group, group_dst=0)
        assert_same(x, expected), assert_same(y, every[rank] if rank else expected)
    raises(RuntimeError, "complex", dist.reduce, x, op=Op.MAX, group=group, group_dst=0)


@in_groups(2)
def test_premultiplied_sum_by_a_number_and_by_a_tensor(rank, device, group):
    for dtype in (torch.float32, torch.float64):
        for factor in (0.5, torch.tensor([0.5], dtype=dtype, device=device)):
            x = numbers(rank, 4, dtype=dtype).to(device)
            dist.all_reduce(x, dist._make_nccl_premul_sum(factor), group=group)
            assert_same(x, of_all(4, dtype=dtype).sum(0) * 0.5)
    x = numbers(rank, 4, dtype=torch.int32).to(device)
    op = dist._make_nccl_premul_sum(2.0)
    raises(TypeError, "PreMulSum Data type", dist.all_reduce, x, op, group=group)


@in_groups(1, 2, 3)
def test_reduce_leaves_the_result_with_the_root(rank, device, group):
    k = dist.get_world_size()
    for root in range(k):
        for op in OPS:
            x = numbers(rank, 6).to(device)
            dist.reduce(x, op=op, group=group, group_dst=root)
            assert_same(x, combined(op, of_all(6)) if rank == root else numbers(rank, 6))


@in_groups(1, 2, 3)
def test_broadcast_gather_and_scatter_as_with_gloo(*rank_device_group):
    def call(rank, device, group):
        k, results = dist.get_world_size(), []
        for root in range(k):
            x = numbers(rank, 3, 2).to(device)
            dist.broadcast(x, group=group, group_src=root)
            y = numbers(rank, 4, dtype=torch.int64).to(device)
            outs = [torch.zeros_like(y) for _ in range(k)] if rank == root else None
            dist.gather(y, outs, group=group, group_dst=root)
            z = torch.zeros(2, dtype=torch.float64, device=device)
            parts = [numbers(5 + r, 2, dtype=torch.float64).to(device) for r in range(k)]
            dist.scatter(z, parts if rank == root else None, group=group, group_src=root)
            results += [x, z, *(outs or ())]
        return results

    as_on_gloo(call, *rank_device_group)


@in_groups(1, 2, 3)
def test_all_gather_in_a_list_and_in_one_tensor_as_with_gloo(*rank_device_group):
    def call(rank, device, group):
        k, results = dist.get_world_size(), []
        for dtype in (*FLOATS, *INTS, torch.bool):
            x = numbers(rank, 2, 3, dtype=dtype).to(device)
            outs = [torch.zeros_like(x) for _ in range(k)]
            dist.all_gather(outs, x, group=group)
            rows = torch.zeros(2 * k, 3, dtype=dtype, device=device)
            dist.all_gather_into_tensor(rows, x, group=group)
            results += [*outs, rows]
        return results

    as_on_gloo(call, *rank_device_group)


@in_groups(1, 2, 3)
def test_reduce_scatter_leaves_each_rank_its_part_of_the_sum(rank, device, group):
    k = dist.get_world_size()
    for op in OPS:
        whole = numbers(rank, k, 4)
        expected = combined(op, of_all(k, 4))[rank]
        out = torch.zeros(4, device=device)
        dist.reduce_scatter(out, list(whole.to(device)), op, group=group)
        assert_same(out, expected)
        out.zero_()
        dist.reduce_scatter_tensor(out, whole.to(device), op, group=group)
        assert_same(out, expected)


@in_groups(1, 2, 3)
def test_all_to_all_even_and_uneven(rank, device, group):
    k = dist.get_world_size()
    x = torch.arange(k * 2.0) + 100 * rank
    out = torch.zeros(k * 2, device=device)
    dist.all_to_all_single(out, x.to(device), group=group)
    assert_same(out, torch.cat([torch.arange(k * 2.0)[2 * rank :][:2] + 100 * r for r in range(k)]))

    # rank i sends i + j rows to rank j: none from 0 to 0
    sizes = [rank + other for other in range(k)]
    rows = torch.full((sum(sizes), 3), float(rank), device=device)
    out = torch.zeros(sum(sizes), 3, device=device)
    dist.all_to_all_single(out, rows, sizes, sizes, group=group)
    expected = torch.cat([torch.full((rank + r, 3), float(r)) for r in range(k)])
    assert_same(out, expected)

    inputs = list(rows.split(sizes))
    outputs = [torch.zeros(size, 3, device=device) for size in sizes]
    dist.all_to_all(outputs, inputs, group=group)
    assert_same(torch.cat(outputs), expected)


@in_groups(2, 3)
def test_empty_tensors_go_everywhere(rank, device, group):
    k = dist.get_world_size()
    empty = torch.empty(0, 4, device=device)
    dist.all_reduce(empty, group=group)
    dist.broadcast(empty, 0, group=group)
    dist.reduce(empty, 0, group=group)
    outs = [torch.empty(0, 4, device=device) for _ in range(k)]
    dist.all_gather(outs, empty, group=group)
    dist.all_gather_into_tensor(torch.empty(0, 4, device=device), empty, group=group)
    dist.reduce_scatter_tensor(empty.clone(), empty, group=group)
    dist.all_to_all_single(empty.clone(), empty, group=group)
    dist.scatter(empty, outs if rank == 0 else None, group=group, group_src=0)
    dist.gather(empty, outs if rank == 0 else None, group=group, group_dst=0)
    if rank == 0:
        dist.send(empty, group=group, group_dst=1)
    elif rank == 1:
        dist.recv(empty, group=group, group_src=0)
    x = torch.ones(1, device=device)
    dist.all_reduce(x, group=group)
    assert x.item() == k


@in_groups(2)
def test_memory_formats_and_what_is_not_dense(rank, device, group):
    for layout, size in ((torch.channels_last, (2, 3, 4, 5)), (torch.channels_last_3d, [2] * 5)):
        x = numbers(rank, *size).to(device).to(memory_format=layout)
        dist.all_reduce(x, group=group)
        assert x.is_contiguous(memory_format=layout)
        assert_same(x, of_all(*size).sum(0))
    part = torch.arange(8.0, device=device)[2:6]
    dist.all_reduce(part, group=group)
    assert part.tolist() == [4, 6, 8, 10]

    for x in (torch.ones(2, 3, 4, 5, device=device), torch.ones(2, 3, 4, 5, 6, device=device)):
        for gaps in (x[..., :3], x.transpose(0, 1), x[:, ::2]):
            raises(ValueError, "contiguous", dist.all_reduce, gaps, group=group)
        dist.all_reduce(x[:0].transpose(0, 1), group=group)
    columns = torch.ones(4, 4, device=device)[:, :2]
    for call in (
        lambda: dist.all_reduce(columns, group=group),
        lambda: dist.broadcast(columns, 0, group=group),
        lambda: dist.send(columns, group=group, group_dst=1 - rank),
        lambda: dist.all_gather_into_tensor(torch.ones(8, 2, device=device), columns, group=group),
    ):
        raises(ValueError, "contiguous", call)


@in_group(2)
def test_tensors_elsewhere_and_sizes_that_do_not_fit_raise_at_the_call(rank, device, group):
    x = torch.ones(3, device=device)
    elsewhere = torch.ones(3, device=f"vgpu:{1 - rank}")
    outs = [x, elsewhere]
    raises(ValueError, "one virtual GPU", dist.all_gather, outs, x, group=group)
    raises(ValueError, "parts", dist.all_gather_into_tensor, x, x, group=group)
    raises(ValueError, "parts", dist.reduce_scatter_tensor, x, x, group=group)
    raises(ValueError, "parts", dist.all_to_all_single, x.clone(), x, group=group)
    raises(ValueError, "match", dist.all_gather_into_tensor, torch.cat([x, x]).double(), x, group)
    raises(ValueError, "2 tensors, one a rank: got 1", dist.all_gather, [x.clone()], x, group=group)
    raises(ValueError, "itself|own rank|same", dist.send, x, rank, group=group)


@in_groups(2, 3)
def test_calls_that_are_coalesced_give_one_work(rank, device, group):
    k = dist.get_world_size()
    tensors = [numbers(rank + i, 3).to(device) for i in range(3)]
    with dist._coalescing_manager(group=group, device=device, async_ops=True) as work:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    work.wait()
    for i, tensor in enumerate(tensors):
        assert_same(tensor, sum(numbers(r + i, 3) for r in range(k)))

    parts = [numbers(rank + i, 2).to(device) for i in range(2)]
    wholes = [torch.zeros(k, 2, device=device) for _ in range(2)]
    with dist._coalescing_manager(group=group, device=device):
        for whole, part in zip(wholes, parts, strict=True):
            dist.all_gather_into_tensor(whole, part, group=group)
    with dist._coalescing_manager(group=group, device=device):
        for whole, part in zip(wholes, parts, strict=True):
            dist.reduce_scatter_tensor(part, whole.clone(), group=group)
    for i, (whole, part) in enumerate(zip(wholes, parts, strict=True)):
        assert_same(whole, torch.stack([numbers(r + i, 2) for r in range(k)]))
        assert_same(part, k * numbers(rank + i, 2))


@in_group(2, 3)
def test_objects_travel(rank, device, group):
    k = dist.get_world_size()
    objects = [None] * k
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank}, group=group)
    assert objects == [{"rank": r, "text": "x" * r} for r in range(k)]
    told = [f"from {rank}", rank]
    dist.broadcast_object_list(told, 1, group=group)
    assert told == ["from 1", 1]
    mine = [None]
    dist.scatter_object_list(mine, [(r, "s") for r in range(k)] if rank == 0 else None, 0, group)
    assert mine == [(rank, "s")]
    gathered = [None] * k if rank == 0 else None
    dist.gather_object(rank, gathered, 0, group=group)
    assert gathered == (list(range(k)) if rank == 0 else None)


# -- messages


@in_group(2)
def test_the_work_of_coalesced_messages_waits_for_each_of_them(rank, device, group):
    sent, received = numbers(rank, 3).to(device), torch.zeros(3, device=device)
    if rank == 0:
        with dist._coalescing_manager(group=group, device=device, async_ops=True) as work:
            dist.irecv(received, 1, group=group)
            dist.isend(sent, 1, group=group)
        work.wait()
        hear("rank 1 has received")
        for _ in range(30):  # in which a stream that waits for the last only would go on
            assert not (torch.vgpu.current_stream().query() or work.works[0].is_completed())
            time.sleep(0.01)
        tell("rank 0 waits")
    else:
        dist.recv(received, 0, group=group)
        assert_same(received, numbers(0, 3))
        tell("rank 1 has received")
        hear("rank 0 waits")
        dist.send(sent, 0, group=group)
    assert_same(received, numbers(1 - rank, 3))


@in_groups(2, 3)
def test_messages_go_around_a_ring_and_arrive_in_another_shape(rank, device, group):
    k = dist.get_world_size()
    sent, received = numbers(rank, 4).to(device), torch.zeros(2, 2, device=device)
    both = (dist.isend, sent, rank + 1), (dist.irecv, received, rank - 1)
    ops = [dist.P2POp(op, x, group=group, group_peer=peer % k) for op, x, peer in both]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert_same(received, numbers((rank - 1) % k, 4).view(2, 2))


@in_groups(2)
def test_several_messages_under_way_keep_their_order_whatever_their_tags(rank, device, group):
    """ProcessGroupNCCL::send and recv have the tag as `int /* unused */`."""
    send, recv = partial(dist.isend, group=group), partial(dist.irecv, group=group)
    tensors = [torch.full((2,), float(10 * rank + i), device=device) for i in range(4)]
    if rank == 0:
        works = [send(x, group_dst=1, tag=i) for i, x in enumerate(tensors)]
    else:
        works = [recv(x, group_src=0, tag=9 - i) for i, x in enumerate(tensors)]
    for work in works:
        work.wait()
    assert [x[0].item() for x in tensors] == [0, 1, 2, 3]


# -- groups


@in_group(3)
def test_subgroups_work_beside_each_other_and_know_their_own_ranks(rank, device, group):
    pairs = {pair: a_group(list(pair)) for pair in ((0, 1), (1, 2), (0, 2))}
    sums = {}
    for pair, members in pairs.items():
        if rank in pair:
            sums[pair] = x = torch.full((2,), float(rank + 1), device=device)
            dist.all_reduce(x, group=members, async_op=True)
    everyone = torch.full((2,), float(rank + 1), device=device)
    dist.all_reduce(everyone, group=group)
    torch.vgpu.synchronize()
    for pair, x in sums.items():
        assert x.tolist() == [sum(pair) + 2] * 2
    assert everyone.tolist() == [6, 6]
    if rank in (1, 2):  # ranks of torch's calls are those of the default group
        x = torch.full((2,), float(rank), device=device)
        dist.broadcast(x, 2, group=pairs[1, 2])
        assert x.tolist() == [2, 2]
        y = torch.full((2,), float(rank), device=device)
        (dist.send if rank == 1 else dist.recv)(y, 3 - rank, group=pairs[1, 2])
        assert y.tolist() == [1, 1]


def calls_of(rank, x):
    """Return calls of every collective and message of two ranks, functions(group), with tensors."""
    other, whole = 1 - rank, torch.cat([x, x])
    at_root = [x, x.clone()] if rank == 0 else None

    def batch(group):
        try:
            dist.batch_isend_irecv([dist.P2POp((dist.isend, dist.irecv)[rank], x, other, group)])
        finally:  # after an error torch 2.15 would go on to collect the group's collectives
            dist.distributed_c10d._world.pg_coalesce_state.pop(group, None)

    return {
        "all_reduce": lambda group: dist.all_reduce(x, group=group),
        "all_reduce_coalesced": lambda group: dist.all_reduce_coalesced([x, whole], group=group),
        "broadcast": lambda group: dist.broadcast(x, 0, group=group),
        "reduce": lambda group: dist.reduce(x, 0, group=group),
        "all_gather": lambda group: dist.all_gather([x.clone(), x.clone()], x, group=group),
        "all_gather_into_tensor": lambda group: dist.all_gather_into_tensor(whole, x, group=group),
        "reduce_scatter": lambda group: dist.reduce_scatter(x.clone(), [x, x], group=group),
        "reduce_scatter_tensor": lambda group: dist.reduce_scatter_tensor(x, whole, group=group),
        "all_to_all": lambda group: dist.all_to_all([x.clone(), x.clone()], [x, x], group=group),
        "all_to_all_single": lambda group: dist.all_to_all_single(x.clone(), x, group=group),
        "gather": lambda group: dist.gather(x, at_root, 0, group=group),
        "scatter": lambda group: dist.scatter(x, at_root, 0, group=group),
        "message": lambda group: (dist.send, dist.recv)[rank](x, other, group=group),
        "batch": batch,
    }


@in_group(2)
def test_nccl_alone_refuses_tensors_on_the_cpu(rank, device, group):
    calls = calls_of(rank, torch.ones(2))
    net = torch.nn.Linear(1, 1)
    ddp = torch.nn.parallel.DistributedDataParallel
    calls["ddp"] = lambda group: ddp(net, process_group=group)
    calls["sparse"] = lambda group: dist.all_reduce(torch.eye(2).to_sparse(), group=group)
    for name, call in calls.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `all_reduce_coalesced` will be deprecated
            raises(RuntimeError, "^No backend type associated with device type cpu", call, group)
        assert name
    x = torch.ones(2)
    for tensors in ([x, x], x.to(device)), ([x.to(device)] * 2, x):
        text = "must be on one virtual GPU: got cpu, "
        raises(ValueError, text, dist.all_gather, *tensors, group)
    assert sorted(everywhere(rank)) == [0, 1]


@in_group(2)
def test_types_and_operations_that_nccl_does_not_know_raise(rank, device, group):
    """Of the map `ncclDataType` and of `to_nccl_data_type` in torch's NCCL backend.

    torch hands complex numbers over as pairs of real ones.
    """
    names = {torch.int16: "Short", torch.uint16: "UInt16", torch.uint32: "UInt32"}
    for dtype, name in names.items():
        for call, function in calls_of(rank, torch.ones(2, device=device).to(dtype)).items():
            if call in ("all_to_all", "all_to_all_single", "gather", "scatter", "message", "batch"):
                raises(RuntimeError, f"^Unconvertible NCCL type {name}$", function, group)
            else:
                text = f"^Input tensor data type is not supported for NCCL process group: {name}$"
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    raises(TypeError, text, function, group)
    x = torch.ones(2, dtype=torch.complex64, device=device)
    for call in group.allreduce, group.broadcast, group.reduce:
        call([x]).wait()
    for op in (Op.BAND, Op.BOR, Op.BXOR):
        raises(ValueError, "NCCL", dist.all_reduce, x.real.int(), op, group=group)
        raises(ValueError, "NCCL", dist.reduce, x.real.int(), 0, op, group=group)
    text = "not supported for NCCL process group: ComplexFloat"
    raises(TypeError, text, group._allgather_base, torch.cat([x, x]), x)
    x = torch.ones(2, device=device).to(torch.float8_e4m3fn)
    dist.broadcast(x, 0, group=group)
    raises(RuntimeError, "Unsupported Float8 type for NCCL", dist.all_reduce, x, group=group)
    text = "ProcessGroupNCCL does not support allgather_coalesced"
    raises(NotImplementedError, text, group.allgather_coalesced, [[x, x]], [x])
    raises(NotImplementedError, "not support recvAnysource", dist.recv, x, None, group=group)


@in_group(2)
def test_a_tensor_on_another_gpu_than_before_is_warned_of(rank, device, group):
    dist.all_reduce(torch.ones(2, device=device), group=group)
    x = torch.ones(2, device=f"vgpu:{1 - rank}")
    text = f"on vgpu:{1 - rank}, but before on GPU {rank}: NCCL hangs"
    with pytest.warns(UserWarning, match=text):
        dist.all_reduce(x, group=group)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dist.all_reduce(x, group=group)  # once for each GPU
        dist.all_reduce(x, group=a_group())
    assert x.tolist() == [8, 8]


@in_group(2)
def test_tensors_on_the_cpu_go_through_gloo(rank, device, _):
    group = dist.new_group(backend="cpu:gloo,vgpu:vccl")
    x = torch.ones(2, device=device)
    dist.all_reduce(x, group=group)
    for call in (lambda: dist.all_reduce(x), lambda: dist.broadcast(x, 0)):
        raises(RuntimeError, "vccl", call)  # for the default group has gloo alone
    assert x.tolist() == [2, 2]
    x = numbers(rank, 3)
    dist.all_reduce(x, group=group)
    assert_same(x, of_all(3).sum(0))
    dist.broadcast(x, 0, group=group)
    y = torch.zeros(3)
    (dist.send if rank == 0 else dist.recv)(x if rank == 0 else y, 1 - rank, group=group)
    assert rank == 0 or y.tolist() == x.tolist()
    if rank == 0:
        raises(RuntimeError, "1 failed .* 100 ms", group.monitored_barrier, timedelta(seconds=0.1))


def initialized(backend, folder):
    """Check a default group of such a backend, and the groups of a mesh of two dimensions."""
    rank, size = dist.get_rank(), dist.get_world_size()
    device = virtual_gpus(size)[rank]
    torch.vgpu.set_device(rank)
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    for where in ("cpu", device) if "gloo" in str(backend) else (device,):
        x = numbers(rank, 3).to(where)
        dist.all_reduce(x)
        assert_same(x, of_all(3).sum(0))
    mesh = dist.init_device_mesh("vgpu", (1, size), mesh_dim_names=("outer", "inner"))
    x = torch.full((2,), rank + 1.0, device=device)
    dist.all_reduce(x, group=mesh.get_group("inner"))
    y = torch.full((2,), rank + 1.0, device=device)
    dist.all_reduce(y, group=mesh.get_group("outer"))
    assert (x.tolist(), y.tolist()) == ([3, 3], [rank + 1] * 2)


@pytest.mark.parametrize("backend", [None, "vccl", "cpu:gloo,vgpu:vccl"])
def test_a_default_group_chooses_by_device(backend, tmp_path):
    job_of(2).run(initialized, backend, str(tmp_path), last=True)


# -- what is asynchronous, and what waits for what


@in_groups(2)
def test_a_collective_returns_before_the_others_have_come(rank, device, group):
    x = torch.ones(3, device=device)
    if rank == 0:
        dist.all_reduce(x, group=group)  # which waits for it, but not the host
        work = dist.all_reduce(x, group=group, async_op=True)
        work.wait()
        y = x + 1
        assert not work.is_completed() and not work.is_success()
        tell("rank 0 goes on")
        assert y.tolist() == [5, 5, 5] and work.is_completed() and work.is_success()
    else:
        hear("rank 0 goes on")
        dist.all_reduce(x, group=group)
        dist.all_reduce(x, group=group)
        assert x.tolist() == [4, 4, 4]


@in_groups(2)
def test_a_message_waits_for_no_other_rank_and_no_collective(rank, device, group):
    x, y = torch.ones(3, device=device), torch.full((3,), float(rank), device=device)
    if rank == 0:
        work = dist.all_reduce(x, group=group, async_op=True)
        sent = dist.isend(y, group=group, group_dst=1)
        got = dist.irecv(y2 := torch.zeros(3, device=device), group=group, group_src=1)
        got.wait()
        sent.wait()
        assert y2.tolist() == [1, 1, 1]
        assert not work.is_completed()
        tell("messages have come")
        work.wait()
    else:
        dist.send(y, group=group, group_dst=0)
        dist.recv(y, group=group, group_src=0)
        assert y.tolist() == [0, 0, 0]
        hear("messages have come")
        dist.all_reduce(x, group=group)
    assert x.tolist() == [2, 2, 2]


@in_groups(2)
def test_a_collective_waits_for_earlier_work_of_its_stream_only(rank, device, group):
    side = torch.vgpu.Stream(device)
    x = torch.zeros(3, device=device)
    with Gate(device) as gate:
        x += rank + 1
        before = dist.all_reduce(x, group=group, async_op=True)
        for _ in range(30):  # in which one that does not wait would run
            assert not before.is_completed()
            time.sleep(0.01)
        with gate.opened_later():
            before.wait()
            assert x.tolist() == [3, 3, 3]
    with torch.vgpu.stream(side):
        y = torch.ones(3, device=device)
    side.synchronize()
    with torch.vgpu.stream(side):
        work = dist.all_reduce(y, group=group, async_op=True)
    with Gate(device, torch.vgpu.current_stream(device)) as gate:
        with torch.vgpu.stream(side):
            work.wait()
        wait_until(work.is_completed)
        assert not gate.open.is_set()


@in_groups(2)
def test_the_stream_on_which_a_work_is_waited_for_waits_and_no_other(rank, device, group):
    main, side, other = torch.vgpu.current_stream(), *(torch.vgpu.Stream() for _ in range(2))
    x = torch.ones(3, device=device)
    torch.vgpu.synchronize()
    if rank == 0:
        work = dist.all_reduce(x, group=group, async_op=True)
        with torch.vgpu.stream(other):
            old = x.clone().cpu()
        with torch.vgpu.stream(side):
            work.wait()
            y = x + 1
        assert main.query() and not side.query()
        tell("rank 0 goes on")
        side.synchronize()
        assert (old.tolist(), y.tolist(), x.tolist()) == ([1] * 3, [3] * 3, [2] * 3)
    else:
        hear("rank 0 goes on")
        dist.all_reduce(x, group=group)


@pytest.mark.parametrize("elsewhere", ["side stream", "other device"])
def test_collectives_of_a_group_follow_each_other_wherever_they_are_issued(elsewhere):
    def check():
        mine, group = virtual_gpus(4)[2 * dist.get_rank() :][:2], a_group()
        torch.vgpu.set_device(mine[1])
        on, side = mine[1], torch.vgpu.Stream(mine[1])
        if elsewhere == "other device":
            on, side = mine[0], torch.vgpu.default_stream(mine[0])
        x, y = torch.ones(3, device=on), torch.ones(3, device=mine[1])
        torch.vgpu.synchronize(mine[0]), torch.vgpu.synchronize(mine[1])
        with Gate(on, side):
            with torch.vgpu.stream(side):
                first = dist.all_reduce(x, group=group, async_op=True)
            second = dist.all_reduce(y, group=group, async_op=True)
            run_what_can()
            assert not second.is_completed()
        with torch.vgpu.device(on):
            first.wait(), second.wait()
        assert x.tolist() == y.tolist() == [2, 2, 2]

    job_of(2).run(check)


@in_groups(2)
def test_memory_of_a_tensor_is_accounted_until_its_collective_is_done(rank, device, group):
    torch.vgpu.synchronize()
    gc.collect()
    before = torch.vgpu.memory_allocated(device)
    x = torch.ones(1000, device=device)
    work = dist.all_reduce(x, group=group, async_op=rank == 0)
    if rank == 0:
        del x
        assert torch.vgpu.memory_allocated(device) >= before + 4000
        tell("looked")
        work.wait()
        del work
    torch.vgpu.synchronize()
    if rank == 1:
        del x, work
    gc.collect()
    assert torch.vgpu.memory_allocated(device) == before
    x = torch.ones(1000, device=device)
    with_x = torch.vgpu.memory_allocated(device)
    op = dist._make_nccl_premul_sum(torch.ones(1, device=device))
    work = dist.all_reduce(x, op, group=group, async_op=True)  # for which nothing waits
    torch.vgpu.synchronize()
    del op
    assert torch.vgpu.memory_allocated(device) == with_x
    del x, work
    gc.collect()
    assert torch.vgpu.memory_allocated(device) == before


@in_groups(2)
def test_what_follows_a_backward_pass_waits_for_the_collectives_of_ddp(rank, device, group):
    net = torch.nn.Linear(1, 1, bias=False).to(device)
    views = {"gradient_as_bucket_view": True}  # nothing reads what the collective has written
    ddp = torch.nn.parallel.DistributedDataParallel(net, process_group=group, **views)
    x = torch.full((1, 1), 2.0 + 2 * rank, device=device)
    loss = ddp(x).sum()
    if rank == 1:
        hear("rank 0 is through")
    loss.backward()
    doubled = 2 * net.weight.grad
    if rank == 0:
        tell("rank 0 is through")
    assert doubled.item() == 6  # twice the mean of 2 and 4
    del ddp, loss
    gc.collect()


@in_group(2)
def test_a_collective_in_a_backward_pass_waits_for_the_gradient_that_it_reads(rank, device, group):
    side, other = torch.vgpu.Stream(device), torch.device("vgpu", 1 - rank)
    x = torch.ones(3, device=device, requires_grad=True)
    y = x.clone()
    y.register_hook(lambda gradient: dist.all_reduce(gradient, group=group))
    torch.vgpu.synchronize()
    with side:
        loss = (2 * y).sum()
    with Gate(other):
        side.wait_stream(torch.vgpu.current_stream(other))
        loss.backward()
    assert x.grad.tolist() == [4, 4, 4]


@in_group(2)
def test_a_barrier_lets_the_host_wait(rank, device, group):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if rank == 0:
            dist.barrier(group=group)
            assert dist.distributed_c10d._get_default_store().check(["rank 1 came"])
        else:
            time.sleep(0.2)
            dist.distributed_c10d._get_default_store().set("rank 1 came", "")
            dist.barrier(group=group)


@in_groups(2)
def test_futures_have_the_tensors_and_call_back_behind_them(rank, device, group):
    x = torch.ones(5, device=device)[1:]  # its memory is written, of which it is a view
    if rank == 1:
        hear("rank 0 has asked")
    future = dist.all_reduce(x, group=group, async_op=True).get_future()
    with torch.vgpu.device(1 - rank):  # the stream is one of the tensors' GPU
        both = future.then(lambda f: [f.value()[0] * 2, torch.vgpu._sleep(0.01), f.value()[0] * 3])
    sixes = both.then(lambda f: f.value()[2] + 0)
    assert torch.ones(1, device=device).item() == 1  # the current stream goes on
    copy = both.wait()[2] + 0
    if rank == 0:
        tell("rank 0 has asked")
    assert future.wait()[0] is x
    assert sixes.wait().tolist() == copy.tolist() == [6, 6, 6, 6]
    assert x.tolist() == [2, 2, 2, 2]
    chained = both.then(lambda f: f.wait()[0].sum().item())
    assert chained.wait() == 16
    for call, size in (dist.all_gather_into_tensor, 8), (dist.all_to_all_single, 4):
        out = torch.zeros(size, device=device)
        assert call(out, x, group=group, async_op=True).get_future().wait()[0] is out


# -- spans and links


@in_group(2, 3)
def test_recorded_spans_tell_the_bytes(rank, device, group):
    k = dist.get_world_size()
    x = torch.ones(6 * k, device=device)
    whole = torch.ones(k, 6 * k, device=device)
    with recorded() as spans:
        dist.all_reduce(x, group=group)
        dist.broadcast(x, 0, group=group)
        dist.reduce(x, 0, group=group)
        dist.all_gather_into_tensor(whole, x, group=group)
        dist.reduce_scatter_tensor(x, whole, group=group)
        dist.all_to_all_single(x.clone(), x, group=group)
        dist.gather(x, list(whole) if rank == 0 else None, 0, group=group)
        dist.scatter(x, list(whole) if rank == 0 else None, 0, group=group)
        if rank < 2:
            (dist.send if rank == 0 else dist.recv)(x, 1 - rank, group=group)
    found = [span for span in spans if span.kind == "collective"]
    message = found.pop() if rank < 2 else None
    assert {span.name: span.num_bytes for span in found} == {
        "all_reduce": 2 * (k - 1) * 24,
        "broadcast": 24 * k,
        "reduce": 24 * k,
        "all_gather_into_tensor": (k - 1) * 24 * k,
        "reduce_scatter_tensor": (k - 1) * 24 * k,
        "all_to_all_single": (k - 1) * 24,
        "gather": (k - 1) * 24 * k,
        "scatter": (k - 1) * 24 * k,
    }
    assert {span.engine for span in found} == {"collectives"}
    if message:
        engine = "send 1" if rank == 0 else "recv 0"
        assert (message.name, message.engine, message.num_bytes) == ("message", engine, 24 * k)
    assert all(span.device == device for span in found)


LINK = Link(1e6, latency=1e-3)


@in_group(2, 3, peer_link=LINK)
def test_a_link_keeps_a_collective_for_the_seconds_of_the_formula(rank, device, group):
    k, n = dist.get_world_size(), 30000
    x = torch.zeros(n, dtype=torch.uint8, device=device)
    whole = torch.zeros(k * n, dtype=torch.uint8, device=device)
    with recorded() as spans:
        dist.all_reduce(x, group=group)
        dist.all_gather_into_tensor(whole, x, group=group)
        dist.broadcast(x, 0, group=group)
    ring = 2 * (k - 1)
    expected = [ring * 1e-3 + ring * n / k / 1e6, (k - 1) * (1e-3 + n / 1e6)]
    expected.append((k - 1) * 1e-3 + n / 1e6)
    found = [span for span in spans if span.kind == "collective"]
    ends = everywhere([span.end for span in found])
    issued = everywhere([span.issued for span in found])
    for i, seconds in enumerate(expected):  # from when the last rank came, at the earliest
        assert min(end[i] for end in ends) - max(each[i] for each in issued) >= seconds
    rank, device, group = set_up(peer_link=Link(float("inf"), latency=0.05))
    with recorded() as spans:
        dist.all_reduce(torch.zeros(3, device=device), group=group)
    (span,) = named(spans, "all_reduce")
    assert min(everywhere(span.end)) - max(everywhere(span.issued)) >= ring * 0.05


@in_group(2, peer_link=LINK)
def test_collectives_of_several_groups_share_a_link(rank, device, _):
    groups = [a_group() for _ in range(4)]
    tensors = [torch.zeros(20000, dtype=torch.uint8, device=device) for _ in groups]
    torch.vgpu.synchronize()
    with recorded() as spans, Gate(device) as gate:
        for group, x in zip(groups, tensors, strict=True):
            dist.all_reduce(x, group=group, async_op=True)
        gate.let_go()
        torch.vgpu.synchronize()
    found = named(spans, "all_reduce")
    assert max(span.end for span in found) - found[0].issued >= 4 * 0.022


@in_group(2, 3, peer_link=LINK)
def test_a_message_keeps_one_direction_of_the_link_and_a_collective_both(rank, device, group):
    found = registry.find(device)
    x, y = (torch.zeros(n, dtype=torch.uint8, device=device) for n in (40000, 400000))
    move = (dist.isend, dist.irecv, lambda *_, group: None)[rank]
    with recorded() as spans:
        move(x, 1 - rank, group=group)
    assert all(message.end - message.issued >= 0.041 for message in named(spans, "message"))
    assert (found.sending.free_at > found.receiving.free_at) == (rank == 0)
    before = found.sending.free_at + found.receiving.free_at
    move(y, 1 - rank, group=group)
    wait_until(lambda: rank == 2 or found.sending.free_at + found.receiving.free_at > before)
    dist.all_reduce(x, group=group)  # begins when the links of all ranks are free
    torch.vgpu.synchronize()
    assert found.sending.free_at == found.receiving.free_at
    assert len({*everywhere(found.sending.free_at)}) == 1


OTHERS = costs.all_gather, costs.all_to_all, costs.broadcast, costs.gather


def test_an_all_reduce_takes_the_faster_of_ring_and_tree():
    ring, tree = (costs.all_reduce(8, 800, Route(1.0, latency)) for latency in (0.0, 1e6))
    assert (ring.steps, ring.num_bytes) == (14, 1400)
    assert (tree.steps, tree.num_bytes) == (6, 1600)
    for cost in (costs.all_reduce, *OTHERS):
        alone = cost(1, 800, Route(1.0, 1.0, startup=1.0))
        assert alone == costs.CollectiveCost(0, 0), "a rank alone sends nothing"
        assert alone.seconds(Route(1.0, 1.0, startup=1.0)) == 0


@pytest.mark.parametrize(
    ("k", "machines", "ring", "tree"),
    [
        (16, 1, (30, 0), (8, 0)),
        (16, 2, (30, 2), (16, 2)),  # a chain of 8 up and down in each, and one step between them
        (64, 8, (126, 14), (20, 6)),
        (8, 8, (14, 14), (6, 6)),
        (5, 2, (8, 2), (6, 2)),  # the chain of the fuller one
    ],
)
def test_steps_between_machines_are_those_of_nccls_ring_and_trees(k, machines, ring, tree):
    """Of ring: nInterSteps = 2 (nNodes - 1); of trees: 2 (nRanks / nNodes - 1) and 2 log2 nNodes.

    See src/graph/tuning.cc of NCCL.
    """
    found = []
    for latency in (0.0, 1e6):
        route = Route(1.0, latency, 0.5, machines, 3 * latency)
        cost = costs.all_reduce(k, 64 * k, route)
        found.append((cost.steps, cost.between))
        steps = (cost.steps - cost.between) * latency + cost.between * 3 * latency
        assert cost.seconds(route) == 0.5 + steps + cost.num_bytes
    assert found == [ring, tree]
    for kind in OTHERS:
        cost = kind(k, 64 * k, route)
        assert (cost.steps, cost.between) == (k - 1, machines - 1)  # once around the ring
    assert costs.send(2, 8, route).between == machines - 1


def test_ranks_agree_on_the_last_start_and_the_slowest_link():
    def agreed(*rows):
        return Agreement.of(torch.tensor(rows, dtype=torch.float64), ready=5.0)

    one, other = (1, 5.0, 2e9, 1e-6, 7, 0), (1, 6.0, 1e9, 3e-6, 7, 0)
    for rows in ((one, other), (other, one)):
        assert agreed(*rows) == Agreement(start=6.0, bandwidth=1e9, latency=3e-6)
    elsewhere = (1, 1e12, 1e9, 3e-6, 8, 0)  # the time on another host says nothing here
    before, start = time.perf_counter(), agreed(one, elsewhere).start
    assert max(5.0, before) <= start <= max(5.0, time.perf_counter())


def test_a_text_of_many_tensors_has_some_shapes_and_all_elements():
    tensors = [torch.ones(i) for i in range(1, 10)]
    shapes = ", ".join(f"float32[{i}]" for i in range(1, 9))
    for count, text in (
        (8, f"all_reduce({shapes}, sum)"),
        (9, f"all_reduce({shapes}, ... (9 tensors, 45 elements), sum)"),
    ):
        call = Collective("all_reduce", tensors[:count], [], "sum")
        assert call.text == text


# -- errors


@in_ranks(2)
def test_ranks_that_disagree_are_told_what_each_has_called():
    def kernel(rank, device, group):
        x = torch.ones(3, device=device)
        if rank:
            x = torch.ones(4, device=device)[torch.tensor([7, 1, 2], device=device)]
        try:
            dist.all_reduce(x, group=group, async_op=True)  # `wait` could raise its error first
            torch.vgpu.synchronize()
        except torch.AcceleratorError as error:
            if rank == 1:  # its own kernel is what it hears of first
                assert "index 7" in str(error)
                dist.all_reduce(x[:0], group=group)  # the group tells the rest
            raise

    def ones(device, count=3, **options):
        return torch.ones(count, device=device, **options)

    reduce, broadcast, me = dist.all_reduce, dist.broadcast, dist.get_rank()
    all_to_all, kinds = dist.all_to_all_single, (torch.int32, torch.float32)
    for call, *words in (
        (lambda r, d, g: reduce(ones(d, 3 + r), group=g), "[3]", "rank {1}: all_reduce(float32[4]"),
        (
            lambda r, d, g: reduce(ones(d, dtype=(torch.float32, torch.float64)[r]), group=g),
            *("float32[3]", "float64[3]"),
        ),
        (
            lambda r, d, g: reduce(ones(d), group=g) if r else broadcast(ones(d), 0, group=g),
            *("all_reduce", "broadcast"),
        ),
        (lambda r, d, g: broadcast(ones(d), me, group=g), "rank 0: broadcast(float32[3], root 0)"),
        (lambda r, d, g: dist.reduce(ones(d), me, OPS[2 + r], g), "min, root", "max, root"),
        (lambda r, d, g: dist.gather(ones(d), [ones(d)] * 2, me, g), "root 0", "root 1"),
        (lambda r, d, g: dist.reduce_scatter(ones(d), [ones(d)] * 2, OPS[2 + r], g), "min", "max"),
        (lambda r, d, g: all_to_all(*[ones(d, 2).to(kinds[r])] * 2, group=g), *map(str, kinds)),
        (lambda r, d, g: reduce(ones(d), (Op.MIN, Op.MAX)[r], group=g), "min", "max"),
        (
            lambda r, d, g: (dist.recv, dist.send)[r](ones(d, 3 + r), 1 - me, group=g),
            *("send of message(4 of float32", "recv of message(3 of float32) from rank {1}"),
        ),
        (kernel, "but cannot", "index 7"),
    ):
        rank, device, group = set_up(is_reversed=True)
        text = failure_of(lambda: call(rank, device, group))  # noqa: B023
        for word in ("disagree", "rank 0", "rank 1", *words):
            assert word.format(*dist.get_process_group_ranks(group)) in text, text
        for _ in range(2):
            again = failure_of(lambda: reduce(ones(device), group=group))  # noqa: B023
            assert "failed before" in again and words[0] in again, again
        x = ones(device)
        reduce(x, group=a_group())
        assert x.tolist() == [2, 2, 2]


@in_ranks(2)
def test_parts_of_sizes_that_do_not_fit_raise_in_both_ranks():
    def ones(*counts):
        return [torch.ones(count, device=f"vgpu:{dist.get_rank()}") for count in counts]

    for call in (
        lambda rank, x, **group: dist.all_to_all_single(x.clone(), x, [1, 2], [1, 2], **group),
        lambda rank, x, **group: dist.scatter(x, None if rank else ones(4, 4), 0, **group),
        lambda rank, x, **group: dist.gather(x, None if rank else ones(2, 2), 0, **group),
        lambda rank, x, **group: dist.all_gather(ones(*[2 + 2 * rank] * 2), x, **group),
        lambda rank, x, **group: dist.reduce_scatter(x, ones(2, 2), **group),
    ):
        dist.barrier()
        rank, device, group = set_up()
        group.set_timeout(timedelta(seconds=1))
        text = failure_of(partial(call, rank, *ones(3), group=group))
        assert "nothing was raised" not in text


@in_group(3, timeout=LIMIT)
def test_who_waits_in_vain_says_for_whom_and_for_as_long_as_the_group_may(rank, device, group):
    other = a_group([2, 1, 0], timeout=4)
    group.set_timeout(timedelta(seconds=3))
    if rank == 1:
        hear("rank 0 gave up"), hear("rank 2 gave up")
    x = torch.ones(3, device=device)
    texts = failure_of(lambda: dist.all_reduce(x, group=group))
    with pytest.raises(torch.AcceleratorError):
        x.tolist()
    assert ("waited in it and gave up" in texts) == (rank == 1), texts
    if rank == 1:
        return
    tell(f"rank {rank} goes on"), hear(f"rank {2 - rank} goes on")  # so that both can be asked
    words = "recv of message(3 of float32) from", "", "send of message(3 of float32) to"
    call = dist.send if rank else dist.recv
    texts += failure_of(lambda: call(torch.ones(3, device=device), 1, group=other))
    tell(f"rank {rank} gave up")
    assert f"rank {rank} waited 3 s in all_reduce(float32[3], sum)" in texts, texts
    assert "rank 1 did not join" in texts
    assert f"rank {rank} waited 4 s in {words[rank]} rank 1" in texts, texts
    assert f"rank {2 - rank} waits in {words[2 - rank]} rank 1" in texts, texts


@in_group(2)
def test_what_was_issued_before_the_first_error_fails_by_it_each_time(rank, device, group):
    with Gate(device):
        works = [dist.all_reduce(torch.ones(3 + rank, device=device), group=group, async_op=True)]
        works += [dist.all_reduce(torch.ones(1, device=device), group=group, async_op=True)]
    wait_until(works[1].is_completed)
    for _ in range(2):
        raises(dist.DistBackendError, "^the ranks disagree", works[0].wait)
        assert not works[0].is_success() and "the ranks disagree" in str(works[0].exception())
    raises(dist.DistBackendError, "^this process group failed: the ranks dis", works[1].wait)
    again = failure_of(lambda: dist.all_reduce(torch.ones(1, device=device), group=group))
    assert "failed before: the ranks disagree" in again


@in_group(2)
def test_groups_come_and_go_without_leaving_threads_or_engines(rank, device, _):
    def use(times):
        for _ in range(times):
            group = a_group()
            x = torch.ones(3, device=device)
            dist.all_reduce(x, group=group)
            assert x.tolist() == [2, 2, 2]
            dist.destroy_process_group(group)
        del group
        gc.collect()

    use(3)
    found = registry.find(device)
    before = len(found.collective_engines), len(os.listdir("/proc/self/task"))
    memory = torch.vgpu.memory_allocated(device)
    use(20)
    after = len(found.collective_engines), len(os.listdir("/proc/self/task"))
    assert after[0] == before[0] and after[1] <= before[1] + 2, (before, after)
    assert torch.vgpu.memory_allocated(device) == memory


@in_group(2)
def test_a_process_forks_while_a_collective_is_under_way(rank, device, group):
    x = torch.ones(3, device=device)
    with held_collectives() as under_way:
        dist.all_reduce(x, group=group, async_op=True)
        assert under_way.wait(30)
        if (child := os.fork()) == 0:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    assert x.tolist() == [2, 2, 2]


@in_group(2)
def test_a_group_that_is_destroyed_runs_what_it_was_given(rank, device, group):
    x = torch.ones(3, device=device)
    with Gate(device) as gate:
        work = dist.all_reduce(x, group=group, async_op=True)
        with gate.opened_later():
            dist.destroy_process_group(group)
        assert work.is_success()
    assert x.tolist() == [2, 2, 2]


@in_group(2)
def test_all_to_all_writes_dense_tensors_only_whatever_their_parts(rank, device, group):
    x = numbers(rank, 2, 2, 2).to(device)
    strided = torch.full((2, 2, 2), -1.0, device=device).permute(0, 2, 1)
    for output, value in ((strided, x), (torch.zeros_like(x), x.permute(0, 2, 1))):
        call = dist.all_to_all_single, output, value, [1, 1], [1, 1]
        raises(ValueError, "all_to_all_single: tensors must be contiguous", *call, group=group)
    x = numbers(rank, 2, 2, 2, 2).to(device).to(memory_format=torch.channels_last)
    output = torch.full_like(x, -1)
    dist.all_to_all_single(output, x, [1, 1], [1, 1], group=group)
    assert output.tolist() == of_all(2, 2, 2, 2)[:, rank].tolist()


@in_group(2)
def test_a_wait_with_a_timeout_lasts_no_longer(rank, device, group):
    """Rank 1 takes part once rank 0 has given up, so that no wait can be long enough by chance."""
    x = torch.ones(3, device=device)
    if rank == 1:
        hear("rank 0 has given up")
    work = dist.all_reduce(x, group=group, async_op=True)
    if rank == 0:
        text = failure_of(lambda: work.wait(timedelta(seconds=0.01)))
        assert "all_reduce: not complete after 0:00:00.01" in text, text
        tell("rank 0 has given up")
    assert work.wait(timedelta(seconds=60)) and work.is_completed()  # the host has waited
    assert x.tolist() == [2, 2, 2]
