"""Import this module before torchvision: it makes torchvision work with a CPU build of torch."""

from d2lpar.data.batches import ImageDataset
from d2lpar.torchvision_import import import_torchvision

__all__ = ["ImageDataset"]

import_torchvision()
