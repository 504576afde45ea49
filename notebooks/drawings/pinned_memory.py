"""A copy to the host: into pageable memory with the host's help, into pinned memory without."""

from pen import INK, PALE, QUIET, Drawing

TALL = 58


def draw():
    drawing = Drawing(300, "A copy needs the host for pageable memory, and not for pinned memory")
    row(drawing, 20, "pageable memory", "the host takes part, and waits until the end")
    drawing.box(396, 58, 120, TALL, "staging buffer,\npinned")
    drawing.arrow(320, 87, 392, 87)
    drawing.arrow(516, 87, 606, 87)
    drawing.text(560, 70, "host", ink=INK)
    drawing.box(610, 58, 130, TALL, "your tensor", fill=PALE)
    row(drawing, 164, "pinned memory", "the host goes on as soon as the copy is launched")
    drawing.arrow(320, 231, 606, 231)
    drawing.box(610, 202, 130, TALL, "your tensor,\npinned", fill=PALE)
    return drawing


def row(drawing, y, title, words):
    """Draw what both ways have in common: the tensor on the device and the copy engine."""
    drawing.text(20, y + 6, title, anchor="start", bold=True)
    drawing.box(20, y + 38, 120, TALL, "tensor on\nthe device", device=0)
    drawing.arrow(140, y + 67, 196, y + 67)
    drawing.box(200, y + 38, 120, TALL, "copy engine", device=1)
    drawing.text(20, y + 114, words, anchor="start", ink=QUIET)
