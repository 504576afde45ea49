"""torchtitan's own trainer on its Llama for debugging; arguments are torchtitan's.

It begins with a seed checkpoint, which `--checkpoint.create_seed_checkpoint` makes before.
Without a GPU it trains on the CPU, which torchtitan itself does not offer: a module takes the place
of `torch.cuda`, with no memory to report.
"""

import runpy
import sys
from importlib.metadata import version
from types import SimpleNamespace

import torch

SIZES = """--training.local_batch_size=4 --training.seq_len=32 --training.steps=5
    --training.mixed_precision_param=float32 --lr_scheduler.warmup_steps=1 --metrics.log_freq=1
    --debug.seed=0 --checkpoint.enable --checkpoint.interval=1000"""
if version("torchtitan") < "0.3":
    SIZES += """ --job.dump_folder=out --model.name=llama3 --model.flavor=debugmodel
        --training.dataset=c4_test --model.hf_assets_path=tests/assets/tokenizer"""
else:
    SIZES += """ --module=llama3 --config=llama3_debugmodel --dump_folder=out
        --hf_assets_path=tests/assets/tokenizer --validator.no-enable
        --training.disable_cuda_graphs --parallelism.spmd_backend=partial_dtensor"""


class CPU(SimpleNamespace):
    def __getattr__(self, name):
        return getattr(torch.cpu, name)


sys.argv[1:1] = SIZES.split()
if not hasattr(torch.distributed, "set_timeout"):  # torchtitan 0.3 calls it; torch 2.13 lacks it
    torch.distributed.set_timeout = lambda timeout, group: None
if not torch.cuda.is_available():
    import torchtitan.train  # noqa: F401

    cpu = CPU(
        get_device_name=lambda device: "cpu",
        get_device_properties=lambda device: SimpleNamespace(total_memory=1),
        memory_stats=lambda device: {},
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
        current_device=lambda: 0,
    )
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan.") and hasattr(module, "device_type"):
            module.device_type, module.device_module = "cpu", cpu
runpy.run_module("torchtitan.train", run_name="__main__", alter_sys=True)
