"""The figure of chapter 14: time and memory of layouts."""

import statistics

from d2lpar.plotting.charts import write_plain_numbers
from d2lpar.plotting.figures import MEASURED, PREDICTED, WIDE, new_figure, style


def plot_layouts(plans, measured, memory, names):
    """Return a figure of layouts: seconds per step over memory per GPU.

    A predicted layout is a circle, or a square if it has a pipeline, labelled with t. A line joins
    layouts that differ in the micro-batch only. A thin line leads to the measured time, if any.
    Layouts that exceed the memory are on a grey background.

    Args:
        plans: a list of `layouts.Planned` with seconds and bytes.
        measured: a dict from layouts to measured seconds per step.
        memory: memory of a GPU, in bytes.
        names: a dict from labels to the layouts to label.

    Raises:
        ValueError: there are no plans, or a labelled layout has no plan.
    """
    rows = {plan.layout: (plan.num_bytes / 1e9, plan.seconds) for plan in plans}
    if not rows:
        raise ValueError("plans must not be empty")
    for name, layout in names.items():
        if layout not in rows:
            raise ValueError(f"no plan for {name!r}, {layout}")
    curves = {}  # layouts that differ in the micro-batch only
    for layout in sorted(rows, key=lambda layout: layout.micro_batch):
        key = layout.recompute, layout.pipeline, layout.tensor
        curves.setdefault(key, []).append(layout)
    centred = {"ha": "center", "va": "center_baseline"}
    figure, [[axes]] = new_figure(figsize=(WIDE, 4.4))
    with style():
        for (recompute, pipeline, tensor), layouts in curves.items():
            x, y = zip(*(rows[layout] for layout in layouts), strict=True)
            look = {"color": PREDICTED, "linestyle": "-" if recompute else (0, (1, 2))}
            look |= {"marker": "o" if pipeline == 1 else "s", "markersize": 8}
            axes.plot(x, y, linewidth=0.8, markerfacecolor="white", **look)
            for at in zip(x, y, strict=True):
                axes.text(*at, tensor, fontsize=5.5, clip_on=True, **centred)
        for layout, seconds in measured.items():
            if layout in rows:
                x, y = rows[layout]
                axes.plot([x, x], [y, seconds], color=MEASURED, linewidth=0.6, zorder=1)
                axes.plot(x, seconds, "D", color=MEASURED, markersize=3.5)
        middle = statistics.median(y for _, y in rows.values())
        for name, layout in names.items():
            shift = (24, 30) if rows[layout][1] > middle else (-64, -18)  # away from the others
            look = {"arrowprops": {"arrowstyle": "->", "color": "black"}, "fontsize": 8}
            axes.annotate(name, rows[layout], shift, textcoords="offset points", **look)
        for marker, dashes, words in (
            ("o", "-", "predicted, p = 1"),
            ("s", "-", "predicted, p > 1"),
            ("", (0, (1, 2)), "not recomputed"),
        ):
            look = {"color": PREDICTED, "linestyle": dashes, "markerfacecolor": "white"}
            axes.plot([], [], marker=marker, label=words, **look)
        axes.plot([], [], "D", color=MEASURED, label="measured", linestyle="none")
        most, gigabytes = memory / 1e9, "memory of a GPU (GB)"
        axes.set(xlabel=gigabytes, ylabel="a step (s)", yscale="log", xlim=(0, 1.25 * most))
        axes.axvspan(most, 1.25 * most, color="#e4e4e4", zorder=0)
        at = {"transform": axes.get_xaxis_transform(), "va": "top", "fontsize": 8}
        axes.text(1.02 * most, 0.96, "does not fit", **at)
        write_plain_numbers(axes.yaxis)
        axes.grid(True)
        axes.margins(y=0.1)
        figure.legend(loc="outside lower center", ncols=4)
    return figure
