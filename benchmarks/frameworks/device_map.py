"""Transformers: a model loaded with `device_map="auto"`, its layers on all devices."""

import tempfile

import torch
from tiny import report
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2,
)  # fmt: skip
tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
with tempfile.TemporaryDirectory() as folder:
    LlamaForCausalLM(config).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, device_map="auto")
if torch.cuda.is_available():
    assert set(model.hf_device_map.values()) == {0, 1}, model.hf_device_map
loss = model(input_ids=tokens, labels=tokens).loss
written = model.generate(tokens.to(model.device), max_new_tokens=8, do_sample=False, pad_token_id=0)
report([loss, *written[0, -8:]])
