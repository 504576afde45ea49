"""Eager: a launch and a kernel for each operator. Compiled: one launch of one fused kernel."""

from pen import DEVICES, QUIET, Drawing

OPERATORS = ["e = a + b", "f = c + d", "g = e + f"]
LEFT, STEP, WIDE = 130, 206, 188


def draw():
    drawing = Drawing(500, "Eager execution beside a compiled program")
    drawing.text(20, 24, "Eager: one operator at a time", anchor="start", bold=True)
    rows(drawing, 44)
    for i, words in enumerate(OPERATORS):
        x = LEFT + i * STEP
        drawing.box(x, 44, WIDE, 36, words)
        drawing.arrow(x + WIDE / 2, 80, x + WIDE / 2, 104)
        drawing.box(x, 104, WIDE, 40, "kernel", device=0)
        result, first, second = words[0], words[4], words[-1]
        for place, name in ((30, first), (60, second)):  # what it reads
            drawing.arrow(x + place, 186, x + place, 145)
            drawing.text(x + place + 12, 166, f"*{name}*", ink=QUIET)
        drawing.arrow(x + WIDE - 30, 144, x + WIDE - 30, 185)
        drawing.text(x + WIDE - 42, 166, f"*{result}*", ink=QUIET)
    words = "Every result goes to memory, and the next kernel reads *e* and *f* back."
    drawing.text(LEFT + 300, 240, words, ink=QUIET)
    drawing.line(20, 258, 740, 258)
    drawing.text(20, 280, "Compiled: the whole graph at once", anchor="start", bold=True)
    rows(drawing, 300)
    drawing.box(LEFT, 300, 206, 36, "trace and compile, once", fill="none")
    drawing.arrow(LEFT + 206, 318, LEFT + 236, 318)
    drawing.box(LEFT + 236, 300, 112, 36, "graph", fill="none")
    drawing.arrow(LEFT + 348, 318, LEFT + 378, 318)
    drawing.box(LEFT + 378, 300, 182, 36, "one launch in a call")
    drawing.arrow(LEFT + 469, 336, LEFT + 469, 360)
    words = "one fused kernel:   (a + b) + (c + d)   with e and f in registers"
    drawing.box(LEFT, 360, 600, 40, words, device=0)
    for i, name in enumerate("abcd"):
        drawing.arrow(LEFT + 30 + 30 * i, 442, LEFT + 30 + 30 * i, 401)
        drawing.text(LEFT + 42 + 30 * i, 422, f"*{name}*", ink=QUIET)
    drawing.arrow(LEFT + 570, 400, LEFT + 570, 441)
    drawing.text(LEFT + 558, 422, "*g*", ink=QUIET)
    return drawing


def rows(drawing, y):
    """Name the rows of one half, and draw its memory."""
    for words, below in (("Python", 18), ("device", 80), ("memory", 160)):
        drawing.text(20, y + below, words, anchor="start")
    drawing.box(LEFT, y + 142, 600, 36, fill=DEVICES[2])
