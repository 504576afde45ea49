import gc
import itertools
import threading
import weakref

import pytest
import torch
from matplotlib.patches import FancyArrowPatch

import d2lpar
from d2lpar.chapters.hybridization.operator_graph import OperatorGraph

CPU = torch.device("cpu")


@pytest.fixture(params=["cpu", "vgpu"])
def device(request):
    return CPU if request.param == "cpu" else request.getfixturevalue("devices")[0]


def program(first, second):
    """Run the program of chapter 03 on two devices (or twice the same) and return its graph."""
    with OperatorGraph() as graph:
        A = torch.full((3,), 2.0, device=first)
        C = A + 2
        B = (A.to(second) + 1).to(first)
        D = B * C
    assert (D == 12).all()
    return graph


def names(graph):
    return [node.name for node in graph.nodes]


def reads(graph):
    return [node.reads for node in graph.nodes]


def waits(graph):
    return [node.waits for node in graph.nodes]


def test_program_on_one_device(device):
    graph = program(device, device)
    assert names(graph) == ["full", "add", "add", "mul"]
    assert reads(graph) == [(), (0,), (0,), (1, 2)]
    assert [node.before for node in graph.nodes] == [set(), {0}, {0}, {0, 1, 2}]
    assert [node.level for node in graph.nodes] == [0, 1, 1, 2]
    assert {node.device for node in graph.nodes} == {device}
    assert graph.independent_pairs() == [(1, 2)]


def test_program_on_two_devices(devices):
    graph = program(*devices)
    assert str(graph) == (
        "0: full on vgpu:0 reads [], level 0\n"
        "1: add  on vgpu:0 reads [0], level 1\n"
        "2: copy on vgpu:1 reads [0], level 1\n"
        "3: add  on vgpu:1 reads [2], level 2\n"
        "4: copy on vgpu:0 reads [3], level 3\n"
        "5: mul  on vgpu:0 reads [1, 4], level 4"
    )
    assert graph.nodes[5].before == {0, 1, 2, 3, 4} and graph.nodes[3].before == {0, 2}
    assert graph.independent_pairs() == [(1, 2), (1, 3), (1, 4)]
    assert repr(graph) == "OperatorGraph(6 operators on 2 devices)"


def test_operators_are_the_spans_of_a_timeline(devices):
    with d2lpar.Timeline() as timeline:
        graph = program(*devices)
    with_work = [span for span in timeline.spans if span.kind != "wait"]
    spans = sorted(with_work, key=lambda span: span.issued)[: len(graph.nodes)]
    assert [(span.kind == "copy") for span in spans] == [name == "copy" for name in names(graph)]
    for node, span in zip(graph.nodes, spans, strict=True):
        assert all(spans[i].end <= span.start for i in node.reads)


def test_readers_before_and_after_a_change_in_place(device):
    x = torch.ones(3, device=device)
    with OperatorGraph() as graph:
        y = x + 1
        x.add_(1)
        z = x * 2
        y.sub_(z)
    assert names(graph) == ["add", "add_", "mul", "sub_"]
    assert reads(graph) == [(), (), (1,), (0, 2)]
    assert waits(graph) == [(), (0,), (), ()]
    assert [node.level for node in graph.nodes] == [0, 1, 2, 3]
    assert graph.nodes[3].before == {0, 1, 2}
    assert graph.independent_pairs() == []
    assert "1: add_ on" in str(graph) and "reads [], waits for [0], level 1" in str(graph)


def test_a_change_waits_only_for_readers_that_nothing_else_orders(device):
    """Of three readers the first comes before the second anyway, and the last before the change."""
    x = torch.ones(3, device=device)
    with OperatorGraph() as graph:
        a = x + 1
        torch.mul(a, x)
        b = x + 3
        x.add_(b)
        x.add_(1)
    assert reads(graph) == [(), (0,), (), (2,), (3,)]
    assert waits(graph) == [(), (), (), (1,), ()]
    assert graph.nodes[3].before == {0, 1, 2}


def test_views_stand_for_the_memory_that_they_share(device):
    """Also views that were made before, and by an operator whose schema does not call it one."""
    x = torch.ones(2, 3, device=device)
    transposed = x.t()
    with OperatorGraph() as graph:
        x.mul_(2)
        y = transposed @ x
        row = x[0].view(3, 1)
        row.zero_()
        transposed.sum()
        torch.ops.aten._unsafe_view(y, [9]) + 1
    assert names(graph) == ["mul_", "mm", "zero_", "sum", "add"]
    assert reads(graph) == [(), (0,), (0,), (2,), (1,)]
    assert waits(graph) == [(), (), (1,), (), ()]


def test_results_written_to_given_tensors(device):
    x, out = torch.ones(3, device=device), torch.ones(3, device=device)
    with OperatorGraph() as graph:
        y = out + 1
        torch.add(x, 1, out=out)
        out.exp()
        x.copy_(y)
        torch._foreach_mul_([x, out], 2.0)
    assert reads(graph)[:4] == [(), (), (1,), (0,)]
    assert waits(graph)[:4] == [(), (0,), (), (1,)]
    assert set().union(*reads(graph)[4:]) == {1, 3} and 2 in graph.nodes[-1].before


def test_operators_of_several_threads_are_added_one_by_one(monkeypatch):
    """On several GPUs, backward runs in a thread for each."""
    locked, add = [], OperatorGraph._add

    def watched(graph, *operator):
        locked.append(graph._lock.locked())
        add(graph, *operator)

    monkeypatch.setattr(OperatorGraph, "_add", watched)
    with OperatorGraph() as graph:
        torch.ones(3) + 1
    assert locked == [True, True] and names(graph) == ["ones", "add"]


def test_operators_without_a_tensor_as_their_result(device):
    x = torch.ones(3, device=device)
    with OperatorGraph() as graph:
        y = x + 1
        assert y[0].item() == 2
        y.zero_()
    assert names(graph) == ["add", "item", "zero_"]
    assert reads(graph) == [(), (0,), (0,)] and graph.nodes[2].waits == (1,)
    assert graph.nodes[1].device == device


def test_what_is_no_work_and_what_reads_only_a_shape(device):
    with OperatorGraph() as graph:
        x = torch.empty(2, 3, device=device)
        x.t_()
        x.shape, x.detach(), x.is_pinned()
        x.fill_(1)
        torch.empty_like(x)
        torch.ones_like(x)
        x.new_zeros(3)
        x.double()
    assert names(graph) == ["fill_", "ones", "new_zeros", "to"]
    assert reads(graph) == [(), (), (), (0,)]


def test_backward(device):
    x = torch.ones(2, 2, device=device, requires_grad=True)
    with OperatorGraph() as graph:
        y = x.exp()  # keeps its result for the backward pass
        y.sum().backward()
        with torch.no_grad():
            x -= 0.1 * x.grad
    assert names(graph) == ["exp", "sum", "ones", "mul", "mul", "sub_"]
    assert reads(graph) == [(), (0,), (), (0, 2), (3,), (4,)]
    assert graph.nodes[5].before == {0, 2, 3, 4}
    assert graph.independent_pairs() == [(0, 2), (1, 2), (1, 3), (1, 4), (1, 5)]


def test_gradients_of_two_halves_do_not_depend_on_each_other(devices):
    torch.manual_seed(0)
    W, X = torch.randn(3, 2).double(), torch.randn(8, 3).double()
    with OperatorGraph() as graph:
        grads = []
        for part, device in zip(X.chunk(2), devices, strict=True):
            w = W.to(device).requires_grad_()
            loss = torch.relu(part.to(device) @ w).square().sum()
            grads += torch.autograd.grad(loss, w)
        total = grads[0].to("cpu") + grads[1].to("cpu")
    for node in graph.nodes:
        if node.device != CPU:
            assert {graph.nodes[i].device for i in node.before} <= {node.device}
    last = graph.nodes[-1]
    assert {graph.nodes[i].device for i in last.before} == {CPU, *devices}
    assert "relu'" in names(graph)
    w = W.clone().requires_grad_()
    torch.testing.assert_close(total, torch.autograd.grad(torch.relu(X @ w).square().sum(), w)[0])


def test_no_tensor_is_kept_alive(device):
    """Neither while it records, nor afterwards: its memory can be used again at once."""
    accel = torch.get_device_module(device)
    before = accel.memory_allocated(device) if device != CPU else 0
    with OperatorGraph() as graph:
        x = torch.ones(1000, device=device)
        y = x + 1
        kept = [weakref.ref(x), weakref.ref(y)]
        del x, y
        gc.collect()
        assert [ref() for ref in kept] == [None, None]
        if device != CPU:
            accel.synchronize(device)
            assert accel.memory_allocated(device) == before
    assert len(graph.nodes) == 2


def test_new_memory_in_the_place_of_old(device):
    """A tensor that gets the address of one that is gone reads nothing of it."""
    with OperatorGraph() as graph:
        for _ in range(200):
            torch.zeros(10, device=device).add_(1)
    assert reads(graph) == [(i - 1,) if i % 2 else () for i in range(400)]
    assert all(node.level == i % 2 for i, node in enumerate(graph.nodes))


def test_a_graph_starts_anew_and_cannot_be_entered_twice():
    graph = OperatorGraph()
    x = torch.ones(3)
    with graph:
        x.add_(1)
        with pytest.raises(RuntimeError, match="recording already"), graph:
            pass
        x.add_(1)
    assert reads(graph) == [(), (0,)]
    with graph:
        y = x + 1
    assert reads(graph) == [()] and (y == 4).all()
    assert (x + 1).sum() == 12 and len(graph.nodes) == 1
    with graph:
        x.add_(1)  # has a reader in the graph that was
    assert waits(graph) == [()]
    with pytest.raises(RuntimeError, match="size"), graph:
        torch.ones(2) + torch.ones(3)
    assert names(graph) == ["ones", "ones"]  # what ran before the error
    assert torch.ones(2).sum() == 2 and len(graph.nodes) == 2


def test_sparse_tensors_and_other_threads():
    table = torch.nn.Embedding(4, 3, sparse=True)
    with OperatorGraph() as graph:
        table(torch.tensor([1, 2])).sum().backward()
        thread = threading.Thread(target=lambda: torch.ones(3) + 1)
        thread.start()
        thread.join()
    assert names(graph)[:2] == ["embedding", "sum"] and "add" not in names(graph)


# The picture


def arrows(axes):
    return [text.arrow_patch for text in axes.texts if getattr(text, "arrow_patch", None)]


def boxes(axes):
    return [text for text in axes.texts if text.get_text()]


def drawn(figure):
    """Return the places of the boxes in a figure, in pixels."""
    figure.draw_without_rendering()
    return [text.get_bbox_patch().get_window_extent() for text in boxes(figure.axes[0])]


def test_picture(devices):
    figure = program(*devices).plot("A program")
    [axes] = figure.axes
    assert axes.get_title() == "A program" and axes.get_xlabel() == "level"
    labels = [text.get_text() for text in boxes(axes)]
    assert labels == ["full", "add", "copy", "add", "copy", "mul"]
    assert [text.get_position()[0] for text in boxes(axes)] == [0, 1, 1, 2, 3, 4]
    rows = dict(zip(axes.get_yticks(), (t.get_text() for t in axes.get_yticklabels()), strict=True))
    at = [rows[text.get_position()[1]] for text in boxes(axes)]
    assert at == ["vgpu:0", "vgpu:0", "vgpu:1", "vgpu:1", "vgpu:0", "vgpu:0"]
    sharp = ["Square" in type(t.get_bbox_patch().get_boxstyle()).__name__ for t in boxes(axes)]
    assert sharp == [False, False, True, False, True, False]
    assert len(arrows(axes)) == 6 and all(type(a) is FancyArrowPatch for a in arrows(axes))
    assert {arrow.get_linestyle() for arrow in arrows(axes)} == {"solid"}


def test_arrows_end_beside_the_boxes(devices):
    labels = ["A = 2 and more text", "C = A + 2 and text", "copy A", "B", "copy B", "D = B * C"]
    figure = program(*devices).plot(labels=labels)
    places = drawn(figure)
    assert [text.get_text() for text in boxes(figure.axes[0])] == labels
    ends = [(0, 1), (0, 2), (2, 3), (3, 4), (1, 5), (4, 5)]

    def beside(point):
        near = [box.padded(6).contains(*point) and not box.contains(*point) for box in places]
        assert sum(near) == 1
        return near.index(True)

    found = [
        (beside(text.anncoords.transform(text.xyann)), beside(text.xycoords.transform(text.xy)))
        for text in figure.axes[0].texts
        if getattr(text, "arrow_patch", None)
    ]
    assert sorted(found) == sorted(ends)
    assert not places[0].padded(20).overlaps(places[1])


def test_boxes_do_not_overlap(devices):
    """Many operators of one level stand below each other, and clear of the next device."""
    with OperatorGraph() as graph:
        for where in devices:
            x = torch.ones(3, device=where)
            for _ in range(7):
                torch.nn.functional.silu(x)
    places = drawn(graph.plot())
    assert len(places) == 16
    assert not any(a.overlaps(b) for a, b in itertools.combinations(places, 2))


def test_what_overwrites_gets_a_dashed_arrow():
    x = torch.ones(3)
    with OperatorGraph() as graph:
        x + 1
        x.add_(1)
        x + 1
    waiting, reading = arrows(graph.plot().axes[0])
    assert waiting.get_linestyle() != "solid" == reading.get_linestyle()
    assert waiting.get_edgecolor() != reading.get_edgecolor()
    assert waiting.get_linewidth() > reading.get_linewidth()


def test_a_graph_draws_itself_in_a_cell(monkeypatch):
    graph = program(CPU, CPU)
    assert graph._repr_mimebundle_() == {}
    monkeypatch.setattr("d2lpar.plotting.figures.in_notebook", lambda: True)
    shown = graph._repr_mimebundle_()
    assert set(shown) == {"image/png", "text/plain"} and shown["text/plain"] == "<OperatorGraph>"
    assert OperatorGraph()._repr_mimebundle_() == {} and str(OperatorGraph()) == ""
    with pytest.raises(ValueError, match="nothing to draw"):
        OperatorGraph().plot()
    with pytest.raises(ValueError, match="labels must have length 4: got 2"):
        graph.plot(labels=["a", "b"])


def test_a_long_graph_can_be_drawn():
    x = torch.ones(3)
    with OperatorGraph() as graph:
        for _ in range(1000):
            x = x + 1
    assert graph.nodes[-1].level == 999 and len(graph.nodes[-1].before) == 999
    del graph.nodes[150:]  # enough for more inches and more ticks than a figure has
    figure = graph.plot()
    assert figure.get_size_inches()[0] == 40 and len(figure.axes[0].get_xticks()) < 20
