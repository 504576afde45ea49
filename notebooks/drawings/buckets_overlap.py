"""A backward pass and the sums of its gradients: all at the end, and bucket by bucket."""

from pen import DEVICES, INK, QUIET, Drawing

LEFT = 110
WIDTHS = {4: 76, 3: 64, 2: 54, 1: 76, 0: 104}  # pixels of the backward pass of each layer
SUMS = [160, 100]  # and of the sum of each bucket
FULL = [WIDTHS[4] + WIDTHS[3], sum(WIDTHS.values())]  # when a bucket is full


def draw():
    drawing = Drawing(312, "Sums after the backward pass, and beside it")
    at_end, beside = FULL[1] + sum(SUMS), FULL[1] + SUMS[1]
    drawing.text(LEFT, 22, "One sum after the backward pass", anchor="start", bold=True)
    backward(drawing, 38)
    for y in (82, 230):
        drawing.text(LEFT - 10, y + 18, "link", anchor="end")
    link(drawing, 82, FULL[1], sum(SUMS), "all gradients")
    drawing.text(LEFT, 154, "A sum for each bucket, once it is full", anchor="start", bold=True)
    backward(drawing, 170)
    link(drawing, 230, FULL[0], SUMS[0], "bucket 0: layers 4, 3")
    link(drawing, 230, FULL[1], SUMS[1], "bucket 1")
    for full in FULL:
        drawing.arrow(LEFT + full, 206, LEFT + full, 230)
        drawing.text(LEFT + full - 7, 218, "full", anchor="end", ink=QUIET)
    drawing.line(LEFT + at_end, 82, LEFT + at_end, 266, dashed=True)
    drawing.arrow(LEFT + at_end, 248, LEFT + beside, 248, "saved")
    words = "Only what a sum takes after the end of the backward pass makes the step longer."
    drawing.text(380, 290, words)
    return drawing


def backward(drawing, y):
    drawing.text(LEFT - 10, y + 18, "backward", anchor="end")
    x = LEFT
    for layer, width in WIDTHS.items():
        drawing.box(x, y, width, 36, f"layer {layer}" if width > 60 else layer, device=0)
        x += width


def link(drawing, y, start, width, words):
    drawing.box(LEFT + start, y, width, 36, words, fill=DEVICES[1], ink=INK)
