"""A pair of layers with what lies around it: tokens are gathered in front of it, split behind."""

from pen import INK, Drawing

ROWS, HEIGHT, PART = (54, 130), 56, 28


def draw():
    drawing = Drawing(270, "A pair of layers on two devices, between tokens that are split")
    for x, words in ((16, "*X*"), (84, "norm"), (688, "*Y*")):
        for device, y in enumerate(ROWS):
            part = "" if words == "norm" else "₀₁"[device]
            drawing.box(x, y + PART * device, 56, PART, words + part, device=device)
    for x, words in ((286, "*U*"), (370, "GELU"), (454, "*V*")):
        for device, y in enumerate(ROWS):
            part = "" if words == "GELU" else "₀₁"[device]
            drawing.box(x, y, 60, HEIGHT, words + part, device=device)
    for x, words in ((168, "all-\ngather"), (546, "reduce-\nscatter")):
        drawing.box(x, ROWS[0] - 6, 88, ROWS[1] + HEIGHT - ROWS[0] + 12, words)
    for x, end in ((72, 84), (140, 168), (634, 688)):
        for device, y in enumerate(ROWS):
            middle = y + PART * device + PART / 2
            drawing.arrow(x, middle, end, middle)
    for x, end in ((256, 286), (346, 370), (430, 454), (514, 546)):
        for y in ROWS:
            drawing.arrow(x, y + HEIGHT / 2, end, y + HEIGHT / 2)
    drawing.text(78, 26, "own tokens", bold=True)
    drawing.text(400, 26, "all tokens, own part of the pair", bold=True)
    drawing.text(690, 26, "own tokens", bold=True)
    for y, words in ((214, "forward →"), (244, "← backward")):
        drawing.text(400, y, words, bold=True)
    for x, forward, backward in (
        (212, "gathers the tokens", "sums and splits the gradients"),
        (590, "sums and splits the terms", "gathers the gradients"),
    ):
        drawing.text(x, 214, forward, ink=INK)
        drawing.text(x, 244, backward, ink=INK)
    return drawing
