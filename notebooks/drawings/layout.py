"""Sixteen GPUs in two machines: tensor groups, replicas, and the stages of a pipeline."""

from pen import Drawing

LEFT, WIDE, GAP = 118, 62, 12


def draw():
    drawing = Drawing(318, "Sixteen GPUs, split by t = 4, d = 2 and p = 2")
    for stage, top in enumerate((44, 196)):
        drawing.box(LEFT - 14, top - 16, 632, 96, fill="none")
        drawing.text(LEFT - 24, top + 20, f"machine {stage}", anchor="end", bold=True)
        drawing.text(LEFT - 24, top + 42, f"stage {stage}", anchor="end")
        for replica in range(2):
            for part in range(4):
                rank = 8 * stage + 4 * replica + part
                x = left_of(replica, part)
                drawing.box(x, top, WIDE, 44, f"GPU {rank}", device=(0, 2)[replica])
            middle = left_of(replica, 0) + 2 * WIDE + 1.5 * GAP
            drawing.text(middle, top + 62, "share each layer (NVLink)", size=15)
    for replica in range(2):
        for part in range(4):
            x = left_of(replica, part) + WIDE / 2
            drawing.arrow(x - 6, 126, x - 6, 178)
            drawing.arrow(x + 6, 178, x + 6, 126)
    drawing.text(LEFT + 302, 152, "network", size=15)
    for replica, words in enumerate(("replica 0: half of the batch", "replica 1: the other half")):
        middle = left_of(replica, 0) + 2 * WIDE + 1.5 * GAP
        drawing.text(middle, 14, words, bold=True)
    drawing.text(380, 304, "replicas sum their gradients, stage by stage", size=15)
    return drawing


def left_of(replica, part):
    return LEFT + replica * 314 + part * (WIDE + GAP)
