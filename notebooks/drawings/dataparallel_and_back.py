"""A step of DataParallel: the four moves forward, and what each becomes in the backward pass."""

from dataparallel_forward import COLUMNS, HEIGHT, ROWS, draw_forward, draw_legend, draw_titles
from pen import QUIET, Drawing

DOWN = 196  # from the forward to the backward pass


def draw():
    drawing = Drawing(416, "A step of DataParallel on two devices: forward, and back")
    draw_forward(drawing)
    drawing.line(14, 190, 746, 190, dashed=True, ink=QUIET)
    draw_titles(drawing, ["add up", "apply, backward", "scatter"], DOWN + 26)
    (x0, w0), (x1, w1), (x2, w2), (x3, w3), (x4, w4) = COLUMNS
    rows = [y + DOWN for y in ROWS]
    middle = sum(rows) / 2
    drawing.box(x4, middle, w4, HEIGHT, "loss", device=0)
    drawing.arrow(x4, middle + HEIGHT / 2, x3 + w3, middle + HEIGHT / 2)
    drawing.box(x3, middle, w3, HEIGHT, "∂*ŷ*", device=0)
    for device, y in enumerate(rows):
        part, start = "₀₁"[device], middle + HEIGHT / 2 + (-8, 8)[device]
        drawing.arrow(x3, start, x2 + w2, y + HEIGHT / 2)
        drawing.box(x2, y, w2, HEIGHT, f"∂*ŷ*{part}", device=device)
        drawing.arrow(x2, y + HEIGHT / 2, x1 + w1, y + HEIGHT / 2)
        drawing.box(x1, y, w1, HEIGHT, f"gradient *g*{part}", device=device)
        drawing.arrow(x1, y + HEIGHT / 2, x0 + w0, start)
    drawing.box(x0, middle, w0, HEIGHT, "*g*₀ + *g*₁", device=0)
    draw_legend(drawing, 396)
    return drawing
