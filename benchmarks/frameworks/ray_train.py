"""Ray Train's getting started with PyTorch: `prepare_model` and `prepare_data_loader`."""

import tempfile

import ray
import ray.train.torch
import torch
import torch.nn.functional as F
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from tiny import LR, dataset, network
from torch import distributed as dist
from torch.utils.data import DataLoader


def train(config):
    model = ray.train.torch.prepare_model(network())
    loader = ray.train.torch.prepare_data_loader(DataLoader(dataset(), batch_size=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    losses = []
    for _ in range(2):
        for X, y in loader:
            loss = F.cross_entropy(model(X), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(mean.item() / dist.get_world_size())
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model.module.state_dict(), f"{folder}/model.pt")
        ray.train.report({"losses": losses}, checkpoint=Checkpoint.from_directory(folder))


gpus = torch.cuda.device_count()
ray.init(num_gpus=gpus, include_dashboard=False)  # Ray looks for NVIDIA's driver, and finds none
with tempfile.TemporaryDirectory() as folder:
    trainer = TorchTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=2, use_gpu=gpus > 0),
        run_config=RunConfig(storage_path=folder),
    )
    losses = trainer.fit().metrics["losses"]
print("losses", *(f"{loss:.6f}" for loss in losses), flush=True)
