"""What the drawings of the chapters are made with: boxes, arrows and words, as SVG.

A drawing is a file beside this one, with a function `draw()` that returns a `Drawing`. `make
drawings` puts all of them into the chapters. Lengths are pixels of a page 760 wide; x goes to the
right, y down. Words are 15 pixels high or more, so that they can be read when projected. Each
drawing has a light ground of its own, for pages that are dark.
"""

from html import escape
from math import atan2, cos, hypot, sin

WIDTH = 760
SIZE = 15  # of words, pixels
INK, QUIET, GROUND = "#1b1b1b", "#6b6b6b", "#ffffff"
DEVICES = ["#12355b", "#edae49", "#8fb8de", "#d1495b"]  # fill of what is on a device
ON_DEVICES = ["#ffffff", INK, INK, "#ffffff"]  # and of words in it
PALE = "#eef2f6"  # fill of what is nowhere in particular
_STYLE = "font-family:Helvetica,Arial,'DejaVu Sans',sans-serif"


class Drawing:
    """A drawing on a light ground.

    Args:
        height: pixels.
        title: what it shows, for readers who cannot see it.
    """

    def __init__(self, height, title):
        self.height, self.title = height, title
        self._parts = []

    def text(self, x, y, words, *, size=SIZE, anchor="middle", ink=INK, bold=False):
        """Write words, whose lines are centred on y; those between * are slanted.

        Args:
            anchor: "start", "middle" or "end": which part of a line is at x.
        """
        lines = str(words).split("\n")
        first = y - (len(lines) - 1) * size * 0.62 + size * 0.35
        weight = ' font-weight="bold"' if bold else ""
        for i, line in enumerate(lines):
            spans = escape(line).split("*")
            slanted = [f'<tspan font-style="italic">{span}</tspan>' for span in spans[1::2]]
            spans[1::2] = slanted
            self._parts.append(
                f'<text x="{x:g}" y="{first + i * size * 1.24:.1f}" font-size="{size:g}" '
                f'text-anchor="{anchor}" fill="{ink}"{weight}>{"".join(spans)}</text>'
            )

    def box(self, x, y, width, height, words="", *, device=None, fill=None, ink=None, size=SIZE):
        """Draw a box, with words in its middle.

        Args:
            x, y: of its upper left corner.
            device: number of the device that it is on, which gives its colour; or None.
            fill: another colour; "none" for the outline alone.
        """
        if device is not None:
            fill, ink = DEVICES[device], ink or ON_DEVICES[device]
        outline = QUIET if fill in (None, "none", PALE) else GROUND
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" '
            f'fill="{fill or PALE}" stroke="{outline}"/>'
        )
        if words:
            self.text(x + width / 2, y + height / 2, words, size=size, ink=ink or INK)

    def arrow(self, x1, y1, x2, y2, words="", *, bend=0, ink=INK, dashed=False, size=SIZE):
        """Draw an arrow from (x1, y1) to (x2, y2), with words beside its middle.

        Args:
            bend: by how many pixels its middle lies to the left of the straight way.
        """
        length = hypot(x2 - x1, y2 - y1)
        along = (x2 - x1) / length, (y2 - y1) / length
        middle = (x1 + x2) / 2 + bend * along[1], (y1 + y2) / 2 - bend * along[0]
        turn = 2 * middle[0] - (x1 + x2) / 2, 2 * middle[1] - (y1 + y2) / 2
        angle = atan2(y2 - turn[1], x2 - turn[0])
        tip = [
            f"{x2 - 9 * cos(angle + side):.1f},{y2 - 9 * sin(angle + side):.1f}"
            for side in (0.42, -0.42)
        ]
        end = x2 - 6 * cos(angle), y2 - 6 * sin(angle)
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<path d="M{x1:g},{y1:g} Q{turn[0]:.1f},{turn[1]:.1f} {end[0]:.1f},{end[1]:.1f}" '
            f'fill="none" stroke="{ink}" stroke-width="1.6"{dashes}/>'
            f'<path d="M{x2:g},{y2:g} L{tip[0]} L{tip[1]} Z" fill="{ink}"/>'
        )
        if words:
            self.text(middle[0], middle[1] - 0.8 * size, words, size=size, ink=ink)

    def line(self, x1, y1, x2, y2, *, ink=QUIET, dashed=False):
        """Draw a line from (x1, y1) to (x2, y2)."""
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<path d="M{x1:g},{y1:g} L{x2:g},{y2:g}" stroke="{ink}" stroke-width="1.2"{dashes}/>'
        )

    def svg(self):
        """Return the drawing as the text of an SVG file."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{self.height}" '
            f'viewBox="0 0 {WIDTH} {self.height}" style="{_STYLE}" role="img">'
            f"<title>{escape(self.title)}</title>"
            f'<rect width="{WIDTH}" height="{self.height}" rx="8" fill="{GROUND}"/>'
            + "".join(self._parts)
            + "</svg>"
        )
