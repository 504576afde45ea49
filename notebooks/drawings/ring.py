"""The ring: each device passes one chunk to its neighbour, k - 1 times to add, k - 1 to share."""

from pen import DEVICES, INK, ON_DEVICES, Drawing

K, SIDE, HEIGHT, PITCH = 4, 40, 28, 42


def draw():
    drawing = Drawing(486, "A ring of four devices sums four chunks in six rounds")
    for rounds in range(2 * K - 1):
        row, column = divmod(rounds, K) if rounds < K else (1, rounds - K + 1)
        x, top = 72 + column * 176, 66 + row * 212
        title = f"after round {rounds}" if rounds else "start"
        drawing.text(x + K * SIDE / 2, top - (22 if row else 42), title, bold=True)
        for chunk in range(K if rounds == 0 else 0):
            drawing.text(x + chunk * SIDE + 19, top - 20, f"{chunk}")
        if rounds == 0:
            drawing.text(x - 8, top - 20, "chunk", anchor="end")
        for device in range(K):
            y = top + device * PITCH
            if column == row:  # the first of its row
                drawing.text(x - 8, y + HEIGHT / 2, f"device {device}", anchor="end")
            for chunk in range(K):
                terms = number_of_terms(device, chunk, rounds)
                fill = {1: None, K: DEVICES[0]}.get(terms, DEVICES[2])
                ink = ON_DEVICES[0] if terms == K else INK
                devices = range(chunk, chunk + terms) if terms > 1 else [device]
                digits = sum(10 ** (each % K) for each in devices)
                drawing.box(x + chunk * SIDE, y, SIDE - 2, HEIGHT, digits, fill=fill, ink=ink)
    for device in range(K):  # which chunk each device sends in round 1
        x, y = 72 + device * SIDE + 19, 66 + device * PITCH + HEIGHT
        if device < K - 1:
            drawing.arrow(x, y + 1, x, y + PITCH - HEIGHT)
        else:  # on to device 0
            drawing.line(x, y, x, y + 10, ink=INK)
            drawing.line(x, y + 10, 238, y + 10, ink=INK)
            drawing.line(238, y + 10, 238, 57, ink=INK)
            drawing.line(238, 57, x, 57, ink=INK)
            drawing.arrow(x, 56, x, 66)
    drawing.text(24, 294, "rounds 1 to 3 add:\n*reduce-scatter*", anchor="start")
    drawing.text(24, 354, "rounds 4 to 6 copy:\n*all-gather*", anchor="start")
    words = "Each digit tells whether a device's number is in the sum: 1011 is 1 + 10 + 1000."
    drawing.text(380, 468, words)
    return drawing


def number_of_terms(device, chunk, rounds):
    """Return how many devices' numbers a chunk is the sum of, after so many rounds."""
    behind = (device - chunk) % K  # how far the chunk has come when it reaches the device
    if rounds >= K - 1 and (behind == K - 1 or behind < rounds - (K - 1)):
        return K
    return behind + 1 if behind <= rounds else 1
