"""What torch.compile does: trace, add the backward pass, fuse and generate; guards later."""

from pen import DEVICES, INK, QUIET, Drawing

WIDE, STEP = 158, 194


def draw():
    drawing = Drawing(330, "The three parts of torch.compile, and what happens in later calls")
    drawing.text(20, 24, "The first call", anchor="start", bold=True)
    parts = [
        ("your function", None, "Python bytecode"),
        ("TorchDynamo", 0, "traces it\nwith FakeTensors"),
        ("AOTAutograd", 0, "traces the\nbackward pass, too"),
        ("Inductor", 0, "fuses, and writes\nC++ or Triton"),
    ]
    for i, (words, device, below) in enumerate(parts):
        x = 20 + i * STEP
        drawing.box(x, 48, WIDE - 20, 44, words, device=device)
        drawing.text(x + WIDE / 2 - 10, 120, below, ink=QUIET)
        if i:
            drawing.arrow(x - STEP + WIDE - 20, 70, x, 70)
    drawing.arrow(283, 146, 283, 172)
    drawing.arrow(477, 146, 477, 172)
    drawing.arrow(671, 146, 671, 172)
    for x, words in ((214, "graph, guards"), (408, "two graphs"), (602, "kernels")):
        drawing.box(x, 172, WIDE - 20, 36, words, fill=DEVICES[2])
    drawing.line(20, 226, 740, 226)
    drawing.text(20, 248, "Every later call", anchor="start", bold=True)
    drawing.box(20, 268, 138, 44, "inputs")
    drawing.arrow(158, 290, 214, 290)
    drawing.box(214, 268, 138, 44, "do all\nguards hold?", fill=DEVICES[1])
    drawing.arrow(352, 290, 408, 290, "yes")
    drawing.box(408, 268, 138, 44, "record for\nautograd", fill=DEVICES[2])
    drawing.arrow(546, 290, 602, 290)
    drawing.box(602, 268, 138, 44, "run the kernels", fill=DEVICES[2])
    drawing.line(214, 280, 192, 280, ink=INK, dashed=True)
    drawing.line(192, 280, 192, 86, ink=INK, dashed=True)
    drawing.arrow(192, 86, 214, 86)
    drawing.text(202, 248, "no: trace and compile again", anchor="start", ink=QUIET)
    return drawing
