"""What torch.compile can do here, what it captures, what it generates."""

import os
import signal
import sys

import fresh
import pytest
import torch
from torch import nn

from d2lpar.chapters.hybridization import compiling
from d2lpar.chapters.hybridization.compiling import (
    captured_graph,
    compile_backend,
    count_calls,
    kernel_text,
)


@pytest.fixture
def undecided():
    """Forget what earlier tests have found out, and what this one does."""
    compiling.failure_of_inductor.cache_clear()
    yield
    compiling.failure_of_inductor.cache_clear()


def test_inductor_where_it_can_compile(monkeypatch, undecided, capsys):
    monkeypatch.setattr(torch, "compile", lambda function: function)
    assert compile_backend() == "inductor"
    assert capsys.readouterr().out == "torch.compile generates kernels for cpu, with inductor\n"


def test_aot_eager_where_it_cannot_and_the_reason(monkeypatch, undecided, capsys):
    tried = []

    def broken(function):
        tried.append(function)
        raise RuntimeError("\nNo compiler found: (None, 'g++')\n\nSet TORCHDYNAMO_VERBOSE=1")

    monkeypatch.setattr(torch, "compile", broken)
    assert [compile_backend("cpu"), compile_backend(torch.device("cpu"))] == ["aot_eager"] * 2
    out = capsys.readouterr().out
    assert out.count("cannot generate kernels here: No compiler found: (None, 'g++')\n") == 2
    assert "TORCHDYNAMO" not in out
    assert len(tried) == 1  # decided once for a kind of device


def test_an_interrupt_waits_until_the_compiler_is_set_up(monkeypatch, undecided):
    done = []

    def interrupted(function):
        os.kill(os.getpid(), signal.SIGINT)
        done.append(True)
        return function

    monkeypatch.setattr(torch, "compile", interrupted)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background
    try:  # ignores it
        with pytest.raises(KeyboardInterrupt):
            compile_backend()
    finally:
        signal.signal(signal.SIGINT, handler)
    assert done == [True]
    monkeypatch.setattr(torch, "compile", lambda function: function)
    assert compile_backend() == "inductor"


def test_machine_without_compiler(tmp_path, monkeypatch):
    """A process whose compiler does not exist finds out, and what it falls back to works."""
    program = (
        "import torch\n"
        "from d2lpar.chapters.hybridization import compiling\n"
        "backend = compiling.compile_backend()\n"
        "x = torch.arange(3.0)\n"
        "print(backend, torch.compile(lambda x: 2 * x + 1, backend=backend)(x).tolist())\n"
        "print('processes', torch._inductor.config.compile_threads)\n"
    )
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", f"{tmp_path}")
    done = fresh.run(program, fresh.TORCH)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "no-such-compiler" in lines[0]
    assert lines[2:] == ["aot_eager [1.0, 3.0, 5.0]", "processes 1"]


def test_graph_of_an_exported_network():
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    graph = captured_graph(torch.export.export(net, (torch.rand(5, 4),)))
    assert [(node.name, node.reads, node.level) for node in graph.nodes] == [
        ("input", (), 0),
        ("p_0_weight", (), 0),
        ("p_0_bias", (), 0),
        ("linear", (0, 1, 2), 1),
        ("relu", (3,), 2),
        ("p_2_weight", (), 2),
        ("p_2_bias", (), 2),
        ("linear", (4, 5, 6), 3),
    ]
    assert graph.nodes[4].before == {0, 1, 2, 3}
    assert graph.nodes[7].before == set(range(7))
    assert {node.device for node in graph.nodes} == {torch.device("cpu")}
    assert graph.plot("drawn").axes[0].get_title() == "drawn"


def test_graph_that_dynamo_captured():
    graphs = []

    def keep(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    torch.compile(lambda x, y: (x * 2 + y).sum() - x, backend=keep)(torch.rand(3), torch.rand(3))
    graph = captured_graph(graphs[0])
    assert [node.name for node in graph.nodes] == ["l_x_", "mul", "l_y_", "add", "sum", "sub"]
    assert [node.reads for node in graph.nodes] == [(), (0,), (), (1, 2), (3,), (0, 4)]
    assert [node.level for node in graph.nodes] == [0, 1, 1, 2, 3, 4]


def test_device_of_what_was_captured():
    graphs = []
    torch.compiler.reset()
    capture = torch.compile(
        lambda x: x + 1, backend=lambda graph, _: graphs.append(graph) or graph.forward
    )
    capture(torch.rand(3, device="meta"))
    assert {node.device.type for node in captured_graph(graphs[0]).nodes} == {"meta"}


def leaf(x):
    return x + 1


@pytest.mark.parametrize("n", [0, 3])
def test_count_calls(n):
    def fails():
        leaf(1)
        raise KeyError("it")

    extra = sys.version_info < (3, 12)  # a comprehension is a function of its own there
    assert count_calls(leaf, 2) == 1
    assert count_calls(abs, -2) == 0
    assert count_calls(lambda: [leaf(i) for i in range(n)]) == 1 + extra + n
    before = sys.getprofile()
    with pytest.raises(KeyError):
        count_calls(fails)
    assert sys.getprofile() is before


CPP = """
extern "C"  void  kernel(const float* in_ptr0, float* out_ptr0)
    for(int64_t x0=static_cast<int64_t>(0L); x0<static_cast<int64_t>(16L); x0+=1)
                    auto tmp0 = at::vec::Vectorized<float>::loadu(in_ptr0 + x0, 16);
                    auto tmp1 = static_cast<float>(1.0);
                    auto tmp2 = at::vec::Vectorized<float>(tmp1);
                    auto tmp3 = tmp0 * tmp2;
                    tmp3.store(out_ptr0 + static_cast<int64_t>(x0));
"""
CPP_TEXT = """auto tmp0 = at::vec::Vectorized<float>::loadu(in_ptr0 + x0, 16);
auto tmp3 = tmp0 * tmp2;
tmp3.store(out_ptr0 + static_cast<int64_t>(x0));"""
SCALAR = """
                auto tmp0 = in_ptr0[static_cast<int64_t>(x0)];
                auto tmp1 = static_cast<float>(1.0);
                auto tmp2 = decltype(tmp0)(tmp0 + tmp1);
                out_ptr0[static_cast<int64_t>(x0)] = tmp2;
"""
SCALAR_TEXT = """auto tmp0 = in_ptr0[static_cast<int64_t>(x0)];
auto tmp2 = decltype(tmp0)(tmp0 + tmp1);
out_ptr0[static_cast<int64_t>(x0)] = tmp2;"""
TRITON = """
    xmask = xindex < xnumel
    tmp0 = tl.load(in_ptr0 + (x0), xmask)
    tmp1 = 1.0
    tmp2 = tmp0 - tmp1
    tl.store(out_ptr0 + (x0), tmp2, xmask)
"""
TRITON_TEXT = """tmp0 = tl.load(in_ptr0 + (x0), xmask)
tmp2 = tmp0 - tmp1
tl.store(out_ptr0 + (x0), tmp2, xmask)"""


@pytest.mark.parametrize(
    "source, text", [(CPP, CPP_TEXT), (SCALAR, SCALAR_TEXT), (TRITON, TRITON_TEXT)]
)
def test_kernel_text(source, text, monkeypatch):
    seen = []

    def run(compiled, *args):
        seen.append(args)
        return None, [source]

    monkeypatch.setattr("torch._inductor.utils.run_and_get_code", run)
    assert kernel_text(leaf, 7) == text
    assert seen == [(7,)]
