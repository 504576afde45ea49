"""Modelled GPUs: a simulated clock, and the duration of kernels, copies and host work.

simulation      discrete-event simulation of ops: its engines, and the clocks of host threads
model           the model of a device: a GPU in a machine, and its shared links
hardware        machines, and models by name
modelled_gpu    a GPU by its data sheet, and the duration of a kernel
datasheets      published figures of GPUs
kernels         bytes and matrix products of a kernel
products        matrix products of an operator
convolutions    cuDNN's algorithms for convolutions, as matrix products
links           bandwidth and latency of links: nominal and measured
host            host time of operators and modules
program_clock   simulated time for `time.time` and similar functions, under `vgpu run`
"""
