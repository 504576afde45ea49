"""The linear scaling rule: four small steps, one step of four times the rate, one of the same."""

from math import cos, radians, sin

from pen import DEVICES, QUIET, Drawing

STEP = 46  # length of a small step, pixels


def draw():
    drawing = Drawing(262, "Small steps and large ones, where the gradient changes little and much")
    for x, turn, title in (
        (60, 3, "the gradient changes little"),
        (430, 36, "the gradient changes much"),
    ):
        drawing.text(x + 130, 22, title, bold=True)
        draw_paths(drawing, x, 150, turn)
    for x, words, ink in (
        (40, "4 small steps", DEVICES[0]),
        (240, "1 step, same rate", QUIET),
        (470, "1 step, 4 times the rate", DEVICES[3]),
    ):
        drawing.arrow(x, 238, x + 34, 238, ink=ink)
        drawing.text(x + 44, 238, words, anchor="start")
    return drawing


def draw_paths(drawing, x, y, turn):
    """Draw three ways from one point; the direction of small steps turns by so many degrees."""
    first = radians(-28)
    for length, ink, shift in ((4 * STEP, DEVICES[3], -9), (STEP, QUIET, 9)):
        top = y + shift
        drawing.arrow(x, top, x + length * cos(first), top + length * sin(first), ink=ink)
    at, angle = (x, y), first
    for _ in range(4):
        end = at[0] + STEP * cos(angle), at[1] + STEP * sin(angle)
        drawing.arrow(*at, *end, ink=DEVICES[0])
        at, angle = end, angle + radians(turn)
