"""What one of four ranks holds between two steps with Adam: DDP with views, and ZeRO."""

from pen import DEVICES, ON_DEVICES, QUIET, Drawing

K, UNIT, LEFT = 4, 136, 124  # ranks; pixels of N bytes
KINDS = [("parameters", 1, 0), ("gradients", 1, 1), ("Adam's two averages", 2, 2)]
STAGES = [
    ("DDP, views", (0, 0, 0)),
    ("ZeRO-1", (0, 0, 1)),
    ("ZeRO-2", (0, 1, 1)),
    ("ZeRO-3", (1, 1, 1)),
]


def draw():
    drawing = Drawing(310, "Memory of one of four ranks with DDP and with ZeRO 1, 2 and 3")
    x = LEFT
    for name, size, _ in KINDS:
        drawing.text(x + size * UNIT / 2, 22, name, bold=True)
        x += size * UNIT
    drawing.text(x + 54, 22, "in all", bold=True)
    for row, (name, sharded) in enumerate(STAGES):
        y, x, total = 42 + row * 52, LEFT, 0
        drawing.text(LEFT - 12, y + 19, name, anchor="end", bold=True)
        for (_, size, colour), split in zip(KINDS, sharded, strict=True):
            held = size * UNIT / (K if split else 1)
            drawing.box(x, y, size * UNIT - 4, 38, fill="none")
            multiple = {1: "*N*", 2: "2*N*"}[size]
            words = multiple + "/*k*" if split else multiple
            look = {"fill": DEVICES[colour], "ink": ON_DEVICES[colour]}
            drawing.box(x, y, held - 4, 38, words, **look)
            x += size * UNIT
            total += size / (K if split else 1)
        drawing.text(x + 54, y + 19, f"{total:g} *N*" if total != 1 else "*N*")
    words = "*k* = 4 ranks. What a rank does not hold of an outlined box lies with the others."
    drawing.text(380, 266, words, ink=QUIET)
    words = "Without views, DDP holds another *N*: buckets beside the gradients."
    drawing.text(380, 290, words, ink=QUIET)
    return drawing
