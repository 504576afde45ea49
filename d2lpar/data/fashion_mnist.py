"""Load Fashion-MNIST, or its synthetic stand-in (see `sources`), in batches."""

import warnings

import torch

from d2lpar.data import synthetic_garments
from d2lpar.data.batches import BatchLoader, ImageDataset
from d2lpar.data.sources import Source
from d2lpar.devices import num_gpus

CLASSES = tuple(
    "t-shirt, trouser, pullover, dress, coat, sandal, shirt, sneaker, bag, ankle boot".split(", ")
)
FILES = {  # MD5 of the uncompressed files, in the order of reading
    "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
    "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
    "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
    "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
}
MIRROR = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"


def _tensor(content):
    """Return the tensor in an IDX file (http://yann.lecun.com/exdb/mnist/)."""
    ndim = content[3]
    shape = [int.from_bytes(content[4 + 4 * i : 8 + 4 * i], "big") for i in range(ndim)]
    tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=4 + 4 * ndim)
    tensor = tensor.view(shape)
    return tensor.unsqueeze(1) if ndim == 3 else tensor  # images: (n, 1, 28, 28)


SOURCE = Source(
    name="Fashion-MNIST",
    dataset="FashionMNIST",
    files=FILES,
    layouts=("FashionMNIST/raw", "raw", "."),  # torchvision's folder first
    probe=f"{MIRROR}t10k-labels-idx1-ubyte.gz",
    parse=lambda contents: tuple(_tensor(content) for content in contents),
    stand_in=synthetic_garments,
    sizes=(60_000, 10_000),
)


def load_data_fashion_mnist(batch_size, resize=None, *, pin_memory=False):
    """Return training and test batches of Fashion-MNIST, or of its synthetic stand-in.

    The environment variable D2LPAR_DATA=synthetic selects the stand-in.

    Args:
        batch_size: images per batch.
        resize: side or (height, width), in pixels, to which images are scaled.
        pin_memory: whether batches are in page-locked memory, for non-blocking copies.

    Returns:
        (train_iter, test_iter): iterables of batches X, (batch_size, 1, height, width) float32 in
        [0, 1], and y, (batch_size,) int64. `train_iter.dataset.name` names the data set.

    Raises:
        FileNotFoundError: D2LPAR_DATA is a folder without the files of Fashion-MNIST.
        ValueError: a file in that folder is damaged.
    """
    name, tensors = SOURCE.load()
    if pin_memory and not num_gpus():
        warnings.warn("no device to pin memory for: the batches are pageable", stacklevel=2)
        pin_memory = False
    iters = []
    for images, labels, shuffle in ((*tensors[:2], True), (*tensors[2:], False)):
        dataset = ImageDataset(images, labels, name, CLASSES, resize)
        iters.append(BatchLoader(dataset, batch_size, shuffle, pin_memory))
    return tuple(iters)
