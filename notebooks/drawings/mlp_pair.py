"""A pair of layers on two devices, cut by outputs and then by inputs, between f and g."""

from pen import INK, Drawing

ROWS, HEIGHT = (54, 130), 56


def draw():
    drawing = Drawing(280, "A pair of linear layers on two devices, between f and g")
    draw_ends(drawing)
    for x, width, words in ((176, 74, "*U*"), (284, 74, "ReLU"), (392, 74, "*V*")):
        for device, y in enumerate(ROWS):
            part = "" if words == "ReLU" else "₀₁"[device]
            drawing.box(x, y, width, HEIGHT, words + part, device=device)
    for x, end in ((144, 176), (250, 284), (358, 392), (466, 584)):
        for y in ROWS:
            drawing.arrow(x, y + HEIGHT / 2, end, y + HEIGHT / 2)
    for device, y in enumerate(ROWS):
        drawing.text(522, y + HEIGHT / 2 - 13, f"term {device}")
    drawing.text(213, 28, "by outputs", bold=True)
    drawing.text(429, 28, "by inputs", bold=True)
    return drawing


def draw_ends(drawing):
    """Draw what is on both sides of a pair: X and f, g and Y, and what f and g do."""
    top, bottom = ROWS[0], ROWS[1] + HEIGHT
    for device, y in enumerate(ROWS):
        drawing.box(22, y, 50, HEIGHT, "*X*", device=device)
        drawing.arrow(72, y + HEIGHT / 2, 104, y + HEIGHT / 2)
        drawing.arrow(624, y + HEIGHT / 2, 668, y + HEIGHT / 2)
        drawing.box(668, y, 50, HEIGHT, "*Y*", device=device)
    for x, name in ((104, "*f*"), (584, "*g*")):
        drawing.box(x, top - 6, 40, bottom - top + 12, name, size=20)
    for y, words in ((224, "forward →"), (254, "← backward")):
        drawing.text(364, y, words, bold=True)
    for x, forward, backward in (
        (124, "passes *X* on", "sums the gradients"),
        (604, "sums the terms", "passes the gradient on"),
    ):
        drawing.text(x, 224, forward, ink=INK, bold="sums" in forward)
        drawing.text(x, 254, backward, ink=INK, bold="sums" in backward)
