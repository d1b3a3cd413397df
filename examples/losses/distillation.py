"""Distillation from a teacher on the same ranks: torchrun --nproc-per-node 2 examples/losses/distillation.py"""

import torch
import torch.nn.functional as F  # noqa: N812
from common import Model, train

from longspan.training import per_sequence

TEMPERATURE, MIXED = 2.0, 0.5
torch.manual_seed(7)
teacher = Model().requires_grad_(requires_grad=False)


def divergence(student, taught):
    """Return KL(teacher || student) at each position, at a temperature."""
    logs = [F.log_softmax(logits / TEMPERATURE, dim=-1) for logits in (student, taught)]
    return TEMPERATURE**2 * (logs[1].exp() * (logs[1] - logs[0])).sum(-1)


def distillation(model, frozen, step):
    scores, taught = step.run(model), step.run(teacher)  # with the same plan, so both have the same tokens
    terms = MIXED * divergence(scores.logits, taught.logits) - (1 - MIXED) * scores.logprobs
    sums = per_sequence(terms, step.mine, step.group, mask=step.counts, gradients="average")
    return sums.sum() / step.data.response.sum()  # the mean over tokens, the same on every rank


def plain(model, frozen, data):
    """Compute the loss in one process, document by document."""
    terms = []
    for d, t in zip(data.documents(model), data.documents(teacher), strict=True):
        mixed = MIXED * divergence(d.scores.logits, t.scores.logits) - (1 - MIXED) * d.scores.logprobs
        terms.append(mixed[d.response])
    return torch.cat(terms).mean()


if __name__ == "__main__":
    train(distillation, plain)
