"""Lightning in 15 minutes: a LightningModule, fitted and validated by a Trainer.

lightning_train.py STRATEGY PRECISION
"""

import sys

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import FSDPStrategy
from tiny import LR, dataset, network, report
from torch.utils.data import DataLoader


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = network()
        self.losses = []

    def training_step(self, batch, batch_idx):
        X, y = batch
        loss = F.cross_entropy(self.net(X), y)
        self.losses.append(self.all_gather(loss.detach()).mean())
        return loss

    def validation_step(self, batch, batch_idx):
        X, y = batch
        self.log("val_loss", F.cross_entropy(self.net(X), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=LR)


strategy, precision = sys.argv[1:]
if strategy == "fsdp":  # without a policy, torch itself fails when `validate` wraps the model again
    strategy = FSDPStrategy(auto_wrap_policy={torch.nn.Sequential})
model = Classifier()
loader = DataLoader(dataset(), batch_size=4)
trainer = L.Trainer(
    accelerator="auto", devices=2, strategy=strategy, precision=precision, max_epochs=2,
    logger=False, enable_checkpointing=False, enable_progress_bar=False,
)  # fmt: skip
trainer.fit(model, loader, loader)
(results,) = trainer.validate(model, loader, verbose=False)
if trainer.is_global_zero:
    report([*model.losses, results["val_loss"]])
