"""What DeepSpeed's program does, by torch alone: DeepSpeed compiles C++ before it runs on a CPU."""

import torch
import torch.nn.functional as F
from tiny import LR, dataset, network, report
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
data = dataset()
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
model = DistributedDataParallel(network())
optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
losses = []
for _ in range(2):
    for X, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
report(losses)
dist.barrier()  # no rank closes its sockets while the other still sums
del model
dist.destroy_process_group()
