"""The pretrained body: taken from torch hub's folder when it is the right one, otherwise None."""

import hashlib
import importlib.util

import pytest
import torch

from d2lpar import _d2l
from d2lpar.data import pretrained

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed"
)


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """Return where the weights belong, in a hub folder of its own, without a connection."""

    def offline(*_):
        raise ConnectionError("no connection")

    monkeypatch.setattr(pretrained, "require_connection", offline)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("D2LPAR_DATA", raising=False)
    before = torch.hub.get_dir()
    torch.hub.set_dir(tmp_path)
    yield tmp_path / "checkpoints" / "resnet18-f37072fd.pth"
    torch.hub.set_dir(before)


def write(path, monkeypatch):
    """Write the weights of a new network to the file, whose hash is taken for the right one."""
    net = _d2l.import_torchvision().models.resnet18()
    path.parent.mkdir()
    torch.save(net.state_dict(), path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(pretrained, "SHA256", digest[:8])
    return net


def test_the_body_has_the_weights_of_the_file(checkpoint, monkeypatch, capsys):
    net = write(checkpoint, monkeypatch).eval().double()
    body = pretrained.imagenet_body(side=64).eval().double()
    assert "are here" in capsys.readouterr().out
    images = torch.rand(2, 3, 64, 64).double()
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (pretrained.MEAN, pretrained.STD))
    expected = net((images - mean) / std)
    torch.testing.assert_close(net.fc(body(images)), expected)
    assert body(torch.rand(2, 3, 32, 32)).shape == (2, 512)  # scaled to 64


def test_a_damaged_file_is_not_used(checkpoint, capsys):
    checkpoint.parent.mkdir()
    checkpoint.write_bytes(b"not weights")
    assert pretrained.imagenet_body() is None
    assert "wrong or cut short" in capsys.readouterr().out


def test_without_a_connection_there_is_no_body(checkpoint, capsys):
    assert pretrained.imagenet_body() is None
    assert "(no connection)" in capsys.readouterr().out
    assert not checkpoint.exists()


def test_the_synthetic_data_set_has_no_body(checkpoint, monkeypatch, capsys):
    write(checkpoint, monkeypatch)
    monkeypatch.setenv("D2LPAR_DATA", "synthetic")
    assert pretrained.imagenet_body() is None
    assert "(D2LPAR_DATA=synthetic)" in capsys.readouterr().out
