"""One Python thread launches kernels into the queues of two devices."""

from pen import DEVICES, ON_DEVICES, PALE, QUIET, Drawing

LINES = ("x_gpu1.mm(x_gpu1)", "x_gpu2.mm(x_gpu2)")


def draw():
    drawing = Drawing(290, "One Python thread fills the queues of two devices")
    for x, title in ((115, "Python, one thread"), (412, "queues"), (672, "devices")):
        drawing.text(x, 26, title, bold=True)
    drawing.box(20, 52, 190, 170, fill=PALE)
    for i in range(6):
        device = i % 2
        y = 74 + i * 25
        drawing.text(115, y, LINES[device])
    for device, y in enumerate((56, 160)):
        middle = y + 29
        drawing.arrow(210, 105 + 64 * device, 286, middle)
        for i, number in enumerate((3, 2)):
            drawing.box(290 + i * 123, y, 119, 58, f"kernel {number}", device=device)
        drawing.arrow(534, middle, 598, middle)
        words = f"devices[{device}]\nruns kernel 1"
        drawing.box(602, y, 140, 58, words, fill=DEVICES[device], ink=ON_DEVICES[device])
    drawing.text(115, 252, "launches, and goes on:\nmicroseconds", ink=QUIET)
    drawing.text(412, 252, "first in,\nfirst out", ink=QUIET)
    drawing.text(672, 252, "run one at a time:\nmilliseconds", ink=QUIET)
    return drawing
