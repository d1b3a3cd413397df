"""Group sequence policy optimisation, ratios of whole responses: torchrun --nproc-per-node 2 examples/losses/gspo.py"""

import torch
from common import train

from longspan.training import per_sequence, shard_like

CLIP = 0.05


def gspo(model, frozen, step):
    data, mine = step.data, step.mine
    gained = step.run(model).logprobs - shard_like(data.old, mine, shift=1)
    means = per_sequence(gained, mine, step.group, mask=step.counts, reduce="mean", gradients="average")
    ratio = means.exp()  # one per document; from here on the same on every rank
    return -torch.min(ratio * data.advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * data.advantages).mean()


def plain(model, frozen, data):
    """Compute the loss in one process, document by document."""
    losses = []
    for d, advantage in zip(data.documents(model), data.advantages, strict=True):
        ratio = (d.scores.logprobs - d.old)[d.response].mean().exp()
        losses.append(-torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage))
    return torch.stack(losses).mean()


if __name__ == "__main__":
    train(gspo, plain)
