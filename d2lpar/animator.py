"""Plot training curves while a network trains."""

import functools
import math
import time

from d2lpar.plotting.figures import in_notebook, new_figure, style

SHARE = 0.03  # maximum fraction of the training time to spend on drawing


class Animator:
    """Plot curves in a figure that updates while a cell runs, as d2l's class of this name does.

    In a notebook the figure is redrawn in place, and drawing takes at most 3 % of the time. The end
    of the cell draws it once more, and the notebook stores that. If `xlim` is (minimum, maximum), a
    progress bar above the axes shows the position of the newest point until the cell ends. Outside
    a notebook points are recorded, but not drawn.

    Args:
        xlabel, ylabel: labels of the axes.
        legend: a list with a name for each curve.
        xlim, ylim: pairs (minimum, maximum); by default they fit the points.
        xscale, yscale: "linear" or "log".
        fmts: matplotlib format strings, one for each curve.
        nrows, ncols: number of rows and columns of axes; the curves are drawn in the first axes.
        figsize: (width, height) of the figure, in inches.

    Attributes:
        X, Y: for each curve the list of its x and of its y; None before the first point.
        fig, axes: the matplotlib figure, and the list of its axes.
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
        self._shape = nrows, ncols, figsize
        self.legend = [] if legend is None else list(legend)
        self.X, self.Y, self.fmts = None, None, fmts
        settings = {"xlabel": xlabel, "ylabel": ylabel, "xscale": xscale, "yscale": yscale}
        settings |= {"xlim": xlim, "ylim": ylim}
        self._settings = {name: value for name, value in settings.items() if value is not None}
        self._newest = math.inf  # the x of the newest point
        self._display = None  # the handle by which the displayed figure is updated
        self._next_draw = 0.0  # no drawing before this time, in seconds of time.monotonic
        self._draws_at_end = False  # whether the end of the cell draws once more
        if in_notebook():
            self.draw()  # imports matplotlib, which takes a second, before the training starts

    @functools.cached_property
    def _figure(self):
        return new_figure(*self._shape)  # on first use: a rank without a notebook needs none

    @property
    def fig(self):
        return self._figure[0]

    @property
    def axes(self):
        return list(self._figure[1].flat)

    def add(self, x, y):
        """Add a point to each curve.

        Args:
            x, y: a number, or a list with one for each curve; None adds no point to a curve.

        Raises:
            ValueError: x and y differ in length, or there are more numbers than curves or `fmts`.
        """
        y = list(y) if hasattr(y, "__len__") else [y]
        x = list(x) if hasattr(x, "__len__") else [x] * len(y)
        num_curves = len(self.fmts) if self.X is None else len(self.X)
        if len(x) != len(y) or len(y) > num_curves:
            what = "fmts" if self.X is None else "curves"
            raise ValueError(
                f"x and y must have equal lengths, {num_curves} at most, the number of {what}: "
                f"got {len(x)} and {len(y)}"
            )
        if self.X is None:
            self.X, self.Y = [[] for _ in y], [[] for _ in y]
        newest = []
        for i, (a, b) in enumerate(zip(x, y, strict=True)):
            if a is not None and b is not None:
                self.X[i].append(float(a))
                self.Y[i].append(float(b))
                newest.append(float(a))
        self._newest = max(newest, default=self._newest)
        if in_notebook():
            self._show()

    def draw(self, bar=True):
        """Draw all points, and the progress bar if any; return the figure."""
        with style():
            axes = self.axes[0]
            axes.cla()
            for x, y, fmt in zip(self.X or (), self.Y or (), self.fmts, strict=False):
                axes.plot(x, y, fmt, marker="." if len(x) < 25 else "")
            axes.set(**self._settings)
            axes.grid()
            if bar and self._underway():
                self._draw_bar()
            for legend in [*self.fig.legends]:  # of the previous drawing
                legend.remove()
            if self.legend and axes.lines:
                columns = 3 if max(map(len, self.legend)) < 12 else 2
                place = {"loc": "outside lower center", "ncols": columns, "fontsize": 8}
                self.fig.legend(axes.lines, self.legend, **place)
        return self.fig

    def _underway(self):
        """Return whether the newest point lies before the end of a rising `xlim`."""
        limits = self._settings.get("xlim")
        if not hasattr(limits, "__len__") or any(limit is None for limit in limits):
            return False  # no fixed end
        first, last = self.axes[0].get_xlim()
        return first < last and self._newest < last

    def _draw_bar(self):
        from matplotlib.patches import Rectangle

        axes = self.axes[0]
        newest = max(self._newest, axes.get_xlim()[0])
        done, _ = (axes.transScale + axes.transLimits).transform((newest, 1))
        for share, colour in ((1, "0.85"), (done, "0.35")):
            place = {"transform": axes.transAxes, "clip_on": False, "color": colour}
            axes.add_patch(Rectangle((0, 1.02), share, 0.02, **place))

    def _show(self):
        """Draw, unless it is too early; the end of the cell draws once more, without the bar."""
        from IPython import get_ipython

        start = time.monotonic()
        early = start < self._next_draw
        if not early:
            self._update(self.draw())
            end = time.monotonic()
            self._next_draw = end + (end - start) * (1 / SHARE - 1)
        if not self._draws_at_end and (early or self._underway()):
            get_ipython().events.register("post_run_cell", self._end_of_cell)
            self._draws_at_end = True

    def _update(self, figure):
        from IPython.display import display

        if self._display is None:
            self._display = display(figure, display_id=True)
        else:
            self._display.update(figure)

    def _end_of_cell(self, result):
        from IPython import get_ipython

        get_ipython().events.unregister("post_run_cell", self._end_of_cell)
        self._next_draw, self._draws_at_end = 0.0, False
        self._update(self.draw(bar=False))
