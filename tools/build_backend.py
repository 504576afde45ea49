"""Build with setuptools; an editable install also gets a copy of `vgpu_autoload.py`.

An editable install has nothing else in site-packages. If its source folder is deleted,
`import torch` must still find the entry point.
"""

import base64
import hashlib
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

MODULE = "vgpu_autoload.py"


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    name = build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    path, code = Path(wheel_directory, name), Path(MODULE).read_bytes()
    with ZipFile(path) as wheel:
        files = {name: wheel.read(name) for name in wheel.namelist()}
    digest = base64.urlsafe_b64encode(hashlib.sha256(code).digest()).decode().rstrip("=")
    (record,) = (name for name in files if name.endswith(".dist-info/RECORD"))
    files[record] += f"{MODULE},sha256={digest},{len(code)}\n".encode()
    files[MODULE] = code
    with ZipFile(path, "w", ZIP_DEFLATED) as wheel:
        for name_of_file, content in files.items():
            wheel.writestr(name_of_file, content)
    return name
