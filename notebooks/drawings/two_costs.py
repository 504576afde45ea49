"""Time to an accuracy: the time of a step times the number of steps, over the batch."""

from math import log

from pen import DEVICES, PALE, QUIET, Drawing

WIDE, HIGH, TOP = 188, 150, 62
ONE, EIGHT = DEVICES[0], DEVICES[3]


def draw():
    drawing = Drawing(292, "The time of a step, times the number of steps, is the time to accuracy")
    lefts = (34, 284, 534)
    titles = ("time of a step", "number of steps", "time to accuracy")
    for left, title in zip(lefts, titles, strict=True):
        drawing.text(left + WIDE / 2, 26, title, bold=True)
        drawing.box(left, TOP, WIDE, HIGH, fill=PALE)
        drawing.text(left + WIDE / 2, TOP + HIGH + 18, "batch (both axes logarithmic)")
    drawing.text(253, TOP + HIGH / 2, "×", size=26)
    drawing.text(503, TOP + HIGH / 2, "=", size=26)
    batches = [2**i for i in range(9)]
    one, eight = [1 + 0.5 * b for b in batches], [2 + 0.5 * b / 8 for b in batches]
    steps = [200 / b + 5 for b in batches]
    curve(drawing, lefts[0], one, ONE, 150)
    curve(drawing, lefts[0], eight, EIGHT, 150, dashed=True)
    curve(drawing, lefts[1], steps, QUIET, 250)
    for seconds, ink in ((one, ONE), (eight, EIGHT)):
        products = [a * b for a, b in zip(seconds, steps, strict=True)]
        curve(drawing, lefts[2], products, ink, 1200, best=True, dashed=ink is EIGHT)
    for x, words, ink in ((190, "1 device", ONE), (320, "8 devices", EIGHT)):
        drawing.line(x, 270, x + 28, 270, ink=ink, dashed=ink is EIGHT)
        drawing.text(x + 36, 270, words, anchor="start")
    drawing.box(466, 263, 14, 14, fill="none")
    drawing.text(490, 270, "the best batch", anchor="start")
    return drawing


def curve(drawing, left, values, ink, most, best=False, dashed=False):
    """Draw values over batches that double, on a log axis from 1 to `most`."""

    def place(i):
        x = left + 14 + i * (WIDE - 28) / (len(values) - 1)
        return x, TOP + HIGH - 12 - (HIGH - 24) * log(values[i]) / log(most)

    for i in range(len(values) - 1):
        drawing.line(*place(i), *place(i + 1), ink=ink, dashed=dashed)
    if best:
        x, y = place(min(range(len(values)), key=values.__getitem__))
        drawing.box(x - 7, y - 7, 14, 14, fill="none")
