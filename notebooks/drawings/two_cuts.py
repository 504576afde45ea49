"""The two ways to cut a matrix over two devices: by outputs, and by inputs."""

from pen import PALE, Drawing

TOP, SIDE, BAR = 56, 128, 38


def draw():
    drawing = Drawing(248, "A product of a matrix and a vector, cut by outputs and by inputs")
    half = SIDE / 2
    x = 26
    drawing.text(x + 142, 24, "by outputs (“column”)", bold=True)
    for device in range(2):
        y = TOP + device * half
        part = "₀₁"[device]
        drawing.box(x, y, SIDE, half, f"*W*{part}", device=device)
        drawing.box(x + 246, y, BAR, half, f"*y*{part}", device=device)
    drawing.box(x + 154, TOP, BAR, SIDE, "*x*", fill=PALE)
    drawing.text(x + 219, TOP + half, "=", size=20)
    drawing.text(x + 142, TOP + SIDE + 20, "the parts are put together")
    x = 372
    drawing.text(x + 172, 24, "by inputs (“row”)", bold=True)
    for device in range(2):
        part = "₀₁"[device]
        drawing.box(x + device * half, TOP, half, SIDE, f"*W*{part}", device=device)
        drawing.box(x + 154, TOP + device * half, BAR, half, f"*x*{part}", device=device)
        left = x + 246 + device * 76
        drawing.box(left - 6, TOP, BAR + 12, SIDE, f"*W*{part}*x*{part}", device=device)
    drawing.text(x + 219, TOP + half, "=", size=20)
    drawing.text(x + 303, TOP + half, "+", size=20)
    drawing.text(x + 172, TOP + SIDE + 20, "the terms are added up")
    for left, words, device in ((190, "device 0", 0), (340, "device 1", 1), (490, "on both", None)):
        drawing.box(left, 220, 26, 18, device=device)
        drawing.text(left + 34, 229, words, anchor="start")
    return drawing
