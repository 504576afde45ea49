"""GPipe and 1F1B with four stages and six micro-batches, on one time axis."""

from pen import INK, QUIET, Drawing

K, M, UNIT, ROW, LEFT = 4, 6, 24, 26, 76
SECONDS = {"forward": 1, "backward": 2}  # units of time
FILL = {"forward": "#cfe0f1", "backward": "#edae49"}  # as in the figures of schedules


def draw():
    drawing = Drawing(392, "GPipe and 1F1B with four stages and six micro-batches on one time axis")
    end = 0
    for top, title, order in ((46, "GPipe", gpipe), (200, "1F1B", one_forward_one_backward)):
        drawing.text(LEFT - 8, top - 18, title, anchor="end", bold=True)
        for s, tasks in enumerate(start_times([order(s) for s in range(K)])):
            y = top + s * ROW
            drawing.text(LEFT - 8, y + ROW / 2, f"stage {s}", anchor="end")
            for (kind, i), start in tasks:
                width = SECONDS[kind] * UNIT
                drawing.box(LEFT + start * UNIT, y, width, ROW - 2, str(i), fill=FILL[kind])
                end = max(end, start + SECONDS[kind])
    for start in (0, end):
        drawing.line(LEFT + start * UNIT, 22, LEFT + start * UNIT, 314, dashed=True)
    drawing.arrow(LEFT, 322, LEFT + end * UNIT + 8, 322, ink=QUIET)
    drawing.text(LEFT + end * UNIT / 2, 338, "time", ink=INK)
    for x, kind in ((96, "forward"), (286, "backward")):
        width = SECONDS[kind] * UNIT
        drawing.box(x, 354, width, ROW - 2, "*i*", fill=FILL[kind])
        drawing.text(x + width + 8, 366, f"{kind} pass", anchor="start")
    drawing.text(500, 366, "*i*: number of the micro-batch", anchor="start")
    return drawing


def gpipe(s):
    """Return what a stage computes, in order: pairs of a kind and a micro-batch."""
    return [(kind, i) for kind in SECONDS for i in range(M)]


def one_forward_one_backward(s):
    """Return what a stage computes, in order: pairs of a kind and a micro-batch."""
    ahead = min(K - s - 1, M)
    tasks = [("forward", i) for i in range(ahead)]
    for i in range(M):
        tasks += [("forward", i + ahead)] if i + ahead < M else []
        tasks.append(("backward", i))
    return tasks


def start_times(schedule):
    """Return the tasks of each stage with the time at which each starts."""
    ends = {("forward", -1, i): 0 for i in range(M)}
    todo, rows = [list(tasks) for tasks in schedule], [[] for _ in schedule]
    while any(todo):
        for s, tasks in enumerate(todo):
            while tasks:
                kind, i = tasks[0]
                before = ("forward", s - 1, i) if kind == "forward" else ("backward", s + 1, i)
                if kind == "backward" and s == K - 1:
                    before = "forward", s, i
                if before not in ends:
                    break
                (last, number), start = rows[s][-1] if rows[s] else (("forward", -1), 0)
                free = start + SECONDS[last] if rows[s] else 0
                rows[s].append((tasks.pop(0), max(free, ends[before])))
                ends[kind, s, i] = rows[s][-1][1] + SECONDS[kind]
    return rows
