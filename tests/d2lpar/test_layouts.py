"""Layouts: ranks and groups, what is refused and why, what a sweep measures, and the step of
chapter 13's lab in a layout that splits in all three ways."""

from pathlib import Path

import nbformat
import pytest
import torch
import torch.distributed as dist

import d2lpar
from d2lpar.chapters.planning_a_training_run.gpt import GPT
from d2lpar.chapters.planning_a_training_run.layouts import (
    Layout,
    candidates,
    layouts,
    sweep,
    why_not,
)
from vgpu.modelled.hardware import Machine
from vgpu.modelled.links import Link
from vgpu.modelled.modelled_gpu import GPU

LAB = Path(__file__).resolve().parents[2] / "notebooks" / "deeper" / "13_program.ipynb"
SIZES = {"batch": 512, "layers": 30, "heads": 32}
# Kernels of 1e9 bytes/s of memory, links of 1e9 bytes/s inside and 1e8 between machines
FABRIC = Link(1e9)
GPU_OF_TESTS = GPU("test", 2 * 10**9, 1e9, {"float32": 1e12, "float16": 4e12}, 1, FABRIC, FABRIC)
MACHINE = Machine(GPU_OF_TESTS, 2, network=Link(1e8), host=0.0)


def test_groups_of_ranks_are_those_of_megatron():
    # Megatron-LM, parallel_state.py: 16 GPUs, tensor 2, pipeline 4: "[g0, g1], [g2, g3], ...",
    # "[g0, g4, g8, g12], [g1, g5, g9, g13], ...", data "[g0, g2], [g1, g3], [g4, g6], ..."
    layout = Layout(tensor=2, pipeline=4, data=2)
    assert layout.gpus == 16
    assert layout.ranks_of(3, "tensor") == [2, 3]
    assert layout.ranks_of(5, "pipeline") == [1, 5, 9, 13]
    assert layout.ranks_of(6, "data") == [4, 6]


def test_every_axis_parts_the_ranks():
    layout = Layout(tensor=2, pipeline=3, data=4)
    for axis in ("tensor", "data", "pipeline"):
        groups = {tuple(layout.ranks_of(rank, axis)) for rank in range(layout.gpus)}
        assert sorted(sum(groups, ())) == list(range(24))
        assert {len(group) for group in groups} == {getattr(layout, axis)}


@pytest.mark.parametrize(("act", "text"), [
    (lambda: Layout(tensor=0), "tensor of a Layout must be a positive integer: got 0"),
    (lambda: Layout(micro_batch=2.0), "micro_batch .* got 2.0"),
    (lambda: Layout(zero=2), "zero of a Layout must be 0 or 1: got 2"),
    (lambda: Layout(data=4).ranks_of(4, "data"), "rank must be 0 to 3: got 4"),
    (lambda: Layout(data=4).ranks_of(0, "model"), "tensor, data, pipeline: got 'model'"),
    (lambda: Layout(data=3).micro_batches(512), "divisible by 3 replicas .* of 1: got 512"),
])  # fmt: skip
def test_what_is_no_layout(act, text):
    with pytest.raises(ValueError, match=text):
        act()


@pytest.mark.parametrize(("layout", "reason"), [
    (Layout(tensor=3), "32 attention heads do not divide among t = 3"),
    (Layout(pipeline=4), "30 layers do not divide among p = 4 stages"),
    (Layout(tensor=16), "t = 16 does not fit into machines of 8 GPUs"),
    (Layout(data=64, micro_batch=16), "a batch of 512 does not divide among d = 64 replicas"),
    (Layout(tensor=4, pipeline=3, data=4, micro_batch=2), None),
])  # fmt: skip
def test_why_not(layout, reason):
    said = why_not(layout, **SIZES)
    assert said == reason if reason is None else said.startswith(reason)


def test_layouts_are_the_candidates_that_nothing_speaks_against():
    # p divides 64 and 30: 1 or 2. t is 1, 2, 4 or 8, d follows; 8 sequences for each of 64
    # replicas allow all micro-batches of 1 to 8: 2 x 4 x 4 x 2.
    found = layouts(64, **SIZES)
    assert len(found) == len(set(found)) == 64
    assert {each.gpus for each in found} == {64} == {each.gpus for each in candidates(64)}
    assert len(candidates(64)) == 28 * 8  # 28 ways to write 2 ** 6 as a product of three
    assert len(layouts(64, **SIZES, gpus_per_machine=None)) == 64 + 2 * 8 * 2
    with_zero = layouts(64, **SIZES, zero=(0, 1))
    assert len(set(with_zero)) == 128 and sum(each.zero for each in with_zero) == 64
    assert layouts(2, **SIZES, micro_batches=(4,), recompute=(True,)) == [
        Layout(1, 1, 2, 4, True),
        Layout(1, 2, 1, 4, True),
        Layout(2, 1, 1, 4, True),
    ]


def vector(num_bytes, device=0):
    return torch.empty(num_bytes // 4, device=f"vgpu:{device}")


def one_step(work):
    """Return a step for `sweep` of which each micro-batch is `work(layout)`."""

    def step(layout):
        def run(m):
            for _ in range(m):
                work(layout)

        return run

    return step


def test_a_sweep_times_what_the_step_runs():
    seen = []

    def step(layout):
        seen.append(dist.get_world_size())
        group = dist.new_group(layout.ranks_of(0, "data"))
        return lambda m: dist.all_reduce(vector(409_600), group=group)

    pair, four = sweep(step, [Layout(data=2), Layout(data=4)], batch=4, model=MACHINE)
    assert seen == [2, 4]
    # a ring of 2 sends 2 (k - 1) / k of the bytes at 1e9 bytes/s; one of 4 is over two machines,
    # and each rank has half of the card, of which two ranks of a machine use both halves
    assert pair.seconds == pytest.approx(409_600 / 1e9, rel=1e-3)
    assert four.seconds == pytest.approx(1.5 * 409_600 / 1e8, rel=1e-3)
    assert pair.num_bytes == four.num_bytes == 409_600 and pair.refused is None


def test_what_the_caller_keeps_on_the_devices_does_not_count():
    d2lpar.virtual_gpus(2)
    kept = vector(840)
    step = one_step(lambda layout: dist.all_reduce(vector(409_600)))
    (row,) = sweep(step, [Layout(data=2)], batch=2, model=MACHINE)
    assert row.num_bytes == 409_600 and kept.numel() == 210


def test_memory_that_is_missing_is_a_reason():
    size = 3 * 10**9 // 1024 * 1024
    step = one_step(lambda layout: vector(size // layout.data))
    rows = sweep(step, [Layout(data=1), Layout(data=2)], batch=2, model=MACHINE)
    assert [row.num_bytes for row in rows] == [size, size // 2]
    assert rows[0].refused == "it needs 3.0 GB, and test has 2.0 GB"
    assert rows[1].refused is None


def test_micro_batches_count_as_many_as_there_are():
    counts = []

    def step(layout):
        x = vector(850_000)

        def run(m):
            counts.append(m)
            for _ in range(m):
                x.zero_()  # a millisecond at 0.85 of 1e9 bytes/s

        return run

    layout = Layout(data=2, micro_batch=2)
    (row,) = sweep(step, [layout], batch=400, model=MACHINE)
    assert counts == [1, 2, 3]
    assert row.seconds == pytest.approx(0.1, rel=1e-3)  # 100 micro-batches
    counts.clear()
    sweep(step, [layout], batch=12, model=MACHINE)
    assert counts == [1, 3]


def test_stages_are_as_far_apart_as_their_ranks():
    step = one_step(lambda layout: vector(100_000, 0).to("vgpu:1"))
    # stages of one rank are in one machine of two, those of two ranks in two
    for d, bandwidth in ((1, 1e9), (2, 1e8)):
        (row,) = sweep(step, [Layout(pipeline=2, data=d)], batch=d, model=MACHINE)
        assert row.seconds == pytest.approx(1e5 / bandwidth, rel=1e-3)


def test_each_stage_has_a_host_of_its_own():
    def work(layout):
        for device in range(layout.pipeline):
            x = vector(512, device)
            for _ in range(10):
                x.add_(1)

    machine = Machine(GPU_OF_TESTS, 2, network=FABRIC, host=1e-3)
    rows = sweep(one_step(work), [Layout(), Layout(pipeline=2)], batch=1, model=machine)
    assert rows[1].seconds == pytest.approx(rows[0].seconds, rel=0.02)


def names_of_lab(last):
    """Return what the code of chapter 13's lab defines, up to the cell with the id `last`."""
    names = {"__name__": "chapter_14"}
    for cell in nbformat.read(LAB, as_version=4).cells:
        if cell.cell_type == "code":
            exec(cell.source, names)
        if cell.id == last:
            return names
    raise AssertionError(f"no cell {last}")


def test_all_three_splits_at_once_take_the_step_of_one_device(capsys):
    # 8 virtual GPUs: 4 processes, for 2 parts of 2 replicas, each with 2 stages
    names, layout = names_of_lab("c14-p-errors"), Layout(2, 2, 2, 1, True)
    methods = names["Methods"](dtype=torch.float64)
    tiny = GPT(2, 16, 4, length=8, vocabulary=32)
    torch.manual_seed(1)
    X, y = torch.randint(32, (2, 4, 8))
    ranks = d2lpar.launch(names["errors"], layout, tiny, X, y, methods, nproc=4)
    assert len(ranks) == 4
    losses, expected, gradients = zip(*ranks, strict=True)
    assert sum(losses) / 4 == pytest.approx(expected[0], rel=1e-10)
    assert max(gradients) < 1e-10  # of the largest entry


def test_zero_1_of_the_lab_trains_the_same_weights():
    names = names_of_lab("c14-p-update")
    Bucket, update = names["Bucket"], names["update"]

    def weights(zero):  # of a layer after three steps of two replicas
        rank = dist.get_rank()
        gpu = d2lpar.virtual_gpus(2)[rank]
        torch.manual_seed(0)
        layer = torch.nn.Linear(16, 32).to(gpu)
        bucket = Bucket(layer, dist.group.WORLD, zero, hide=False)
        for X in torch.randn(3, 2, 8, 16):
            layer(X[rank].to(gpu)).square().mean().backward()
            bucket.finish()
            update(bucket)
        return layer.weight.detach().cpu()

    same = d2lpar.launch(lambda: weights(0).equal(weights(1)), nproc=2)
    assert same == [True, True]
