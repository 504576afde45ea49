"""Data sets: files found, verified and downloaded, or a synthetic stand-in that is announced.

The files are looked for in the folder that the environment variable D2LPAR_DATA names, in d2l's
``../data``, in ``data`` and in the user's cache, then downloaded. If all that fails, a synthetic
data set of the same shapes is drawn and named as such.
"""

import contextlib
import gzip
import hashlib
import os
import socket
import tempfile
import threading
import time
import urllib.request
import zlib
from pathlib import Path

import torch

from d2lpar import _d2l
from d2lpar.data import drawing

PROBE_SECONDS = 4  # how long to look for a connection
OFFLINE_SECONDS = 600  # how long processes remember that there was none
STALL_SECONDS = 10  # how long a download may stand still


class Source:
    """Where a data set comes from.

    Args:
        dataset: its class in torchvision.datasets, which downloads it.
        files: MD5 of the files without compression, by name, in the order in which they are read.
        layouts: the folders that they may be in; the first is torchvision's.
        probe: URL of a gzipped file, to find out whether there is a connection.
        parse: function from the contents of the files to four tensors: images and labels for
            training, images and labels for testing.
        stand_in: the module that draws the stand-in.
        sizes: how many images it draws for training and for testing.
    """

    def __init__(self, name, dataset, files, layouts, probe, parse, stand_in, sizes):
        self.name, self.dataset, self.files, self.layouts = name, dataset, files, layouts
        self.probe, self.parse, self.stand_in, self.sizes = probe, parse, stand_in, sizes
        self._loaded = {}

    def load(self):
        """Return the name of the data set or of its stand-in, and its four tensors.

        Raises:
            FileNotFoundError: D2LPAR_DATA names a folder without the files.
            ValueError: the files there are wrong.
        """
        named = os.environ.get("D2LPAR_DATA", "")
        if named not in self._loaded:
            self._loaded[named] = self._load(named)
        return self._loaded[named]

    def forget(self):
        """Forget the tensors: the next call looks for the data set again."""
        self._loaded.clear()

    def _load(self, named):
        stand_in = f"synthetic {self.name}"
        if named == "synthetic":
            return stand_in, self.synthetic()
        if named:
            tensors = self.read(Path(named).expanduser())
            if tensors is None:
                raise FileNotFoundError(f"D2LPAR_DATA names {named}, where {self.name} is not")
            return self.name, tensors
        for root in (Path("../data"), Path("data"), cache()):
            try:
                tensors = self.read(root)
            except ValueError as error:
                print(f"{self.name} is not read: {error}")
                continue
            if tensors is not None:
                return self.name, tensors
        try:
            return self.name, self.download(cache())
        except Exception as error:
            reason = (getattr(error, "strerror", None) or str(error)).split("\n")[0]
        print(
            f"{self.name} is not here and cannot be downloaded ({reason}): "
            "using a synthetic stand-in."
        )
        return stand_in, self.synthetic()

    def read(self, root):
        """Read the data set in a folder; return None if it is not there.

        Raises:
            ValueError: a file is damaged, or is not the one that belongs there.
        """
        for layout in self.layouts:
            folder = root / layout
            paths = [
                [path for path in (folder / name, folder / f"{name}.gz") if path.is_file()]
                for name in self.files
            ]
            if all(paths):
                md5s = self.files.values()
                return self.parse([_read_any(p, m) for p, m in zip(paths, md5s, strict=True)])
        return None

    def download(self, root):
        """Download the data set through torchvision into a folder, and return its tensors.

        One process downloads while others wait; a file gets its name once it is verified. The first
        line of an exception says why the download is not possible.
        """
        root.mkdir(parents=True, exist_ok=True)
        require_connection(self.probe, root / f"{self.dataset}.offline")
        from filelock import FileLock  # only a download needs it

        with FileLock(root / "download.lock"):
            with contextlib.suppress(ValueError):
                tensors = self.read(root)
                if tensors is not None:
                    return tensors
            torchvision = _d2l.import_torchvision()
            with tempfile.TemporaryDirectory(dir=root) as folder, socket_timeout(STALL_SECONDS):
                getattr(torchvision.datasets, self.dataset)(folder, download=True)
                tensors = self.read(Path(folder))
                to = root / self.layouts[0]
                to.mkdir(parents=True, exist_ok=True)
                for name in self.files:
                    os.replace(Path(folder) / self.layouts[0] / name, to / name)
            return tensors

    def synthetic(self):
        """Return the stand-in's four tensors, from the cache or drawn anew."""
        module, shape = self.stand_in, self.stand_in.SHAPE
        sources = Path(module.__file__).read_bytes() + Path(drawing.__file__).read_bytes()
        path = cache() / f"{Path(module.__file__).stem}-{_md5(sources)[:12]}.bin"
        num_train, n = self.sizes[0], sum(self.sizes)
        pixels = torch.Size(shape).numel()
        with contextlib.suppress(OSError):
            content = path.read_bytes()
            right = len(content) == 32 + n * (pixels + 1)
            if right and _md5(content[32:]).encode() == content[:32]:
                data = torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=32)
                return _split(data[: n * pixels].view(n, *shape), data[n * pixels :], num_train)
        test = module.draw(self.sizes[1], seed=1)
        train = module.draw(num_train, seed=0)
        images, labels = (torch.cat(pair) for pair in zip(train, test, strict=True))
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            content = images.numpy().tobytes() + labels.numpy().tobytes()
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                file.write(_md5(content).encode() + content)
            os.replace(file.name, path)
        return _split(images, labels, num_train)


def _split(images, labels, num_train):
    return images[:num_train], labels[:num_train], images[num_train:], labels[num_train:]


def _read_any(paths, md5):
    """Return the content of the first file with the right MD5."""
    for path in paths[:-1]:
        with contextlib.suppress(ValueError):
            return _read(path, md5)
    return _read(paths[-1], md5)


def _read(path, md5):
    """Return the content of a file, plain or gzipped; raise ValueError if its MD5 is wrong."""
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path.name} is damaged ({error})") from error
    found = _md5(content)
    if found != md5:
        raise ValueError(f"{path.name} is wrong or cut short (MD5 {found}, not {md5})")
    return content


def _md5(content):
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def cache():
    """Return the user's cache folder for this package."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "d2lpar"


def require_connection(address, note):
    """Raise ConnectionError unless a file can be read within PROBE_SECONDS.

    `note` is a file whose age says when a process last failed at that. The file at `address` begins
    with gzip's two bytes: a login page does not.
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
            with urllib.request.urlopen(address, timeout=PROBE_SECONDS) as response:
                answers.append(response.read(2) == b"\x1f\x8b")

    # In a thread, since looking up a host's name has no time limit.
    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS)
    if not any(answers):
        note.touch()
        raise ConnectionError("no connection")


@contextlib.contextmanager
def socket_timeout(seconds):
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
