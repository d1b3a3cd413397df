"""Random tokens over simulated ranks, and how far side tensors, gathers and numbers of sequences are from one device:
for test_tokens.py and for its mutants."""

import numpy as np
import torch

import longspan as ls
from longspan.run.simulated import simulate
from longspan.training import gather_tokens, per_sequence, per_token, shard_batch, shard_like
from tests.cases import LAYOUTS, random_layout, random_lengths

TOLERANCE = 1e-12


class TokenCase:
    """Documents, a layout, and tokens with some that do not count, drawn from a seed; ranks may hold none."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        self.total, self.world, self.rows = (int(rng.integers(low, high)) for low, high in ((1, 40), (1, 6), (1, 4)))
        per_row = seed % 3 == 1
        lengths = [random_lengths(rng, self.total) for _ in range(self.rows if per_row else 1)]
        self.documents = None if seed % 5 == 4 else lengths if per_row else lengths[0]
        rows = [np.array([self.total])] if self.documents is None else lengths
        self.lengths = [rows[row % len(rows)] for row in range(self.rows)]
        mask = (ls.masks.documents(lengths[0]) & ls.masks.causal()).resized(self.total)
        self.layout = random_layout(rng, LAYOUTS[seed % len(LAYOUTS)], mask, self.total, self.world)
        self.rng, self.gradients = rng, ("sum", "average")[seed % 2]
        self.values = self.normal(self.rows, self.total).requires_grad_()
        self.counts = torch.as_tensor(rng.random((self.rows, self.total)) < rng.choice([0.2, 0.7, 1.0]))
        if seed % 7 == 0 and self.world > 1:  # whole ranks without a token that counts
            self.counts[:, self.layout.owner(np.arange(self.total)) != 0] = False

    def normal(self, *shape):
        return torch.as_tensor(self.rng.normal(size=shape))

    @property
    def num_sequences(self):
        return sum(map(len, self.lengths))

    def batch(self, rank):
        batch = {"labels": torch.zeros(self.rows, self.total, dtype=torch.int64)}
        return shard_batch(batch, self.layout, rank, documents=self.documents, positions="sequence")

    def documents_of(self, values):
        """A tensor (tokens of the document) for each sequence."""
        return [part for row, lengths in zip(values, self.lengths, strict=True) for part in row.split(lengths.tolist())]

    def shards(self, x):
        """Each rank's part of x, leaves of one graph each, as processes have them."""
        parts = [self.layout.shard(x.detach(), rank, 1) for rank in range(self.world)]
        return [part.requires_grad_() if x.requires_grad else part for part in parts]

    def gradient_off(self, parts):
        """How far the ranks' gradients, as parameters see them after the trainer's reduction, are from one device's."""
        grads = [torch.zeros_like(part) if part.grad is None else part.grad for part in parts]
        whole = self.layout.unshard(grads, 1) / (self.world if self.gradients == "average" else 1)
        return worst((whole, self.values.grad)) / (1 + float(self.values.grad.abs().max()))


def worst(*pairs):
    return max(float((a - b).detach().abs().max()) if a.numel() else 0.0 for a, b in pairs)


def side_tensors_off(seed):
    """How far a tensor of token numbers is from what every slot should hold, and from the labels."""
    case, shift, off = TokenCase(seed), seed % 4, 0.0
    ids = torch.arange(case.rows * case.total).view(case.rows, case.total)
    features = case.normal(case.rows, case.total, 2)
    for rank in range(case.world):
        mine = shard_batch(
            {"labels": ids}, case.layout, rank, documents=case.documents, positions="sequence", num_shifts=3
        )
        found = shard_like(ids.double(), mine, shift=shift, fill=-100)
        expected = torch.full(found.shape, -100.0, dtype=torch.float64)
        for row in range(case.rows):
            document = np.repeat(np.arange(len(case.lengths[row])), case.lengths[row])
            for slot, place in enumerate(case.layout.positions(rank)):
                aim = place + shift
                if place < case.total and aim < case.total and document[aim] == document[place]:
                    expected[row, slot] = ids[row, aim]
        pairs = [(found, expected)]
        if shift:  # what multi-token prediction makes of labels
            pairs.append((found, mine["shift_labels" + ("" if shift == 1 else f"_{shift}")]))
        more = shard_like(features, case.layout, rank, shift=shift, dim=1, documents=case.documents, fill=-1)
        other = torch.stack([shard_like(features[..., i], mine, shift=shift, fill=-1) for i in range(2)], dim=-1)
        off = max(off, worst(*pairs, (more, other)))
    return off


def gathered_off(seed):
    """How far whole tokens are from the truth on any rank, and gradients after the trainer's reduction; relative."""
    case = TokenCase(seed)
    weights = case.normal(case.rows, case.total)
    loss_of = lambda whole: ((whole * weights).sum() + 1) ** 2  # noqa: E731  (every token's gradient depends on all)
    loss_of(case.values).backward()
    parts = case.shards(case.values)

    def work(rank):
        whole = gather_tokens(parts[rank.rank()], case.batch(rank.rank()), rank, 1, gradients=case.gradients)
        return whole.detach(), loss_of(whole)

    found = simulate(case.world, work)
    sum(loss for _, loss in found).backward()
    return max(worst(*((whole, case.values) for whole, _ in found)), case.gradient_off(parts))


def expected_numbers(case, values, reduce):
    """A sum or a mean for each document, one after the other."""
    kept = [
        part[counts] for part, counts in zip(case.documents_of(values), case.documents_of(case.counts), strict=True)
    ]
    sums = [part.sum() if len(part) else 0 * values.sum() for part in kept]
    return torch.stack([s / max(len(part), 1) if reduce == "mean" else s for s, part in zip(sums, kept, strict=True)])


def sequences_off(seed):
    """How far numbers of sequences are from the truth on any rank, and gradients of a loss of them; relative."""
    case, reduce = TokenCase(seed), ("sum", "mean")[seed // 2 % 2]
    weights = case.normal(case.num_sequences)
    loss_of = lambda numbers: (numbers * weights).sum() + numbers.square().sum() ** 2 / 50  # noqa: E731
    expected = expected_numbers(case, case.values, reduce)
    loss_of(expected).backward()
    parts = case.shards(case.values)

    def work(rank):
        mine, counts = case.batch(rank.rank()), case.layout.shard(case.counts, rank.rank(), 1)
        numbers = per_sequence(parts[rank.rank()], mine, rank, reduce=reduce, mask=counts, gradients=case.gradients)
        return numbers, loss_of(numbers)

    found = simulate(case.world, work)
    sum(loss for _, loss in found).backward()
    off = worst(*((numbers, expected) for numbers, _ in found)) / (1 + expected.abs().max().item())
    return max(off, case.gradient_off(parts))


def weighed_off(seed):
    """The same for a mean of whole sequences that weighs each token's loss, as in GSPO by token."""
    case = TokenCase(seed)
    factors = case.normal(case.rows, case.total)
    means = expected_numbers(case, case.values, "mean").exp()
    spread = torch.cat([m.expand(int(n)) for m, n in zip(means, np.concatenate(case.lengths), strict=True)])
    expected = (spread.view(case.rows, case.total) * factors * case.values).sum() ** 2
    expected.backward()
    parts = case.shards(case.values)

    def work(rank):
        mine, own = case.batch(rank.rank()), parts[rank.rank()]
        counts = case.layout.shard(case.counts, rank.rank(), 1)
        options = {"gradients": case.gradients}
        means = per_sequence(own, mine, rank, reduce="mean", mask=counts, **options).exp()
        terms = per_token(means, mine, rank, **options) * case.layout.shard(factors, rank.rank(), 1) * own
        return per_sequence(terms, mine, rank, **options).sum() ** 2

    found = simulate(case.world, work)
    sum(found).backward()
    return max(worst(*((loss, expected) for loss in found)) / (1 + expected.item()), case.gradient_off(parts))
