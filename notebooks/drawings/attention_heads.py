"""Attention on two devices: whole heads on each, between f and g."""

from mlp_pair import HEIGHT, ROWS, draw_ends
from pen import Drawing


def draw():
    drawing = Drawing(280, "Four attention heads on two devices, between f and g")
    draw_ends(drawing)
    for device, y in enumerate(ROWS):
        drawing.box(176, y, 96, HEIGHT, "*Q*, *K*, *V*\nof 2 heads", device=device)
        for place in range(2):
            head = 2 * device + place
            drawing.box(306, y + place * 29, 78, 27, f"head {head}", device=device)
        drawing.box(418, y, 66, HEIGHT, f"mix{'₀₁'[device]}", device=device)
        drawing.text(534, y + HEIGHT / 2 - 13, f"term {device}")
        for x, end in ((144, 176), (272, 306), (384, 418), (484, 584)):
            drawing.arrow(x, y + HEIGHT / 2, end, y + HEIGHT / 2)
    drawing.text(224, 28, "by outputs", bold=True)
    drawing.text(345, 28, "alone", bold=True)
    drawing.text(451, 28, "by inputs", bold=True)
    return drawing
