"""Push and pull: three workers, and two servers that hold one half of the parameters each."""

from pen import QUIET, Drawing

WORKERS = (62, 152, 242)  # the middle of each, y
SERVERS = (96, 208)


def draw():
    drawing = Drawing(330, "Three workers push to and pull from two servers")
    drawing.text(105, 20, "workers", bold=True)
    drawing.text(640, 20, "servers", bold=True)
    for worker, y in enumerate(WORKERS):
        drawing.box(
            20, y - 32, 170, 64, f"worker {worker}\ngradient *g*{'₀₁₂'[worker]}", device=worker
        )
    for server, y in enumerate(SERVERS):
        rows = ("rows 0 to 4", "rows 5 to 9")[server]
        drawing.box(540, y - 40, 200, 80, f"server {server}\nholds *w*, {rows}")
    for worker, y in enumerate(WORKERS):
        for server, top in enumerate(SERVERS):
            there = top - 24 + 20 * worker
            drawing.arrow(190, y - 12 + 20 * server, 540, there)
            drawing.arrow(540, there + 9, 190, y - 4 + 20 * server, dashed=True, ink=QUIET)
    drawing.arrow(120, 306, 170, 306)
    drawing.text(178, 306, "push: add to the values", anchor="start")
    drawing.arrow(460, 306, 410, 306, dashed=True, ink=QUIET)
    drawing.text(468, 306, "pull: fetch the values", anchor="start")
    return drawing
