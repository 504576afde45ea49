"""Accelerate's quick tour: one loop, for DDP and FSDP2 as `accelerate launch` says."""

import torch.nn.functional as F
from accelerate import Accelerator
from tiny import LR, dataset, network, report
from torch.optim import AdamW
from torch.utils.data import DataLoader

accelerator = Accelerator()
model = network()
optimizer = AdamW(model.parameters(), lr=LR)
loader = DataLoader(dataset(), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for _ in range(2):
    for X, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
report(losses)
accelerator.wait_for_everyone()
# DDP must not outlive its group: torch may abort.
model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)
accelerator.end_training()
