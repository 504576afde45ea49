"""Drawing synthetic images: random numbers, signed distances, and data sets of all classes.

All functions take and return tensors that broadcast to (n, height, width), for n images at once.
A signed distance is negative inside a shape and positive outside, in pixels.
"""

from concurrent.futures import ThreadPoolExecutor

import torch

CHUNK = 300  # images drawn at once: their pixels fit into a core's cache
ORDER = 0x6A72  # added to the seed, to draw the order of the images


class Brush:
    """The random numbers for n square images of `side` pixels."""

    def __init__(self, n, generator, side):
        self.n, self.generator, self.side = n, generator, side

    def uniform(self, low, high):
        """Return n numbers between two bounds, (n, 1, 1)."""
        return low + (high - low) * torch.rand(self.n, 1, 1, generator=self.generator, device="cpu")

    def normal(self, mean, std):
        """Return n normally distributed numbers, (n, 1, 1)."""
        return mean + std * torch.randn(self.n, 1, 1, generator=self.generator, device="cpu")

    def chance(self, probability):
        """Return n booleans that are True with a probability, (n, 1, 1)."""
        return torch.rand(self.n, 1, 1, generator=self.generator, device="cpu") < probability

    def noise(self, knots=None):
        """Return normal noise on the pixels, or on knots x knots points, enlarged linearly."""
        knots = knots or self.side
        grid = torch.randn(self.n, knots, knots, generator=self.generator, device="cpu")
        if knots == self.side:
            return grid
        at = torch.linspace(0, knots - 1, self.side, device="cpu").view(self.side, 1)
        weight = (1 - (at - torch.arange(knots, device="cpu")).abs()).clamp(min=0)  # (side, knots)
        return weight @ grid @ weight.T


def pixels(side):
    """Return the coordinates of the pixels from the middle: x (1, 1, side) and y (1, side, 1)."""
    at = torch.arange(side, dtype=torch.float32, device="cpu") - (side - 1) / 2
    return at.view(1, 1, side), at.view(1, side, 1)


def knots(t, *points):
    """Return the piecewise linear function through points (position, value), constant outside."""
    (t0, value), *rest = points
    total = torch.as_tensor(value, dtype=torch.float32)
    for t1, v1 in rest:
        width = torch.as_tensor(t1 - t0, dtype=torch.float32).clamp(min=1e-3)
        total = total + (v1 - value) * ((t - t0) / width).clamp(0, 1)
        t0, value = t1, v1
    return total


def stroke(x, y, start, end, radius, end_radius=None):
    """Return the signed distance to a stroke from start to end, each a pair (x, y)."""
    (x0, y0), (x1, y1) = start, end
    dx, dy = x1 - x0, y1 - y0
    length = (dx * dx + dy * dy).sqrt().clamp(min=1e-3)
    dx, dy = dx / length, dy / length
    along = x * dx + (y * dy - x0 * dx - y0 * dy)
    beside = x * dy - (y * dx + x0 * dy - y0 * dx)
    inside = along.clamp(min=0).clamp_(max=length)
    distance = along.sub_(inside).square_().add_(beside.square_()).sqrt_()
    if end_radius is not None:
        distance.sub_(inside.mul_((end_radius - radius) / length))
    return distance.sub_(radius)


def largest(*distances):
    """Return the intersection of shapes given by signed distances."""
    result = distances[0]
    for distance in distances[1:]:
        result = torch.maximum(result, distance)
    return result


def cover(distance):
    """Return how much of each pixel a shape covers, in [0, 1], from its signed distance."""
    return (0.5 - distance).clamp_(0, 1)


def paint(tone, mask, value):
    """Blend a value into a tone, as far as a mask in [0, 1] says."""
    return torch.lerp(tone, value, mask.to(tone.dtype))


def mixed(b, *parts):
    """Return n numbers, each from one of several (probability, low, high) ranges, (n, 1, 1)."""
    draw, value, total = b.uniform(0, 1), None, 0.0
    for probability, low, high in parts:
        sample = b.uniform(low, high)
        value = sample if value is None else torch.where(draw < total, value, sample)
        total += probability
    return value


def draw_classes(drawings, shape, num_images, seed):
    """Draw a balanced, shuffled data set.

    Args:
        drawings: for each class a function from n and a generator to n images in [0, 1].
        shape: the shape of one image, (channels, height, width).
        num_images: a multiple of the number of classes.
        seed: seeds the random numbers. The same seed draws the same images, on any number of cores.

    Returns:
        Images (num_images, *shape) and labels (num_images,), both uint8.

    Raises:
        ValueError: the images do not divide into the classes.
    """
    each, rest = divmod(num_images, len(drawings))
    if rest or not each:
        raise ValueError(f"{num_images} images do not divide into {len(drawings)} classes")
    images = torch.empty(num_images, *shape, dtype=torch.uint8, device="cpu")
    labels = torch.empty(num_images, dtype=torch.uint8, device="cpu")
    # Not seeded with `seed` itself: whoever shuffles after manual_seed(seed) would draw the same
    # permutation again, and so sort the images by class.
    order = torch.randperm(num_images, generator=_generator(seed + ORDER), device="cpu")

    def draw_chunk(number, label, rows):
        drawn = drawings[label](len(rows), _generator(seed + 1000 * number))
        images[rows] = (drawn * 255).to(torch.uint8).view(-1, *shape)
        labels[rows] = label

    chunks = [
        (label, rows)
        for label, all_rows in enumerate(order.split(each))
        for rows in all_rows.split(CHUNK)
    ]
    # Threads of one core each: small operators are slow when several cores share them.
    num_threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(num_threads, initializer=lambda: torch.set_num_threads(1)) as pool:
            for done in [pool.submit(draw_chunk, i, *c) for i, c in enumerate(chunks, start=1)]:
                done.result()
    finally:
        torch.set_num_threads(num_threads)
    return images, labels


def _generator(seed):
    return torch.Generator("cpu").manual_seed(seed)
