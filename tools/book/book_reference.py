"""The reference of the book: pages of public names, whose text Sphinx takes from their docstrings.

One for the names at the top of d2lpar, one for what its shared modules have besides, one for each
chapter that has a module or a folder of its own, and one for vgpu.
"""

import importlib
import inspect
import pkgutil

import d2lpar
from d2lpar import chapters

TOP = "The names that chapters share"
MORE = (  # shared modules that have public names besides those at the top
    "d2lpar.timing",
    "d2lpar.training",
    "d2lpar.data.batches",
    "d2lpar.vision",
    "d2lpar.side_streams",
    "d2lpar.plotting.charts",
    "d2lpar.plotting.figures",
    "d2lpar.exercises",
)


def reference():
    """Return the pages of the reference: a dict from a page's name to its text."""
    homes = {}
    for name in d2lpar.__all__:
        homes.setdefault(d2lpar._HOME[name], []).append(name)
    sections = [_section(home, names, "d2lpar") for home, names in homes.items()]
    texts = {
        "d2lpar": _page(TOP, "`from d2lpar import ...`", *sections),
        "shared": _page("More of the shared modules", *map(_module, MORE)),
    }
    for chapter in pkgutil.iter_modules(chapters.__path__, "d2lpar.chapters."):
        name = chapter.name.rpartition(".")[2]
        texts[name] = _page(name.replace("_", " ").capitalize(), _module(chapter.name))
    return texts | {"vgpu": _page("Virtual and modelled GPUs", _module("vgpu"))}


def _page(title, *sections):
    return "\n\n".join([f"# {title}", *sections])


def _module(home):
    """Return the section on a module, which leaves to the first page the names that are there."""
    module = importlib.import_module(home)
    names = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if name[0] != "_" and getattr(value, "__module__", None) == home and value.__doc__
    ]
    shared = [f"`{name}`" for name in names if name in d2lpar.__all__]
    section = _section(home, [name for name in names if name not in d2lpar.__all__], home)
    return f"{section}\n\n{', '.join(shared)}: see [{TOP}](d2lpar.md)." if shared else section


def _section(home, names, owner):
    """Return the section of a page on a module, with the names that Sphinx finds in `owner`."""
    module = importlib.import_module(home)
    first = inspect.getdoc(module).split("\n\n")[0]
    lines = [f"## `{home}`", "", first, "", "```{eval-rst}", f".. currentmodule:: {owner}"]
    for name in names:
        value = getattr(importlib.import_module(owner), name)
        if inspect.isclass(value):
            lines += ["", f".. autoclass:: {name}", "   :members:"]
        elif callable(value):
            lines += ["", f".. autofunction:: {name}"]
        else:
            lines += ["", f".. data:: {name}", "", f"   {_described(value)}"]
    return "\n".join([*lines, "```"])


def _described(value):
    """Return a sentence on a value that has no docstring."""
    if isinstance(value, dict):
        kinds = sorted({f"`{type(each).__name__}`" for each in value.values()})
        return f"By name, each a {' or '.join(kinds)}: {', '.join(map(repr, value))}."
    return f"A `{type(value).__name__}`."
