"""Accelerate's guide to big model inference: layers spread over the devices by `device_map`."""

import tempfile

import torch
import torch.nn.functional as F
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from safetensors.torch import save_model
from tiny import dataset, network, report

with tempfile.TemporaryDirectory() as folder:
    save_model(network(), f"{folder}/model.safetensors")
    with init_empty_weights():
        model = network()
    limits = {0: 3000, 1: 3000} if torch.cuda.is_available() else None  # bytes: too few for all
    model = load_checkpoint_and_dispatch(model, folder, device_map="auto", max_memory=limits)
if torch.cuda.is_available():
    assert set(model.hf_device_map.values()) == {0, 1}, model.hf_device_map
X, y = dataset().tensors
scores = model(X)
report([F.cross_entropy(scores, y.to(scores.device))])
