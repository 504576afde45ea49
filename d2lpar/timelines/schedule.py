"""Charts of schedules: who did what when, as marks in rows."""

from d2lpar.plotting.figures import PHASES, WIDE, new_figure, style
from vgpu.recording import lanes

_PAPER = {"facecolor": "w", "edgecolor": "none", "alpha": 0.8, "pad": 0.8}  # under a text
_EDGE = "#606060"


def plot_schedule(rows, title=None, unit=None):
    """Draw a schedule: a row for each name, a bar for each mark.

    Marks with the same first word have the same colour. The rest of a mark's name, such as a
    number, or a name of one word is written into the bar if it fits.

    Args:
        rows: a dict from the label of a row to its marks, with `name`, `start` and `end` in
            seconds. The time axis starts at the earliest mark.
        title: the text above the chart.
        unit: what the marks count in place of seconds, "forward passes" for example.

    Returns:
        A figure.

    Raises:
        ValueError: there is no mark.
    """
    from matplotlib.patches import Patch

    marks = [mark for row in rows.values() for mark in row]
    if not marks:
        raise ValueError(f"rows must have at least one mark: got {rows}")
    start, end = min(mark.start for mark in marks), max(mark.end for mark in marks)
    scale = 1.0 if unit or end - start >= 5 else 1e3
    unit = unit or ("s" if scale == 1 else "ms")
    words = list(dict.fromkeys(mark.name.split()[0] for mark in marks))
    looks = {word: PHASES[i % len(PHASES)] for i, word in enumerate(words)}
    figure, [[axes]] = new_figure(figsize=(WIDE, 1.2 + 0.3 * len(rows)))
    bars = []
    with style():
        axes.set(xlabel=f"time ({unit})", title=title, ylim=(len(rows), 0))
        axes.set_xlim(0, (end - start) * scale)
        axes.set_yticks([i + 0.5 for i in range(len(rows))], list(rows))
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.grid(True, axis="x")
        for i, row in enumerate(rows.values()):
            placed = lanes(row)
            height = 0.84 / (1 + max((lane for lane, _ in placed), default=0))
            for lane, mark in placed:
                place = [scale * (moment - start) for moment in (mark.start, mark.end)]
                word, _, rest = mark.name.partition(" ")
                middle = i + 0.08 + (lane + 0.5) * height
                bar = named_bar(axes, middle, 0.95 * height, place, rest or word)
                bar[0].set(facecolor=looks[word][0], hatch=looks[word][1], edgecolor=_EDGE)
                bar[0].set_clip_on(False)  # its border at the end of the axis
                bar[1].set(bbox=_PAPER)
                bars.append(bar)
        handles = [
            Patch(label=word, facecolor=colour, hatch=hatch, edgecolor=_EDGE)
            for word, (colour, hatch) in looks.items()
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(5, len(handles)))
    remove_wide_texts(figure, bars)
    return figure


def named_bar(axes, middle, height, place, name):
    """Draw a bar between two times, `place`, with a name in it; return the bar and the text."""
    start, end = place
    bar = axes.barh(middle, end - start, height, start, linewidth=0.5, zorder=3)[0]
    text = axes.text((start + end) / 2, middle, name, ha="center", va="center", fontsize=8)
    text.set(zorder=4)
    return bar, text


def remove_wide_texts(figure, bars):
    """Remove the texts that are wider than their bars; return the names of the others."""
    figure.draw_without_rendering()
    fit = set()
    for bar, text in bars:
        if text.get_window_extent().width <= bar.get_window_extent().width:
            fit.add(text.get_text())
        else:
            text.remove()
    return fit
