"""Lightning Fabric: a loop of one's own.

lightning_fabric.py STRATEGY
"""

import sys

import lightning as L
import torch
import torch.nn.functional as F
from tiny import LR, dataset, network, report
from torch.utils.data import DataLoader

fabric = L.Fabric(accelerator="auto", devices=2, strategy=sys.argv[1])
fabric.launch()
model = network()
if sys.argv[1] == "fsdp":
    model = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=LR))
else:
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=LR))
loader = fabric.setup_dataloaders(DataLoader(dataset(), batch_size=4))
losses = []
for _ in range(2):
    for X, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X), y)
        fabric.backward(loss)
        optimizer.step()
        losses.append(fabric.all_reduce(loss.detach(), reduce_op="mean"))
if fabric.is_global_zero:
    report(losses)
