"""DeepSpeed's getting started: an engine from a configuration.

deepspeed_train.py STAGE [fp16 | bf16]
"""

import argparse

import deepspeed
import torch.nn.functional as F
from tiny import LR, dataset, network, report
from torch import distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("stage", type=int)
parser.add_argument("precision", nargs="?")
parser.add_argument("--local_rank", type=int)
options = parser.parse_args()
config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01, "torch_adam": True}},
    "zero_optimization": {"stage": options.stage},
    "gradient_clipping": 1.0,
}
if options.precision:
    config[options.precision] = {"enabled": True}
if options.precision == "fp16":
    config["fp16"]["initial_scale_power"] = (
        8  # so that no step is left out while the scale is found
    )
model = network()
engine, _, loader, _ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=config, training_data=dataset()
)
losses = []
for _ in range(2):
    for X, y in loader:
        X, y = X.to(engine.device, next(engine.parameters()).dtype), y.to(engine.device)
        loss = F.cross_entropy(engine(X).float(), y)
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
report(losses)
dist.destroy_process_group()
