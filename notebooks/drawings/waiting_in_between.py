"""The same two kernels: Python launches both and then waits, or waits in between."""

from pen import INK, PALE, QUIET, Drawing

LEFT, LONG, LAUNCH = 112, 250, 12  # pixels: where time begins; a kernel; a launch
HIGH = 28  # of a row


def draw():
    drawing = Drawing(350, "Waiting in between turns the maximum of two times into their sum")
    panel(drawing, 12, "Python launches both, then waits: the maximum", False)
    panel(drawing, 172, "Python waits in between: the sum", True)
    words = "Small boxes in the row of Python are launches, in the colour of their device."
    drawing.text(20, 334, words, anchor="start", ink=QUIET)
    drawing.arrow(640, 334, 740, 334, "time", ink=QUIET)
    return drawing


def panel(drawing, top, title, in_between):
    """Draw a title and three rows: what Python and the two devices do."""
    rows = [top + 26 + i * 40 for i in range(3)]
    drawing.text(LEFT, top + 8, title, anchor="start", bold=True)
    for y, name in zip(rows, ("Python", "devices[0]", "devices[1]"), strict=True):
        drawing.text(LEFT - 10, y + HIGH / 2, name, anchor="end")
    starts = [LEFT + LAUNCH, LEFT + LAUNCH * 2 + (LONG if in_between else 0)]
    ends = [start + LONG for start in starts]
    for device, start in enumerate(starts):
        drawing.box(start - LAUNCH, rows[0], LAUNCH, HIGH, device=device)  # a launch
        drawing.line(start, rows[0] + HIGH, start, rows[1 + device], ink=INK)
    for device, start in enumerate(starts):
        drawing.box(start, rows[1 + device], LONG, HIGH, "works", device=device)
    if in_between:
        waits = [(starts[0], starts[1] - LAUNCH), (starts[1], ends[1])]
        idle = [(starts[0], rows[2], LONG), (starts[1], rows[1], LONG)]
        for x, y, width in idle:
            drawing.box(x, y, width - 4, HIGH, "has nothing to do", fill="none", ink=QUIET)
    else:
        waits = [(starts[1], ends[1])]
    for start, end in waits:
        drawing.box(start, rows[0], end - start, HIGH, "waits", fill=PALE)
    drawing.line(ends[1], rows[0] - 8, ends[1], rows[2] + HIGH + 8, dashed=True)
    drawing.text(ends[1] + 8, rows[2] + HIGH / 2, "done", anchor="start")
