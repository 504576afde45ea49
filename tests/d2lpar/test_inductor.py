"""What torch.compile can do here, and what it generates."""

import os
import signal

import fresh
import pytest
import torch

from d2lpar.chapters.hybridization import compile_backend, inductor, kernel_text


@pytest.fixture
def undecided():
    """Forget what earlier tests have found out, and what this one does."""
    inductor.failure_of_inductor.cache_clear()
    yield
    inductor.failure_of_inductor.cache_clear()


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
    with pytest.raises(KeyboardInterrupt):
        compile_backend()
    assert done == [True]
    monkeypatch.setattr(torch, "compile", lambda function: function)
    assert compile_backend() == "inductor"


@pytest.mark.slow
def test_machine_without_compiler(tmp_path, monkeypatch):
    program = (
        "import torch\n"
        "from d2lpar.chapters.hybridization import compile_backend\n"
        "backend = compile_backend()\n"
        "x = torch.arange(3.0)\n"
        "print(backend, torch.compile(lambda x: 2 * x + 1, backend=backend)(x).tolist())\n"
        "print('processes', torch._inductor.config.compile_threads)\n"
    )
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", f"{tmp_path}")
    lines = fresh.printed(program, fresh.TORCH).splitlines()
    assert "no-such-compiler" in lines[0]
    assert lines[2:] == ["aot_eager [1.0, 3.0, 5.0]", "processes 1"]


KERNELS = {  # code of inductor; the text has the lines marked with +
    "C++": """
 extern "C"  void  kernel(const float* in_ptr0, float* out_ptr0)
     for(int64_t x0=static_cast<int64_t>(0L); x0<static_cast<int64_t>(16L); x0+=1)
+                    auto tmp0 = at::vec::Vectorized<float>::loadu(in_ptr0 + x0, 16);
                     auto tmp1 = static_cast<float>(1.0);
                     auto tmp2 = at::vec::Vectorized<float>(tmp1);
+                    auto tmp3 = tmp0 * tmp2;
+                    tmp3.store(out_ptr0 + static_cast<int64_t>(x0));
""",
    "scalar C++": """
+                auto tmp0 = in_ptr0[static_cast<int64_t>(x0)];
                 auto tmp1 = static_cast<float>(1.0);
+                auto tmp2 = decltype(tmp0)(tmp0 + tmp1);
+                out_ptr0[static_cast<int64_t>(x0)] = tmp2;
""",
    "Triton": """
     xmask = xindex < xnumel
+    tmp0 = tl.load(in_ptr0 + (x0), xmask)
     tmp1 = 1.0
+    tmp2 = tmp0 - tmp1
+    tl.store(out_ptr0 + (x0), tmp2, xmask)
""",
}


@pytest.mark.parametrize("language", KERNELS)
def test_kernel_text_has_loads_arithmetic_and_stores(language, monkeypatch):
    lines = KERNELS[language].splitlines()

    def run(compiled, *args):
        assert args == (7,)
        return None, ["\n".join(line[1:] for line in lines)]

    monkeypatch.setattr("torch._inductor.utils.run_and_get_code", run)
    expected = [line[1:].strip() for line in lines if line.startswith("+")]
    assert kernel_text(lambda x: x + 1, 7).splitlines() == expected
