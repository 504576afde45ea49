"""Fashion-MNIST in batches, or a synthetic stand-in for it.

The images are looked for in the folder that the environment variable D2LPAR_DATA names, in
d2l's ``../data``, in ``data`` and in the user's cache, then downloaded. Where all that fails, a
synthetic data set of the same shapes and classes is drawn, and said to be one.
"""

import contextlib
import functools
import gzip
import hashlib
import os
import socket
import tempfile
import threading
import time
import urllib.request
import warnings
import zlib
from pathlib import Path

import torch

from d2lpar.data.batches import BatchLoader

CLASSES = (
    "t-shirt",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)
NAME = "Fashion-MNIST"
SYNTHETIC_NAME = "synthetic Fashion-MNIST"

# MD5 of the files without compression, in the order in which they are read.
FILES = {
    "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
    "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
    "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
    "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
}
NUM_TRAIN, NUM_TEST = 60_000, 10_000
LAYOUTS = ("FashionMNIST/raw", "raw", ".")  # torchvision's, and the files by themselves
MIRROR = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
PROBE_SECONDS = 4  # how long to look for a connection
OFFLINE_SECONDS = 600  # how long other processes rely on there being none
STALL_SECONDS = 10  # how long a download may stand still


class ImageDataset(torch.utils.data.Dataset):
    """Images and labels in memory.

    Args:
        images: (n, 1, height, width), uint8.
        labels: (n,).
        name: for the titles of figures.
        resize: side, or height and width, that images are scaled to when they are read.
    """

    classes = CLASSES

    def __init__(self, images, labels, name, resize=None):
        self.images, self.labels, self.name = images, labels.to(torch.int64), name
        self.resize = (resize, resize) if isinstance(resize, int) else resize

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        X, y = self.__getitems__([index])
        return X[0], int(y[0])

    def __getitems__(self, indices):
        """Return images (n, 1, height, width), float32 in [0, 1], and labels (n,), int64."""
        indices = torch.as_tensor(indices, device="cpu")
        X = self.images[indices].to(torch.float32).div_(255)
        if self.resize:
            X = torch.nn.functional.interpolate(X, self.resize, mode="bilinear", antialias=True)
        return X, self.labels[indices]


def load_data_fashion_mnist(batch_size, resize=None, *, pin_memory=False, num_workers=0):
    """Return the training and the test batches of Fashion-MNIST, or of its synthetic stand-in.

    Args:
        batch_size: images in a batch.
        resize: side in pixels, or (height, width), that images are scaled to.
        pin_memory: batches in page-locked memory, for copies that do not block.
        num_workers: processes that prepare batches; none by default, since batches of small
            images are sliced faster than they are passed between processes.

    Returns:
        The training and the test batches. A batch is X, (batch_size, 1, height, width) float32 in
        [0, 1], and y, (batch_size,) int64. `train_iter.dataset.name` tells which data set it is;
        D2LPAR_DATA=synthetic in the environment asks for the stand-in.

    Raises:
        FileNotFoundError: D2LPAR_DATA names a folder without the files of Fashion-MNIST.
        ValueError: the files there are others.
    """
    name, tensors = _load(os.environ.get("D2LPAR_DATA", ""))
    if pin_memory and not _has_devices():
        warnings.warn("no device to pin memory for: the batches are pageable", stacklevel=2)
        pin_memory = False
    iters = []
    for images, labels, shuffle in ((*tensors[:2], True), (*tensors[2:], False)):
        dataset = ImageDataset(images, labels, name, resize)
        if num_workers:
            loader = torch.utils.data.DataLoader(
                dataset,
                batch_size,
                shuffle,
                num_workers=num_workers,
                pin_memory=pin_memory,
                collate_fn=_whole_batch,
            )
        else:
            loader = BatchLoader(dataset, batch_size, shuffle, pin_memory)
        iters.append(loader)
    return tuple(iters)


def _whole_batch(batch):
    return batch


def _has_devices():
    from d2lpar.devices import num_gpus

    return num_gpus() > 0


@functools.cache
def _load(named):
    """Return the data set's name and its four tensors: images and labels to train and to test."""
    if named == "synthetic":
        return SYNTHETIC_NAME, _synthetic()
    if named:
        tensors = _read_root(Path(named).expanduser())
        if tensors is None:
            raise FileNotFoundError(f"D2LPAR_DATA names {named}, where {NAME} is not")
        return NAME, tensors
    for root in (Path("../data"), Path("data"), _cache()):
        try:
            tensors = _read_root(root)
        except ValueError as error:
            print(f"{NAME} is not read: {error}")
            continue
        if tensors is not None:
            return NAME, tensors
    try:
        return NAME, _download(_cache())
    except Exception as error:
        reason = (getattr(error, "strerror", None) or str(error)).split("\n")[0]
    print(f"{NAME} is not here and cannot be downloaded ({reason}): using a synthetic stand-in.")
    return SYNTHETIC_NAME, _synthetic()


def _read_root(root):
    """Read the data set under a folder; return None if it holds none, raise ValueError if wrong."""
    for layout in LAYOUTS:
        folder = root / layout
        paths = [
            [path for path in (folder / name, folder / f"{name}.gz") if path.is_file()]
            for name in FILES
        ]
        if all(paths):
            return tuple(_read_any(p, m) for p, m in zip(paths, FILES.values(), strict=True))
    return None


def _read_any(paths, md5):
    """Return the tensor in the first of the files that is right."""
    for path in paths[:-1]:
        with contextlib.suppress(ValueError):
            return _read(path, md5)
    return _read(paths[-1], md5)


def _read(path, md5):
    """Return the tensor in an IDX file, plain or compressed.

    path: of the file; md5: of its content. Raises ValueError when the content is another.
    Source of the format: http://yann.lecun.com/exdb/mnist/
    """
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path.name} is damaged ({error})") from error
    found = _md5(content)
    if found != md5:
        raise ValueError(f"{path.name} is wrong or cut short (MD5 {found}, not {md5})")
    ndim = content[3]
    shape = [int.from_bytes(content[4 + 4 * i : 8 + 4 * i], "big") for i in range(ndim)]
    tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=4 + 4 * ndim)
    tensor = tensor.view(shape)
    return tensor.unsqueeze(1) if ndim == 3 else tensor  # images: (n, 1, 28, 28)


def _md5(content):
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def _cache():
    """Return the user's cache folder for this package."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "d2lpar"


def _download(root):
    """Download the data set through torchvision into a folder, and return its tensors.

    One process downloads while others wait; a file gets its name when it is known to be right.
    Raises an exception, whose first line says why, when that is not possible.
    """
    root.mkdir(parents=True, exist_ok=True)
    _require_connection(root / "offline")
    from filelock import FileLock  # not everybody downloads

    with FileLock(root / "download.lock"):
        with contextlib.suppress(ValueError):
            tensors = _read_root(root)
            if tensors is not None:
                return tensors
        from d2lpar._d2l import import_torchvision

        torchvision = import_torchvision()
        with tempfile.TemporaryDirectory(dir=root) as folder, _socket_timeout(STALL_SECONDS):
            torchvision.datasets.FashionMNIST(folder, download=True)
            tensors = _read_root(Path(folder))
            raw = root / LAYOUTS[0]
            raw.mkdir(parents=True, exist_ok=True)
            for name in FILES:
                os.replace(Path(folder) / LAYOUTS[0] / name, raw / name)
        return tensors


def _require_connection(note):
    """Raise ConnectionError unless the mirror answers within PROBE_SECONDS.

    note: a file whose age tells when a process last looked in vain.
    """
    try:
        age = time.time() - note.stat().st_mtime
    except OSError:
        age = OFFLINE_SECONDS
    if 0 <= age < OFFLINE_SECONDS:
        raise ConnectionError("no connection")
    answers = []

    def probe():
        with contextlib.suppress(Exception):
            url = f"{MIRROR}t10k-labels-idx1-ubyte.gz"
            with urllib.request.urlopen(url, timeout=PROBE_SECONDS) as response:
                answers.append(response.read(2) == b"\x1f\x8b")  # gzip, not a login page

    # In a thread, since looking up a host's name knows no time limit.
    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS)
    if not any(answers):
        note.touch()
        raise ConnectionError("no connection")


@contextlib.contextmanager
def _socket_timeout(seconds):
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def _synthetic():
    """Return the synthetic stand-in's four tensors, from the cache or drawn anew."""
    from d2lpar.data import garments

    drawing = _md5(Path(garments.__file__).read_bytes())[:12]
    path = _cache() / f"garments-{drawing}.bin"
    n, pixels = NUM_TRAIN + NUM_TEST, garments.SIDE**2
    with contextlib.suppress(OSError):
        content = path.read_bytes()
        if len(content) == 32 + n * (pixels + 1) and _md5(content[32:]).encode() == content[:32]:
            data = torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=32)
            images = data[: n * pixels].view(n, 1, garments.SIDE, garments.SIDE)
            return _split(images, data[n * pixels :])
    test = garments.draw(NUM_TEST, seed=1)
    train = garments.draw(NUM_TRAIN, seed=0)
    images, labels = (torch.cat(pair) for pair in zip(train, test, strict=True))
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        content = images.numpy().tobytes() + labels.numpy().tobytes()
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(_md5(content).encode() + content)
        os.replace(file.name, path)
    return _split(images, labels)


def _split(images, labels):
    return (
        images[:NUM_TRAIN],
        labels[:NUM_TRAIN],
        images[NUM_TRAIN:],
        labels[NUM_TRAIN:],
    )
