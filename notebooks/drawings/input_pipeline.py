"""The input pipeline of a training step, and the two places at which images can be augmented."""

from pen import PALE, Drawing


def draw():
    drawing = Drawing(270, "The input pipeline from the disk to two devices")
    drawing.box(20, 100, 90, 70, "disk,\nmemory")
    for i, y in enumerate((65, 115, 165)):
        drawing.arrow(110, 135, 160, y + 20)
        drawing.box(160, y - 3, 120, 46, f"worker {i}:\ndecode, A")
        drawing.arrow(280, y + 20, 330, 117 + 18 * i)
    drawing.box(330, 100, 120, 70, "batch in\nhost memory", fill=PALE)
    for device, y in enumerate((60, 150)):
        drawing.arrow(450, 135, 520, y + 30)
        drawing.box(520, y, 220, 60, "B, forward,\nbackward", device=device)
    drawing.text(220, 26, "A: augment on the host,", bold=True)
    drawing.text(220, 45, "image by image", size=15)
    drawing.text(630, 26, "B: augment on the device,", bold=True)
    drawing.text(630, 45, "a batch at once", size=15)
    drawing.text(478, 90, "copy", size=15)
    drawing.text(220, 236, "cores of the host, shared\nby all devices", size=15)
    drawing.text(630, 236, "as many as there are devices", size=15)
    return drawing
