"""The forward pass of DataParallel: scatter and replicate, apply, gather, and the loss."""

from pen import Drawing

COLUMNS = [(14, 88), (200, 92), (388, 84), (568, 84), (694, 54)]  # x and width of the boxes
HEIGHT = 46
ROWS = 54, 124  # tops, one for each device


def draw():
    drawing = Drawing(226, "The forward pass of DataParallel on two devices")
    draw_forward(drawing)
    draw_legend(drawing, 204)
    return drawing


def draw_forward(drawing):
    """Draw the forward pass in the upper 190 pixels of a drawing."""
    titles = ["scatter *X*\nreplicate *w*", "apply", "gather"]
    draw_titles(drawing, titles, 24)
    (x0, w0), (x1, w1), (x2, w2), (x3, w3), (x4, w4) = COLUMNS
    middle = sum(ROWS) / 2
    drawing.box(x0, ROWS[0], w0, HEIGHT, "batch *X*")
    drawing.box(x0, ROWS[1], w0, HEIGHT, "net *w*", device=0)
    for device, y in enumerate(ROWS):
        part = "₀₁"[device]
        for top, shift in zip(ROWS, (-8, 8), strict=True):
            drawing.arrow(x0 + w0, top + HEIGHT / 2, x1, y + HEIGHT / 2 + shift)
        drawing.box(x1, y, w1, HEIGHT, f"*X*{part}, *w*", device=device)
        drawing.arrow(x1 + w1, y + HEIGHT / 2, x2, y + HEIGHT / 2)
        drawing.box(x2, y, w2, HEIGHT, f"*ŷ*{part}", device=device)
        end = middle + HEIGHT / 2 + (-8, 8)[device]
        drawing.arrow(x2 + w2, y + HEIGHT / 2, x3, end)
    drawing.box(x3, middle, w3, HEIGHT, "*ŷ*", device=0)
    drawing.arrow(x3 + w3, middle + HEIGHT / 2, x4, middle + HEIGHT / 2)
    drawing.box(x4, middle, w4, HEIGHT, "loss", device=0)


def draw_titles(drawing, titles, y):
    """Write what happens between the columns."""
    for (x, width), (next_x, _), title in zip(COLUMNS, COLUMNS[1:], titles, strict=False):
        drawing.text((x + width + next_x) / 2, y, title, bold=True)


def draw_legend(drawing, y):
    """Say which colour is which device."""
    for x, words, device in ((200, "host", None), (320, "device 0", 0), (470, "device 1", 1)):
        drawing.box(x, y - 9, 26, 18, device=device)
        drawing.text(x + 34, y, words, anchor="start")
