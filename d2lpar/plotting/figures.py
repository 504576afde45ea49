"""Create figures that display themselves in a notebook; style and colours of the chapters.

Figures are created without pyplot, so a cell shows each of them once. Lines differ in lightness and
dashes, bars in lightness and hatching, so they remain distinct when printed in grey.
"""

import base64
import contextlib
import functools
import io
import sys
from pathlib import Path

WIDE = 6.3  # inches: the width of a cell of JupyterLab in a window of 1024 pixels
MEASURED, PREDICTED, IDEAL = "#12355b", "#d1495b", "#777777"
LINES = (  # colour, dashes, marker
    (MEASURED, "-", "o"),
    (PREDICTED, "--", "s"),
    ("#66a182", "-.", "^"),
    ("#edae49", ":", "D"),
)
KINDS = {  # kind of span: colour, hatch, colour of the hatch
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
    """Context manager or decorator: new artists get the style of the chapters' figures.

    Raises:
        ImportError: matplotlib is not installed.
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
        """A figure that displays itself as the value of a cell; its text is the same every run."""

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
    """Return whether the code runs in a Jupyter kernel, which can show figures."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    return getattr(get_ipython(), "kernel", None) is not None


def new_figure(nrows=1, ncols=1, figsize=(3.5, 2.5)):
    """Return a figure in the style of the chapters, and an array (nrows, ncols) of its axes.

    Args:
        nrows, ncols: number of rows and columns of axes.
        figsize: (width, height), in inches.
    """
    with style():
        figure = _figure_class()(figsize=figsize, dpi=120, layout="constrained")
        all_axes = figure.subplots(nrows, ncols, squeeze=False)
        for axes in all_axes.flat:
            axes.title.set_wrap(True)  # otherwise a long title is cut off
        return figure, all_axes
