"""What work is done on: tensors, their values and the memory that they take.

tensor      VirtualTensor: what user code sees
cells       layouts and values
memory      the accounting of memory; caching: what CUDA's allocator would reserve
storages    memory that is given back while tensors still use it
saving      pickling and loading; lazy: parameters whose shape is not known yet
generators  random numbers: a seed and an offset, as on CUDA
"""
