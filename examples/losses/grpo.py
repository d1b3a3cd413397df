"""Group relative policy optimisation: torchrun --nproc-per-node 2 examples/losses/grpo.py"""

import torch
from common import train

from longspan.training import per_sequence, per_token, shard_like

CLIP, BETA = 0.2, 0.04


def grpo(model, frozen, step):
    data, mine, group = step.data, step.mine, step.group
    logprobs = step.run(model).logprobs
    old = shard_like(data.old, mine, shift=1)  # the sampler's, one per token, shifted with the labels
    reference = shard_like(data.reference, mine, shift=1)
    advantages = per_token(data.advantages, mine, group)  # one per document
    ratio, gap = (logprobs - old).exp(), reference - logprobs
    gained = torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    terms = BETA * (gap.exp() - gap - 1) - gained
    losses = per_sequence(terms, mine, group, mask=step.counts, reduce="mean", gradients="average")  # FSDP averages
    return losses.mean()  # the same on every rank


def plain(model, frozen, data):
    """Compute the loss in one process, document by document."""
    losses = []
    for d, advantage in zip(data.documents(model), data.advantages, strict=True):
        ratio = (d.scores.logprobs - d.old).exp()
        gained = torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        distance = (d.reference - d.scores.logprobs).exp() - (d.reference - d.scores.logprobs) - 1
        losses.append((BETA * distance - gained)[d.response].mean())
    return torch.stack(losses).mean()


if __name__ == "__main__":
    train(grpo, plain)
