"""Devices: what one consists of, and how a process gets them.

device         a device: engines, streams, memory, random numbers, errors
device_setup   virtual_gpus: creates and configures devices
backend        registers the device type with torch
"""
