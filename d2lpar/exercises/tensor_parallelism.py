"""Reference solutions for exercise notebook 10."""

import itertools

import torch
from torch.nn import functional as F

from d2lpar.chapters.tensor_parallelism import copied, summed
from d2lpar.exercises.marks import reference
from d2lpar.timelines.timeline import Timeline
from vgpu import GPU, as_machine, virtual_gpus


@reference
def by_hand(name):
    """Return the lists that device 0 and device 1 compute."""
    x = torch.tensor([1.0, 10, 100, 1000])
    W = torch.tensor([[1.0, 0, 2, 1], [3, 1, 0, 2], [0, 2, 1, 1], [1, 1, 1, 0]])
    pairs = zip(W.chunk(2, 1), x.chunk(2), strict=True)
    results = {
        "output_part": [rows @ x for rows in W.chunk(2)],
        "input_term": [columns @ part for columns, part in pairs],
        "gradient_term": [rows.sum(0) for rows in W.chunk(2)],
    }
    return [result.tolist() for result in results[name]]


@reference
def row_names(num_heads, size, by_head):
    """Return names of rows such as Q0.1, sorted by head or by kind."""
    places = itertools.product(range(3), range(num_heads), range(size))
    order = sorted(places, key=lambda place: place[1]) if by_head else places
    return [f"{'QKV'[kind]}{head}" + f".{row}" * (size > 1) for kind, head, row in order]


@reference
def fewest_channels(kernel, flops, bandwidth, itemsize):
    """Return the least number of channels that pays off on 2 and on 8 devices, by brute force."""

    def seconds(k, c):  # per pixel
        ring = 2 * (k - 1) * itemsize * c / (k * bandwidth)
        return 12 * c * c * kernel**2 / (k * flops) + 2 * ring

    return next(c for c in itertools.count(1) if all(seconds(1, c) > seconds(k, c) for k in (2, 8)))


class _Products(GPU):
    """A GPU whose convolutions take the time of matrix products, without Winograd."""

    def kernel_seconds(self, kernel):
        products = kernel.products and [each._replace(alternatives=()) for each in kernel.products]
        name = kernel.name.replace("convolution", "product")
        return super().kernel_seconds(kernel._replace(products=products, name=name))


@reference
def channels_that_pay(link):
    """Return the numbers of channels faster on four modelled V100s, which replace the devices."""
    seconds = {}
    gpu = _Products(**vars(as_machine("v100").gpu))
    for k, c in itertools.product((1, 4), (32, 64, 128, 256)):
        devices = virtual_gpus(k, model=gpu, values=False, peer_link=link, host=0.0)
        shapes = (64, c, 28, 28), (c // k, c, 3, 3), (c, c // k, 3, 3)
        parts, Us, Vs = (
            [torch.zeros(shape, device=device, requires_grad=True) for device in devices]
            for shape in shapes
        )
        with Timeline() as timeline:
            H = [F.relu(F.conv2d(*each, padding=1)) for each in zip(copied(parts), Us, strict=True)]
            terms = [F.conv2d(*each, padding=1) for each in zip(H, Vs, strict=True)]
            torch.autograd.backward([Y.sum() for Y in summed(terms)])
        seconds[k, c] = timeline.seconds
    return [c for c in (32, 64, 128, 256) if seconds[4, c] < seconds[1, c]]
