"""Who waits for whom: BSP, SSP and ASP, with one worker that is 3.4 times as slow."""

from pen import PALE, QUIET, Drawing

STEPS, UNIT, LEFT, ROW = 6, 26, 190, 26
COMPUTE = (3.4, 1, 1)  # time units of a step of each worker


def draw():
    drawing = Drawing(400, "Six steps of three workers under BSP, SSP and ASP")
    models = {"BSP (*s* = 0)": 0, "SSP (*s* = 2)": 2, "ASP": STEPS}
    for panel, (name, staleness) in enumerate(models.items()):
        top = 16 + 116 * panel
        drawing.text(16, top + 1.5 * ROW + 2, name, anchor="start", bold=True)
        for worker, steps in enumerate(schedule(staleness)):
            y = top + worker * (ROW + 4)
            drawing.text(LEFT - 10, y + ROW / 2, f"worker {worker}", anchor="end")
            end = 0
            for number, (start, stop) in enumerate(steps):
                if start > end:
                    width = (start - end) * UNIT
                    words = "wait" if width > 40 else ""
                    x = LEFT + end * UNIT
                    drawing.box(x, y, width, ROW, words, fill=PALE, ink=QUIET)
                if number < STEPS:
                    width = (stop - start) * UNIT
                    drawing.box(LEFT + start * UNIT, y, width, ROW, f"{number}", device=worker)
                end = stop
    drawing.arrow(LEFT, 364, 750, 364)
    drawing.text(LEFT, 384, "time; the number in a box is that of the step", anchor="start")
    return drawing


def schedule(staleness):
    """Return for each worker the start and the end of each step, and of one more."""
    steps = [[] for _ in COMPUTE]
    for t in range(STEPS + 1):
        slowest = 0
        if t > staleness:
            slowest = max(done[t - 1 - staleness][1] for done in steps)
        for done, compute in zip(steps, COMPUTE, strict=True):
            start = max(done[-1][1] if done else 0, slowest)
            done.append((start, start + compute))
    return steps
