"""Draw the synthetic stand-in for CIFAR-10: 32x32 images of vehicles, animals and things.

Every image shows one object of random proportions and colours, seen from the side, before a
cluttered background. Only the shape determines the class: direction, tilt, position and light are
random, as in photographs.

Coordinates: an object is about 24 wide, x points in the direction that it faces, y downwards.
"""

import torch

from d2lpar.data import synthetic_drawing as drawing
from d2lpar.data.synthetic_drawing import cover, knots, largest, paint, stroke

SIDE = 32  # pixels
SHAPE = (3, SIDE, SIDE)


class ObjectBrush(drawing.Brush):
    """Images (n, 3, 32, 32) to paint on, and the coordinates `x` and `y` of an object in them."""

    def __init__(self, n, generator):
        super().__init__(n, generator, SIDE)
        px, py = drawing.pixels(SIDE)
        self.scale = self.uniform(0.85, 1.2)
        angle = self.normal(0, 0.12)
        x, y = px - self.normal(0, 2.2), py - self.normal(0, 1.8)
        side = torch.where(self.chance(0.5), 1.0, -1.0)
        self.x = side * (x * angle.cos() + y * angle.sin()) / self.scale
        self.y = (y * angle.cos() - x * angle.sin()) / self.scale
        # The background is darker than most objects.
        self.image = paint(self.ground(), self.ground(), self.slope(px, py)[:, None])
        self.image = self.image + 0.05 * self.noise(8)[:, None]
        for _ in range(4):  # the clutter
            start = self.uniform(-16, 16), self.uniform(-16, 16)
            end = start[0] + self.normal(0, 6), start[1] + self.normal(0, 6)
            mask = cover(stroke(px, py, start, end, self.uniform(0.5, 2.5), self.uniform(0.5, 2.5)))
            mask = (mask * self.uniform(0.3, 0.9))[:, None]
            self.image = paint(self.image, mask, self.ground() * 1.7)

    def color(self):
        """Return random, mostly light colours, (n, 3, 1, 1)."""
        return 1 - 0.75 * self.rand(self.n, 3, 1, 1) * self.uniform(0.3, 1.0)[:, None]

    def ground(self):
        """Return random dark colours, (n, 3, 1, 1)."""
        return 0.6 * (1 - self.color()) + 0.05

    def slope(self, x, y):
        """Return a value that rises from 0 to 1 over the image, in a random direction."""
        angle = self.uniform(0, 6.2832)
        return (0.5 + (x * angle.cos() + y * angle.sin()) / 32).clamp(0, 1)

    def add(self, distance, color, opacity=1.0):
        """Paint a shape, given by its signed distance."""
        mask = cover(distance * self.scale) * opacity
        self.image = paint(self.image, mask[:, None], color)

    def body(self, distance):
        """Paint a shape in a random colour, shaded and textured; return the colour."""
        color = self.color()
        shade = 1 + self.normal(0, 0.02) * self.y + self.noise(10) * self.uniform(0.02, 0.12)
        self.add(distance, color * shade[:, None])
        return color

    def lit(self):
        """Return the images under random light, with camera noise."""
        px, py = drawing.pixels(SIDE)
        cast = 0.8 + 0.4 * self.rand(self.n, 3, 1, 1)
        light = self.uniform(0.55, 1.2)[:, None] * cast
        light = light * (1 + self.normal(0, 0.25) * (self.slope(px, py) - 0.5))[:, None]
        grain = self.randn(self.image.shape)
        return (self.image.clamp(0, 1) * light + 0.02 * grain).clamp(0, 1)


def box(x, y, left, right, top, bottom):
    """Return the signed distance to a rectangle."""
    return largest(left - x, x - right, top - y, y - bottom)


def ellipse(x, y, middle, radius):
    """Return the approximate signed distance to an ellipse; middle and radius: pairs (x, y)."""
    away = ((x - middle[0]) / radius[0]).square() + ((y - middle[1]) / radius[1]).square()
    least = torch.minimum(*(torch.as_tensor(r, dtype=torch.float32) for r in radius))
    return (away.sqrt() - 1) * least


def wheels(c, floor, *places, low=1.7, high=2.8):
    """Paint wheels under a vehicle, at places along x."""
    radius, tire, hub = c.uniform(low, high), c.color() * 0.4, c.color()
    for place in places:
        c.add(ellipse(c.x, c.y, (place, floor), (radius, radius)), tire)
        c.add(ellipse(c.x, c.y, (place, floor), (radius / 2, radius / 2)), hub)


def car(c):
    floor, roof = c.uniform(3, 5), c.uniform(-6, -3)
    hood = c.uniform(-1.5, 0.5)
    front, back = c.uniform(3.5, 6), c.uniform(-9, -6)
    top = knots(c.x, (back - 2.5, hood), (back, roof), (front - 3.5, roof), (front, hood))
    color = c.body(largest(top - c.y, c.y - floor, c.x.abs() - c.uniform(10, 12)))
    glass = largest(top + 1 - c.y, c.y - hood, (c.x - c.normal(-1, 0.8)).abs() - 5)
    c.add(glass, paint(color, torch.tensor(0.7), c.color()))
    wheels(c, floor, c.uniform(-7.5, -6), c.uniform(6, 7.5))


def truck(c):
    floor, split = c.uniform(3.5, 5.5), c.uniform(2.5, 5)
    load = c.uniform(-9, -4)
    c.body(box(c.x, c.y, c.uniform(-12, -10), split - 0.6, load, floor - 1))
    cab = c.uniform(-4.5, -2)
    nose = knots(c.x, (split + 1.5, cab), (split + 4.5, cab + c.uniform(0.5, 4)))
    c.body(largest(nose - c.y, c.y - floor, split - c.x, c.x - c.uniform(9.5, 11.5)))
    c.add(box(c.x, c.y, split + 1.5, split + 4, cab + 1, cab + 3), c.color())
    wheels(c, floor, c.uniform(-8, -6), c.uniform(6, 8))


def bus(c):
    floor, roof = c.uniform(3.5, 5.5), c.uniform(-8, -5)
    half = c.uniform(10, 12.5)
    c.body(box(c.x, c.y, -half, half, roof, floor))
    pane, width, sill = c.color(), c.uniform(0.8, 1.8), roof + c.uniform(3.5, 5)
    for place in (-8, -4, 0, 4, 8):
        c.add(box(c.x, c.y, place - width, place + width, roof + 1.5, sill), pane)
    wheels(c, floor, c.uniform(-8, -5), c.uniform(5, 8))


def boat(c):
    deck, keel = c.uniform(1, 4), c.uniform(6, 8.5)
    slant = (c.y - deck) * c.uniform(0.3, 0.9)
    bow, stern = c.uniform(8, 11.5), c.uniform(-11, -7)
    mast, peak = c.normal(-0.5, 1.2), c.uniform(-12, -8)
    c.add(box(c.x, c.y, mast - 0.5, mast + 0.5, peak, deck), c.color())
    reach = (c.y - peak) * c.uniform(0.35, 0.7)
    sail = largest(mast + 0.5 - c.x, c.x - mast - 0.5 - reach, c.y - deck + c.uniform(1, 2))
    c.body(sail)
    jib = largest(mast - 0.5 - reach * c.uniform(0.5, 0.9) - c.x, c.x - mast + 0.8, c.y - deck + 2)
    c.add(jib + 9.0 * ~c.chance(0.5), c.color())
    c.body(largest(deck - c.y, c.y - keel, stern + slant / 2 - c.x, c.x - bow + slant))


def plane(c):
    radius, nose, tail = c.uniform(1.5, 2.7), c.uniform(9, 12), c.uniform(-11.5, -9)
    color, fin = c.color(), c.uniform(5, 8)
    rear = largest(tail - c.x, c.x - tail - 4 - c.y * 0.5, -c.y - fin, c.y)
    c.add(rear, color)
    c.body(stroke(c.x, c.y, (nose - 3, c.normal(0, 0.4)), (tail, 0 * nose), radius, radius * 0.5))
    root, tip = c.normal(1, 1), c.uniform(-6, -2)
    drop = c.uniform(4.5, 8)
    zero = 0 * root
    wing = stroke(c.x, c.y, (root, 0.5 + zero), (tip, drop), c.uniform(1.5, 2.3), 0.6 + zero)
    far = stroke(c.x, c.y, (root + 1, -0.5 + zero), (tip + 2, -0.7 * drop), 1.2 + zero, 0.5)
    c.add(far, color * 0.8)
    c.add(wing, color)


def bird(c):
    length, height = c.uniform(5, 7.5), c.uniform(3, 4.6)
    color, leg = c.color(), c.color() * 0.5
    for place in (-0.8, 1.6):
        c.add(stroke(c.x, c.y, (place + 0 * length, height), (place + 1, height + 4), 0.45), leg)
    tip = (-length - 4, c.uniform(-3, 2))
    c.add(stroke(c.x, c.y, (-length, 0 * length), tip, 1.4, 0.8 + 0 * leg[:, 0]), color)
    body = ellipse(c.x, c.y, (0, 0), (length, height))
    head = (length - c.uniform(0, 1), -height + c.uniform(-1.5, 0.5))
    size = c.uniform(2, 3)
    tip = (head[0] + size + c.uniform(1.5, 4), head[1] + 0.5)
    c.add(stroke(c.x, c.y, head, tip, 1.2, 0.3 + 0 * size), c.color())
    c.body(torch.minimum(body, ellipse(c.x, c.y, head, (size, size))))
    c.add(ellipse(c.x, c.y, (-1, 0.2), (length * 0.6, height * 0.5)), color)
    c.add(ellipse(c.x, c.y, (head[0] + 0.7, head[1] - 0.5), (0.7, 0.7)), torch.tensor(0.05))


def fish(c):
    length, height = c.uniform(6.5, 9.5), c.uniform(3, 5.5)
    color, spread = c.color(), c.uniform(0.5, 1.1)
    root = c.x + length - 2
    tail = largest(root, -length - c.uniform(3, 5) - c.x, c.y.abs() - 1 + root * spread)
    c.add(tail, color)
    fin = largest(-c.x - 3, c.x - 2.5 - c.y * 0.3, -c.y - height - c.uniform(1, 3), c.y)
    c.add(fin, color)
    c.body(ellipse(c.x, c.y, (0, 0), (length, height)))
    c.add(ellipse(c.x, c.y, (length * 0.6, -height * 0.25), (0.9, 0.9)), torch.tensor(0.05))
    gill = (c.x - length * 0.3 - c.normal(0, 0.3)).abs() - 0.4 + c.y.square() * 0.04
    c.add(gill, color * 0.6, c.chance(0.5) * 1.0)


def house(c):
    half, eaves, floor = c.uniform(6, 9), c.uniform(-2.5, 0.5), c.uniform(7, 9.5)
    ridge, chimney = c.uniform(-10, -6.5), c.uniform(2, 4)
    c.add(box(c.x, c.y, chimney, chimney + 1.8, ridge - 0.5, eaves), c.color())
    c.body(box(c.x, c.y, -half, half, eaves, floor))
    slant = (half + 1.5) / (eaves - ridge)
    c.body(largest(c.x.abs() - (c.y - ridge) * slant, c.y - eaves))
    door, window = c.uniform(-5, -1), c.uniform(1.5, 4)
    c.add(box(c.x, c.y, door, door + 2.6, floor - c.uniform(4, 5.5), floor), c.color())
    c.add(box(c.x, c.y, window, window + 2.4, eaves + 2, eaves + 4.6), c.color())


def mug(c):
    half, top, floor = c.uniform(4.5, 6.5), c.uniform(-7, -4.5), c.uniform(5.5, 8)
    color = c.color()
    middle = (half + 0.5, (top + floor) / 2 + c.normal(0, 0.5))
    size = (c.uniform(2.6, 4), c.uniform(3, 4.5))
    ring = ellipse(c.x, c.y, middle, size).abs() - c.uniform(0.6, 1.1)
    c.add(ring, color)
    taper = (c.y - top) * c.normal(0.03, 0.05)
    c.body(largest(c.x.abs() - half + taper, top - c.y, c.y - floor))
    c.add(ellipse(c.x, c.y, (0, top), (half - 0.5, 1.2)), c.color() * 0.6)
    band = c.normal(1, 1.5)
    c.add(largest((c.y - band).abs() - 1, c.x.abs() - half + 0.3), c.color(), c.chance(0.4) * 1.0)


def teapot(c):
    wide, high = c.uniform(5, 7), c.uniform(4, 6)
    color = c.color()
    mouth = (wide + c.uniform(2.5, 4.5), c.uniform(-5, -2.5))
    c.add(stroke(c.x, c.y, (wide - 1.5, 2.0 + 0 * wide), mouth, 1.8, 0.8 + 0 * wide), color)
    size = (c.uniform(2.6, 4), c.uniform(2.8, 4.2))
    ring = ellipse(c.x, c.y, (-wide - 0.5, c.normal(0.3, 0.5)), size).abs() - c.uniform(0.6, 1.0)
    c.add(ring, color)
    c.add(ellipse(c.x, c.y, (0, -high - 0.8), (1.3, 1.3)), c.color())
    c.body(ellipse(c.x, c.y, (0, 0.5), (wide, high)))
    c.add(box(c.x, c.y, -wide * 0.6, wide * 0.6, high - 0.4, high + 1.2), color)
    c.add(largest((c.y + high * 0.6).abs() - 0.4, c.x.abs() - wide * 0.75), color * 0.5)


OBJECTS = (car, truck, bus, boat, plane, bird, fish, house, mug, teapot)
CLASSES = tuple(function.__name__ for function in OBJECTS)


def _images(function, n, generator):
    canvas = ObjectBrush(n, generator)
    function(canvas)
    return canvas.lit()


def draw(num_images, seed):
    """Draw a data set of synthetic objects in colour."""
    return drawing.draw_classes(OBJECTS, _images, SHAPE, num_images, seed)
