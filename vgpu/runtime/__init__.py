"""Streams, engines, the scheduler and the clocks.

threads      current device and current streams of a thread
registry     all devices of this process
identity     name, compute capability and properties of a device
streams      queues of ops
engines      threads that run ops
scheduler    ops, their dependencies and queues, waiting, recordings; the wall clock
spans        Span, the item of a recording
clocks       functions that read or advance the current clock, for programs
interrupts   where Python raises KeyboardInterrupt, and how to delay it
notebook     integration into Jupyter kernels
"""
