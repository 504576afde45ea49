"""A network of eight layers, cut into four stages of two layers each."""

from pen import DEVICES, INK, ON_DEVICES, Drawing

STAGES, LAYERS, WIDE, HIGH, GAP, LEFT, TOP = 4, 2, 50, 78, 4, 62, 62


def draw():
    drawing = Drawing(216, "A network of eight layers, cut into four stages")
    pitch = 162
    drawing.text(26, TOP + HIGH / 2, "*X*")
    drawing.arrow(38, TOP + HIGH / 2, LEFT - 4, TOP + HIGH / 2)
    for stage in range(STAGES):
        x = LEFT + stage * pitch
        right = x + LAYERS * WIDE + GAP
        drawing.text((x + right) / 2, 24, f"stage {stage}", bold=True)
        drawing.text((x + right) / 2, 45, f"on device {stage}")
        for layer in range(LAYERS):
            number = stage * LAYERS + layer
            drawing.box(
                x + layer * (WIDE + GAP), TOP, WIDE, HIGH, f"layer\n{number}",
                fill=DEVICES[stage], ink=ON_DEVICES[stage],
            )  # fmt: skip
        if stage < STAGES - 1:
            drawing.arrow(right + 3, TOP + 22, x + pitch - 3, TOP + 22)
            drawing.arrow(x + pitch - 3, TOP + 56, right + 3, TOP + 56, dashed=True)
    drawing.arrow(right + 3, TOP + 22, right + 28, TOP + 22)
    drawing.arrow(right + 28, TOP + 56, right + 3, TOP + 56, dashed=True)
    drawing.text(right + 32, TOP + HIGH / 2, "loss", anchor="start")
    for y, words, dashed in (
        (164, "forward: activations cross the cuts", False),
        (192, "backward: gradients of the activations cross them", True),
    ):
        ends = (170, 216) if not dashed else (216, 170)
        drawing.arrow(ends[0], y, ends[1], y, dashed=dashed, ink=INK)
        drawing.text(230, y, words, anchor="start")
    return drawing
