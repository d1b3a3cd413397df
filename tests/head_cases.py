"""Random losses and log-probabilities from hidden states and a head, against one device, in float64.

    python -m tests.head_cases --cases 2000

Every case goes four ways: tokens over simulated ranks, words over simulated ranks, one process, and logits without a
head. Expected values are written out in plain PyTorch here, labels shifted token by token.
"""

import argparse
import contextlib
import sys
import time
from dataclasses import dataclass
from unittest import mock

import numpy as np
import torch

from longspan import masks
from longspan.layouts import Layout
from longspan.run.simulated import simulate
from longspan.training import Head, shard_batch
from longspan.training import loss as losses
from longspan.training import loss_without_logits as slabs
from tests.cases import LAYOUTS, random_layout, random_lengths

BAR = 1e-12
WORDS = (1, 2, 3, 5, 7, 11, 13, 17, 29, 37)


@dataclass(frozen=True)
class Case:
    """Whole tensors of one device, and how they are cut."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    labels: torch.Tensor
    kept: torch.Tensor
    lengths: np.ndarray
    layout: Layout
    sizes: tuple[int, ...]
    form: dict
    terms: dict
    options: dict
    upstream: torch.Tensor
    parts: int

    @property
    def leaves(self):
        return [self.hidden, self.weight] + ([] if self.bias is None else [self.bias])

    @property
    def ignored(self):
        return self.options["ignore_index"]


def random_case(seed, world=None, ranks=None):
    """The case of a seed, over so many ranks of tokens and of words."""
    rng = np.random.default_rng(seed)
    world, ranks = world or int(rng.integers(1, 5)), ranks or int(rng.integers(1, 4))
    total, rows, width = int(rng.integers(world, 40)), int(rng.integers(1, 3)), int(rng.integers(1, 7))
    if total == rows:
        total += 1
    lengths = random_lengths(rng, total)
    mask = (masks.documents(lengths) & masks.causal()).resized(total)
    layout = random_layout(rng, LAYOUTS[seed % len(LAYOUTS)], mask, total, world)
    words = int(rng.choice(WORDS))
    sizes = np.diff(np.concatenate(([0], np.sort(rng.integers(0, words + 1, size=ranks - 1)), [words])))
    kept = rng.random((rows, total)) < rng.choice([0.1, 0.5, 1.0])
    if seed % 3 == 0:  # labels on one rank's tokens alone
        kept[:, layout.owner(np.arange(total)) != seed % world] = False
    if seed % 23 == 5:
        kept[:] = False

    def drawn(*shape, size=1.0):
        return torch.as_tensor(rng.normal(size=shape) * size)

    reduction = str(rng.choice(["mean", "mean", "sum"]))
    return Case(
        drawn(rows, total, width).requires_grad_(),
        drawn(words, width, size=rng.choice([0.1, 1.0, 8.0])).requires_grad_(),
        drawn(words).requires_grad_() if rng.random() < 0.5 else None,
        torch.as_tensor(rng.integers(0, words, size=(rows, total))),
        torch.as_tensor(kept),
        lengths,
        layout,
        tuple(int(n) for n in sizes),
        {
            "scale": float(rng.choice([1.0, 0.125, 1.7])),
            "soft_cap": rng.choice([None, None, 2.5]),
            "temperature": float(rng.choice([1.0, 0.6])),
        },
        {"label_smoothing": float(rng.choice([0.0, 0.1, 1.0])), "z_loss": float(rng.choice([0.0, 1e-2]))},
        {
            "reduction": reduction,
            "num_tokens": int(rng.integers(1, 90)) if reduction == "mean" and rng.random() < 0.3 else None,
            "ignore_index": int(rng.choice([-100, -1, 0, words])),
        },
        drawn(2, rows, total),
        int(rng.integers(1, 9)),
    )


@contextlib.contextmanager
def small_slabs(parts):
    """Slabs of few tokens, which no real call would have."""
    with mock.patch.object(slabs, "LEAST", 1), mock.patch.object(slabs, "PARTS", parts):
        yield


# -- one device, in plain PyTorch --------------------------------------------------------------------------------------


def shifted(case):
    """Whole labels, each token's that of the next one in its document."""
    owner = np.repeat(np.arange(len(case.lengths)), case.lengths)
    found = torch.full_like(case.labels, case.ignored)
    for row in range(len(found)):
        for i in range(len(owner) - 1):
            if owner[i] == owner[i + 1] and case.kept[row, i + 1]:
                found[row, i] = case.labels[row, i + 1]
    return found


def logits(case):
    raw = torch.einsum("bsd,vd->bsv", case.hidden, case.weight)
    raw = case.form["scale"] * (raw if case.bias is None else raw + case.bias)
    cap = case.form["soft_cap"]
    return (raw if cap is None else cap * torch.tanh(raw / cap)) / case.form["temperature"]


def expected(case, leaves, z):
    """Loss, log-probabilities and entropies of whole tensors, and gradients of these leaves of the first, and of the
    others with upstream gradients."""
    labels = shifted(case)
    counted = labels != case.ignored
    words = torch.nn.functional.one_hot(torch.where(counted, labels, 0), len(case.weight)).double()
    lse = torch.log(torch.exp(z - z.detach().amax(-1, keepdim=True)).sum(-1)) + z.detach().amax(-1)
    log_p = z - lse[..., None]
    logprobs = torch.where(counted, (log_p * words).sum(-1), 0.0)
    entropies = torch.where(counted, -(log_p.exp() * log_p).sum(-1), 0.0)
    smooth = case.terms["label_smoothing"]
    each = -(log_p * ((1 - smooth) * words + smooth / len(case.weight))).sum(-1) + case.terms["z_loss"] * lse**2
    count = case.options["num_tokens"] or max(int(counted.sum()), 1)
    loss = torch.where(counted, each, 0.0).sum() / (1 if case.options["reduction"] == "sum" else count)
    other = (torch.stack((logprobs, entropies)) * case.upstream).sum()
    grads = [torch.autograd.grad(one, leaves, retain_graph=True) for one in (loss, other)]
    return {"loss": loss, "logprobs": logprobs, "entropies": entropies} | _named(*grads)


def _named(of_loss, of_tokens):
    return {
        f"gradient {i} of {what}": grad
        for what, grads in (("loss", of_loss), ("tokens", of_tokens))
        for i, grad in enumerate(grads)
    }


# -- the four ways -----------------------------------------------------------------------------------------------------


def over_tokens(case, gradients="sum"):
    """Tokens over simulated ranks; each has the whole head."""
    head, layout = Head(case.weight, case.bias, **case.form), case.layout

    def work(rank):
        loss, found, mine = rank_work(case, head, rank.rank(), rank, gradients)
        return loss, found, (torch.stack(found) * mine).sum()

    results = simulate(layout.world_size, work)
    share = layout.world_size if gradients == "average" else 1
    of_loss = torch.autograd.grad(sum(loss for loss, *_ in results) / share, case.leaves, retain_graph=True)
    of_tokens = torch.autograd.grad(sum(one for *_, one in results), case.leaves)
    whole = [layout.unshard([found[i] for _, found, _ in results], 1) for i in range(2)]
    reported = {float(loss.detach()) for loss, *_ in results}
    assert len(reported) == 1, "ranks report different losses"
    return {"loss": results[0][0], "logprobs": whole[0], "entropies": whole[1]} | _named(of_loss, of_tokens)


def rank_work(case, head, rank, group, gradients):
    """Loss, log-probabilities and upstream gradients of one rank's tokens."""
    layout = case.layout
    batch = {"labels": case.labels, "loss_mask": case.kept}
    cut = {"documents": case.lengths, "positions": "document", "ignore_index": case.ignored}
    labels = shard_batch(batch, layout, rank, **cut)["shift_labels"]
    hidden = layout.shard(case.hidden, rank, 1)
    loss = losses.token_loss(hidden, labels, group=group, gradients=gradients, head=head, **case.terms, **case.options)
    found = losses.token_logprobs(hidden, labels, head=head, ignore_index=case.ignored)
    return loss, found, layout.shard(case.upstream, rank, 2)


def over_words(case):
    """Words over simulated ranks; each has all tokens, and must get their whole gradient."""
    labels, ends = shifted(case), np.cumsum(case.sizes)
    hidden = [case.hidden.detach().clone().requires_grad_() for _ in case.sizes]
    calls = {"group": None, "gradients": "sum", **case.terms, **case.options}

    def work(rank):
        own = slice(ends[rank.rank()] - case.sizes[rank.rank()], ends[rank.rank()])
        bias = None if case.bias is None else case.bias[own]
        head = Head(case.weight[own], bias, group=rank, **case.form)
        loss = losses.token_loss(hidden[rank.rank()], labels, head=head, **calls)
        found = losses.token_logprobs(hidden[rank.rank()], labels, head=head, ignore_index=case.ignored)
        return loss, found, (torch.stack(found) * case.upstream).sum()

    results = simulate(len(case.sizes), work)
    leaves = [*hidden, *case.leaves[1:]]
    grads = [torch.autograd.grad(sum(r[i] for r in results), leaves, retain_graph=True) for i in (0, 2)]
    for several in grads:
        assert all(torch.equal(one, several[0]) for one in several[: len(hidden)]), "ranks have different gradients"
    of_loss, of_tokens = ([several[0], *several[len(hidden) :]] for several in grads)
    found = {"loss": results[-1][0], "logprobs": results[-1][1].logprobs, "entropies": results[-1][1].entropies}
    return found | _named(of_loss, of_tokens)


def alone(case):
    """One process; the gradient of the loss is that of a second backward pass, which computes logits again."""
    head, labels = Head(case.weight, case.bias, **case.form), shifted(case)
    calls = {"group": None, "gradients": "average", **case.terms, **case.options}
    return _of_one(case, losses.token_loss(case.hidden, labels, head=head, **calls), case.leaves, case.hidden, head)


def of_logits(case, z):
    """Logits in one process."""
    calls = {"group": None, "gradients": "sum", **case.terms, **case.options}
    return _of_one(case, losses.token_loss(z, shifted(case), **calls), [z], z, None)


def _of_one(case, loss, leaves, values, head):
    found = losses.token_logprobs(values, shifted(case), head=head, ignore_index=case.ignored)
    first = [g.clone() for g in torch.autograd.grad(loss, leaves, retain_graph=True)]
    of_loss = torch.autograd.grad(loss, leaves)
    assert all((a - b).abs().max() <= BAR * max(1.0, b.abs().max()) for a, b in zip(first, of_loss, strict=True))
    of_tokens = torch.autograd.grad((torch.stack(found) * case.upstream).sum(), leaves)
    return {"loss": loss, "logprobs": found.logprobs, "entropies": found.entropies} | _named(of_loss, of_tokens)


def worst(case, found, right):
    """The largest error, relative to the largest value of its tensor, and where. Where a word is as good as sure, it is
    a difference of logits which cancel: errors are then relative to a hundredth of the head's own largest number."""
    form = case.form["scale"] / case.form["temperature"]
    least = 1e-2 * max(1.0, float(case.weight.detach().abs().max()) * form)
    errors = {
        name: float((found[name] - value).detach().abs().max()) / max(float(value.detach().abs().max()), least)
        for name, value in right.items()
    }
    name = max(errors, key=lambda name: (np.isnan(errors[name]), errors[name]))
    return errors[name], name


def check(seed):
    """The largest error of a case over all ways, and where; nan counts most."""
    case = random_case(seed)
    right = expected(case, case.leaves, logits(case))
    z = logits(case).detach().requires_grad_()
    with small_slabs(case.parts):
        ways = {
            "tokens": (over_tokens(case, ("sum", "average")[seed % 2]), right),
            "words": (over_words(case), right),
            "alone": (alone(case), right),
            "logits": (of_logits(case, z), expected(case, [z], z)),
        }
    errors = {f"{name} of {way}": error for way, (f, r) in ways.items() for error, name in [worst(case, f, r)]}
    name = max(errors, key=lambda name: (np.isnan(errors[name]), errors[name]))
    return errors[name], name


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    began, largest, failed = time.process_time(), 0.0, []
    for seed in range(options.first, options.first + options.cases):
        error, name = check(seed)
        if not error <= BAR:
            failed.append(seed)
            print(f"case {seed}: {name} is off by {error:.1e}")
        largest = max(largest, error)
    took = time.process_time() - began
    print(f"{options.cases} cases, {len(failed)} above {BAR:.0e}; largest error {largest:.1e}; {took:.0f} s")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
