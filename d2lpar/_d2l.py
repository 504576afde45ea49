"""Load d2l.torch, for names that d2lpar does not define."""

import difflib
import importlib
import importlib.util
import sys

from d2lpar.torchvision_import import import_torchvision


def lookup(name):
    """Return an attribute of d2l.torch.

    Raises:
        AttributeError: d2l cannot be imported, or has no such name; the message says how to
            install it, or suggests a similar name.
    """
    import d2lpar

    try:
        d2l = load()
    except Exception as error:
        raise AttributeError(
            f"module 'd2lpar' has no attribute {name!r}{_suggestion(name, dir(d2lpar))}, and d2l, "
            f"which may define it, cannot be imported ({type(error).__name__}: {error}). To "
            f"install it: {install_command()}",
            name=name,
        ) from error
    try:
        return getattr(d2l, name)
    except AttributeError:
        raise AttributeError(
            f"neither module 'd2lpar' nor d2l.torch has an attribute {name!r}"
            f"{_suggestion(name, [*dir(d2lpar), *dir(d2l)])}",
            name=name,
        ) from None


def _suggestion(name, known):
    """Return " (did you mean 'x'?)" with the most similar known name, or ""."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return f" (did you mean {near[0]!r}?)" if near else ""


def load():
    """Import and return d2l.torch; raise ModuleNotFoundError if a package is missing."""
    if "d2l.torch" not in sys.modules:
        if importlib.util.find_spec("d2l") is None:
            raise ModuleNotFoundError("No module named 'd2l'", name="d2l")
        import_torchvision()
    return importlib.import_module("d2l.torch")


def install_command():
    """Return the commands that install d2l and a torchvision that matches the installed torch."""
    import torch

    major, minor = torch.__version__.split(".")[:2]
    torchvision = f"torchvision==0.{int(minor) + 15}.*" if major == "2" else "torchvision"
    return (
        f"pip install --no-deps d2l==1.0.3 '{torchvision}' && "
        "pip install ipython matplotlib matplotlib-inline numpy pandas pillow requests scipy"
    )
