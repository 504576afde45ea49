"""Write the reference of the book: a page for the top of the package, and one for each wing.

A page lists public names; Sphinx adds their docstrings.
"""

import importlib
import inspect

import d2lpar

TOP = "The names that chapters share"
WINGS = {  # page: title, modules
    "parallel": (
        "Ways to split work",
        (
            *("collectives", "pipelines", "sharded_layers", "strategies", "costs", "side_streams"),
            *("layouts", "gpt"),
        ),
    ),
    "processes": ("Many processes", ("ddp", "collective_bytes")),
    "servers": (
        "Parameter servers",
        ("store", "clients", "actors", "ray_setup", "ad_clicks", "plots"),
    ),
    "virtual": ("Virtual and modelled GPUs", ("", "modelled_gpu", "hardware", "calibration")),
    "data": ("Data", ("batches", "workers")),
    "graphs": ("Graphs and compiling", ("operator_graph", "compiling")),
    "plotting": ("Figures", ("charts", "figures")),
    "others": (
        "Models, training, timing, exercises",
        ("d2lpar.models", "d2lpar.training", "d2lpar.timing", "d2lpar.exercises"),
    ),
}


def reference():
    """Return the pages of the reference, a dict from names to texts."""
    homes = {}
    for name in d2lpar.__all__:
        homes.setdefault(f"d2lpar.{d2lpar._HOME[name]}", []).append(name)
    sections = [_section(home, names, "d2lpar") for home, names in homes.items()]
    texts = {"d2lpar": "\n\n".join([f"# {TOP}", "`from d2lpar import ...`", *sections])}
    for wing, (title, modules) in WINGS.items():
        sections = []
        for module in modules:
            home = module if wing == "others" else f"d2lpar.{wing}.{module}".rstrip(".")
            names = public_names(home)
            shared = [f"`{name}`" for name in names if name in d2lpar.__all__]
            sections.append(_section(home, [n for n in names if n not in d2lpar.__all__], home))
            if shared:
                sections[-1] += f"\n\n{', '.join(shared)}: see [{TOP}](d2lpar.md)."
        texts[wing] = "\n\n".join([f"# {title}", *sections])
    return texts


def public_names(home):
    """Return the names of the public functions and classes of a module, in source order."""
    module = importlib.import_module(home)
    names = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == home
    ]
    values = [(name, getattr(module, name)) for name in names]
    return [name for name, value in values if callable(value) and value.__doc__]


def _section(home, names, owner):
    """Return the section on a module, with names that Sphinx imports from `owner`."""
    module = importlib.import_module(home)
    first = inspect.getdoc(module).split("\n\n")[0]
    lines = [f"## `{home}`", "", first, "", "```{eval-rst}", f".. currentmodule:: {owner}"]
    for name in names:
        if inspect.isclass(getattr(importlib.import_module(owner), name)):
            lines += ["", f".. autoclass:: {name}", "   :members:"]
        else:
            lines += ["", f".. autofunction:: {name}"]
    return "\n".join([*lines, "```"])
