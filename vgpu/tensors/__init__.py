"""Tensors, their values and their memory.

tensor         VirtualTensor, the tensor in user code
cells          layouts and values of tensors
device_memory  accounting of a device's memory
caching        model of CUDA's caching allocator
pinned_memory  CPU memory, copies of which need no wait
storages       bytes and sizes of storages, tensors that are set to them, pickling and loading
lazy           parameters without a shape yet
generators     random numbers: a seed and an offset, as on CUDA
"""
