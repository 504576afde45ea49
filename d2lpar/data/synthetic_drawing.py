"""Draw synthetic images from random numbers and signed distances.

All functions take and return tensors that broadcast to (n, height, width), for n images at once.
A signed distance, in pixels, is negative inside a shape and positive outside.
"""

import functools
from concurrent.futures import ThreadPoolExecutor

import torch

CHUNK = 300  # images drawn at once: they fit into a core's cache
ORDER = 0x6A72  # offset of the seed that shuffles the images


class Brush:
    """Random numbers for n square images of `side` pixels, (n, 1, 1) where nothing else is said."""

    def __init__(self, n, generator, side):
        self.n, self.side = n, side
        self.rand, self.randn = (
            functools.partial(draw, generator=generator, device="cpu")
            for draw in (torch.rand, torch.randn)
        )

    def uniform(self, low, high):
        return low + (high - low) * self.rand(self.n, 1, 1)

    def normal(self, mean, std):
        return mean + std * self.randn(self.n, 1, 1)

    def chance(self, probability):
        """Return booleans that are True with a probability."""
        return self.rand(self.n, 1, 1) < probability

    def mixed(self, *parts):
        """Return numbers, each from one of several ranges (probability, low, high)."""
        draw, value, total = self.uniform(0, 1), None, 0.0
        for probability, low, high in parts:
            sample = self.uniform(low, high)
            value = sample if value is None else torch.where(draw < total, value, sample)
            total += probability
        return value

    def noise(self, knots=None):
        """Return normal noise per pixel, or on a grid of knots x knots, interpolated linearly."""
        knots = knots or self.side
        grid = self.randn(self.n, knots, knots)
        if knots == self.side:
            return grid
        at = torch.linspace(0, knots - 1, self.side, device="cpu").view(self.side, 1)
        weight = (1 - (at - torch.arange(knots, device="cpu")).abs()).clamp(min=0)  # (side, knots)
        return weight @ grid @ weight.T


def pixels(side):
    """Return coordinates of pixels, 0 in the middle: x (1, 1, side) and y (1, side, 1)."""
    at = torch.arange(side, dtype=torch.float32, device="cpu") - (side - 1) / 2
    return at.view(1, 1, side), at.view(1, side, 1)


def knots(t, *points):
    """Interpolate linearly between points (position, value) at `t`; constant outside."""
    (t0, value), *rest = points
    total = torch.as_tensor(value, dtype=torch.float32)
    for t1, v1 in rest:
        width = torch.as_tensor(t1 - t0, dtype=torch.float32).clamp(min=1e-3)
        total = total + (v1 - value) * ((t - t0) / width).clamp(0, 1)
        t0, value = t1, v1
    return total


def stroke(x, y, start, end, radius, end_radius=None):
    """Return the signed distance to a thick line from `start` to `end`, pairs (x, y)."""
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
    """Return the signed distance to the intersection of shapes."""
    return functools.reduce(torch.maximum, distances)


def cover(distance):
    """Return the fraction of each pixel, 0 to 1, that a shape covers, from its signed distance."""
    return (0.5 - distance).clamp_(0, 1)


def paint(tone, mask, value):
    """Blend from `tone` (mask 0) to `value` (mask 1)."""
    return torch.lerp(tone, value, mask.to(tone.dtype))


def draw_classes(classes, draw, shape, num_images, seed):
    """Draw a balanced, shuffled data set.

    Args:
        classes: a list; its order is that of the labels.
        draw: a function of a class, n and a generator that returns n images in [0, 1].
        shape: (channels, height, width).
        num_images: a multiple of the number of classes.
        seed: seeds the random numbers; the images do not depend on the number of cores.

    Returns:
        Images (num_images, *shape) and labels (num_images,), both uint8.
    """
    each, rest = divmod(num_images, len(classes))
    if rest or not each:
        raise ValueError(f"num_images must be a multiple of {len(classes)}: got {num_images}")
    images = torch.empty(num_images, *shape, dtype=torch.uint8, device="cpu")
    labels = torch.empty(num_images, dtype=torch.uint8, device="cpu")
    # ORDER: a reader's randperm after manual_seed(seed) would undo this permutation.
    order = torch.randperm(num_images, generator=_generator(seed + ORDER), device="cpu")

    def draw_chunk(number, label, rows):
        drawn = draw(classes[label], len(rows), _generator(seed + 1000 * number))
        images[rows] = (drawn * 255).to(torch.uint8).view(-1, *shape)
        labels[rows] = label

    chunks = [
        (label, rows)
        for label, all_rows in enumerate(order.split(each))
        for rows in all_rows.split(CHUNK)
    ]
    # One core per thread: small operators are slow on several cores.
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
