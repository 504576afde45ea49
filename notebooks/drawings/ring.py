"""The ring: each device passes one chunk to its neighbour, k - 1 times to add, k - 1 to share."""

from pen import DEVICES, INK, ON_DEVICES, Drawing

K, SIDE, TOP = 4, 34, 46


def draw():
    drawing = Drawing(296, "A ring of four devices sums four chunks in six rounds")
    titles = {0: "start", 1: "after round 1", 3: "after round 3", 6: "after round 6"}
    for column, (rounds, title) in enumerate(titles.items()):
        x = 72 + column * 176
        drawing.text(x + K * SIDE / 2, 22, title, bold=True)
        for device in range(K):
            y = TOP + device * 52
            if column == 0:
                drawing.text(x - 8, y + SIDE / 2, f"device {device}", anchor="end")
            for chunk in range(K):
                terms = number_of_terms(device, chunk, rounds)
                fill = {1: None, K: DEVICES[0]}.get(terms, DEVICES[2])
                ink = ON_DEVICES[0] if terms == K else INK
                words = "Σ" if terms == K else terms
                drawing.box(x + chunk * SIDE, y, SIDE - 3, SIDE, words, fill=fill, ink=ink)
    for device in range(K):
        x, y = 72 + device * SIDE + 15, TOP + device * 52 + SIDE
        if device < K - 1:
            drawing.arrow(x, y + 1, x, y + 17)
        else:  # on to device 0
            drawing.line(x, y, x, y + 10, ink=INK)
            drawing.line(x, y + 10, 214, y + 10, ink=INK)
            drawing.line(214, y + 10, 214, TOP - 8, ink=INK)
            drawing.line(214, TOP - 8, x, TOP - 8, ink=INK)
            drawing.arrow(x, TOP - 8, x, TOP)
    words = "A number says how many devices' chunks have been added up; Σ is the sum of all four."
    drawing.text(380, 274, words)
    return drawing


def number_of_terms(device, chunk, rounds):
    """Return how many devices' numbers a chunk is the sum of, after so many rounds."""
    behind = (device - chunk) % K  # how far the chunk has come when it reaches the device
    if rounds >= K - 1 and (behind == K - 1 or behind < rounds - (K - 1)):
        return K
    return behind + 1 if behind <= rounds else 1
