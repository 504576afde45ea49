"""The three ways to split a network over two devices."""

from pen import Drawing

LAYERS, WIDE, HIGH = 4, 34, 120


def draw():
    drawing = Drawing(272, "A network split by layers, inside its layers, and by data")
    titles = ("by layers", "inside the layers", "by data")
    for way, title in enumerate(titles):
        left = 26 + way * 250
        drawing.text(left + 104, 24, title, bold=True)
        for layer in range(LAYERS):
            x = left + 20 + layer * 44
            if way == 0:
                drawing.box(x, 62, WIDE, HIGH, device=layer // 2)
            else:
                gap = 0 if way == 1 else 18
                for half in range(2):
                    high = (HIGH - gap) / 2
                    drawing.box(x, 62 + half * (high + gap), WIDE, high, device=half)
            if layer < LAYERS - 1:
                for y in (92, 152) if way == 2 else (122,):
                    if way == 1:
                        drawing.arrow(x + WIDE + 5, 132, x + WIDE + 5, 104)
                        drawing.arrow(x + WIDE + 5, 112, x + WIDE + 5, 140)
                    elif way == 2 or layer == 1:
                        drawing.arrow(x + WIDE, y, x + WIDE + 10, y)
    for layer in range(LAYERS):
        x = 546 + layer * 44 + WIDE / 2
        drawing.arrow(x, 125, x, 112)
        drawing.arrow(x, 119, x, 132)
    drawing.text(130, 212, "activations cross the cut", size=15)
    drawing.text(380, 212, "every layer exchanges", size=15)
    drawing.text(630, 212, "gradients are summed", size=15)
    drawing.box(150, 238, 22, 18, device=0)
    drawing.text(180, 247, "on device 0", anchor="start")
    drawing.box(300, 238, 22, 18, device=1)
    drawing.text(330, 247, "on device 1", anchor="start")
    drawing.text(450, 247, "each bar is a layer", anchor="start")
    return drawing
