"""The front end launches operators into a queue, the back end runs them in order."""

from pen import DEVICES, GROUND, INK, ON_DEVICES, PALE, Drawing


def draw():
    drawing = Drawing(292, "Front end and back end of a PyTorch program, and the queue between")
    drawing.text(108, 24, "front end: Python", bold=True)
    drawing.text(378, 24, "queue of the device", bold=True)
    drawing.text(640, 24, "back end: the device", bold=True)
    for i, line in enumerate(("y = x @ x", "z = y + 1", "s = z.sum()", "s.item() waits")):
        fill = DEVICES[2] if i < 3 else DEVICES[1]
        drawing.box(16, 44 + i * 40, 184, 34, line, fill=fill, ink=INK)
    drawing.arrow(200, 101, 290, 101, "launch")
    for x, words in ((294, "sum"), (384, "+ 1")):
        drawing.box(x, 76, 84, 50, words, fill=PALE)
    drawing.text(378, 152, "in the order of the launches")
    drawing.arrow(470, 101, 536, 101)
    drawing.box(540, 44, 204, 114, device=0)
    drawing.text(642, 70, "runs one kernel", ink=ON_DEVICES[0])
    drawing.box(562, 92, 160, 48, "x @ x", fill=GROUND)
    drawing.text(552, 190, "memory", anchor="start")
    for x, words in ((614, "y"), (660, "z"), (706, "s")):
        drawing.box(x, 172, 38, 36, f"*{words}*", fill=DEVICES[2] if words == "y" else "none")
    drawing.line(642, 158, 633, 172, ink=INK)
    drawing.line(725, 208, 725, 236, ink=INK)
    drawing.line(725, 236, 108, 236, ink=INK, dashed=True)
    drawing.arrow(108, 236, 108, 200)
    drawing.text(416, 222, "the value of *s*, which Python waits for")
    words = "The first three lines have returned. Their results have a shape, but no values yet."
    drawing.text(380, 268, words)
    return drawing
