"""Eager: a launch and a kernel for each operator. Compiled: one launch of one fused kernel."""

from pen import DEVICES, QUIET, Drawing

OPERATORS = ["1 · x", "+ 6", "· x", "+ 15", "· x"]
LEFT, STEP, WIDE = 130, 118, 88


def draw():
    drawing = Drawing(500, "Eager execution beside a compiled program")
    drawing.text(20, 24, "Eager: one operator at a time", anchor="start", bold=True)
    rows(drawing, 44)
    for i, words in enumerate(OPERATORS):
        x = LEFT + i * STEP
        drawing.box(x, 44, WIDE, 36, words)
        drawing.arrow(x + WIDE / 2, 80, x + WIDE / 2, 104)
        drawing.box(x, 104, WIDE, 40, "kernel", device=0)
        drawing.arrow(x + 20, 186, x + 20, 145)
        if words == "· x":  # it reads two tensors, and all others one
            drawing.arrow(x + 36, 186, x + 36, 145)
        drawing.arrow(x + WIDE - 20, 144, x + WIDE - 20, 185)
    for y in (62, 124):
        drawing.text(LEFT + len(OPERATORS) * STEP - 6, y, "…", bold=True)
    words = "Every result goes to memory, and the next kernel reads it back."
    drawing.text(LEFT + 294, 236, words, ink=QUIET)
    drawing.line(20, 258, 740, 258)
    drawing.text(20, 280, "Compiled: the whole graph at once", anchor="start", bold=True)
    rows(drawing, 300)
    drawing.box(LEFT, 300, 206, 36, "trace and compile, once", fill="none")
    drawing.arrow(LEFT + 206, 318, LEFT + 236, 318)
    drawing.box(LEFT + 236, 300, 112, 36, "graph", fill="none")
    drawing.arrow(LEFT + 348, 318, LEFT + 378, 318)
    drawing.box(LEFT + 378, 300, 182, 36, "one launch in a call")
    drawing.arrow(LEFT + 469, 336, LEFT + 469, 360)
    words = "one fused kernel:   ((1 · x + 6) · x + 15) · x + …   in registers"
    drawing.box(LEFT, 360, 560, 40, words, device=0)
    drawing.arrow(LEFT + 20, 442, LEFT + 20, 401)
    drawing.arrow(LEFT + 540, 400, LEFT + 540, 441)
    drawing.text(LEFT + 32, 421, "reads x", anchor="start", ink=QUIET)
    drawing.text(LEFT + 528, 421, "writes the result", anchor="end", ink=QUIET)
    return drawing


def rows(drawing, y):
    """Name the rows of one half, and draw its memory."""
    for words, below in (("Python", 18), ("device", 80), ("memory", 160)):
        drawing.text(20, y + below, words, anchor="start")
    drawing.box(LEFT, y + 142, 600, 36, fill=DEVICES[2])
