"""Patches modules and classes of other packages, now or as soon as they are imported."""

import functools
import importlib.abc
import importlib.machinery
import re
import sys

_changes = {}  # name of a module -> functions(module)


def replace(owner, **values):
    """Replace names of a module or class."""
    for name, value in values.items():
        setattr(owner, name, value)


def naming_device(device_type, function):
    """Return a function of torch whose errors name this device type instead of "vgpu"."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            text = re.sub(r"\bvgpu(\w+)Type\b", rf"torch.{device_type}.\1Tensor", str(error))
            error.args = (re.sub(r"\bvgpu(?=:\d|')", device_type, text), *error.args[1:])
            raise

    return call


def when_imported(name, change):
    """Call `change(module)` for the module `name`: now if it is imported, otherwise at import."""
    if name in sys.modules:
        change(sys.modules[name])
        return
    if not _changes:
        sys.meta_path.insert(0, _Finder())
    _changes.setdefault(name, []).append(change)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        changes = _changes.get(name)
        if changes is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                for change in changes:
                    change(module)

            spec.loader.exec_module = exec_module
        return spec
