"""Figure of chapter 11: when workers push."""

from d2lpar.plotting.figures import MEASURED, PREDICTED, WIDE, new_figure, style


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
