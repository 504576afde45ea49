"""Find, verify and download data sets, or draw a synthetic stand-in and say so.

The files are searched in the folder of the environment variable D2LPAR_DATA, in d2l's ``../data``,
in ``data`` and in the user's cache, then downloaded. If all fails, the stand-in of the same shapes
is used.
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
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from d2lpar import torchvision_import
from d2lpar.data import synthetic_drawing

PROBE_SECONDS = 4  # time limit of the search for a connection
OFFLINE_SECONDS = 600  # how long processes remember a failed search
STALL_SECONDS = 10  # time limit of a stalled download


@dataclass(eq=False)
class Source:
    """A data set: four tensors, training images and labels, test images and labels."""

    name: str
    dataset: str  # its class in torchvision.datasets, which downloads it
    files: dict  # from file names to MD5 without compression, in the order of reading
    layouts: tuple  # possible subfolders of the files; the first is torchvision's
    probe: str  # URL of a gzipped file, to test the connection
    parse: Callable  # from the contents of the files to the four tensors
    stand_in: ModuleType  # draws the stand-in
    sizes: tuple  # numbers of training and of test images of the stand-in
    _loaded: dict = field(default_factory=dict)

    def load(self):
        """Return the name of the data set or of its stand-in, and its four tensors."""
        choice = os.environ.get("D2LPAR_DATA", "")
        if choice not in self._loaded:
            self._loaded[choice] = self._load(choice)
        return self._loaded[choice]

    def forget(self):
        """Clear the cached tensors: the next call searches for the data set again."""
        self._loaded.clear()

    def _load(self, choice):
        stand_in = f"synthetic {self.name}"
        if choice == "synthetic":
            return stand_in, self.synthetic()
        if choice:
            tensors = self.read(Path(choice).expanduser())
            if tensors is None:
                raise FileNotFoundError(f"{self.name} not found in D2LPAR_DATA={choice}")
            return self.name, tensors
        for root in (Path("../data"), Path("data"), cache()):
            try:
                tensors = self.read(root)
            except ValueError as error:
                print(f"{self.name} in {root} is ignored: {error}")
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
        """Return the tensors of the data set in a folder, or None if a file is missing.

        Raises ValueError if a file is damaged or has another MD5.
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
        """Download the data set through torchvision into a folder; return its tensors.

        One process downloads while others wait; files are moved into place after verification. The
        first line of an exception states the reason.
        """
        root.mkdir(parents=True, exist_ok=True)
        require_connection(self.probe, root / f"{self.dataset}.offline")
        from filelock import FileLock  # only a download needs it

        with FileLock(root / "download.lock"):
            with contextlib.suppress(ValueError):
                tensors = self.read(root)
                if tensors is not None:
                    return tensors
            torchvision = torchvision_import.import_torchvision()
            with tempfile.TemporaryDirectory(dir=root) as folder, socket_timeout(STALL_SECONDS):
                getattr(torchvision.datasets, self.dataset)(folder, download=True)
                tensors = self.read(Path(folder))
                to = root / self.layouts[0]
                to.mkdir(parents=True, exist_ok=True)
                for name in self.files:
                    os.replace(Path(folder) / self.layouts[0] / name, to / name)
            return tensors

    def synthetic(self):
        """Return the stand-in's four tensors, cached or newly drawn."""
        module, (num_train, num_test) = self.stand_in, self.sizes
        sources = Path(module.__file__).read_bytes() + Path(synthetic_drawing.__file__).read_bytes()
        digest = _md5(sources + repr(self.sizes).encode())[:12]
        path = cache() / f"{Path(module.__file__).stem}-{digest}.npz"
        with contextlib.suppress(OSError, EOFError, ValueError, zipfile.BadZipFile):
            with np.load(path) as file:
                return tuple(torch.from_numpy(array) for array in file.values())
        test, train = module.draw(num_test, seed=1), module.draw(num_train, seed=0)
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                np.savez(file, *train, *test)
            os.replace(file.name, path)
        return *train, *test


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
        raise ValueError(f"{path.name} is wrong or cut short: its MD5 must be {md5}, got {found}")
    return content


def _md5(content):
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def cache():
    """Return the user's cache folder for this package."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "d2lpar"


def require_connection(address, note):
    """Raise ConnectionError unless the gzipped file at a URL can be read within PROBE_SECONDS.

    The modification time of the file `note` is that of the last failure of any process.
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
                answers.append(response.read(2) == b"\x1f\x8b")  # of gzip, not of a login page

    # In a thread, because DNS has no time limit.
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
