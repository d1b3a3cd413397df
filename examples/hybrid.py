"""Train a hybrid model on packed documents and sharded sequences: torchrun --nproc-per-node 2 examples/hybrid.py

Mamba-2, short convolutions and attention of an unmodified model of transformers; ten steps of training with DDP.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM

from longspan import huggingface

VOCAB, LENGTHS = 64, (70, 41, 17)


def packed(step):
    """Return a row of three documents that count up, each by its own step: the same on every rank."""
    draw = torch.Generator().manual_seed(step)
    rows = [torch.arange(n) * int(torch.randint(1, 4, (1,), generator=draw)) % VOCAB for n in LENGTHS]
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    ids = torch.cat(rows)
    labels = ids.masked_fill(positions == 0, -100)  # no document predicts the next one
    return {"input_ids": ids[None], "labels": labels[None], "position_ids": positions[None]}


def alone(model, batch):
    """Return the loss of transformers itself, document by document: in one row it would mix them."""
    model.set_attn_implementation("sdpa")
    parts = batch["input_ids"].split(LENGTHS, 1)
    losses = [model(input_ids=part, labels=part, use_cache=False).loss * (part.shape[1] - 1) for part in parts]
    model.set_attn_implementation("longspan")
    return sum(losses) / sum(n - 1 for n in LENGTHS)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "bamba", vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, attn_layer_indices=[1, 3], mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="longspan")
    trained = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(10):
        inputs = huggingface.shard_inputs(trained, packed(step), dist.group.WORLD)
        loss = huggingface.full_loss(trained(**inputs).loss, inputs, gradients="average")  # DDP averages
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        inputs = huggingface.shard_inputs(model, packed(10), dist.group.WORLD)
        result = huggingface.full_loss(model(**inputs).loss, inputs)
        expected = alone(model, packed(10))
    print(f"rank {dist.get_rank()}: loss {result:.4f}, off that of one process {abs(result - expected).item():.1e}")
    dist.destroy_process_group()
