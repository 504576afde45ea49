"""What DeepSpeed's program does on two ranks, by torch in one process.

DeepSpeed compiles C++ before it runs on a CPU, and ranks that meet over gloo may abort at the end.
"""

import torch
import torch.nn.functional as F
from tiny import LR, dataset, network, report
from torch.utils.data import DataLoader, DistributedSampler

data = dataset()
ranks = [
    DataLoader(data, batch_size=4, sampler=DistributedSampler(data, num_replicas=2, rank=rank))
    for rank in range(2)
]
model = network()
optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
losses = []
for _ in range(2):
    for batches in zip(*ranks, strict=True):
        optimizer.zero_grad()
        loss = sum(F.cross_entropy(model(X), y) for X, y in batches) / len(ranks)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
report(losses)
