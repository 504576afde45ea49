"""Two streams of a device, the events between them, and the engines that they feed."""

from pen import INK, PALE, QUIET, Drawing

TALL, FRONT = 46, 484  # height of a place in a stream; where streams end, at the right


def draw():
    drawing = Drawing(322, "Two streams with events feed the engines of a device")
    drawing.text(318, 26, "streams: what Python has launched", bold=True)
    drawing.text(634, 26, "engines", bold=True)
    top, below = 58, 178
    events = queue(drawing, top, "compute stream", ("event 2", "kernel 3", "event 3"), device=0)
    waits = queue(drawing, below, "copy stream", ("wait 2", "copy 2", "wait 3", "copy 3"), device=1)
    for number in (2, 3):
        x1, x2 = events[f"event {number}"], waits[f"wait {number}"]
        drawing.arrow(x1, top + TALL + 3, x2, below - 3, dashed=True)
    drawing.text(364, 141, "copy 3 waits for\nthe end of kernel 3", ink=QUIET)
    drawing.box(534, top - 6, 200, TALL + 12, "compute engine\nruns kernel 2", device=0)
    drawing.box(534, 118, 200, TALL, "copy engine from host\nhas nothing to do", fill=PALE)
    drawing.box(534, below - 6, 200, TALL + 12, "copy engine to host\nruns copy 1", device=1)
    for y in (top, below):
        drawing.arrow(FRONT + 2, y + TALL / 2, 530, y + TALL / 2)
    drawing.arrow(634, below + TALL + 7, 634, 264)
    drawing.box(534, 268, 200, 36, "pinned buffer 1 of the host", fill="none", ink=INK)
    drawing.text(
        318,
        262,
        "what stands at the right was launched first:\neach stream keeps its order",
        ink=QUIET,
    )
    return drawing


def queue(drawing, y, title, names, device):
    """Draw a stream whose front is at the right; return the middles of its places."""
    drawing.text(24, y + TALL / 2, title.replace(" ", "\n"), anchor="start", bold=True)
    x, middles = FRONT, {}
    for name in names:
        mark = name.startswith(("event", "wait"))
        width = 72 if mark else 88
        drawing.box(x - width, y, width, TALL, name, device=None if mark else device)
        middles[name] = x - width / 2
        x -= width + 4
    return middles
