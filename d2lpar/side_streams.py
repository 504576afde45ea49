"""Sending from one device to another on side streams, while both go on computing.

A device has one link: its messages leave one after the other, and arrive one after the other.
"""

import functools
from typing import NamedTuple

import torch


class Message(NamedTuple):
    """A tensor on its way: its source, the copy, and an event, or None, at the end of the copy."""

    source: torch.device
    tensor: torch.Tensor
    arrival: object


def send(tensor, into):
    """Copy a tensor to another device, behind the work that both have so far; return a `Message`.

    The copy runs on side streams of the two devices, so that neither device's own stream waits for
    the link; `receive` makes the target's wait. Between tensors of one device, and to or from the
    CPU, it is a plain copy.

    Args:
        tensor: the tensor to send. It may be freed at once; before you write to it, see `let_go`.
        into: a tensor of the same shape, on any device; it is written to.
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
    """Make the current stream of the target wait for a message; return its tensor."""
    _wait(message.tensor.device, message.arrival)
    return message.tensor


def let_go(message):
    """Make the current stream of the source wait until a message has left."""
    _wait(message.source, message.arrival)


def _wait(device, event):
    if event is not None:
        torch.get_device_module(device).current_stream(device).wait_event(event)


@functools.cache
def _stream(device, direction):
    """Return the one stream for all messages out of a device, or into it, to keep them in order."""
    return torch.get_device_module(device).Stream(device)
