"""Train in your own loop with accelerate on padded batches, with each sequence sharded over all ranks.

On two CPU processes, with a tiny model:  torchrun --nproc-per-node 2 examples/trainers/accelerate_loop.py
On 8 GPUs, with your own model:           torchrun --nproc-per-node 8 examples/trainers/accelerate_loop.py Qwen/Qwen3-8B
"""

import copy
import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

from longspan import huggingface
from longspan.huggingface.accelerate import split_sequences

STEPS = 10


def load():
    torch.manual_seed(0)
    if len(sys.argv) > 1:
        return AutoModelForCausalLM.from_pretrained(sys.argv[1], attn_implementation="longspan")
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="longspan")


def padded(rows):
    """Pad rows of different lengths into one batch."""
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


if __name__ == "__main__":
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    ranks = split_sequences(accelerator)  # before prepare(): loaders then give all ranks of a sequence the same batches
    model = load()
    alone = copy.deepcopy(model).to(accelerator.device)  # one process, whole sequences, transformers' own attention
    alone.set_attn_implementation("eager")
    rows = [torch.arange(20 + 7 * n % 50) * (1 + n % 3) % 64 for n in range(4 * STEPS)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone)]
    loader = DataLoader(rows, batch_size=4, collate_fn=padded)
    model, optimizers[0], loader = accelerator.prepare(model, optimizers[0], loader)
    errors = []
    for batch in loader:
        inputs = huggingface.shard_inputs(accelerator.unwrap_model(model), batch, ranks.cp)
        loss = huggingface.full_loss(model(**inputs).loss, inputs, gradients="average")  # DDP and FSDP2 average
        accelerator.backward(loss)
        expected = alone(**batch).loss
        expected.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        errors.append(abs(loss.item() - expected.item()))
    print(f"rank {dist.get_rank()}: loss {loss.item():.6f}, off one process {max(errors):.1e}")
    dist.destroy_process_group()
