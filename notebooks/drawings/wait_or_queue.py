"""Three operators on a time axis: Python waits after each, or once at the end."""

from pen import INK, Drawing

LAUNCH, COMPUTE, SYNC, LEFT, ROW = 40, 96, 30, 112, 34  # pixels


def draw():
    drawing = Drawing(300, "Three operators: waiting after each, and waiting once at the end")
    host, end = [], 0
    for i in range(3):
        start = i * (LAUNCH + COMPUTE + SYNC)
        end = start + LAUNCH + COMPUTE + SYNC
        host.append((start, start + LAUNCH, start + LAUNCH + COMPUTE))
    rows(drawing, 12, "wait after each operator", host, end)
    ends = [LAUNCH + (i + 1) * COMPUTE for i in range(3)]
    host = [(i * LAUNCH, end - COMPUTE, end) for i, end in enumerate(ends)]
    rows(drawing, 132, "wait once, at the end", host, ends[-1] + SYNC, syncs=1)
    for x, colour, words in ((150, 2, "launch"), (300, 0, "compute"), (460, 1, "tell the host")):
        drawing.box(x, 262, 22, 22, device=colour)
        drawing.text(x + 30, 273, words, anchor="start")
    return drawing


def rows(drawing, y, title, operators, end, syncs=3):
    """Draw a front end and a back end; of each operator when it is launched, run and has run."""
    drawing.text(LEFT, y + 10, title, anchor="start", bold=True)
    for i, name in enumerate(("front end", "back end")):
        drawing.text(LEFT - 10, y + 26 + i * (ROW + 4) + ROW / 2, name, anchor="end")
    top, below = y + 26, y + 26 + ROW + 4
    for number, (launch, start, done) in enumerate(operators, 1):
        drawing.box(LEFT + launch, top, LAUNCH, ROW, number, device=2)
        drawing.box(LEFT + start, below, COMPUTE, ROW, number, device=0)
        if number > len(operators) - syncs:
            drawing.box(LEFT + done, top, SYNC, ROW, number, device=1)
    drawing.line(LEFT + end, top - 6, LEFT + end, below + ROW + 6, ink=INK, dashed=True)
    drawing.text(LEFT + end + 8, below + ROW / 2, "done", anchor="start", ink=INK)
