"""Draw the synthetic stand-in for Fashion-MNIST: 28x28 images of garments.

Every image is a silhouette of random proportions, made of piecewise linear outlines and thick
strokes, then shaded, textured and given noise. As in the real data classes overlap: shirt, T-shirt,
pullover and coat differ in collar, buttons and sleeves only; a sandal is a shoe with holes, an
ankle boot a sneaker with a shaft.

Coordinates are in pixels from the middle: x to the right, y downwards. Functions take and return
tensors that broadcast to (n, 28, 28), for n images at once.
"""

import torch

from d2lpar.data import synthetic_drawing as drawing
from d2lpar.data.synthetic_drawing import cover, knots, largest, paint, stroke

SIDE = 28  # pixels
SHAPE = (1, SIDE, SIDE)


class GarmentBrush(drawing.Brush):
    """Random numbers and warped pixel coordinates `x` and `y` for n images.

    One coordinate is constant along the other axis, which makes outlines along it cheap: `y` for
    clothes, `x` for shoes (`lying`).
    """

    def __init__(self, n, generator, lying=False):
        super().__init__(n, generator, SIDE)
        x, y = drawing.pixels(SIDE)
        x = (x - self.normal(0, 0.5)) / self.normal(1.05, 0.05).clamp(0.85, 1.15)
        y = (y - self.normal(0, 0.4)) / self.normal(1.04, 0.04).clamp(0.88, 1.12)
        tilt, bend = self.normal(0, 0.03), self.normal(0, 0.3)
        phase, rate = self.uniform(0, 6.3), 6.3 / self.uniform(12, 30)
        if lying:
            x = torch.where(self.chance(0.06), -x, x)  # a few face the other way
            self.x, self.y = x, y - tilt * x + bend * torch.sin(rate * x + phase)
        else:
            self.x, self.y = x + tilt * y + bend * torch.sin(rate * y + phase), y


def stripes(b, t, low, high):
    """Return stripes along `t`, in [0, 1], with random phases and periods from `low` to `high`."""
    return cover(torch.sin(t * (6.2832 / b.uniform(low, high)) + b.uniform(0, 6.3)))


def textured(b, plain=0.5, horizontal=0.2, vertical=0.1, checked=0.1):
    """Return the tone of a fabric: brightness, shading and, by chance, a pattern."""
    base = b.mixed((0.25, 0.12, 0.5), (0.75, 0.5, 1.0))
    second = b.uniform(0.1, 1.0)
    draw = b.uniform(0, 1)
    across = (draw > plain) & (draw < plain + horizontal + checked)
    down = (draw > plain + horizontal) & (draw < plain + horizontal + checked + vertical)
    across = across * stripes(b, b.y, 2.5, 9) * b.uniform(0.4, 1)
    down = down * stripes(b, b.x, 2.2, 6) * b.uniform(0.4, 1)
    fabric = b.noise() * b.uniform(0.02, 0.14)
    fabric += b.noise(8) * b.uniform(0.03, 0.16) + (1 + b.normal(0, 0.006) * b.y)
    tone = paint(paint(base.expand_as(fabric), across, second), down, second)
    return tone.mul_(fabric)


def photograph(b, tone, mask):
    """Return images of a tone under a mask, with random exposure and sensor noise."""
    light = mask * b.uniform(0.78, 1.08)
    return tone.clamp(0.06, 1.05).add_(b.noise() * 0.01).mul_(light).clamp_(0, 1)


def top(b, sleeve, width, hem, flare, button, collar, print_=0.0, rib=0.0, open_front=0.0):
    """Draw a top.

    Args:
        sleeve: length as a fraction of the arm, 0 to 1.1.
        width, flare: half-width at the chest, and its mean increase at the hem, in pixels.
        hem: y of the lower edge.
        button, collar, print_, rib, open_front: probabilities of details.
    """
    x, y, ax = b.x, b.y, b.x.abs()
    neck_y = b.normal(-12.4, 0.5)
    neck = b.uniform(2.2, 4.4)
    shoulder = width + b.normal(0.6, 0.7)
    waist = width + b.normal(-0.4, 0.8)
    points = [(neck_y, neck), (neck_y + b.uniform(1.2, 3.0), shoulder), (-5.0, width)]
    points += [(3.0, waist), (hem, waist + b.normal(flare, 0.8))]
    half = knots(y, *points)
    body = largest(ax - half, torch.maximum(y - hem, neck_y - y))
    arm, reach = sleeves(b, ax, (shoulder - 1.7, neck_y + 3.2), sleeve, (2.0, 3.1), (1.3, 2.3))
    mask = torch.maximum(cover(body), cover(arm))

    tone = textured(b)
    gap = cover(body.abs_() - 0.4) * cover(arm) * ((y > -6) & (y < reach + 2))
    tone = paint(tone, gap * b.uniform(0.3, 0.95), b.uniform(0, 0.12))

    draw = b.uniform(0, 1)
    ends = b.mixed((0.15, -7, -2), (0.85, 14, 15))
    contrast = b.mixed((0.5, 0.0, 0.4), (0.5, 0.7, 1.1))
    line = cover(ax - b.uniform(0.3, 0.9)) * ((y < ends) & (draw < button))
    tone = paint(tone, line * b.uniform(0.4, 1), contrast)
    dots = stripes(b, y, 2.6, 4.5) * ((y < ends) & (draw < 0.6 * button)) * b.uniform(0.3, 0.9)
    tone = paint(tone, cover((x - 0.8).abs() - 0.7) * dots, 1 - contrast)
    front = cover(ax - (y - neck_y) * b.uniform(0.05, 0.3)) * b.chance(open_front)
    tone = paint(tone, front * b.uniform(0.5, 1), b.uniform(0.0, 1.0))

    side = ax - b.uniform(1.5, 4.5)
    logo = torch.maximum(side, (y - b.normal(-2.5, 1.5)).abs() - b.uniform(0.8, 4.0))
    ink = b.uniform(0, 1.1) + b.uniform(0, 0.5) * b.noise(14)
    tone = paint(tone, cover(logo) * b.chance(print_), ink)
    edge = cover(hem - 1.6 - y) * b.chance(rib) * b.uniform(0.2, 0.8)
    tone = paint(tone, edge, b.uniform(0.1, 1.0))

    head = slice(0, 11)  # rows of neckline and collar
    hx, hy = ax[:, head], y[:, head] - neck_y
    depth = b.mixed((0.3, 2.0, 6.0), (0.7, 0.3, 2.2))
    neckline = (hx / (neck - 0.6)).square_() + (hy / depth).square() - 1
    outer, inner = (neck - 1.2, b.uniform(0.1, 0.5)), (b.uniform(0.2, 0.6), depth + 0.8)
    wing = cover(stroke(hx, hy, outer, inner, 1.1)) * b.chance(collar) * b.uniform(0.4, 1)
    tone[:, head] = paint(tone[:, head], wing, b.uniform(0.2, 1.1))
    mask[:, head] *= 1 - cover(neckline * 2)
    return photograph(b, tone, mask)


def sleeves(b, ax, shoulder, sleeve, upper, cuff):
    """Return the signed distance to both sleeves, and the y of their ends.

    Args:
        ax: distance of the pixels from the middle.
        shoulder, sleeve: start (x, y) of a sleeve, and its length; below 0.05 there is none.
        upper, cuff: ranges of the radius at the two ends.
    """
    angle = b.normal(0.30, 0.12).clamp(0.05, 0.75) + (0.5 - sleeve).clamp(min=0) * b.uniform(0, 1)
    end = (shoulder[0] + 21 * sleeve * angle.sin(), shoulder[1] + 21 * sleeve * angle.cos())
    arm = stroke(ax, b.y, shoulder, end, b.uniform(*upper), b.uniform(*cuff))
    return arm.add_(9.0 * (sleeve < 0.05)), end[1]


def t_shirt(b):
    sleeve = b.mixed((0.84, 0.18, 0.42), (0.1, 0.0, 0.12), (0.06, 0.45, 1.0))
    hem = b.normal(11.8, 1.1)
    return top(b, sleeve, b.normal(7.5, 0.8), hem, 0.0, button=0.04, collar=0.05, print_=0.45)


def trouser(b):
    y, ax = b.y, b.x.abs()
    waist = b.normal(4.2, 0.7)
    hip = waist + b.uniform(0.2, 1.6)
    ankle = b.normal(4.6, 1.1).clamp(2.6, 7.5)
    end = torch.where(b.chance(0.12), b.uniform(4, 10), b.normal(12.8, 0.4))
    outer = knots(y, (-13.0, waist), (-8.0, hip), (0.0, (hip + ankle) / 2), (13.0, ankle))
    crotch = b.normal(-6.0, 1.2)
    spread = b.mixed((0.2, 0, 0.5), (0.8, 0.4, 2.4))
    inner = knots(y, (crotch, -0.6), (crotch + 3, 0.25 * spread), (13.0, spread))
    mask = cover(largest(ax - outer, -13.0 - y, y - end)) * cover(inner - ax)
    tone = textured(b, plain=0.78, horizontal=0.05, vertical=0.12, checked=0.03)
    tone = paint(tone, cover(ax - 0.5) * (y < crotch + 2) * b.uniform(0, 0.6), tone * 0.5)
    tone = paint(tone, cover((y + 11.6).abs() - 0.7) * b.uniform(0, 0.7), b.uniform(0.1, 1))
    crease = cover((ax - (outer + inner) / 2).abs() - 0.6)
    tone = paint(tone, crease * b.uniform(0, 0.3), b.uniform(0, 1))
    return photograph(b, tone, mask)


def pullover(b):
    sleeve = b.mixed((0.94, 0.82, 1.05), (0.06, 0.4, 0.8))
    hem = b.normal(11.0, 1.1)
    width = b.normal(7.5, 0.8)
    return top(b, sleeve, width, hem, -0.2, button=0.05, collar=0.05, print_=0.2, rib=0.7)


def dress(b):
    x, y, ax = b.x, b.y, b.x.abs()
    sleeve = b.mixed((0.55, 0.0, 0.04), (0.3, 0.15, 0.45), (0.15, 0.6, 1.0))
    neck_y = b.normal(-12.6, 0.3)
    chest = b.normal(4.0, 0.7)
    waist = chest - b.uniform(0.0, 1.6)
    hem_width = waist + b.mixed((0.5, 0.2, 2.5), (0.5, 2.0, 7.0))
    waist_y = b.uniform(-5, 1)
    hem = b.normal(12.6, 0.6)
    shoulder = (neck_y, chest - b.uniform(0.4, 2.4))
    half = knots(y, shoulder, (-8.5, chest), (waist_y, waist), (hem, hem_width))
    body = largest(ax - half, y - hem, neck_y - y)
    strap = b.uniform(1.0, 3.0)
    neckline = (ax / strap).square() + ((y - neck_y) / b.uniform(0.5, 5.0)).square()
    arm, _ = sleeves(b, ax, (chest - 0.8, neck_y + 2.6), sleeve, (1.3, 2.2), (1.0, 1.8))
    mask = torch.maximum(cover(body), cover(arm)) * (1 - cover((neckline - 1) * 2))
    tone = textured(b, plain=0.6, horizontal=0.15, vertical=0.1, checked=0.05)
    belt = cover((y - waist_y).abs() - b.uniform(0.5, 1.1)) * b.chance(0.35)
    tone = paint(tone, belt * b.uniform(0.4, 1), b.uniform(0, 1))
    skirt = cover(waist_y - y) * b.chance(0.25)
    tone = paint(tone, skirt, b.uniform(0.2, 1))
    tone = paint(tone, cover(ax - 0.5) * b.chance(0.12) * b.uniform(0.2, 0.7), b.uniform(0, 1))
    pleats = stripes(b, 9 * x / half.clamp(min=1), 3, 6) * (y > waist_y) * b.chance(0.3)
    tone = paint(tone, pleats * b.uniform(0.1, 0.5), tone * 0.5)
    return photograph(b, tone, mask)


def coat(b):
    sleeve = b.mixed((0.96, 0.82, 1.08), (0.04, 0.4, 0.8))
    hem = b.mixed((0.8, 11.8, 13.8), (0.2, 9.5, 11.5))
    width = b.normal(6.9, 0.8)
    return top(b, sleeve, width, hem, 1.2, button=0.88, collar=0.5, rib=0.1, open_front=0.45)


def shirt(b):
    sleeve = b.mixed((0.5, 0.78, 1.05), (0.42, 0.2, 0.5), (0.08, 0.0, 0.12))
    hem = b.normal(11.8, 1.0)
    return top(b, sleeve, b.normal(6.7, 0.8), hem, 0.2, button=0.78, collar=0.78, print_=0.08)


def shoe(b, shaft, holes, heel, laces):
    """Draw a shoe that points to the left.

    Args:
        shaft, heel: y of the upper edge at the ankle; height of the heel, in pixels.
        holes: fraction cut out of the upper, 0 to 1.
        laces: probability of laces.
    """
    x, y = b.x, b.y
    floor = b.normal(6.4, 0.8)
    toe, end = b.normal(-12.6, 0.4), b.normal(12.4, 0.5)
    sole = b.uniform(0.8, 2.6)
    lift = knots(x, (toe + 9, 0 * heel), (end - 3, heel))  # rises towards the heel
    ground = floor - lift
    toe_height = b.uniform(1.8, 3.8)
    ankle = b.uniform(-1.0, 4.5)
    instep = b.uniform(0.3, 0.75)
    top = floor - toe_height
    points = [(toe, floor - 0.5), (toe + 2.0, top), (toe + 6.5, top - b.uniform(0.2, 1.6))]
    points += [(ankle, top + instep * (shaft - floor + toe_height))]
    points += [(ankle + b.uniform(0.5, 2.5), shaft), (end - 1, shaft + b.normal(0.2, 0.8))]
    upper_y = knots(x, *points)
    back = end - b.uniform(0.0, 1.4) * ((floor - y) / 10).clamp(0, 2)
    upper = largest(upper_y - y, y - ground + sole, x - back, toe - x)
    plate = largest(ground - sole - y, y - ground, x - back, toe - x)
    block = b.uniform(1.2, 5.0)
    heel_shape = largest(ground - 0.5 - y, y - floor, x - back, end - block - x)
    heel_shape = torch.where(heel > 0.6, heel_shape, torch.full_like(heel_shape, 9.0))

    lean = b.uniform(-1.2, 1.2)
    period = b.uniform(4.0, 11.0)
    wave = torch.sin(6.2832 * ((x + lean * (y - floor)) / period + b.uniform(0, 1)))
    cut = cover((torch.cos(3.1416 * (1 - holes)) - wave) * 1.6) * (holes > 0.02)
    opened = cover(upper) * (1 - cut)
    sole_mask = torch.maximum(cover(plate), cover(heel_shape))
    mask = torch.maximum(opened, sole_mask)

    tone = textured(b, plain=0.85, horizontal=0.05, vertical=0.05, checked=0.02)
    sole_tone = b.mixed((0.5, 0.6, 1.1), (0.5, 0.1, 0.6))
    tone = paint(tone, sole_mask * (1 - opened), sole_tone)
    mark = stroke(x, y, (b.normal(0, 2), floor - 1.5), (b.normal(4, 2), floor - 5.5), 0.8)
    tone = paint(tone, cover(mark) * b.chance(laces * 0.7) * b.uniform(0.3, 1), b.uniform(0, 1.1))
    tie = cover((y - upper_y - 1.0).abs() - 1.0)
    tie = tie * stripes(b, x + y, 1.8, 3.2) * ((x - ankle + 3).abs() < 4) * b.chance(laces)
    tone = paint(tone, tie * b.uniform(0.3, 0.9), b.uniform(0.0, 1.1))
    zip_ = cover((x - end + b.uniform(3, 6)).abs() - 0.4)
    zip_ = zip_ * b.chance(0.3) * (1 - b.chance(laces) * 1)
    tone = paint(tone, zip_ * b.uniform(0, 0.6), tone * 0.4)
    tone = tone * (1 - b.uniform(0, 0.35) * ((y - shaft) / 16).clamp(0, 1))
    return photograph(b, tone, mask)


def sandal(b):
    shaft = b.mixed((0.6, -4.5, 2.5), (0.4, -9.0, -3.0))
    heel = b.mixed((0.5, 0.0, 0.5), (0.5, 1.5, 9.0))
    holes = b.mixed((0.88, 0.45, 0.75), (0.12, 0.1, 0.4))
    return shoe(b, shaft, holes, heel, laces=0.1)


def sneaker(b):
    shaft = b.mixed((0.88, -3.2, 0.6), (0.12, -6.5, -3.0))
    holes = b.mixed((0.95, 0.0, 0.0), (0.05, 0.05, 0.3))
    return shoe(b, shaft, holes, b.uniform(0, 0.6), laces=0.7)


def bag(b):
    x, y, ax = b.x, b.y, b.x.abs()
    half_width, half_height = b.uniform(8.0, 13.4), b.uniform(4.0, 9.5)
    middle = 12.8 - half_height - b.uniform(0, 2)
    taper = b.normal(0, 0.1)
    corner = b.uniform(0.5, 3.5)
    dx = ax - (half_width - corner) * (1 + taper * (y - middle) / 8)
    dy = (y - middle).abs() - (half_height - corner)
    rounded = (dx.clamp(min=0).square() + dy.clamp(min=0).square()).sqrt()
    box = rounded + torch.maximum(dx, dy).clamp(max=0) - corner
    rim = middle - half_height
    rx, ry = half_width * b.uniform(0.3, 0.85), b.uniform(2.0, 13.0)
    ellipse = ((x / rx).square() + ((y - rim - 0.5) / ry).square()).sqrt()
    handle = largest(((ellipse - 1).abs() * torch.minimum(rx, ry)) - b.uniform(0.5, 1.3), y - rim)
    mask = torch.maximum(cover(box), cover(handle) * b.chance(0.8))
    tone = textured(b, plain=0.7, horizontal=0.1, vertical=0.06, checked=0.06)
    flap_y = rim + half_height * b.uniform(0.3, 1.2)
    flap = cover((y - flap_y - b.normal(0, 0.08) * ax).abs() - 0.5) * b.chance(0.5)
    tone = paint(tone, flap * b.uniform(0.2, 0.9), b.uniform(0, 0.5))
    clasp = cover(((x - b.normal(0, 0.5)).square() + (y - flap_y).square()).sqrt() - 1.1)
    tone = paint(tone, clasp * b.chance(0.45), b.uniform(0.3, 1.1))
    pocket = cover((box + b.uniform(1.5, 3.0)).abs() - 0.4) * b.chance(0.25)
    tone = paint(tone, pocket * b.uniform(0.2, 0.7), tone * 0.4)
    return photograph(b, tone, mask)


def ankle_boot(b):
    shaft = b.mixed((0.84, -13.0, -7.5), (0.16, -7.5, -4.0))
    heel = b.mixed((0.55, 0.0, 1.2), (0.45, 1.2, 5.5))
    return shoe(b, shaft, b.uniform(0, 0), heel, laces=0.3)


# in the order of Fashion-MNIST's labels
GARMENTS = (t_shirt, trouser, pullover, dress, coat, sandal, shirt, sneaker, bag, ankle_boot)
SHOES = (sandal, sneaker, ankle_boot)


def _images(garment, n, generator):
    return garment(GarmentBrush(n, generator, lying=garment in SHOES))


def draw(num_images, seed):
    """Draw a data set of synthetic garments."""
    return drawing.draw_classes(GARMENTS, _images, SHAPE, num_images, seed)
