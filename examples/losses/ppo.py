"""Proximal policy optimisation with values: torchrun --nproc-per-node 2 examples/losses/ppo.py

The value of a state belongs to its position, reward and sampler's log-probability to the token that is predicted
there. Advantages accumulate backwards through every response, on any number of ranks.
"""

import torch
from common import train

from longspan.training import gather_tokens, per_sequence, shard_like

CLIP, GAMMA, LAMBDA, VALUE, ENTROPY = 0.2, 0.99, 0.9, 0.5, 0.01


def discounted(deltas):
    """Return sum_k (gamma lambda)^k delta_{t + k}, for one response."""
    total, sums = deltas.new_zeros(()), []
    for delta in deltas.flip(0):
        total = delta + GAMMA * LAMBDA * total
        sums.append(total)
    return torch.stack(sums[::-1]) if sums else deltas


def ppo(model, frozen, step):
    data, mine, group = step.data, step.mine, step.group
    scores = step.run(model)
    old = shard_like(data.old, mine, shift=1)
    last = torch.tensor(data.lengths).cumsum(0) - 1
    rewards = shard_like(torch.zeros_like(data.old).index_copy(1, last, data.rewards[None]), mine, shift=1)
    with torch.no_grad():  # the old values; the next one is 0 where the document ends
        before = step.run(frozen).values * step.counts
        after = shard_like(gather_tokens(before, mine, group), mine, shift=1)
        deltas = gather_tokens((rewards + GAMMA * after - before) * step.counts, mine, group)
        advantages = torch.cat([discounted(x) for x in deltas[0].split(data.lengths)])[None]
        advantages = shard_like(advantages, mine, shift=0)  # already at positions
    ratio = (scores.logprobs - old).exp()
    gained = torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    missed = (scores.values - before - advantages).square()
    terms = VALUE * missed - gained - ENTROPY * scores.entropies
    return per_sequence(terms, mine, group, mask=step.counts, reduce="mean", gradients="average").mean()


def plain(model, frozen, data):
    """Compute the loss in one process, document by document."""
    losses = []
    for d, f in zip(data.documents(model), data.documents(frozen), strict=True):
        kept = d.response
        before, rewards = f.scores.values[kept], torch.zeros(int(kept.sum()))
        rewards[-1] = d.reward
        after = torch.cat((before[1:], torch.zeros(1)))
        advantages = discounted(rewards + GAMMA * after - before)
        ratio = (d.scores.logprobs - d.old)[kept].exp()
        gained = torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
        missed = (d.scores.values[kept] - before - advantages).square()
        losses.append((VALUE * missed - gained - ENTROPY * d.scores.entropies[kept]).mean())
    return torch.stack(losses).mean()


if __name__ == "__main__":
    train(ppo, plain)
