"""What ranks do in the tests of losses without logits; importable by name, as worker processes need it."""

from functools import cache

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from longspan.training import BatchError, Head, token_logprobs, token_loss
from tests.head_cases import expected, logits, random_case, rank_work, small_slabs, worst

TOKENS, WORDS, WIDTH = 24, 37, 6


@cache
def groups(words):
    """The groups of this rank: over tokens, and over words, of which there are so many ranks."""
    world, rank = dist.get_world_size(), dist.get_rank()
    over_words = [dist.new_group(list(range(start, start + words))) for start in range(0, world, words)]
    over_tokens = [dist.new_group(list(range(start, world, words))) for start in range(words)]
    return over_tokens[rank % words], over_words[rank // words]


def cases(seeds, words):
    """The largest error of each seed on this rank, and where; tokens and words are cut over ranks."""
    return [_case(seed, words) for seed in seeds]


def _case(seed, words):
    over_tokens, over_words = groups(words)
    case = random_case(seed, world=over_tokens.size(), ranks=words)
    right = expected(case, case.leaves, logits(case))
    gradients = ("sum", "average")[seed % 2]
    start = sum(case.sizes[: over_words.rank()])
    own = slice(start, start + case.sizes[over_words.rank()])
    bias = None if case.bias is None else case.bias[own]
    head = Head(case.weight[own], bias, group=over_words, **case.form)
    with small_slabs(case.parts):
        loss, found, upstream = rank_work(case, head, over_tokens.rank(), over_tokens, gradients)
        mine = [
            torch.autograd.grad(value, case.leaves, retain_graph=True)
            for value in (loss, (torch.stack(found) * upstream).sum())
        ]
    result = {"loss": loss}
    for what, grads, size in (("loss", mine[0], over_tokens.size()), ("tokens", mine[1], 1)):
        for i, grad in enumerate(grads):
            total = grad.clone()
            dist.all_reduce(total, group=over_tokens)
            if i:  # each rank has the gradient of its own words, and of hidden states the whole one
                dist.all_reduce(total, group=over_words)
            shared = size if what == "loss" and gradients == "average" else 1
            result[f"gradient {i} of {what}"] = total / shared
    for i, name in enumerate(("logprobs", "entropies")):
        parts = [None] * over_tokens.size()
        dist.all_gather_object(parts, found[i].detach(), group=over_tokens)
        result[name] = case.layout.unshard(parts, 1)
    return worst(case, result, right)


class Model(nn.Module):
    """A body and a head whose loss is taken within."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, x, labels, group):
        hidden = self.body(x).tanh()
        loss = token_loss(hidden, labels, group=group, gradients="average", head=self.head)
        return loss, token_logprobs(hidden, labels, head=self.head)


def fsdp(checkpointed):
    """The largest difference of gradients from one process, under FSDP2, and what is said outside of forward."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(TOKENS) % WORDS
    labels[: TOKENS // world] = -100  # the first rank has none
    alone, sharded = Model(), Model()
    loss, found = alone(x, labels, None)
    (loss + 0.1 * found.entropies.sum()).backward()
    fully_shard(sharded)
    part = slice(rank * TOKENS // world, (rank + 1) * TOKENS // world)
    call = (x[part], labels[part], dist.group.WORLD)
    with small_slabs(3):
        loss, found = checkpoint(sharded, *call, use_reentrant=False) if checkpointed else sharded(*call)
        (loss + 0.1 * world * found.entropies.sum()).backward()
    errors = [
        float((one.grad.full_tensor() - other.grad).abs().max())
        for one, other in zip(sharded.parameters(), alone.parameters(), strict=True)
    ]
    sharded.reshard()
    try:
        token_loss(x[part], labels[part], group=None, gradients="sum", head=sharded.head)
    except BatchError as error:
        return max(errors), str(error)
    return max(errors), "nothing"
