"""A frozen layer, and beside it the two thin matrices of LoRA that are trained."""

from pen import DEVICES, INK, ON_DEVICES, QUIET, Drawing

SIDE, RANK = 132, 26


def draw():
    drawing = Drawing(330, "A frozen matrix W, and beside it two thin matrices A and B")
    drawing.box(24, 128, 70, 64, "input\n*X*")
    drawing.box(240, 22, SIDE, SIDE, "*W*\nfrozen", fill=DEVICES[2], ink=INK)
    drawing.text(384, 52, "*d* outputs by\n*d* inputs", anchor="start", ink=QUIET)
    drawing.box(170, 236, SIDE, RANK, "*A*", fill=DEVICES[0], ink=ON_DEVICES[0])
    drawing.text(236, 284, "*r* by *d*", ink=QUIET)
    drawing.box(404, 184, RANK, SIDE, "*B*", fill=DEVICES[0], ink=ON_DEVICES[0])
    drawing.text(442, 286, "*d* by *r*,\nzero at the start", anchor="start", ink=QUIET)
    drawing.arrow(94, 148, 236, 92)
    drawing.arrow(94, 174, 166, 244)
    drawing.arrow(302, 249, 400, 249, "*r* numbers")
    drawing.box(560, 138, 44, 44, "+")
    drawing.arrow(372, 98, 556, 152)
    drawing.arrow(430, 238, 558, 174)
    drawing.text(504, 226, "times *α* / *r*", anchor="start")
    drawing.arrow(604, 160, 660, 160)
    drawing.text(696, 160, "output")
    return drawing
