"""Group relative policy optimisation of Qwen3-8B on long rollouts in plain PyTorch: prompts and completions are packed
into one sequence, which is sharded over all GPUs, as are the parameters of policy and reference (FSDP2).

Install:            pip install ".[hf]" datasets peft
On 8 GPUs:          torchrun --nproc-per-node 8 examples/grpo_fsdp2.py --rollouts rollouts.jsonl
LoRA:               add --lora; the reference is the policy without its adapters
Smoke run:          torchrun --nproc-per-node 2 examples/grpo_fsdp2.py --smoke
In one process:     torchrun --nproc-per-node 1 examples/grpo_fsdp2.py --smoke

A line of rollouts.jsonl is a group: {"prompt": "...", "completions": ["...", ...], "rewards": [1.0, ...]}. This program
does not generate. Only --smoke has run, on CPUs: nothing here has run on a GPU.
"""

import argparse
import contextlib
import json
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from qwen3_256k import load, save, shard, start, update
from transformers import AutoTokenizer

from longspan import huggingface
from longspan.training import per_sequence, per_token, shard_like

CLIP, BETA = 0.2, 0.04


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen3-8B", help="Hub name or folder")
    parser.add_argument("--rollouts", help="a .jsonl file")
    parser.add_argument("--groups", type=int, default=8, help="groups of completions that are packed into a batch")
    parser.add_argument("--length", type=int, default=40_960, help="tokens of the longest prompt with a completion")
    parser.add_argument("--trained-length", type=int, default=32_768, help="YaRN extends positions from here")
    parser.add_argument("--updates", type=int, default=2, help="steps of the optimizer on each batch")
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--lora", action="store_true", help="train adapters; the sharded weights are frozen")
    parser.add_argument("--output", default="qwen3-grpo")
    parser.add_argument("--smoke", action="store_true", help="a tiny model in float32, compared with one process")
    options = parser.parse_args()
    if not (options.rollouts or options.smoke):
        parser.error("--rollouts is missing: a .jsonl file")
    return options


class Rollouts(NamedTuple):
    """Completions with their prompts, one after the other: tokens and labels (-100 in prompts) are (1, tokens)."""

    lengths: list[int]
    ids: torch.Tensor
    labels: torch.Tensor
    advantages: torch.Tensor
    """One of each completion: rewards, normalised within each group."""


def batches(options, device="cpu"):
    """Yield rollouts of several groups, the same on every rank."""
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    groups = [json.loads(line) for line in Path(options.rollouts).read_text().splitlines()]
    for first in range(0, len(groups), options.groups):
        ids, labels, advantages = [], [], []
        for group in groups[first : first + options.groups]:
            rewards = torch.tensor(group["rewards"])
            advantages.append((rewards - rewards.mean()) / (rewards.std() + 1e-4))
            prompt = tokenizer(group["prompt"])["input_ids"]
            for completion in group["completions"]:
                tokens = [*tokenizer(completion, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
                ids.append(torch.tensor([*prompt, *tokens]))
                labels.append(torch.tensor([-100] * len(prompt) + tokens))
        lengths = [len(each) for each in ids]
        ids, labels, advantages = (torch.cat(each).to(device) for each in (ids, labels, advantages))
        yield Rollouts(lengths, ids[None], labels[None], advantages)


def loss_of_tokens(new, old, reference, advantages):
    ratio, gap = (new - old).exp(), reference - new
    gain = torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return BETA * (gap.exp() - gap - 1) - gain


def log_probabilities(model, rollouts, group):
    """Return the log-probability of the label of each of this rank's tokens, and the layout of the tokens."""
    positions = torch.cat([torch.arange(length) for length in rollouts.lengths])[None].to(rollouts.ids.device)
    batch = {"input_ids": rollouts.ids, "labels": rollouts.labels, "position_ids": positions}
    part = huggingface.shard_for_logprobs(model, batch, group)
    return model(**part).logits.logprobs, part["longspan"].layout


def train(options):
    device, dtype, mesh = start(options)
    policy = shard(load(options, "longspan"), mesh.dp_cp, dtype)
    reference, as_reference = policy, policy.disable_adapter if options.lora else contextlib.nullcontext
    if not options.lora:
        reference = shard(load(options, "longspan"), mesh.dp_cp, dtype)
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer, curve = torch.optim.AdamW(trained, lr=options.learning_rate, weight_decay=0.0), []
    for rollouts in batches(options, device):
        with torch.no_grad():
            old, _ = log_probabilities(policy, rollouts, mesh.cp)
            with as_reference():
                there, _ = log_probabilities(reference, rollouts, mesh.cp)
        for _ in range(options.updates):
            new, layout = log_probabilities(policy, rollouts, mesh.cp)
            packed = {"documents": rollouts.lengths}
            advantages = per_token(rollouts.advantages, layout, mesh.cp, **packed)
            labels = shard_like(rollouts.labels, layout, mesh.cp.get_local_rank(), shift=1, fill=-100, **packed)
            terms, averaging = loss_of_tokens(new, old, there, advantages), {"gradients": "average"}  # FSDP2 averages
            means = per_sequence(terms, layout, mesh.cp, mask=labels != -100, reduce="mean", **packed, **averaging)
            update(optimizer, trained, means.mean(), curve)  # over completions, the same on every rank
    save(policy, options.output)
    return policy, curve


def train_alone(options):
    """Return the same of one process, which runs each completion by itself, with transformers' own attention."""
    policy, reference = load(options, "eager"), load(options, "eager")
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer, curve = torch.optim.AdamW(trained, lr=options.learning_rate, weight_decay=0.0), []

    def score(model, rollouts):
        """Return log-probabilities of each completion's tokens."""
        rows = (row[0].split(rollouts.lengths) for row in (rollouts.ids, rollouts.labels))
        result = []
        for ids, labels in zip(*rows, strict=True):
            logits = model(ids[None], use_cache=False).logits[0, :-1]
            result.append(logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0][labels[1:] != -100])
        return result

    for rollouts in batches(options):
        with torch.no_grad():
            old, there = score(policy, rollouts), score(reference, rollouts)
        for _ in range(options.updates):
            each = zip(score(policy, rollouts), old, there, rollouts.advantages, strict=True)
            loss = torch.stack([loss_of_tokens(*values).mean() for values in each]).mean()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            curve.append((loss.item(), norm.item()))
    return curve


def smoke(options):
    """Train a tiny model by the same code; rank 0 compares the losses with those of plain transformers."""
    import smoke

    with tempfile.TemporaryDirectory() as folder:  # each rank writes its own, with the same contents
        options.model, options.rollouts = smoke.write_model(folder), smoke.write_rollouts(folder)
        options.length, options.trained_length = smoke.LENGTH, smoke.TRAINED_LENGTH
        options.groups, options.learning_rate, options.output = 2, 3e-3, f"{folder}/trained"
        policy, curve = train(options)
        if dist.get_rank() == 0:
            smoke.compare(curve, train_alone(options), policy)


if __name__ == "__main__":
    options = parse_arguments()
    smoke(options) if options.smoke else train(options)
    dist.destroy_process_group()
