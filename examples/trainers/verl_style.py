"""Run verl's two calls without verl: log-probabilities of responses and the actor update, packed and over ranks.

On two CPU processes, with a tiny model:  torchrun --nproc-per-node 2 examples/trainers/verl_style.py
On 8 GPUs, with your own model:           torchrun --nproc-per-node 8 examples/trainers/verl_style.py Qwen/Qwen3-8B
"""

import copy
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, LlamaConfig

from longspan import huggingface
from longspan.training import gather_tokens

TEMPERATURE, CLIP, KL = 0.7, 0.05, 0.1


def load(device):
    torch.manual_seed(0)
    if len(sys.argv) > 1:
        return AutoModelForCausalLM.from_pretrained(sys.argv[1], attn_implementation="longspan").to(device)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="longspan").to(device)


def log_probs(model, data, group):
    """Return (rows, response) log-probabilities on every rank; gradients are those of the rank's own tokens.

    `data` is verl's: input_ids with left-padded prompts and right-padded responses, attention_mask, response_mask."""
    ids, real = data["input_ids"], data["attention_mask"].bool()
    scored = torch.zeros_like(real)
    scored[:, -data["response_mask"].shape[1] :] = data["response_mask"].bool()
    places = data["attention_mask"].cumsum(1) - 1
    batch = {"input_ids": ids[real], "position_ids": places[real], "labels": ids.masked_fill(~scored, -100)[real]}
    batch = {name: value[None] for name, value in batch.items()}  # all rows as documents of one row: no padding
    part = huggingface.shard_for_logprobs(model, batch, group, temperature=TEMPERATURE)
    mine = model(**part).logits.logprobs
    whole = gather_tokens(mine, part["longspan"].layout, group, 1, gradients="average")  # DDP averages
    padded = torch.zeros(ids.shape, device=ids.device).masked_scatter(real, whole[0])
    return padded[:, -data["response_mask"].shape[1] - 1 : -1]  # each position has the next token's


def whole_log_probs(model, data, group):
    """Return the same on one process, from logits of padded rows."""
    places = (data["attention_mask"].cumsum(1) - 1).clamp(min=0)
    logits = model(data["input_ids"], data["attention_mask"], places).logits[:, :-1].float() / TEMPERATURE
    result = logits.log_softmax(-1).gather(-1, data["input_ids"][:, 1:, None])[..., 0]
    return result[:, -data["response_mask"].shape[1] :]


def train(score, actor, reference, data, group=None):
    """Return the losses of five updates on one batch: PPO's clipped ratio, and a KL penalty to the reference."""
    with torch.no_grad():
        old, there = score(actor, data, group), score(reference, data, group)
    optimizer, losses, mask = torch.optim.SGD(actor.parameters(), lr=0.5), [], data["response_mask"]
    for _ in range(5):
        new = score(actor, data, group)
        ratio, gap = (new - old).exp(), there - new
        gain = torch.min(ratio * data["advantages"], ratio.clamp(1 - CLIP, 1 + CLIP) * data["advantages"])
        loss = ((KL * (gap.exp() - gap - 1) - gain) * mask).sum() / mask.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return torch.tensor(losses)


if __name__ == "__main__":
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", dist.get_rank()) if torch.cuda.is_available() else torch.device("cpu")
    actor = load(device)
    reference = copy.deepcopy(actor)
    alone = [copy.deepcopy(actor), copy.deepcopy(actor)]
    draw = torch.Generator().manual_seed(1)
    mask = (torch.arange(60) >= torch.randint(0, 20, (4, 1), generator=draw)).long()  # prompts, padded on the left
    mask[:, 30:] = (torch.arange(30) < torch.randint(9, 30, (4, 1), generator=draw)).long()  # responses
    data = {
        "input_ids": torch.randint(0, 64, (4, 60), generator=draw),
        "attention_mask": mask,
        "response_mask": mask[:, 30:],
    }
    data["advantages"] = torch.randn(4, 1, generator=draw)
    data = {name: value.to(device) for name, value in data.items()}
    result = train(log_probs, DistributedDataParallel(actor), reference, data, dist.group.WORLD)
    for model in alone:
        model.set_attn_implementation("eager")
    error = (result - train(whole_log_probs, *alone, data)).abs().max()
    print(f"rank {dist.get_rank()}: loss {result[0]:.4f} to {result[-1]:.4f}, off one process {error:.1e}")
    dist.destroy_process_group()
