"""Names that fall through to d2l.torch, with d2l, without it, and with a torchvision that fails."""

import importlib.util
import inspect
import sys
import textwrap

import fresh
import pytest
import torch

import d2lpar
from d2lpar import _d2l

has_d2l = importlib.util.find_spec("d2l") is not None
with_d2l = pytest.mark.skipif(not has_d2l, reason="d2l is not installed")


def run(code, *paths):
    """Run code in a process that has imported torch only, with folders in front of its path."""
    code = f"import sys; sys.path[:0] = {[str(p) for p in paths]}\n{textwrap.dedent(code)}"
    return fresh.printed(code, fresh.TORCH)


def test_without_d2l_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "d2l.torch", raising=False)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "d2l" else find_spec(name, *a)
    )
    with pytest.raises(AttributeError, match="show_trace_2d.*pip install --no-deps d2l==1.0.3"):
        d2lpar.show_trace_2d  # noqa: B018
    assert not hasattr(d2lpar, "show_trace_2d")
    with pytest.raises(AttributeError, match=r"'Bencmark' \(did you mean 'Benchmark'\?\), and d2l"):
        d2lpar.Bencmark  # noqa: B018


def test_install_command_names_the_torchvision_of_this_torch(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    assert "'torchvision==0.28.*'" in _d2l.install_command()


SHOWS = "loads = []\nshow_images = 'shown'"


@pytest.mark.parametrize(("name", "module", "printed"), [
    ("show_images", SHOWS, "shown True"),
    ("nonsense", SHOWS, "neither module 'd2lpar' nor d2l.torch has an attribute 'nonsense'"),
    ("Bencmark", SHOWS, "has an attribute 'Bencmark' (did you mean 'Benchmark'?)"),
    ("show_imags", SHOWS, "has an attribute 'show_imags' (did you mean 'show_images'?)"),
    ("show_images", "import surely_lost", "No module named 'surely_lost'"),
])  # fmt: skip
def test_names_come_from_d2l_or_the_error_helps(tmp_path, name, module, printed):
    (tmp_path / "d2l").mkdir()
    (tmp_path / "d2l" / "__init__.py").touch()
    (tmp_path / "d2l" / "torch.py").write_text(module)
    (tmp_path / "torchvision.py").touch()
    code = f"""
    import d2lpar
    try:
        print(d2lpar.{name}, "{name}" in vars(d2lpar))
    except AttributeError as error:
        print(error)
    """
    assert printed in run(code, tmp_path).splitlines()[0]


FAKE_TORCHVISION = """
import torchvision.extension
import torch
for name in ("nms", "qnms"):
    @torch.library.register_fake(f"torchvision::{name}")
    def fake(dets, scores, iou_threshold):
        return dets
"""


def test_torchvision_without_operators_is_imported(tmp_path):
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(FAKE_TORCHVISION)
    (tmp_path / "torchvision" / "extension.py").write_text("print('extension')")
    code = """
    from d2lpar.torchvision_import import import_torchvision
    torchvision = import_torchvision()
    assert torchvision is sys.modules["torchvision"] is import_torchvision()
    """
    # Twice: the module that was left from the failed import has been purged.
    assert run(code, tmp_path).split() == ["extension", "extension"]


def test_another_error_of_torchvision_passes(tmp_path):
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('something else')")
    code = """
    from d2lpar.torchvision_import import import_torchvision
    import torch
    try:
        import_torchvision()
    except RuntimeError as error:
        print(error, hasattr(torch.ops.torchvision, "nms"))
    """
    assert run(code, tmp_path) == "something else False\n"


@with_d2l
def test_real_d2l_shows_images():
    d2l = _d2l.load()
    d2l.plt.switch_backend("agg")
    assert len(d2lpar.show_images([torch.rand(28, 28)] * 4, 1, 4)) == 4
    assert d2lpar.show_images is d2l.show_images and d2lpar.Animator is not d2l.Animator
    d2l.plt.close()


@with_d2l
@pytest.mark.parametrize("name", d2lpar.__all__)
def test_signatures_begin_with_those_of_d2l(name):
    theirs = getattr(_d2l.load(), name, None)
    if theirs is None:
        return  # a name of ours alone
    theirs = list(inspect.signature(theirs).parameters.values())
    ours = list(inspect.signature(getattr(d2lpar, name)).parameters.values())
    for mine, other in zip(ours, theirs, strict=False):
        if other.kind not in (other.VAR_KEYWORD, other.VAR_POSITIONAL):
            # d2l asks for devices when it is imported, we when the function is called
            default = None if isinstance(other.default, list) else other.default
            assert (mine.name, mine.default) == (other.name, default)
    assert len(ours) >= len([p for p in theirs if p.kind is p.POSITIONAL_OR_KEYWORD])
    assert all(p.default is not p.empty or p.kind is p.VAR_KEYWORD for p in ours[len(theirs) :])
