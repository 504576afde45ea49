"""What bytes travel over, from a GPU's memory to other machines, each with its bandwidth."""

from pen import DEVICES, PALE, Drawing

LEFTS = (20, 400)


def draw():
    drawing = Drawing(436, "Two machines of four GPUs, and the bandwidth of every link in them")
    for machine, left in enumerate(LEFTS):
        drawing.box(left, 14, 340, 230, fill="none")
        drawing.text(left + 12, 32, f"machine {machine}", anchor="start", bold=True)
        drawing.box(left + 14, 48, 312, 24, "NVLink", device=1)
        for gpu in range(4):
            x = left + 14 + gpu * 80
            drawing.line(x + 36, 72, x + 36, 86)
            drawing.box(x, 86, 72, 74, device=0)
            drawing.text(x + 36, 102, "GPU", ink="#ffffff")
            drawing.box(x + 8, 118, 56, 34, "HBM", fill=PALE)
            drawing.line(x + 36, 160, x + 36, 172)
        drawing.box(left + 14, 172, 312, 24, "PCIe", device=2)
        for x in (left + 89, left + 251):
            drawing.line(x, 196, x, 204)
        drawing.box(left + 14, 204, 150, 30, "host")
        drawing.box(left + 176, 204, 150, 30, "network cards", device=3)
    for left in LEFTS:
        drawing.arrow(left + 251, 234, left + 251, 262)
        drawing.arrow(left + 251, 262, left + 251, 235)
    drawing.box(20, 262, 720, 26, "network: InfiniBand or Ethernet", fill=PALE)
    longest = 330
    for i, (name, words, width, device) in enumerate(
        (
            ("memory (HBM3)", "3,350 GB/s", 3350, 0),
            ("NVLink 4", "450 GB/s", 450, 1),
            ("PCIe 5.0 x16", "63 GB/s", 63, 2),
            ("InfiniBand NDR", "50 GB/s", 50, 3),
            ("10 Gbit Ethernet", "1.25 GB/s", 1.25, 3),
        )
    ):
        y = 304 + i * 24
        drawing.text(160, y + 10, name, anchor="end")
        drawing.box(176, y + 1, max(1.5, longest * width / 3350), 18, fill=DEVICES[device])
        drawing.text(190 + max(1.5, longest * width / 3350), y + 10, words, anchor="start")
    return drawing
