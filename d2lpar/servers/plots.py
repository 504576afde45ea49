"""Figures of what the workers of parameter servers did."""

import functools

import torch

from d2lpar.plotting.figures import LINES, new_figure, style

_PARTS = {
    "computing": ("#12355b", ""),
    "communicating": ("#edae49", "////"),
    "waiting": ("w", ".."),
}


def _styled(plot):
    """Let a function draw in the style of the chapters."""

    @functools.wraps(plot)
    def styled(*args, **kwargs):
        with style():
            return plot(*args, **kwargs)

    return styled


@_styled
def plot_seconds(runs, ends):
    """Draw where the time of each worker went, as figure 10 of OSDI'14 does.

    Args:
        runs: a dict from a name to a list with a dict for each worker: the seconds of "computing",
            "communicating" and "waiting".
        ends: a dict from the name to the predicted seconds of each worker.

    Returns:
        A figure.
    """
    figure, [[axes]] = new_figure(figsize=(7, 3))
    ticks, labels = [], []
    for i, (name, workers) in enumerate(runs.items()):
        shift = (len(workers) - 1) / 2
        for rank, seconds in enumerate(workers):
            x, bottom = i + 0.8 * (rank - shift) / len(workers), 0.0
            for part, (colour, hatch) in _PARTS.items():
                label = part if not ticks else None
                look = {"color": colour, "hatch": hatch, "edgecolor": "#12355b", "label": label}
                axes.bar(x, seconds[part], 0.6 / len(workers), bottom, **look)
                bottom += seconds[part]
            reach = 0.36 / len(workers)
            label = None if ticks else "predicted end"
            look = {"color": "#d1495b", "linestyle": "--", "label": label}
            axes.hlines(ends[name][rank], x - reach, x + reach, **look)
            ticks.append(x)
            labels.append(f"{rank}\n{name}" if rank == len(workers) // 2 else f"{rank}")
    axes.set_xticks(ticks, labels)
    axes.set(xlabel="worker", ylabel="time (s)")
    figure.legend(loc="outside lower center", ncols=4)
    return figure


@_styled
def plot_staleness(runs, slow=0):
    """Draw how often each number of updates fell between a pull and its push.

    Args:
        runs: a dict from a name to a list with the numbers of each worker.
        slow: the rank of the worker that is drawn apart.

    Returns:
        A figure.
    """
    figure, axes = new_figure(1, len(runs), figsize=(8, 2.4))
    highest, largest = 0, max(max(numbers) for workers in runs.values() for numbers in workers)
    for ax, (name, workers) in zip(axes[0], runs.items(), strict=True):
        bottom = torch.zeros(largest + 1)
        for label, colour, hatch, ranks in (
            ("fast workers", "#12355b", "", [r for r in range(len(workers)) if r != slow]),
            ("slow worker", "#edae49", "////", [slow]),
        ):
            numbers = torch.tensor([number for rank in ranks for number in workers[rank]])
            heights = torch.bincount(numbers, minlength=largest + 1)
            look = {"color": colour, "hatch": hatch, "edgecolor": "#12355b", "label": label}
            ax.bar(range(largest + 1), heights, 0.9, bottom, **look)
            bottom += heights
        ax.set(title=name, xlabel="updates in between")
        highest = max(highest, bottom.max().item())
    for ax in axes[0]:
        ax.set_ylim(0, 1.05 * highest)
    axes[0][0].set_ylabel("pushes")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


@_styled
def plot_learning(runs):
    """Draw loss and accuracy against time and against updates.

    Args:
        runs: a dict from a name to a list of points (seconds, updates, loss, accuracy).

    Returns:
        A figure.
    """
    figure, grid = new_figure(2, 2, figsize=(8, 4.6))
    for (name, points), (colour, dashes, _) in zip(runs.items(), LINES, strict=False):
        seconds, updates, *results = zip(*points, strict=True)
        for row, values in zip(grid, results, strict=True):
            for axes, x in zip(row, (seconds, updates), strict=True):
                axes.plot(x, values, dashes, color=colour, label=name)
    for row, ylabel in zip(grid, ("test loss", "test accuracy"), strict=True):
        row[0].set(ylabel=ylabel)
        [axes.grid(True) for axes in row]
    grid[1][0].set(xlabel="time (s)")
    grid[1][1].set(xlabel="updates")
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


@_styled
def plot_pushes(moments, killed):
    """Draw a stroke for each push that was acknowledged, over time, with a row for each worker.

    Args:
        moments: a dict from a name to a list of moments, in seconds.
        killed: the moment at which a server was killed.

    Returns:
        A figure.
    """
    figure, [[axes]] = new_figure(figsize=(7, 2.4))
    start = min(times[0] for times in moments.values())
    strokes = [[t - start for t in times] for times in moments.values()]
    rows = range(len(strokes), 0, -1)
    axes.eventplot(strokes, lineoffsets=list(rows), linelengths=0.6, colors="#12355b")
    label = "server killed"
    axes.axvline(killed - start, color="#d1495b", linestyle=(0, (6, 4)), label=label)
    axes.set_yticks(rows, moments)
    axes.set(xlabel="time (s)")
    figure.legend(loc="outside lower center")
    return figure
