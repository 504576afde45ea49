"""Charts of schedules: who did what when, as marks in rows."""

from d2lpar.plotting.figures import PHASES, WIDE, new_figure, style
from vgpu.recording import lanes

_PAPER = {"facecolor": "w", "edgecolor": "none", "alpha": 0.8, "pad": 0.8}  # under a text


def plot_schedule(rows, title=None, unit=None):
    """Draw who did what when: a row for each name, a bar for each mark.

    The first word of a mark's name chooses the colour; the rest, a number say, is written into the
    bar where there is room, and so are names of one word.

    Args:
        rows: a dict from the label of a row to its marks, with `name`, `start` and `end` in
            seconds. The time axis begins with the first of all.
        title: the text above the chart.
        unit: what the marks count in place of seconds, "forward passes" for example.

    Returns:
        A figure.

    Raises:
        ValueError: there is nothing to draw.
    """
    from matplotlib.patches import Patch

    marks = [mark for row in rows.values() for mark in row]
    if not marks:
        raise ValueError(f"no marks to draw in {len(rows)} rows")
    start, end = min(mark.start for mark in marks), max(mark.end for mark in marks)
    scale = 1.0 if unit or end - start >= 5 else 1e3
    unit = unit or ("s" if scale == 1 else "ms")
    words = list(dict.fromkeys(mark.name.split()[0] for mark in marks))
    looks = {word: PHASES[i % len(PHASES)] for i, word in enumerate(words)}
    figure, [[axes]] = new_figure(figsize=(WIDE, 1.2 + 0.3 * len(rows)))
    texts = []
    with style():
        axes.set(xlabel=f"time ({unit})", title=title, ylim=(len(rows), 0))
        axes.set_xlim(0, (end - start) * scale)
        axes.set_yticks([i + 0.5 for i in range(len(rows))], list(rows))
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.grid(True, axis="x")
        for i, row in enumerate(rows.values()):
            for lane, mark in lanes(row):
                height = 0.84 / (1 + max(lane for lane, _ in lanes(row)))
                left, right = (scale * (moment - start) for moment in (mark.start, mark.end))
                word, _, rest = mark.name.partition(" ")
                colour, hatch = looks[word]
                middle = i + 0.08 + (lane + 0.5) * height
                bar = axes.barh(middle, right - left, 0.95 * height, left, color=colour)[0]
                bar.set(hatch=hatch, edgecolor="#606060", linewidth=0.5, zorder=3)
                text = axes.text((left + right) / 2, middle, rest or word, fontsize=8, zorder=4)
                text.set(ha="center", va="center", bbox=_PAPER)
                texts.append((bar, text))
        handles = [
            Patch(label=word, facecolor=looks[word][0], hatch=looks[word][1], edgecolor="#606060")
            for word in words
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(5, len(handles)))
    figure.draw_without_rendering()
    for bar, text in texts:
        if text.get_window_extent().width > bar.get_window_extent().width:
            text.remove()
    return figure
