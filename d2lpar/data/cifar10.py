"""Load CIFAR-10, or its synthetic stand-in (see `sources`)."""

import pickle

import torch

from d2lpar.data import synthetic_objects
from d2lpar.data.batches import ImageDataset
from d2lpar.data.sources import Source

CLASSES = tuple("airplane automobile bird cat deer dog frog horse ship truck".split())
FILES = {  # MD5 of the files, in the order of reading
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}


def _parse(contents):
    """Return the four tensors in the verified contents of the files."""
    images, labels = [], []
    for content in contents:
        batch = pickle.loads(content, encoding="latin1")
        images.append(torch.from_numpy(batch["data"]).view(-1, 3, 32, 32))
        labels.append(torch.tensor(batch["labels"]))
    return torch.cat(images[:-1]), torch.cat(labels[:-1]), images[-1], labels[-1]


SOURCE = Source(
    name="CIFAR-10",
    dataset="CIFAR10",
    files=FILES,
    layouts=("cifar-10-batches-py", "."),
    probe="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
    parse=_parse,
    stand_in=synthetic_objects,
    sizes=(10_000, 2_000),
)


def load_cifar10():
    """Return training and test images of CIFAR-10, or of its synthetic stand-in.

    The environment variable D2LPAR_DATA=synthetic selects the stand-in.

    Returns:
        Two `ImageDataset`s of 3x32x32 images in ten classes, with `name` and `classes`.

    Raises:
        FileNotFoundError: D2LPAR_DATA is a folder without the files of CIFAR-10.
        ValueError: a file in that folder is damaged.
    """
    name, tensors = SOURCE.load()
    classes = CLASSES if name == SOURCE.name else synthetic_objects.CLASSES
    return tuple(ImageDataset(*pair, name, classes) for pair in (tensors[:2], tensors[2:]))
