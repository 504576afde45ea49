"""Import this module before torchvision: it makes torchvision work with a CPU build of torch."""

from d2lpar._d2l import import_torchvision
from d2lpar.data.batches import ImageDataset

__all__ = ["ImageDataset"]

import_torchvision()
