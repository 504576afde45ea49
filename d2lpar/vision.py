"""Importing this module makes torchvision importable, beside a CPU build of torch too."""

from d2lpar._d2l import import_torchvision

import_torchvision()
