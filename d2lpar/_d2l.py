"""d2l.torch, for the names that d2lpar does not define, and torchvision, which it needs."""

import difflib
import importlib
import importlib.util
import sys
import threading

_lock = threading.Lock()


def lookup(name):
    """Return the object that d2l.torch has under a name.

    Raises AttributeError, so that ``hasattr`` works, if d2l lacks the name or cannot be imported;
    the text says how to install it, or suggests a name with a similar spelling.
    """
    import d2lpar

    try:
        d2l = load()
    except Exception as error:
        hint = _similar_name(name, dir(d2lpar))
        raise AttributeError(
            f"module 'd2lpar' has no attribute {name!r}{hint}, and d2l, where "
            f"it may stand, cannot be imported ({type(error).__name__}: {error}). To install it: "
            f"{install_command()}",
            name=name,
        ) from error
    try:
        return getattr(d2l, name)
    except AttributeError:
        raise AttributeError(
            f"neither module 'd2lpar' nor d2l.torch has an attribute {name!r}"
            f"{_similar_name(name, [*dir(d2lpar), *dir(d2l)])}",
            name=name,
        ) from None


def _similar_name(name, known):
    """Return a question that suggests the most similar known name, or an empty string."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return f" (did you mean {near[0]!r}?)" if near else ""


def load():
    """Import and return the module d2l.torch.

    Raises ModuleNotFoundError when d2l or something that it imports is not installed.
    """
    if "d2l.torch" not in sys.modules:
        if importlib.util.find_spec("d2l") is None:
            raise ModuleNotFoundError("No module named 'd2l'", name="d2l")
        import_torchvision()
    return importlib.import_module("d2l.torch")


def import_torchvision():
    """Import and return torchvision, even beside a CPU build of torch.

    The torchvision of PyPI is built for CUDA. Its compiled operators do not load on a CPU build
    of torch, and its import stops at "operator torchvision::nms does not exist". With the schemas
    of two operators defined, everything but these operators works: data sets, transforms, models.
    """
    with _lock:  # two threads would take each other's modules away
        try:
            return importlib.import_module("torchvision")
        except RuntimeError as error:
            if "torchvision::nms does not exist" not in str(error):
                raise
        import torch

        for operator in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, operator):
                torch.library.define(
                    f"torchvision::{operator}",
                    "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
                )
        for module in [m for m in sys.modules if m.split(".")[0] == "torchvision"]:
            del sys.modules[module]
        return importlib.import_module("torchvision")


def install_command():
    """Return the commands that install d2l and torchvision beside the installed torch."""
    import torch

    major, minor = torch.__version__.split(".")[:2]
    torchvision = f"torchvision==0.{int(minor) + 15}.*" if major == "2" else "torchvision"
    return (
        f"pip install --no-deps d2l==1.0.3 '{torchvision}' && "
        "pip install ipython matplotlib matplotlib-inline numpy pandas pillow requests scipy"
    )
