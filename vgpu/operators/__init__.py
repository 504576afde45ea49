"""From a call of an operator to an op.

issuing            from a call to an op: keys, new plans, running at once
plans              the results of an operator, worked out once for each combination of inputs
copies             copies between devices, and to and from the host
special_operators  operators that need more than a plan
attention          scaled_dot_product_attention as one kernel
backward           backward on the streams of forward
comm               scatter, gather, broadcast and reduce for nn.DataParallel
autocast, recurrent, sync_batch_norm: the parts of torch that have these names
"""
