"""Figures that show themselves in a notebook, in one style, and the colours of the chapters.

Figures are made without pyplot, so a cell shows each of them once. Lines differ by lightness and
dashes, bars by lightness and hatching: printed in grey they can still be told apart.
"""

import base64
import contextlib
import functools
import io
import sys
from pathlib import Path

WIDE = 6.3  # inches: as wide as a cell of JupyterLab in a window of 1024 pixels
MEASURED, PREDICTED, IDEAL = "#12355b", "#d1495b", "#777777"
LINES = (  # colour, dashes, marker
    (MEASURED, "-", "o"),
    (PREDICTED, "--", "s"),
    ("#66a182", "-.", "^"),
    ("#edae49", ":", "D"),
)
KINDS = {  # kind of a span: colour, hatch, colour of the hatch
    "kernel": (MEASURED, "", MEASURED),
    "copy": ("#edae49", "/////", "#7a4f00"),
    "wait": ("#e4e4e4", ".....", "#8a8a8a"),
    "collective": ("#5b8f7b", "\\\\\\\\", "#d5efe3"),
}

PHASES = (  # bands with a name, in this order: colour, hatch
    ("#cfe0f1", ""),
    ("#f7dcb4", "//"),
    ("#cde7cf", ".."),
    ("#e5d3ea", "\\\\"),
    ("#eeeeee", "x"),
)


@contextlib.contextmanager
def style():
    """Make a context, or a decorator, in which new artists have the style of the chapters' figures.

    Raises ImportError when matplotlib is not installed; says how to install it.
    """
    try:
        from matplotlib.style import context
    except ModuleNotFoundError as error:
        raise ImportError("figures need matplotlib: pip install matplotlib") from error

    with context(Path(__file__).parent / "chapters.mplstyle"):
        yield


@functools.cache
def _figure_class():
    from matplotlib import figure

    class Figure(figure.Figure):
        """A figure that shows itself as the value of a cell, with a text that never varies."""

        def __repr__(self):
            return "<Figure>"

        def _repr_mimebundle_(self, include=None, exclude=None):
            if not in_notebook():
                return {}
            picture = io.BytesIO()
            self.savefig(picture, format="png")
            encoded = base64.b64encode(picture.getvalue()).decode("ascii")
            return {"image/png": encoded, "text/plain": repr(self)}

    return Figure


def in_notebook():
    """Return whether the code runs in a Jupyter kernel, where a figure can be shown."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    return getattr(get_ipython(), "kernel", None) is not None


def new_figure(nrows=1, ncols=1, figsize=(3.5, 2.5)):
    """Return a figure in the style of the chapters, and an array (nrows, ncols) of its axes.

    `figsize` is its width and height, in inches.
    """
    with style():
        figure = _figure_class()(figsize=figsize, dpi=120, layout="constrained")
        all_axes = figure.subplots(nrows, ncols, squeeze=False)
        for axes in all_axes.flat:
            axes.title.set_wrap(True)  # or a long title is cut off
        return figure, all_axes
