"""The steps of GPT in a layout, and `d2lpar plan`: what fits, what it takes, and what it says."""

import csv
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from d2lpar import __main__ as command
from d2lpar import launch, virtual_gpus
from d2lpar.chapters.planning_a_training_run import gpt, layout_search, plan_command
from d2lpar.chapters.planning_a_training_run.gpt_stage import full_size, group_of, own_numbers
from d2lpar.chapters.planning_a_training_run.layouts import Layout, Planned, sweep
from d2lpar.chapters.planning_a_training_run.measured_steps import (
    rank_correlation,
    steps_on_64_a100s,
)
from d2lpar.chapters.planning_a_training_run.program_costs import (
    head_cost,
    layer_cost,
    message_seconds,
    update_cost,
)
from vgpu.modelled.hardware import MACHINES

SMALL = gpt.GPT(layers=4, width=512, heads=8, length=256, vocabulary=1024)
MACHINE = replace(MACHINES["dgxa100"], host=0.0)
PUBLISHED = Path(__file__).parents[2] / "benchmarks/published/vtrain/gpt_on_a100s_512.csv"


def cost_of_layer(recompute, micro=4, t=1):
    return layer_cost(MACHINE, 512, 8, 256, micro, t, recompute)


def test_sizes_have_the_parameters_of_their_names():
    # Narayanan et al. 2021, table 1, which gives both
    for billions, each in gpt.SIZES.items():
        assert each.parameters / 1e9 == pytest.approx(billions, abs=0.06)


def test_flops_of_a_step():
    # equation 3 of the same paper counts 4 passes of the layers, because they are recomputed
    each = gpt.SIZES[145.6]
    of_paper = (
        96 * 2304 * 2048 * 80 * 12288**2 * (1 + 2048 / (6 * 12288) + 51200 / (16 * 80 * 12288))
    )
    head = 2304 * 2048 * 6 * 12288 * 51200  # which recomputation leaves alone
    assert each.flops(2304) - head == pytest.approx((of_paper - head) * 3 / 4, rel=1e-9)


def test_activations_of_a_layer():
    # Korthikanti et al. 2022 (https://arxiv.org/abs/2205.05198), section 4.1: a layer keeps
    # s b h (34 + 5 a s / h) bytes, and its input, 2 s b h, where it is recomputed
    sbh = 256 * 4 * 512
    assert cost_of_layer(False).kept == pytest.approx(sbh * (34 + 5 * 8 * 256 / 512), rel=0.1)
    assert cost_of_layer(True).kept == 2 * sbh
    # equation 2: with t ranks s b h (10 + 24 / t + 5 a s / (h t))
    of_four = sbh * (10 + 24 / 4 + 5 * 8 * 256 / 512 / 4)
    assert cost_of_layer(False, t=4).kept == pytest.approx(of_four, rel=0.1)


def test_recomputing_costs_a_third():
    # forward is a third of the work, and runs twice
    whole, again = cost_of_layer(False, 32).seconds, cost_of_layer(True, 32).seconds
    assert again / whole == pytest.approx(4 / 3, rel=0.05)


def test_an_update_keeps_twenty_bytes_a_parameter():
    assert update_cost(MACHINE, 2**20, 1, 1, 1).kept == 20 * 2**20 + 512  # Adam counts its steps


def test_zero_divides_what_the_optimizer_keeps_and_sends_no_more():
    # Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054, sections 5.1 and 7.2.1: replicas
    # divide the optimizer's bytes, and send twice the parameters, as an all-reduce does
    size = 80 * 10**6
    every, part = (update_cost(MACHINE, size, 1, 8, 1, zero) for zero in (0, 1))
    assert part.kept == pytest.approx((4 + 16 / 8) * size, rel=1e-5)
    assert part.seconds - part.busy == pytest.approx(every.seconds - every.busy, rel=0.02)
    assert part.busy == pytest.approx(every.busy / 8, rel=0.02)
    alone = update_cost(MACHINE, size, 1, 1, 1, 1)
    assert alone == update_cost(MACHINE, size, 1, 1, 1, 0)
    assert update_cost(MACHINE, 1999, 1, 1000, 1, 1).kept >= 4 * 1999  # does not divide


def test_a_step_with_zero_needs_less_memory():
    layout = Layout(tensor=2, data=4)
    each, zero = (layout_search.step_of(SMALL, replace(layout, zero=n), 8, MACHINE) for n in (0, 1))
    parameters = (4 * 12 * 512**2 + 1024 * 512) // 2
    assert each.num_bytes - zero.num_bytes == pytest.approx(12 * parameters, rel=1e-3)
    assert zero.seconds < each.seconds and zero.layout.zero == 1


def test_a_pipeline_idles_in_its_bubble():
    # Narayanan et al. 2021, section 2.2: (p - 1) / m of the time of m micro-batches; the head is
    # not in it
    thin = replace(SMALL, vocabulary=8, layers=64)
    layout = Layout(pipeline=4, recompute=True)
    few, many = (layout_search.step_of(thin, layout, batch, MACHINE) for batch in (4, 12))
    assert few.seconds / many.seconds == pytest.approx((4 + 3) / (12 + 3), rel=0.05)
    assert (1 - few.idle) / (1 - many.idle) == pytest.approx((4 / 7) / (12 / 15), rel=0.05)


def test_memory_of_the_first_stage_grows_with_the_micro_batches_under_way():
    # layer for layer, the first of p stages keeps the activations of p micro-batches, at most m
    deep = replace(SMALL, layers=16)

    def of(batch, pipeline):
        return layout_search.step_of(deep, Layout(pipeline=pipeline), batch, MACHINE).num_bytes

    kept = layer_cost(MACHINE, 512, 8, 256, 1, 1, False).kept
    assert of(4, 4) - of(2, 4) == 2 * 16 // 4 * kept
    assert of(8, 4) == of(4, 4)


def test_the_head_counts_once_for_each_micro_batch():
    # Stages before the last have no head: it is in none of the p - 1 passes that fill the pipeline
    layout = Layout(tensor=2, pipeline=4, recompute=True)
    wide = replace(SMALL, vocabulary=2048)
    few, more = (layout_search.step_of(each, layout, 4, MACHINE) for each in (SMALL, wide))
    heads = [head_cost(MACHINE, 512, n, 256, 1, 2).seconds for n in (1024, 2048)]
    updates = [update_cost(MACHINE, (12 * 512**2 + n * 512) // 2, 2, 1, 4) for n in (1024, 2048)]
    of_update = updates[1].seconds - updates[0].seconds
    assert more.seconds - few.seconds == pytest.approx(4 * (heads[1] - heads[0]) + of_update)


def plan(capsys, *options):
    sizes = ["--layers", "4", "--width", "512", "--heads", "8", "--length", "256"]
    code = command.main(["plan", *sizes, "--vocabulary", "1024", *options])
    return code, capsys.readouterr().out


def test_the_command_prints_a_table(capsys):
    code, out = plan(capsys, "--gpus", "2", "--batch", "1")
    lines = out.splitlines()
    assert code == 0
    assert lines[0].endswith("1 sequences a step, 2 x A100-SXM4-80GB")
    names = ["t", "p", "d", "micro-batch", "recompute", "s", "a", "step", "MFU"]
    assert lines[1].split()[: len(names)] == names
    rows = [line.split() for line in lines[2:6]]
    assert {tuple(row[:5]) for row in rows} == {
        (*tp, "1", "1", again) for tp in (("1", "2"), ("2", "1")) for again in ("yes", "no")
    }
    seconds = [float(row[5]) for row in rows]
    assert seconds == sorted(seconds)
    # three ways to share 2 GPUs, 4 micro-batches, recomputing or not
    assert "Refused: 20 of 24 layouts." in lines
    assert re.search(r"^ +4  a batch of 1 does not divide among d = 1 .* of 8$", out, re.M)
    assert lines[-1].startswith("Modelled, not measured")
    assert "measured on 2 A100s" in lines[-1]


def test_the_command_takes_a_stage_of_zero(capsys):
    options = ["--gpus", "2", "--batch", "2"]
    whole, divided = (plan(capsys, *options, *zero)[1] for zero in ([], ["--zero", "1"]))
    assert divided.splitlines()[0].endswith("A100-SXM4-80GB, ZeRO 1")
    assert "ZeRO" not in whole and "taken to be without ZeRO, differed" in divided
    with_replicas = "   1   1    2            1         no"
    of_both = [next(s for s in out.splitlines() if with_replicas in s) for out in (whole, divided)]
    # 13.1 million parameters: 16 bytes for the half that the other replica has are 0.1 GB
    gigabytes = [float(line.split()[7]) for line in of_both]
    assert gigabytes[0] - gigabytes[1] == pytest.approx(0.1, abs=0.051)
    assert float(of_both[1].split()[5]) <= float(of_both[0].split()[5])


ROWS = [
    Planned(Layout(1, 1, 4), 2.0, 10**10, 0.25, 0.5),
    Planned(Layout(2, 1, 2), 1.0, 10**10, 0.25, 1.0),
    Planned(Layout(4, 1, 1), 0.5, 10**11, 0.25, 0.5, "it needs 100.0 GB, and it has 85.1 GB"),
    Planned(Layout(1, 2, 2), None, refused="30 layers do not divide"),
    Planned(Layout(1, 4, 1), None, refused="30 layers do not divide"),
]


@pytest.fixture
def rows(monkeypatch):
    """Plan these in place of what is modelled; return a list that the test may change."""
    found = list(ROWS)
    monkeypatch.setattr(plan_command, "plan", lambda *arguments, **options: found)
    return found


def test_days_and_costs_only_where_they_are_asked_for(rows, capsys):
    # 86,400 steps of 8 x 256 tokens, of a second each, on 4 GPUs for 3 an hour
    options = ["--gpus", "4", "--batch", "8"]
    tokens, price = ["--tokens", str(86_400 * 8 * 256)], ["--price", "3"]
    heading, fastest = plan(capsys, *options)[1].splitlines()[1:3]
    assert "days" not in heading and "cost" not in heading and fastest.endswith("25%")
    heading, fastest = plan(capsys, *options, *tokens)[1].splitlines()[1:3]
    assert "cost" not in heading and fastest.split()[-2:] == ["25%", "1.0"]
    heading, fastest = plan(capsys, *options, *tokens, *price)[1].splitlines()[1:3]
    assert heading.endswith("cost") and fastest.split()[-2:] == ["1.0", "288"]


def test_refusals_are_counted_by_reason(rows, capsys):
    out = plan(capsys, "--gpus", "4", "--model", "dgx1")[1].splitlines()
    assert [line.split()[:3] for line in out[2:4]] == [["2", "1", "2"], ["1", "1", "4"]]
    assert out[4:7] == [
        "Refused: 3 of 5 layouts.",
        "    2  30 layers do not divide",
        "    1  a GPU needs more memory than the 16.9 GB that it has",
    ]
    assert out[7].endswith("No step on a V100-SXM2-16GB has been held against it.")


def test_a_network_that_fits_nowhere(rows, capsys):
    del rows[:2]
    code, out = plan(capsys, "--gpus", "4")
    assert code == 1 and "MFU" not in out and "Refused: 3 of 3 layouts." in out


def test_a_closed_pipe_ends_the_command(rows, monkeypatch):
    """As in `d2lpar plan | head -1`: neither the table nor the flush at exit has a traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", pipe)
        assert command.main(["plan", "--gpus", "4", "--parameters", "3.6B"]) == 1


@pytest.mark.parametrize(("options", "text"), [
    (["--gpus", "8"], "which GPT"),
    (["--gpus", "8", "--layers", "4"], "which GPT"),
    (["--gpus", "8", "--parameters", "5B"], "5B parameters is not known, only .* 3.6B"),
    (["--gpus", "8", "--parameters", "3.6B", "--heads", "4"], "not both"),
    (["--gpus", "8", "--parameters", "-1"], "positive number"),
    (["--gpus", "8", "--parameters", "many"], "positive number such as 3.6B: got 'many'"),
    (["--gpus", "8", "--parameters", "3.6B", "--price", "2"], "--price requires --tokens"),
    (["--gpus", "8", "--parameters", "3.6B", "--zero", "2"], "--zero: invalid choice"),
    (["--gpus", "8", "--parameters", "3.6B", "--model", "dgx9"], "no GPU named 'dgx9'"),
])  # fmt: skip
def test_what_it_refuses(capsys, options, text):
    with pytest.raises(SystemExit) as error:
        command.main(["plan", *options])
    assert error.value.code == 2
    assert re.search(text, capsys.readouterr().err)


def test_parameters_name_a_shape():
    assert plan_command.gpt_of(3.6e9) == gpt.GPT(30, 3072, 32)
    assert plan_command.gpt_of(175e9 / 1.2) == gpt.GPT(80, 12288, 96)


def test_a_message_between_stages_is_cut_among_the_ranks_of_a_tensor_group():
    # 4 cards for 8 GPUs, so that each has half of 23 GB/s (0.92 of 200 Gbit/s) while all send;
    # 220 GB/s inside the machine put an eighth of each back together
    machine = replace(MACHINE, network_cards=4)
    num_bytes = 8 * 10**8
    alone = message_seconds(machine, num_bytes, 1, 8)
    assert alone == pytest.approx(num_bytes / 11.5e9, rel=0.01)
    cut = message_seconds(machine, num_bytes, 8, 1)
    assert cut == pytest.approx(num_bytes / 8 / 11.5e9 + 7 / 8 * num_bytes / 220e9, rel=0.03)


def test_the_measured_steps_are_the_published_ones():
    with PUBLISHED.open(encoding="utf-8-sig", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["# GPUs"] == "64"]
    axes = "tensor parallelism", "pipeline parallelism", "data parallelism", "micro batch"
    found = {
        Layout(*(int(row[axis]) for axis in axes), recompute=True): row["iteration time (ms)"]
        for row in rows
    }
    assert len(rows) == 26
    measured = steps_on_64_a100s()
    assert found.keys() == measured.keys()
    for layout, milliseconds in found.items():
        assert float(milliseconds) / 1e3 == pytest.approx(measured[layout], rel=1e-6)


@pytest.mark.parametrize(("x", "y", "correlation"), [
    ([1, 2, 30], [4, 5, 6], 1.0),
    ([1, 2, 3], [6, 5, 4], -1.0),
    ([1, 2, 3, 4], [2, 1, 3, 4], 0.8),  # 1 - 6 * 2 / (4 * 15)
    ([1, 1, 2], [1, 2, 3], 0.75**0.5),  # ranks 1.5, 1.5, 3: 1.5 / sqrt(1.5 * 2)
])  # fmt: skip
def test_rank_correlation(x, y, correlation):
    assert rank_correlation(x, y) == pytest.approx(correlation)


def test_ranks_of_a_group_draw_their_own_numbers_and_afterwards_the_same():
    def draw(rank, device, own=True):
        group = SimpleNamespace(rank=lambda: rank, size=lambda: 2)
        torch.manual_seed(0)
        drawn = []
        for _ in range(2):
            with own_numbers(device, group, own):
                drawn.append(torch.rand(4, device=device).tolist())
        return *drawn, torch.rand(4, device=device).tolist()

    devices = virtual_gpus(2)  # the second is not the current one
    (first, second, after), (other, _, after_other) = map(draw, (0, 1), devices)
    assert first not in (other, second)  # neither in the next layer
    assert after == after_other
    assert draw(0, devices[0]) == (first, second, after)  # recomputed
    assert draw(0, devices[0], own=False) == draw(1, devices[1], own=False)


def test_a_tensor_group_is_made_of_neighbours():
    def my_groups(layout):
        made = (group_of(layout, axis) for axis in ("tensor", "data"))
        return [*map(dist.get_process_group_ranks, made)]

    groups = launch(my_groups, Layout(2, 2, 2), nproc=4)
    assert groups == [[[0, 1], [0, 2]], [[0, 1], [1, 3]], [[2, 3], [0, 2]], [[2, 3], [1, 3]]]


def test_a_step_of_full_size_is_that_of_all_layers():
    def make_trainer(net, devices):
        layers = [torch.zeros(256, 256, device=devices[0]) for _ in range(net.layers)]
        return SimpleNamespace(step=lambda X, y: [W @ W for W in layers])

    def all_layers(layout):
        trainer = make_trainer(net, [device := torch.device("vgpu", 0)])
        words = 1, net.length
        return lambda m: trainer.step(torch.zeros(words, dtype=torch.long, device=device), None)

    net, layout = replace(SMALL, layers=6), Layout()
    [expected] = sweep(all_layers, [layout], 1, MACHINE)
    seconds, num_bytes = full_size(make_trainer, net, layout, 1, MACHINE)
    assert seconds == pytest.approx(expected.seconds)
    assert num_bytes == expected.num_bytes
