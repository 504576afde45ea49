"""Send tensors between devices on side streams, while both devices keep computing.

A device has one link: its messages leave one after another, and arrive one after another.
"""

import functools
from typing import NamedTuple

import torch


class Message(NamedTuple):
    """A tensor in transit: source device, copy on the target, event at the end of the copy."""

    source: torch.device
    tensor: torch.Tensor
    arrival: object


def send(tensor, into):
    """Copy a tensor to another device on side streams; return a `Message`.

    The copy starts after the work launched so far on both devices, and neither current stream
    waits for it until `receive`. On one device, or to or from the CPU, it is a plain copy.

    Args:
        tensor: the tensor to send; it may be freed at once, but not written to before
            `wait_until_sent`.
        into: the target, a tensor of the same shape on any device.
    """
    source, target = tensor.device, into.device
    if source == target or "cpu" in (source.type, target.type):
        into.copy_(tensor)
        return Message(source, into, None)
    accel = torch.get_device_module(source)
    sending, receiving = _stream(source, "out"), _stream(target, "in")
    sending.wait_stream(accel.current_stream(source))
    receiving.wait_stream(accel.current_stream(target))
    with accel.stream(sending), accel.stream(receiving):
        into.copy_(tensor, non_blocking=True)
        arrival = receiving.record_event()
    tensor.record_stream(sending)
    into.record_stream(receiving)
    return Message(source, into, arrival)


def receive(message):
    """Make the current stream of the target wait for the message; return the received tensor."""
    _wait(message.tensor.device, message.arrival)
    return message.tensor


def wait_until_sent(message):
    """Make the current stream of the source wait until the message has been sent."""
    _wait(message.source, message.arrival)


def _wait(device, event):
    if event is not None:
        torch.get_device_module(device).current_stream(device).wait_event(event)


@functools.cache
def _stream(device, direction):
    """Return the device's one stream for all outgoing or incoming messages: it keeps the order."""
    return torch.get_device_module(device).Stream(device)
