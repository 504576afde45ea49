"""When work runs: devices, streams, engines and the scheduler.

threads        the device and the streams that a thread has chosen
device         a device: engines, streams, random numbers, errors; registry: all of them
device_setup   virtual_gpus: how many devices, and their figures
identity       what a device says that it is: name, compute capability, properties
streams        the queues that ops are issued to
engines        the threads that run ops
scheduler      when an op runs, and what waits for what
clocks         the clock in force, as a program sees it
interrupts     where Ctrl-C can strike, and holding it back
notebook       what a Jupyter kernel needs
backend        makes all of it known to torch
"""
