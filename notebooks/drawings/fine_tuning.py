"""Pretraining, copying the body, and a new head with a larger learning rate."""

from pen import DEVICES, ON_DEVICES, QUIET, Drawing

PARTS = [(150, "stem"), (252, "stage 1"), (354, "stage 2"), (456, "stage 3")]
WIDTH, HEIGHT = 92, 56


def draw():
    drawing = Drawing(330, "The body of a trained network is copied; its head is replaced")
    for y, images, head, color in (
        (44, "many images\n8 classes", "head:\n8 classes", None),
        (192, "few images\n2 classes", "new head:\n2 classes", 1),
    ):
        drawing.text(68, y + HEIGHT / 2, images)
        drawing.arrow(118, y + HEIGHT / 2, 150, y + HEIGHT / 2)
        for x, words in PARTS:
            drawing.box(x, y, WIDTH, HEIGHT, words, fill=DEVICES[0], ink=ON_DEVICES[0])
        drawing.arrow(548, y + HEIGHT / 2, 584, y + HEIGHT / 2)
        drawing.box(584, y, 110, HEIGHT, head, device=color)
    for x, _ in PARTS:
        drawing.arrow(x + WIDTH / 2, 104, x + WIDTH / 2, 186)
    drawing.text(349, 22, "the body", bold=True)
    drawing.text(639, 22, "the head", bold=True)
    drawing.text(68, 146, "copy the\nparameters")
    drawing.text(639, 122, "not copied", ink=QUIET)
    drawing.text(639, 172, "random at the start", ink=QUIET)
    for left, right, words in ((150, 548, "small learning rate"), (584, 694, "large one")):
        drawing.line(left, 262, right, 262)
        drawing.text((left + right) / 2, 282, words)
    drawing.text(380, 312, "Above: the source task. Below: the target task.")
    return drawing
