"""Load batches from memory, and split them over devices."""

import torch


class ImageDataset(torch.utils.data.Dataset):
    """Images and labels in memory.

    Args:
        images: (n, channels, height, width), uint8.
        labels: (n,).
        name: the name of the data set.
        classes: the names of the classes, in the order of the labels.
        resize: side or (height, width), in pixels, to which images are scaled when read.
        transform: a function of a PIL image, as in torchvision, applied by indexing but not by
            `batch`.
    """

    def __init__(self, images, labels, name="", classes=(), resize=None, transform=None):
        self.images, self.labels = images, labels.to(torch.int64)
        self.name, self.classes, self.transform = name, classes, transform
        self.resize = (resize, resize) if isinstance(resize, int) else resize

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        if self.transform:
            from PIL import Image  # installed with matplotlib; ranks do not need it

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
    """Iterate over batches (X, y) of a data set, without worker processes.

    Args:
        dataset: an `ImageDataset`.
        batch_size: examples per batch; the last batch may have fewer.
        shuffle: whether to shuffle in every epoch; seed with `torch.manual_seed`.
        pin_memory: whether batches are in page-locked memory.

    Raises:
        ValueError: the batch size is not positive.
    """

    def __init__(self, dataset, batch_size, shuffle=False, pin_memory=False):
        if batch_size < 1:
            raise ValueError(f"batch_size must be positive: got {batch_size}")
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
        devices: a list of k devices or GPU indices.

    Returns:
        The k parts of X and the k parts of y on the devices, two tuples of tensors.

    Raises:
        ValueError: X and y differ in length, or there are no devices or fewer items than devices.
    """
    check_batch(X, y)
    if len(X) < len(devices) or not devices:
        raise ValueError(
            f"a batch of {len(X)} must be split over 1 to {len(X)} devices: got {len(devices)}"
        )
    return _scatter(X, devices), _scatter(y, devices)


def check_batch(X, y):
    """Raise ValueError if X and y differ in length."""
    if len(X) != len(y):
        raise ValueError(f"X and y must have the same length: got {len(X)} and {len(y)}")


def _scatter(tensor, devices):
    parts = tensor.tensor_split(len(devices))
    # Copies to the host block: otherwise the data could be read before it arrives.
    return tuple(
        part.to(device, non_blocking=not str(device).startswith("cpu"))
        for part, device in zip(parts, devices, strict=True)
    )
