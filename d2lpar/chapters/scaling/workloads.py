"""Chapter 11: AlexNet, and plain threads as a baseline for devices that share cores."""

from concurrent.futures import ThreadPoolExecutor

from torch import nn

from vgpu import set_thread_count


def alexnet(num_classes=10, in_channels=1):
    """Build AlexNet in the form of d2l 8.1 (Krizhevsky, Sutskever and Hinton 2012).

    It maps images (N, in_channels, 224, 224) to logits (N, num_classes).
    """
    layers = []
    for num_channels, kernel_size, stride, padding, pool in (
        (96, 11, 4, 1, True),  # (N, 96, 26, 26) after pooling
        (256, 5, 1, 2, True),  # (N, 256, 12, 12)
        (384, 3, 1, 1, False),
        (384, 3, 1, 1, False),
        (256, 3, 1, 1, True),  # (N, 256, 5, 5)
    ):
        layers += [nn.Conv2d(in_channels, num_channels, kernel_size, stride, padding), nn.ReLU()]
        layers += [nn.MaxPool2d(kernel_size=3, stride=2)] if pool else []
        in_channels = num_channels
    layers.append(nn.Flatten())  # (N, 6400)
    for num_inputs in (6400, 4096):
        layers += [nn.Linear(num_inputs, 4096), nn.ReLU(), nn.Dropout()]
    return nn.Sequential(*layers, nn.Linear(4096, num_classes))


def in_plain_threads(*works):
    """Call each function in its own thread, on one core, and wait for all.

    This is the baseline for virtual GPUs: the speed-up of plain threads on the same cores.

    Args:
        *works: functions without arguments that compute on the CPU.

    Raises:
        The exception of the first of `works` that fails.
    """

    def call(work):
        set_thread_count(1)
        work()

    with ThreadPoolExecutor(len(works)) as pool:
        for done in [pool.submit(call, work) for work in works]:
            done.result()
