"""Direct preference optimisation: torchrun --nproc-per-node 2 examples/losses/dpo.py

Documents come in pairs, the chosen response before the rejected one.
"""

import torch
import torch.nn.functional as F  # noqa: N812
from common import train

from longspan.training import per_sequence, shard_like

BETA = 0.3


def dpo(model, frozen, step):
    reference = shard_like(step.data.reference, step.mine, shift=1)  # one per token, shifted with the labels
    gained = step.run(model).logprobs - reference
    sums = per_sequence(gained, step.mine, step.group, mask=step.counts, gradients="average")  # FSDP averages
    chosen, rejected = sums[::2], sums[1::2]  # the same on every rank
    return -F.logsigmoid(BETA * (chosen - rejected)).mean()


def plain(model, frozen, data):
    """Compute the loss in one process, document by document."""
    sums = [(d.scores.logprobs - d.reference)[d.response].sum() for d in data.documents(model)]
    return torch.stack([-F.logsigmoid(BETA * (a - b)) for a, b in zip(sums[::2], sums[1::2], strict=True)]).mean()


if __name__ == "__main__":
    train(dpo, plain)
