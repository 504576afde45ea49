"""GPUs that are modelled: a simulated clock, and what a kernel, a copy and the host take.

simulation        when ops run, and the clock of the host
model             the model of a device: a GPU in a machine, and the links that it shares
hardware          machines, and how models are found by name
modelled_gpu      a GPU as its data sheet describes it, and the time of a kernel
datasheets        the published figures of GPUs
kernels           the work of a kernel: bytes, and its products
products          the products of matrices in an operator
convolutions      the algorithms of cuDNN for convolutions, as products
links             how fast bytes travel: wires as they are sold, and as they were measured
host              what the host takes to run a program
recurrent_layers  operators that are one of cuDNN on CUDA
"""
