"""Figures of chapter 10: the workers' time and pushes."""

from d2lpar.plotting.figures import MEASURED, PREDICTED, WIDE, new_figure, style

_PARTS = {
    "computing": (MEASURED, ""),
    "communicating": ("#edae49", "////"),
    "waiting": ("w", ".."),
}


@style()
def plot_seconds(runs, ends):
    """Return a figure of the time of each worker by activity, like figure 10 of OSDI'14.

    Args:
        runs: a dict from names of runs to lists with a dict for each worker: the seconds of
            "computing", "communicating" and "waiting".
        ends: a dict from names of runs to lists with the predicted seconds of each worker.
    """
    figure, [[axes]] = new_figure(figsize=(WIDE, 2.9))
    ticks, labels = [], []
    for i, (name, workers) in enumerate(runs.items()):
        shift = (len(workers) - 1) / 2
        for rank, seconds in enumerate(workers):
            x, bottom = i + 0.8 * (rank - shift) / len(workers), 0.0
            for part, (colour, hatch) in _PARTS.items():
                label = part if not ticks else None
                look = {"color": colour, "hatch": hatch, "edgecolor": MEASURED, "label": label}
                axes.bar(x, seconds[part], 0.6 / len(workers), bottom, **look)
                bottom += seconds[part]
            reach = 0.36 / len(workers)
            label = None if ticks else "predicted end"
            look = {"color": PREDICTED, "linestyle": "--", "label": label}
            axes.hlines(ends[name][rank], x - reach, x + reach, **look)
            ticks.append(x)
            labels.append(f"{rank}\n{name}" if rank == len(workers) // 2 else f"{rank}")
    axes.set_xticks(ticks, labels)
    axes.set(xlabel="worker", ylabel="time (s)")
    figure.legend(loc="outside lower center", ncols=4)
    return figure


@style()
def plot_pushes(moments, killed):
    """Return a figure with a row for each worker and a tick for each acknowledged push.

    Args:
        moments: a dict from the name of a worker to the times of its pushes, in seconds.
        killed: the time at which a server was killed, in seconds.
    """
    figure, [[axes]] = new_figure(figsize=(WIDE, 2.3))
    start = min(times[0] for times in moments.values())
    ticks = [[t - start for t in times] for times in moments.values()]
    rows = range(len(ticks), 0, -1)
    axes.eventplot(ticks, lineoffsets=list(rows), linelengths=0.6, colors=MEASURED)
    label = "server killed"
    axes.axvline(killed - start, color=PREDICTED, linestyle=(0, (6, 4)), label=label)
    axes.set_yticks(rows, moments)
    axes.set(xlabel="time (s)")
    figure.legend(loc="outside lower center")
    return figure
