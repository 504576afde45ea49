"""Devices, streams, engines and the scheduler.

threads        current device and current streams of a thread
device         a device: engines, streams, random numbers, errors
registry       all devices of this process
device_setup   virtual_gpus: creates and configures devices
identity       name, compute capability and properties of a device
streams        queues of ops
engines        threads that run ops
scheduler      dependencies of ops, waiting, recordings
clocks         the current clock, for programs
interrupts     where Python raises KeyboardInterrupt, and how to delay it
notebook       integration into Jupyter kernels
backend        registers the device type with torch
"""
