import base64
import itertools
from types import SimpleNamespace

import pytest
import torch
from kernels import execute
from matplotlib import colors

from d2lpar.chapters.planning_a_training_run.layouts import Layout
from d2lpar.chapters.planning_a_training_run.plots import plot_layouts
from d2lpar.chapters.scaling import plot_runs
from d2lpar.plotting import charts, figures
from d2lpar.plotting.charts import plot_bars, plot_curves
from d2lpar.plotting.progress import progress
from d2lpar.timelines import gantt
from d2lpar.timelines.gantt import plot_timeline
from d2lpar.timelines.schedule import plot_schedule
from d2lpar.timelines.timeline import Mark
from vgpu import Span

GPU0, GPU1 = torch.device("cuda", 0), torch.device("cuda", 1)


def span(device, engine, start, end, kind="kernel"):
    return Span("aten.mm", kind, device, 0, engine, start, end)


def timeline(spans, marks=(), seconds=1.0):
    devices = [GPU0, GPU1]
    return SimpleNamespace(spans=spans, marks=marks, devices=devices, seconds=seconds, hardware="")


def row_labels(figure):
    return [label.get_text() for label in figure.axes[0].get_yticklabels()]


def legend_labels(figure):
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def pieces(figure, row):
    """Return the intervals (start, end) drawn in a row, in the units of the time axis."""
    place = figure.axes[0].get_yticks()[row_labels(figure).index(row)]
    found = []
    for collection in figure.axes[0].collections:
        for path in collection.get_paths():
            box = path.get_extents()
            if abs((box.y0 + box.y1) / 2 - place) < 0.1:
                found.append((box.x0, box.x1))
    return sorted(found)


def test_gantt_has_a_row_for_each_device_and_engine_and_one_for_the_host():
    spans = [span(GPU1, "compute", 0.2, 0.6), span(GPU0, "host", 0.1, 1.0, "wait")]
    spans += [span(GPU0, "d2h", 0.5, 0.8, "copy"), span(GPU0, "stream", 0.1, 0.2, "wait")]
    figure = plot_timeline(timeline(spans))
    drawn = {
        "cuda:0 compute": [],
        "cuda:0 copy to host": [pytest.approx((500, 800))],
        "cuda:0 stream waits": [pytest.approx((100, 200))],
        "cuda:1 compute": [pytest.approx((200, 600))],
        "host waits": [pytest.approx((100, 1000))],
    }
    assert row_labels(figure) == list(drawn)
    places = figure.axes[0].get_yticks()
    assert figure.axes[0].yaxis_inverted() and list(places) == sorted(places)
    assert {row: pieces(figure, row) for row in drawn} == drawn
    assert legend_labels(figure) == ["kernel", "copy", "wait"]
    assert figure.axes[0].get_xlabel() == "time (ms)"
    assert figure.axes[0].get_xlim() == (0, 1000)


def test_gantt_of_a_part_and_of_a_long_time():
    spans = [span(GPU0, "compute", i, i + 0.5) for i in range(20)]
    whole = plot_timeline(timeline(spans, seconds=20.0), title="Twenty")
    assert whole.axes[0].get_xlabel() == "time (s)"
    assert whole.axes[0].get_title() == "Twenty"
    assert len(pieces(whole, "cuda:0 compute")) == 20
    part = plot_timeline(timeline(spans, seconds=20.0), start=2.1, end=4.1)
    assert part.axes[0].get_xlim() == pytest.approx((2100, 4100))
    assert len(pieces(part, "cuda:0 compute")) == 3
    with pytest.raises(ValueError, match=r"end must be later than start: got 2 s and 3 s"):
        plot_timeline(timeline(spans), start=3, end=2)


def test_gantt_merges_what_the_picture_cannot_show():
    many = [span(GPU0, "compute", i / 20_000, (i + 0.9) / 20_000) for i in range(10_000)]
    alone = span(GPU0, "compute", 0.9, 0.9 + 1e-7)
    drawn = pieces(plot_timeline(timeline([*many, alone])), "cuda:0 compute")
    assert len(drawn) == 2
    assert drawn[0] == pytest.approx((0, 500), abs=1)
    assert drawn[1][1] - drawn[1][0] == pytest.approx(gantt.MIN_WIDTH * 1000 / gantt.PIXELS)


def test_gantt_of_short_spans_shows_each_and_the_gaps_between_them():
    pixel = 1 / gantt.PIXELS
    starts = [0.1, 0.1 + 3 * pixel, 0.5]
    copies = [span(GPU0, "h2d", start, start + 1e-6, "copy") for start in starts]
    drawn = pieces(plot_timeline(timeline(copies)), "cuda:0 copy from host")
    widths = [(end - start) / 1000 / pixel for start, end in drawn]
    assert widths == pytest.approx([1.5, gantt.MIN_WIDTH, gantt.MIN_WIDTH])


def test_gantt_tells_long_spans_apart_where_a_row_has_few():
    long = [span(GPU0, "compute", i / 10, (i + 1) / 10) for i in range(9)]
    short = [span(GPU0, "compute", 0.9 + i / 10_000, 0.9 + (i + 1) / 10_000) for i in range(9)]
    figure = plot_timeline(timeline(long + short))
    assert len(pieces(figure, "cuda:0 compute")) == 10
    assert list(figure.axes[0].collections[0].get_linewidths()) == [0.8] * 9 + [0]
    many = [span(GPU0, "compute", i / 100, (i + 1) / 100) for i in range(99)]
    assert pieces(plot_timeline(timeline(many)), "cuda:0 compute") == [pytest.approx((0, 990))]


def test_gantt_of_nothing():
    figure = plot_timeline(timeline([]))
    assert row_labels(figure) == ["cuda:0 compute", "cuda:1 compute"]
    assert legend_labels(figure) == []


def boxes(figure, artists):
    figure.draw_without_rendering()
    return [artist.get_window_extent() for artist in artists]


def test_phases_are_named_where_there_is_room_and_else_in_the_legend():
    marks = [
        Mark("step", 0.0, 1.0),
        Mark("forward", 0.0, 0.4),
        Mark("backward", 0.4, 0.9),
        Mark("update", 0.9, 0.901),
        Mark("forward", 0.95, 0.951),
    ]
    figure = plot_timeline(timeline([span(GPU0, "compute", 0, 1)], marks))
    texts = figure.axes[0].texts
    assert sorted(text.get_text() for text in texts) == ["backward", "forward", "step"]
    assert legend_labels(figure) == ["kernel", "update"]
    assert row_labels(figure) == ["host", "cuda:0 compute", "cuda:1 compute"]
    drawn = boxes(figure, texts)
    assert not any(a.overlaps(b) for a, b in itertools.combinations(drawn, 2))


def test_phases_are_cut_to_the_part_that_is_drawn():
    marks = [Mark("forward", 0.0, 0.5), Mark("backward", 0.5, 1.0), Mark("update", 0.9, 1.0)]
    figure = plot_timeline(timeline([span(GPU0, "compute", 0, 1)], marks), start=0.4, end=0.8)
    [axes] = figure.axes
    drawn = [
        (bar.get_x(), bar.get_x() + bar.get_width()) for group in axes.containers for bar in group
    ]
    assert drawn == [pytest.approx((400, 500)), pytest.approx((500, 800))]
    assert {text.get_text(): text.get_position()[0] for text in axes.texts} == {
        "forward": pytest.approx(450), "backward": pytest.approx(650)
    }  # fmt: skip


def test_nothing_overlaps_in_a_chart_of_many_rows():
    engines = ("compute", "h2d", "d2h", "p2p", "stream")
    spans = [span(device, engine, 0, 1) for device in (GPU0, GPU1) for engine in engines]
    figure = plot_timeline(timeline(spans))
    labels = boxes(figure, figure.axes[0].get_yticklabels())
    assert len(labels) == 10
    assert not any(a.overlaps(b) for a, b in itertools.combinations(labels, 2))
    [legend] = boxes(figure, figure.legends)
    assert not legend.overlaps(figure.axes[0].get_tightbbox())
    assert legend.y0 >= 0 and min(box.x0 for box in labels) >= 0


def test_a_long_title_takes_a_second_line():
    for figure in (
        plot_timeline(timeline([span(GPU0, "compute", 0, 1)]), "a title " * 12),
        plot_curves([1, 2], {"a": [1, 2]}, "x", "y", title="a title " * 9),
    ):
        axes = figure.axes[0]
        title, drawn = boxes(figure, [axes.title, axes.patch])
        assert 0 <= title.x0 < title.x1 <= figure.bbox.width
        assert drawn.y1 < title.y0 < title.y1 <= figure.bbox.height


def test_colours_survive_greyscale():
    def lightness(colour):
        red, green, blue = colors.to_rgb(colour)
        return 0.299 * red + 0.587 * green + 0.114 * blue

    kinds = sorted(lightness(colour) for colour, _, _ in figures.KINDS.values())
    assert min(b - a for a, b in zip(kinds, kinds[1:], strict=False)) > 0.15
    assert len({hatch for _, hatch, _ in figures.KINDS.values()}) == 4
    assert len({dashes for _, dashes, _ in figures.LINES}) == len(figures.LINES)
    assert len({hatch for _, hatch in figures.PHASES}) == len(figures.PHASES)


def test_figures_do_not_belong_to_pyplot():
    from matplotlib import pyplot

    plot_bars(["a"], [1], [2], "s")
    assert pyplot.get_fignums() == []


def test_bars(monkeypatch):
    figure = plot_bars(["1 GPU", "2 GPUs"], [2.0, None], [2.5, 1.25], "time (s)", "Measured")
    [axes] = figure.axes
    assert [bar.get_height() for group in axes.containers for bar in group] == [2.0, 2.5, 1.25]
    assert [text.get_text() for text in axes.texts] == ["2", "2.5", "1.25"]
    assert legend_labels(figure) == ["predicted", "measured"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1 GPU", "2 GPUs"]
    monkeypatch.setattr(charts, "hardware_name", lambda: "V100-SXM2-16GB")
    assert legend_labels(plot_bars(["a"], [1], [2], "s")) == ["predicted", "modelled"]
    with pytest.raises(ValueError, match="measured must have 2 values, one per label: got 1"):
        plot_bars(["a", "b"], [1, 2], [1], "s")


def test_ticks_of_counts_are_whole_and_a_logarithmic_axis_has_plain_numbers():
    x = list(range(1, 21))
    figure = plot_curves(x, {"loss": x}, "step", "loss")
    figure.draw_without_rendering()
    assert all(tick == int(tick) for tick in figure.axes[0].get_xticks())
    for y, expected in (([0.15, 0.7], {"0.2", "0.3", "0.4", "0.6"}), ([1, 10**6], {"1", "1e+06"})):
        figure = plot_curves([1, 2], {"a": y}, "x", "y", yscale="log")
        figure.draw_without_rendering()
        labels = figure.axes[0].get_yticklabels(which="both")
        assert expected <= {label.get_text() for label in labels}


def test_curves():
    figure = plot_curves([1, 2], {"ring": [1, 1.8]}, "devices", "speed-up", ideal=[1, 2])
    measured, ideal = figure.axes[0].lines
    assert list(measured.get_ydata()) == [1, 1.8] and list(ideal.get_ydata()) == [1, 2]
    assert measured.get_linestyle() == "-" and ideal.is_dashed()
    assert legend_labels(figure) == ["ring", "ideal"]
    names = ["a", "measured", "b", "predicted", "c", "d"]  # more than there are looks
    lines = plot_curves([1], {name: [1] for name in names}, "x", "y").axes[0].lines
    looks = [(line.get_color(), line.get_linestyle(), line.get_marker()) for line in lines]
    a, b, measured, predicted = (figures.LINES[i] for i in (2, 3, 0, 1))
    assert looks == [a, measured, b, predicted, a, b]
    for kind in ("measured", "modelled"):
        names = ["ring, predicted", f"ring, {kind}", "tree, predicted", f"tree, {kind}"]
        lines = plot_curves([1], {name: [1] for name in names}, "x", "y").axes[0].lines
        assert [line.get_color() for line in lines] == [figures.PREDICTED, figures.MEASURED] * 2
        assert len({(line.get_linestyle(), line.get_marker()) for line in lines}) == 4
    with pytest.raises(ValueError, match="curve 'ideal' must have 2 values, one per x: got 3"):
        plot_curves([1, 2], {}, "x", "y", ideal=[1, 2, 3])


def test_runs_are_drawn_with_their_means_and_a_curve():
    runs = {("plain", 8): [40, 50], ("plain", 16): [30], ("scaled", 16): [20, 22, 60]}
    [axes] = plot_runs(runs, "batch", "steps", lambda x: 20 + 200 / x).axes
    formula, *points = axes.lines
    assert [formula.get_xdata()[i] for i in (0, 25, -1)] == pytest.approx([8, 128**0.5, 16])
    assert [formula.get_ydata()[i] for i in (0, 25, -1)] == pytest.approx([45, 37.678, 32.5], 1e-4)
    assert [list(line.get_ydata()) for line in points] == [[40, 50], [30], [20, 22, 60]]
    assert [bar.get_offsets()[0, 1] for bar in axes.collections] == [45, 30, 34]
    [plain, scaled] = points[1:]
    assert plain.get_xdata()[0] != scaled.get_xdata()[0]  # side by side
    assert plain.get_color() == scaled.get_color() == figures.MEASURED
    assert formula.get_color() == figures.PREDICTED and plain.get_marker() != scaled.get_marker()


def test_progress_ends_on_a_line_without_times(capsys):
    assert list(progress(range(4), "a short loop", delay=60)) == list(range(4))
    assert capsys.readouterr() == ("", "")
    assert list(progress(range(40), "epoch 1")) == list(range(40))
    captured = capsys.readouterr()
    assert captured.out == ""
    last = captured.err.rstrip("\n").split("\r")[-1].rstrip()
    assert last == "epoch 1: 100%|" + "█" * 30 + "| 40/40"
    assert captured.err.endswith("\n")
    for i in progress(range(4), "ends early"):
        if i == 2:
            break
    last = capsys.readouterr().err.rstrip("\n").split("\r")[-1].rstrip()
    assert last.startswith("ends early:  50%|") and last.endswith("| 2/4")


def test_a_notebook_shows_each_figure_once_and_stores_the_same_text_in_every_run():
    loop = """import time, torch, d2lpar
for epoch in d2lpar.progress(range(9), "epoch"):
    time.sleep(0.3 * (epoch == 0))  # until the bar is drawn with times, which are longer
print("done")
d2lpar.plot_bars(["a"], [1], [2], "s")"""
    record = """devices = d2lpar.virtual_gpus(2)
with d2lpar.Timeline() as timeline:
    torch.ones(3, device=devices[1])
timeline"""
    cells, shown = execute(loop, record)
    assert shown == ["execute_result"] * 2
    pictures = [cell.outputs.pop().data for cell in cells]
    assert [picture["text/plain"] for picture in pictures] == ["<Figure>", "<Timeline>"]
    for picture in pictures:
        assert base64.b64decode(picture["image/png"]).startswith(b"\x89PNG")
    bar = "epoch: 100%|" + "█" * 30 + "| 9/9" + " " * len(" [00:00<00:00]") + "\n"
    texts = {output.name: output.text for output in cells[0].outputs}
    assert texts == {"stdout": "done\n", "stderr": bar} and cells[1].outputs == []


def test_schedule_has_a_bar_for_each_mark_coloured_by_its_first_word():
    rows = {
        "rank 0": [Mark("forward", 10.0, 10.5), Mark("backward", 10.5, 11.0)],
        "its link": [Mark("bucket 7", 10.6, 10.9), Mark("bucket 8", 10.7, 11.0)],
        "rank 1": [],
    }
    axes = plot_schedule(rows, "a step").axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == list(rows)
    assert axes.get_title() == "a step" and axes.get_xlim() == (0, 1000)
    bars = [(bar.get_x(), bar.get_width(), int(bar.get_y())) for bar in axes.patches]
    assert bars == [pytest.approx(bar) for bar in (
        (0, 500, 0), (500, 500, 0), (600, 300, 1), (700, 300, 1)
    )]  # fmt: skip
    forward, _, seven, eight = axes.patches
    assert seven.get_facecolor() == eight.get_facecolor() != forward.get_facecolor()
    assert seven.get_y() + seven.get_height() <= eight.get_y()  # they overlap in time
    assert [text.get_text() for text in axes.texts] == ["forward", "backward", "7", "8"]


def test_schedule_writes_where_there_is_room_and_all_in_the_legend():
    marks = [Mark("forward", 0.0, 10.0), Mark("update", 10.0, 10.01)]
    figure = plot_schedule({"rank 0": marks})
    assert [text.get_text() for text in figure.axes[0].texts] == ["forward"]
    assert legend_labels(figure) == ["forward", "update"]
    assert figure.axes[0].get_xlabel() == "time (s)"


def test_schedule_in_units_of_its_own():
    axes = plot_schedule({"stage 0": [Mark("forward 0", 1.0, 3.0)]}, unit="forward passes").axes[0]
    assert axes.get_xlabel() == "time (forward passes)" and axes.get_xlim() == (0, 2)
    with pytest.raises(ValueError, match="rows must have at least one mark: got "):
        plot_schedule({"rank 0": []})


def test_no_figure_is_wider_than_a_notebook_in_a_window_of_1024_pixels():
    many, mark = [f"way {i}" for i in range(9)], Mark("forward 0", 0.0, 1.0)
    drawn = [
        plot_bars(many, range(9), range(9), "s"),
        plot_timeline(timeline([span(GPU0, "compute", 0.0, 1.0)])),
        plot_schedule({"stage 0": [mark]}),
    ]
    for figure in drawn:
        assert figure.get_size_inches()[0] * figure.dpi <= 760


def test_layouts_are_points_of_their_t():
    one, two, whole = Layout(2, 1, 4, 2), Layout(2, 1, 4, 1), Layout(1, 1, 8, 4)
    other = Layout(1, 8, 1, 4)  # in eight stages
    predicted = {one: 3.0, two: 2.0, other: 5.0, whole: 2.6}
    measured = {other: 6.0, two: 4.0, one: 3.5, whole: 2.5}
    figure = plot_layouts(predicted, measured, label="modelled", fitted=two)
    [axes] = figure.axes
    points = {line.get_label(): tuple(map(list, line.get_data())) for line in axes.lines[1:]}
    of_t_1 = [2.5, 6.0], [2.6, 5.0]
    assert points == {"t = 1": of_t_1, "t = 2": ([3.5], [3.0]), "fitted": ([4.0], [2.0])}
    texts = {text.get_text(): getattr(text, "xy", None) for text in axes.texts}
    far = "micro-batch 1"  # measured twice as long
    equal = "modelled = measured", "modelled too low"
    assert texts.keys() == {"p = 8", far, *equal}
    assert [text.get_text() for text in axes.get_legend().texts] == ["t = 1", "t = 2", "fitted"]
    assert texts["p = 8"] == (6.0, 5.0)
    assert axes.get_xlabel() == "a step, measured (s)"
    assert axes.get_ylabel() == "a step, modelled (s)"
    assert axes.get_xlim() == axes.get_ylim()


@pytest.mark.parametrize("predicted", [{}, {Layout(): 1.0}])
def test_layouts_that_only_one_side_has_are_refused(predicted):
    with pytest.raises(ValueError, match=f"the same layouts, at least one: got {len(predicted)}"):
        plot_layouts(predicted, {})
