"""The data: found, verified, downloaded or drawn; the batches; batches split over devices."""

import contextlib
import functools
import gzip
import hashlib
import http.server
import importlib.util
import os
import pickle
import socket
import threading
import time
import types
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from gates import in_threads

import d2lpar
from d2lpar import torchvision_import
from d2lpar.data import cifar10, fashion_mnist, sources, synthetic_garments, synthetic_objects
from d2lpar.data.batches import ImageDataset

SOURCE = fashion_mnist.SOURCE

with_torchvision = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed"
)


def idx(tensor):
    """Return a uint8 tensor as the content of an IDX file."""
    sizes = b"".join(size.to_bytes(4, "big") for size in tensor.shape)
    return bytes([0, 0, 8, tensor.ndim]) + sizes + tensor.numpy().tobytes()


@pytest.fixture
def contents(monkeypatch):
    """Return the files of a data set of 20 and 10 images, which data.py takes for the right one."""
    generator = torch.Generator().manual_seed(0)
    files = {}
    for part, n in (("train", 20), ("t10k", 10)):
        images = torch.randint(256, (n, 28, 28), generator=generator, dtype=torch.uint8)
        files[f"{part}-images-idx3-ubyte"] = idx(images)
        files[f"{part}-labels-idx1-ubyte"] = idx(torch.arange(n, dtype=torch.uint8) % 10)
    md5s = {name: hashlib.md5(content).hexdigest() for name, content in files.items()}
    monkeypatch.setattr(SOURCE, "files", md5s)
    monkeypatch.setattr(SOURCE, "sizes", (20, 10))
    return files


@pytest.fixture(autouse=True)
def empty_machine(tmp_path, monkeypatch):
    """Work in an empty folder, with an empty cache and without a connection."""
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("D2LPAR_DATA", raising=False)

    def offline(*_, **__):
        raise urllib.error.URLError("unreachable")

    monkeypatch.setattr(urllib.request, "urlopen", offline)
    SOURCE.forget()
    yield
    SOURCE.forget()


def write(folder, contents, compress=False):
    folder.mkdir(parents=True)
    for name, content in contents.items():
        path, data = (f"{name}.gz", gzip.compress(content)) if compress else (name, content)
        (folder / path).write_bytes(data)
    return folder


def name_and_first_batch(batch_size=4):
    train_iter, test_iter = d2lpar.load_data_fashion_mnist(batch_size)
    assert train_iter.dataset.name == test_iter.dataset.name
    return train_iter.dataset.name, next(iter(test_iter))


# Where the data come from


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize(
    "place", ["data/FashionMNIST/raw", "notebooks/data/FashionMNIST/raw", "cache/d2lpar", "data"]
)
def test_cached_files_are_used(tmp_path, contents, place, compress):
    (tmp_path / "notebooks" / "data").mkdir()
    folder = tmp_path / place
    write(folder / "raw" if folder.name == "data" else folder, contents, compress)
    name, (X, y) = name_and_first_batch()
    assert name == "Fashion-MNIST"
    expected = torch.frombuffer(
        bytearray(contents["t10k-images-idx3-ubyte"][16:]), dtype=torch.uint8
    )
    assert torch.equal((X * 255).round().to(torch.uint8).flatten(), expected[: 4 * 28 * 28])
    assert y.tolist() == [0, 1, 2, 3]


def test_named_folder_comes_first_and_must_have_the_data(tmp_path, contents, monkeypatch):
    monkeypatch.setenv("D2LPAR_DATA", str(write(tmp_path / "elsewhere", contents)))
    assert name_and_first_batch()[0] == "Fashion-MNIST"
    monkeypatch.setenv("D2LPAR_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match="Fashion-MNIST not found in D2LPAR_DATA=.*nowhere"):
        d2lpar.load_data_fashion_mnist(4)


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
@pytest.mark.parametrize("name", ["train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"])
def test_damaged_file_is_never_used(
    tmp_path, contents, monkeypatch, capsys, compress, damage, name
):
    folder = write(tmp_path / "data", contents, compress)
    path = folder / (f"{name}.gz" if compress else name)
    content = path.read_bytes()
    changed = bytearray(content)
    changed[len(content) // 2] ^= 1
    path.write_bytes({"cut": content[:-5], "changed": changed, "empty": b""}[damage])
    assert name_and_first_batch()[0] == "synthetic Fashion-MNIST"
    assert f" is ignored: {path.name} is" in capsys.readouterr().out
    monkeypatch.setenv("D2LPAR_DATA", str(folder))
    with pytest.raises(ValueError, match=f"{path.name} is (damaged|wrong or cut short)"):
        d2lpar.load_data_fashion_mnist(4)


@pytest.mark.parametrize("damaged", ["train-images-idx3-ubyte", "train-images-idx3-ubyte.gz"])
def test_whole_file_beside_a_damaged_one_is_used(tmp_path, contents, damaged):
    folder = write(tmp_path / "data", contents)
    content = contents["train-images-idx3-ubyte"]
    (folder / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(content))
    (folder / damaged).write_bytes(b"")
    assert name_and_first_batch()[0] == "Fashion-MNIST"


# Downloading


class FakeTorchvision:
    """Stands for torchvision: writes the files where torchvision would, and counts."""

    def __init__(self, contents):
        self.contents, self.calls, self.time_limits = contents, 0, []
        self.second = threading.Event()
        self.datasets = types.SimpleNamespace(FashionMNIST=self.download)

    def download(self, root, download):
        assert download
        self.calls += 1
        self.time_limits.append(socket.getdefaulttimeout())
        if self.calls > 1:
            self.second.set()
        self.second.wait(0.3)  # time for another to come in, where nothing keeps it out
        write(Path(root) / "FashionMNIST" / "raw", self.contents)


@pytest.fixture
def online(monkeypatch, contents):
    fake = FakeTorchvision(contents)
    monkeypatch.setattr(sources, "require_connection", lambda address, note: None)
    monkeypatch.setattr(torchvision_import, "import_torchvision", lambda: fake)
    return fake


@pytest.mark.parametrize("damaged", [False, True])
def test_downloads_once_into_the_cache_and_replaces_damaged_files(tmp_path, online, damaged):
    raw = tmp_path / "cache" / "d2lpar" / "FashionMNIST" / "raw"
    if damaged:
        write(raw, {**online.contents, "train-images-idx3-ubyte": b""})
    for _ in range(2):
        assert name_and_first_batch()[0] == "Fashion-MNIST"
        SOURCE.forget()
    assert online.calls == 1
    assert online.time_limits == [sources.STALL_SECONDS]
    assert {path.name for path in raw.iterdir()} == set(SOURCE.files)


def test_two_ask_at_once_and_one_downloads(tmp_path, online):
    root, results = tmp_path / "cache" / "d2lpar", []
    in_threads([lambda: results.append(SOURCE.download(root))] * 2)
    assert online.calls == 1
    assert [len(tensors) for tensors in results] == [4, 4]
    assert torch.equal(results[0][0], results[1][0])


def test_wrong_download_is_not_kept(tmp_path, online, capsys):
    online.contents["t10k-images-idx3-ubyte"] += b"!"
    assert name_and_first_batch()[0] == "synthetic Fashion-MNIST"
    assert "cannot be downloaded (t10k-images-idx3-ubyte is wrong" in capsys.readouterr().out
    assert not list((tmp_path / "cache").rglob("*ubyte*"))


@contextlib.contextmanager
def serving(folder):
    """Serve a folder on this machine; yields its address and the list of paths asked for."""
    asked = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            asked.append(self.path)

    handler = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/", asked
        server.shutdown()
        thread.join()


@pytest.fixture
def network(monkeypatch):
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    monkeypatch.setattr(
        urllib.request,
        "urlopen",
        lambda *args, timeout=10, **_: opener.open(*args, timeout=timeout),
    )


@with_torchvision
@pytest.mark.parametrize("interrupted", [False, True])
def test_downloads_through_torchvision(
    tmp_path, contents, network, monkeypatch, capsys, interrupted
):
    folder = write(tmp_path / "mirror", contents, compress=True)
    dataset = torchvision_import.import_torchvision().datasets.FashionMNIST
    archives = [folder / f"{name}.gz" for name in contents]
    md5s = [(path.name, hashlib.md5(path.read_bytes()).hexdigest()) for path in archives]
    monkeypatch.setattr(dataset, "resources", md5s)
    if interrupted:
        archives[0].write_bytes(archives[0].read_bytes()[:-100])
    with serving(folder) as (address, asked):
        monkeypatch.setattr(dataset, "mirrors", [address])
        monkeypatch.setattr(SOURCE, "probe", f"{address}t10k-labels-idx1-ubyte.gz")
        name, _ = name_and_first_batch()
    if interrupted:
        assert name == "synthetic Fashion-MNIST"
        assert "Error downloading train-images-idx3-ubyte.gz" in capsys.readouterr().out
        assert not list((tmp_path / "cache").rglob("*ubyte*"))
    else:
        assert name == "Fashion-MNIST"
        assert {path.lstrip("/") for path in asked} == {path.name for path in archives}


@with_torchvision
def test_files_and_mirror_are_those_of_torchvision():
    datasets = torchvision_import.import_torchvision().datasets
    garments, cifar = datasets.FashionMNIST, datasets.CIFAR10
    assert [name for name, _ in garments.resources] == [f"{name}.gz" for name in SOURCE.files]
    assert garments.mirrors == [fashion_mnist.MIRROR]
    assert dict(cifar.train_list + cifar.test_list) == cifar10.FILES
    assert (cifar.base_folder, cifar.url) == (cifar10.SOURCE.layouts[0], cifar10.SOURCE.probe)


# Without a connection


def test_offline_is_announced_in_one_line_and_once(contents, capsys):
    for _ in range(2):
        assert name_and_first_batch()[0] == "synthetic Fashion-MNIST"
    assert capsys.readouterr().out == (
        "Fashion-MNIST is not here and cannot be downloaded (no connection): "
        "using a synthetic stand-in.\n"
    )


def test_silent_mirror_is_given_up_and_not_asked_again(tmp_path, network, monkeypatch):
    monkeypatch.setattr(sources, "PROBE_SECONDS", 0.2)
    note = tmp_path / "offline"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        with pytest.raises(ConnectionError, match="no connection"):
            sources.require_connection(address, note)
        silent.settimeout(5)
        silent.accept()[0].close()
        with pytest.raises(ConnectionError, match="no connection"):
            sources.require_connection(address, note)
        silent.settimeout(0.5)
        with pytest.raises(TimeoutError):
            silent.accept()


def test_probe_does_not_wait_for_a_name_that_is_looked_up(tmp_path, monkeypatch):
    released, finished = threading.Event(), []
    monkeypatch.setattr(sources, "PROBE_SECONDS", 0.1)
    monkeypatch.setattr(
        urllib.request, "urlopen", lambda *_, **__: finished.append(released.wait(10))
    )
    with pytest.raises(ConnectionError):
        sources.require_connection(SOURCE.probe, tmp_path / "offline")
    assert not finished
    released.set()


def test_login_page_is_no_connection(tmp_path, network, monkeypatch):
    (tmp_path / "portal").mkdir()
    (tmp_path / "portal" / "t10k-labels-idx1-ubyte.gz").write_text("<html>please log in</html>")
    with serving(tmp_path / "portal") as (address, _):
        address += "t10k-labels-idx1-ubyte.gz"
        with pytest.raises(ConnectionError):
            sources.require_connection(address, tmp_path / "offline")


def test_connection_is_noticed_when_it_is_back(tmp_path, contents, network):
    folder = write(tmp_path / "mirror", contents, compress=True)
    note = tmp_path / "offline"
    note.touch()
    with serving(folder) as (address, asked):
        address += "t10k-labels-idx1-ubyte.gz"
        with pytest.raises(ConnectionError):
            sources.require_connection(address, note)
        assert not asked
        for shift in (-1.1, 1000):  # long ago; in the future, by a clock that was wrong
            moment = time.time() + shift * sources.OFFLINE_SECONDS
            os.utime(note, (moment, moment))
            sources.require_connection(address, note)
        assert len(asked) == 2


@pytest.mark.parametrize("before", [None, 7.0])
def test_time_limit_of_sockets_ends_with_the_download(before):
    users = socket.getdefaulttimeout()
    socket.setdefaulttimeout(before)
    try:
        with pytest.raises(OSError, match="stalled"), sources.socket_timeout(3.0):
            assert socket.getdefaulttimeout() == 3.0
            raise OSError("stalled")
        assert socket.getdefaulttimeout() == before
    finally:
        socket.setdefaulttimeout(users)


# The synthetic stand-in


def test_synthetic_can_be_asked_for(tmp_path, contents, monkeypatch, capsys):
    write(tmp_path / "data", contents)
    monkeypatch.setenv("D2LPAR_DATA", "synthetic")
    assert name_and_first_batch()[0] == "synthetic Fashion-MNIST"
    assert capsys.readouterr().out == ""


def test_synthetic_is_cached_and_a_damaged_cache_is_drawn_anew(tmp_path, contents, monkeypatch):
    drawn = SOURCE.synthetic()
    (cached,) = (tmp_path / "cache" / "d2lpar").iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(synthetic_garments, "draw", None)
        assert all(map(torch.equal, SOURCE.synthetic(), drawn))
    content = cached.read_bytes()
    middle = len(content) // 2  # of the training images
    flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    for damaged in (content[:-1], flipped, b""):
        cached.write_bytes(damaged)
        assert all(map(torch.equal, SOURCE.synthetic(), drawn))
        assert cached.read_bytes() == content


def test_synthetic_works_without_a_place_for_the_cache(tmp_path, contents, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert name_and_first_batch()[0] == "synthetic Fashion-MNIST"
    assert "Not a directory" in capsys.readouterr().out


DRAWN = {  # mean brightness of each class, drawn with seed 3
    synthetic_garments: [81.62, 44.29, 92.44, 40.98, 84.64, 17.33, 76.72, 23.56, 64.47, 39.82],
    synthetic_objects: [72.46, 76.57, 85.56, 73.9, 64.72, 70.79, 72.65, 81.18, 75.62, 72.22],
}


@pytest.mark.parametrize("module", DRAWN)
def test_drawn_set_is_balanced_shuffled_and_depends_on_the_seed_alone(module):
    """The chapters' results rest on its pixels: a change of the drawings changes the means."""
    images, labels = module.draw(1000, seed=3)
    assert images.shape == (1000, *module.SHAPE) and images.dtype == torch.uint8
    assert labels.bincount().tolist() == [100] * 10 and labels[:100].unique().numel() == 10
    assert len(images.flatten(1).unique(dim=0)) == 1000
    means = [images[labels == label].float().mean().item() for label in range(10)]
    assert means == pytest.approx(DRAWN[module], abs=0.02)  # rounding differs between processors
    num_threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        torch.manual_seed(7)
        again = module.draw(1000, seed=3)
        with ThreadPoolExecutor(1) as new_thread:
            assert new_thread.submit(torch.get_num_threads).result() == 3
    finally:
        torch.set_num_threads(num_threads)
    assert torch.equal(again[0], images) and torch.equal(again[1], labels)
    assert not torch.equal(module.draw(1000, seed=4)[0], images)
    with pytest.raises(ValueError, match="num_images must be a multiple of 10: got 1001"):
        module.draw(1001, seed=0)


# Batches


@pytest.fixture
def loaders(contents, monkeypatch):
    monkeypatch.setenv("D2LPAR_DATA", "synthetic")
    return d2lpar.load_data_fashion_mnist


def test_batches(loaders):
    train_iter, test_iter = loaders(8)
    assert (len(train_iter), len(test_iter)) == (3, 2)
    batches = list(train_iter)
    assert [len(y) for _, y in batches] == [8, 8, 4]
    X, y = batches[0]
    assert X.shape == (8, 1, 28, 28) and X.dtype == torch.float32 and y.dtype == torch.int64
    assert 0 <= X.min() and 0.8 < X.max() <= 1
    with pytest.raises(ValueError, match="batch_size must be positive: got 0"):
        loaders(0)


def test_training_batches_are_shuffled_by_the_seed_and_keep_their_labels(loaders):
    train_iter, test_iter = loaders(20)
    X_all, y_all = train_iter.dataset.batch(range(20))

    def epoch(iterable, seed):
        torch.manual_seed(seed)
        return torch.cat([y for _, y in iterable])

    assert torch.equal(epoch(train_iter, 1), epoch(train_iter, 1))
    assert not torch.equal(epoch(train_iter, 1), epoch(train_iter, 2))
    assert torch.equal(epoch(test_iter, 1), test_iter.dataset.labels)
    (X, y), (_, y_next) = next(iter(train_iter)), next(iter(train_iter))
    assert not torch.equal(y, y_next)
    places = [(X_all == image).flatten(1).all(1).nonzero().item() for image in X]
    assert sorted(places) == list(range(20)) and torch.equal(y_all[places], y)


@with_torchvision
@pytest.mark.parametrize("resize", [None, 14, (20, 30), 96])
def test_batches_equal_those_of_d2l(tmp_path, contents, resize):
    torchvision_import.import_torchvision()
    from torchvision import datasets, transforms

    write(tmp_path / "data" / "FashionMNIST" / "raw", contents)
    steps = [transforms.Resize(resize)] if resize else []
    transform = transforms.Compose([*steps, transforms.ToTensor()])
    theirs = datasets.FashionMNIST("../data", train=False, transform=transform)
    X, y = next(iter(d2lpar.load_data_fashion_mnist(10, resize)[1]))
    assert torch.allclose(X, torch.stack([image for image, _ in theirs]), atol=1.01 / 255)
    assert y.tolist() == [label for _, label in theirs]


def test_items_of_the_data_set(loaders):
    dataset = loaders(4)[1].dataset
    X, y = dataset[3]
    assert X.shape == (1, 28, 28) and y == int(dataset.labels[3]) and len(dataset) == 10
    X, y = next(iter(torch.utils.data.DataLoader(dataset, 10)))
    assert torch.equal(X, dataset.batch(range(10))[0]) and torch.equal(y, dataset.labels)
    assert dataset.classes[9] == "ankle boot"


def test_default_device_does_not_matter(loaders):
    with torch.device("meta"):
        X, y = next(iter(loaders(4)[0]))
    assert X.device.type == y.device.type == "cpu"


def test_pin_memory_where_there_is_a_device_to_copy_to(loaders, monkeypatch):
    d2lpar.virtual_gpus(2)
    for pin_memory in (False, True):
        X, y = next(iter(loaders(4, pin_memory=pin_memory)[0]))
        assert X.is_pinned() == y.is_pinned() == pin_memory
    monkeypatch.setattr(fashion_mnist, "num_gpus", lambda: 0)
    with pytest.warns(UserWarning, match="the batches are pageable"):
        train_iter, _ = loaders(4, pin_memory=True)
    assert len(list(train_iter)) == 5


# Splitting


@pytest.mark.parametrize(
    "n, k, sizes", [(8, 2, [4, 4]), (10, 4, [3, 3, 2, 2]), (4, 4, [1] * 4), (5, 1, [5])]
)
def test_split_batch(n, k, sizes):
    X, y = torch.rand(n, 1, 2), torch.arange(n)
    for devices in (["cpu"] * k, d2lpar.virtual_gpus(k)):
        for parts, whole in zip(d2lpar.split_batch(X, y, devices), (X, y), strict=True):
            assert [len(part) for part in parts] == sizes
            assert [str(part.device) for part in parts] == [str(device) for device in devices]
            assert torch.equal(torch.cat([part.cpu() for part in parts]), whole)


@pytest.mark.parametrize("name", ["cpu", "cpu:0", "vgpu:0"])
def test_split_batch_waits_for_copies_to_the_host_only(name, monkeypatch):
    """A part on the host is read at once, a part on a GPU by what is issued later."""
    asked, to = [], torch.Tensor.to
    d2lpar.virtual_gpus(1)

    def record(tensor, device, non_blocking=False):
        asked.append(non_blocking)
        return to(tensor, device, non_blocking=non_blocking)

    monkeypatch.setattr(torch.Tensor, "to", record)
    for device in (name, torch.device(name)):
        d2lpar.split_batch(torch.rand(2, 3), torch.arange(2), [device])
    assert asked == [not name.startswith("cpu")] * 4


def test_split_batch_errors():
    X, y = torch.rand(3, 2), torch.arange(3)
    for k in (4, 0):
        with pytest.raises(
            ValueError, match=f"a batch of 3 must be split over 1 to 3 devices: got {k}"
        ):
            d2lpar.split_batch(X, y, ["cpu"] * k)
    with pytest.raises(ValueError, match="must have the same length: got 3 and 2"):
        d2lpar.split_batch(X, y[:2], ["cpu"])


@pytest.mark.parametrize("seed", range(3))
def test_a_seed_of_the_readers_does_not_sort_the_stand_in(seed):
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(seed))
    _, labels = synthetic_garments.draw(1000, seed=seed)
    assert len(labels[order][:100].unique()) > 5


# CIFAR-10


@pytest.fixture
def pickles(monkeypatch):
    """Return the files of a CIFAR-10 of 50 and 10 images, which cifar10.py takes for the right."""
    files = {}
    for first, name in enumerate(cifar10.FILES):
        data = torch.arange(10 * 3072).add(first).remainder(256).to(torch.uint8).view(10, 3072)
        files[name] = pickle.dumps({"data": data.numpy(), "labels": list(range(10))})
    md5s = {name: hashlib.md5(content).hexdigest() for name, content in files.items()}
    monkeypatch.setattr(cifar10.SOURCE, "files", md5s)
    monkeypatch.setattr(cifar10.SOURCE, "sizes", (100, 20))
    cifar10.SOURCE.forget()
    yield files
    cifar10.SOURCE.forget()


def test_cached_cifar10_is_used(tmp_path, pickles):
    write(tmp_path / "data" / "cifar-10-batches-py", pickles)
    train, test = d2lpar.load_cifar10()
    assert (train.name, len(train), len(test)) == ("CIFAR-10", 50, 10)
    assert train.images.shape == (50, 3, 32, 32) and train.labels.dtype == torch.int64
    assert train.images[10, 0, 0, :3].tolist() == [1, 2, 3]  # the second file
    assert test.images[0, 1, 0, 0] == (1024 + 5) % 256 and train.classes[9] == "truck"


def test_a_transform_gets_each_image_as_a_picture():
    images = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5).to(torch.uint8)
    labels = torch.tensor([7, 8])
    dataset = ImageDataset(images, labels, transform=lambda picture: picture)
    picture, y = dataset[1]
    assert (picture.mode, picture.size, y) == ("RGB", (5, 4), 8)
    assert picture.getpixel((2, 1)) == tuple(images[1, :, 1, 2].tolist())
    picture, _ = ImageDataset(images[:, :1], labels, transform=lambda picture: picture)[0]
    assert picture.mode == "L" and picture.getpixel((4, 3)) == images[0, 0, 3, 4]


def test_a_damaged_file_of_cifar10_is_not_unpickled(tmp_path, pickles, monkeypatch, capsys):
    monkeypatch.setattr(pickle, "loads", None)
    pickles["test_batch"] += b"!"
    write(tmp_path / "data" / "cifar-10-batches-py", pickles)
    train, test = d2lpar.load_cifar10()
    assert (train.name, len(train), len(test)) == ("synthetic CIFAR-10", 100, 20)
    assert train.classes == synthetic_objects.CLASSES
    out = capsys.readouterr().out
    assert " is ignored: test_batch is wrong" in out and "(no connection)" in out
