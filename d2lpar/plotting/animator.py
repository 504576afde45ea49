"""Showing the progress of a loop: a plot that grows, and a progress bar."""

import sys
import time

from d2lpar.plotting.figures import in_notebook, new_figure, style

_SECONDS_BETWEEN_DRAWINGS = 0.5


class Animator:
    """A plot that grows while a loop runs.

    In a notebook it shows one output, which it updates in place, at most twice a second and at the
    end of the cell. Elsewhere it shows nothing: `fig` can be saved.

    Args:
        xlabel, ylabel, legend, xlim, ylim, xscale, yscale: settings of the axes, as in matplotlib.
        fmts: matplotlib's format of each curve; more curves than formats start over.
        nrows, ncols: how many axes; `add` draws in the first.
        figsize: width and height, in inches.

    Attributes:
        X, Y: the points so far, a list for each curve.
        fig, axes: the figure and the list of its axes.
    """

    def __init__(
        self,
        xlabel=None,
        ylabel=None,
        legend=None,
        xlim=None,
        ylim=None,
        xscale="linear",
        yscale="linear",
        fmts=("-", "m--", "g-.", "r:"),
        nrows=1,
        ncols=1,
        figsize=(3.5, 2.5),
    ):
        self.fig, axes = new_figure(nrows, ncols, figsize)
        self.axes = list(axes.flat)
        limits = {"xlim": xlim, "ylim": ylim}
        limits = {name: limit for name, limit in limits.items() if limit is not None}
        self.axes[0].set(xlabel=xlabel, ylabel=ylabel, xscale=xscale, yscale=yscale, **limits)
        self.axes[0].grid(True)
        self.legend, self.fmts = legend or [], fmts
        self.X, self.Y = [], []
        self._lines = []
        self._handle = None
        self._shown = 0.0
        self._flushes = False

    def add(self, x, y):
        """Add a point to each curve.

        Args:
            x: one number for all curves, or one for each.
            y: a number, or one for each curve; None leaves a curve as it is.

        Raises:
            ValueError: x and y are lists of different length.
        """
        y = _numbers(y)
        x = _numbers(x) if _is_list(x) else _numbers(x) * len(y)
        if len(x) != len(y):
            raise ValueError(f"x has {len(x)} numbers and y has {len(y)}: one for each curve")
        if len(y) > len(self._lines):
            self._add_lines(len(y))
        for i, (a, b) in enumerate(zip(x, y, strict=True)):
            if a is not None and b is not None:
                self.X[i].append(a)
                self.Y[i].append(b)
                self._lines[i].set_data(self.X[i], self.Y[i])
        self.axes[0].relim()
        self.axes[0].autoscale_view()
        if in_notebook():
            self._show_soon()

    def _add_lines(self, num_lines):
        with style():
            for i in range(len(self._lines), num_lines):
                self.X.append([])
                self.Y.append([])
                self._lines += self.axes[0].plot([], [], self.fmts[i % len(self.fmts)])
            if self.legend:
                self.axes[0].legend(
                    self._lines[: len(self.legend)], self.legend[:num_lines], frameon=True
                )

    def _show_soon(self):
        """Show the plot now, or at the end of the cell if it was shown a moment ago."""
        if time.monotonic() - self._shown >= _SECONDS_BETWEEN_DRAWINGS:
            self._show()
        elif not self._flushes:
            from IPython import get_ipython

            get_ipython().events.register("post_run_cell", self._flush)
            self._flushes = True

    def _flush(self, *_):
        from IPython import get_ipython

        get_ipython().events.unregister("post_run_cell", self._flush)
        self._flushes = False
        self._show()

    def _show(self):
        from IPython.display import display

        if self._handle is None:
            self._handle = display(self.fig, display_id=True)
        else:
            self._handle.update(self.fig)
        self._shown = time.monotonic()


def _is_list(value):
    """Return whether a value holds one number for each curve."""
    return hasattr(value, "__len__") and getattr(value, "ndim", 1) > 0


def _numbers(values):
    """Return a list of floats; None stays."""
    values = values if _is_list(values) else [values]
    return [None if value is None else float(value) for value in values]


def progress(iterable, description="", total=None):
    """Return a generator of the items of an iterable, under a progress bar of plain text.

    The bar goes to stderr and ends on a line without times, so that two runs of a notebook leave
    the same text.

    Args:
        iterable: what to loop over.
        description: the text before the bar.
        total: number of items, where the iterable has no length.
    """
    try:
        from tqdm import tqdm
    except ModuleNotFoundError as error:
        raise ImportError("a progress bar needs tqdm: pip install tqdm") from error

    bar = "{desc}{percentage:3.0f}%|{bar:30}| {n_fmt}/{total_fmt}"
    if total is None:
        total = len(iterable) if hasattr(iterable, "__len__") else None
    with tqdm(
        total=total,
        desc=f"{description}: " if description else "",
        bar_format=bar + " [{elapsed}<{remaining}]",
        mininterval=0.25,
        file=sys.stderr,
        ascii=False,
    ) as display:
        try:
            for item in iterable:
                yield item
                display.update()
        finally:
            display.bar_format = bar
