"""One training step on two devices: split, forward and backward, sum, update."""

from pen import PALE, Drawing


def draw():
    drawing = Drawing(280, "One training step of two devices that share a batch")
    columns = [(20, 96), (154, 96), (288, 150), (476, 96), (640, 100)]
    titles = ["batch", "split", "forward, backward", "sum", "update"]
    for (x, width), title in zip(columns, titles, strict=True):
        drawing.text(x + width / 2, 24, title, bold=True)
    drawing.box(20, 96, 96, 96, "64\nimages")
    for device, y in enumerate((56, 176)):
        middle = y + 38
        drawing.arrow(116, 144, 154, middle)
        drawing.box(154, y + 10, 96, 56, "32\nimages", device=device)
        drawing.arrow(250, middle, 288, middle)
        drawing.box(
            288, y, 150, 76, f"replica {device}\ngradient *g*" + "₀₁"[device], device=device
        )
        drawing.arrow(438, middle, 476, 128 if device == 0 else 160)
        drawing.arrow(572, 128 if device == 0 else 160, 640, middle)
        drawing.box(640, y, 100, 76, "*W* − η *g* / 64", device=device)
    drawing.box(476, 106, 96, 76, "*g* =\n*g*₀ + *g*₁", fill=PALE)
    drawing.text(524, 204, "allreduce", size=15)
    drawing.text(690, 144, "the same *W*", size=15)
    return drawing
