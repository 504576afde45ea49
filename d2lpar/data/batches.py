"""Batches of a data set in memory, and how they are split over devices."""

import torch


class ImageDataset(torch.utils.data.Dataset):
    """Images and labels in memory.

    Args:
        images: (n, channels, height, width), uint8.
        labels: (n,).
        name: the name of the data set, for the titles of figures.
        classes: the names of the classes, in the order of the labels.
        resize: side, or height and width, that images are scaled to when they are read.
        transform: a function of a PIL image, as torchvision's data sets have it; an example is
            then what it returns, and its label. `batch` does not call it.
    """

    def __init__(self, images, labels, name="", classes=(), resize=None, transform=None):
        self.images, self.labels = images, labels.to(torch.int64)
        self.name, self.classes, self.transform = name, classes, transform
        self.resize = (resize, resize) if isinstance(resize, int) else resize

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        if self.transform:
            from PIL import Image  # as matplotlib brings it, which no rank needs

            pixels = self.images[index].permute(1, 2, 0).squeeze(2).numpy()
            return self.transform(Image.fromarray(pixels)), int(self.labels[index])
        X, y = self.batch([index])
        return X[0], int(y[0])

    def batch(self, indices):
        """Return images (n, channels, height, width), float32 in [0, 1], and labels (n,), int64."""
        indices = torch.as_tensor(indices, device="cpu")
        X = self.images[indices].to(torch.float32).div_(255)
        if self.resize:
            X = torch.nn.functional.interpolate(X, self.resize, mode="bilinear", antialias=True)
        return X, self.labels[indices]


class BatchLoader:
    """Batches of a data set, (X, y), without a worker process.

    Args:
        dataset: an `ImageDataset`.
        batch_size: examples in a batch; the last one may have fewer.
        shuffle: whether every epoch has a new order, which `torch.manual_seed` makes reproducible.
        pin_memory: whether batches lie in page-locked memory.

    Raises:
        ValueError: the batch size is not positive.
    """

    def __init__(self, dataset, batch_size, shuffle=False, pin_memory=False):
        if batch_size < 1:
            raise ValueError(f"batch size of {batch_size} is not positive")
        self.dataset, self.batch_size = dataset, batch_size
        self.shuffle, self.pin_memory = shuffle, pin_memory

    def __len__(self):
        return -(-len(self.dataset) // self.batch_size)

    def __iter__(self):
        n = len(self.dataset)
        order = torch.randperm(n, device="cpu") if self.shuffle else torch.arange(n, device="cpu")
        for indices in order.split(self.batch_size):
            X, y = self.dataset.batch(indices)
            yield (X.pin_memory(), y.pin_memory()) if self.pin_memory else (X, y)


def split_batch(X, y, devices):
    """Split a batch over devices, into parts whose sizes differ by at most one.

    Args:
        X, y: a batch, (b, ...) and (b, ...), on any device.
        devices: k devices, or numbers of GPUs.

    Returns:
        The k parts of X and the k parts of y, as tuples of tensors on the devices.

    Raises:
        ValueError: X and y differ in length, or the batch has fewer items than devices.
    """
    check_batch(X, y)
    if len(X) < len(devices) or not devices:
        raise ValueError(f"batch of {len(X)} does not split over {len(devices)} devices")
    return _scatter(X, devices), _scatter(y, devices)


def check_batch(X, y):
    """Raise ValueError when X and y differ in length."""
    if len(X) != len(y):
        raise ValueError(f"X has {len(X)} items and y has {len(y)}")


def _scatter(tensor, devices):
    parts = tensor.tensor_split(len(devices))
    # A copy to the host that does not block would be read before it has arrived.
    return tuple(
        part.to(device, non_blocking=not str(device).startswith("cpu"))
        for part, device in zip(parts, devices, strict=True)
    )
