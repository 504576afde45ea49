"""Calls of operators, which become ops.

issuing            dispatch of a call: its key, shape inference, or running it synchronously
plans              properties of an operator, the tables for them; Plan, and the cache by key
checks             values and determinism that CUDA's host checks at the call
copies             copies between devices, and to and from the host
special_operators  operators that need more than a plan
attention          scaled_dot_product_attention as one kernel
backward           backward on the streams of forward
comm               scatter, gather, broadcast and reduce for nn.DataParallel
autocast           torch.autocast
gpu_kernels        kernels that torch implements for GPUs only: LSTM, GRU, SyncBatchNorm
"""
