"""Two levels of servers: devices push to the server of their machine, machines to the network's."""

from pen import Drawing

MACHINES = (20, 400)  # the left edge of each, x


def draw():
    drawing = Drawing(372, "Two machines with two devices each, and servers in the network")
    for server, x in enumerate((190, 390)):
        drawing.box(x, 14, 180, 50, f"server {server}\nhalf of the parameters")
    for machine, left in enumerate(MACHINES):
        drawing.box(left, 146, 340, 216, fill="none")
        drawing.text(left + 12, 348, f"machine {machine}", anchor="start", bold=True)
        drawing.box(left + 60, 164, 220, 52, "server of the machine\n*g* = sum of its devices")
        for i in range(2):
            x, device = left + 20 + 160 * i, 2 * machine + i
            drawing.box(x, 282, 140, 48, f"device {device}\n*g*{'₀₁₂₃'[device]}", device=device)
            drawing.arrow(x + 62, 282, left + 120 + 100 * i, 217)
            drawing.arrow(left + 134 + 100 * i, 217, x + 78, 282, dashed=True)
        drawing.text(left + 170, 250, "PCIe")
        for server, x in enumerate((280, 480)):
            start = left + 110 + 100 * server
            drawing.arrow(start, 164, x - 24 + 34 * machine, 65)
            drawing.arrow(x - 12 + 34 * machine, 65, start + 14, 164, dashed=True)
    drawing.text(96, 100, "Ethernet: one sum\nper machine")
    drawing.text(664, 100, "solid: push\ndashed: pull")
    return drawing
