"""The Trainer of Transformers on a small GPT-2: DDP under torchrun, DataParallel without it.

Its arguments are those of `TrainingArguments`.
"""

import sys
import tempfile

import torch
from tiny import report
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments

torch.manual_seed(0)
config = GPT2Config(
    vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
    resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
)  # fmt: skip
tokens = torch.randint(64, (64, 32), generator=torch.Generator().manual_seed(0))
rows = [{"input_ids": row, "labels": row} for row in tokens]
with tempfile.TemporaryDirectory() as folder:
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
        ["--output_dir", folder, "--logging_steps", "1", "--max_steps", "6", "--report_to", "none",
         "--learning_rate", "1e-2", "--seed", "0", "--disable_tqdm", "1", *sys.argv[1:]]
    )  # fmt: skip
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    report([*losses, trainer.evaluate()["eval_loss"]])
