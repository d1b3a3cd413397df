"""Mutants of side tensors, gathers, numbers of sequences and the check of layouts: each breaks one thing, and cases of
the kind that test_tokens.py draws must notice every one of them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import longspan as ls
from longspan import validate
from longspan.layouts import layout as carried
from longspan.run.simulated import simulate
from longspan.training import batch, gather_tokens, loss_without_logits, tokens
from tests.token_cases import TOLERANCE, gathered_off, sequences_off, side_tensors_off, weighed_off

MUTANTS = {}
CHECKS = (side_tensors_off, gathered_off, sequences_off, weighed_off)


def mutant(function):
    """Enters a mutant: the first line of its docstring says what is wrong."""
    MUTANTS[function.__name__] = function
    return function


@mutant
def shift_lost(patch):
    """Numbers of tokens stay in the tokens' own places."""
    patch.setattr(tokens, "shift_within_documents", lambda values, *others: values)


@mutant
def shifted_after_the_cut(patch):
    """Each rank moves its own tokens by one, as if the next one were always here."""
    shard = tokens.shard_like

    def moved(values, like, rank=None, *, shift, dim=-1, fill=0, documents=None):
        part = shard(values, like, rank, shift=0, dim=dim, fill=fill, documents=documents)
        return part.roll(-shift, dim)

    patch.setattr("tests.token_cases.shard_like", moved)


@mutant
def documents_run_together(patch):
    """Side tensors are shifted across the ends of documents."""
    shifted = tokens.shift_within_documents
    one = lambda values, shift, numbers, fill: shifted(values, shift, numbers[:1] * 0, fill)  # noqa: E731
    patch.setattr(tokens, "shift_within_documents", one)


@mutant
def gradient_of_a_gather_not_scaled(patch):
    """FSDP divides by the number of ranks, and nobody multiplies."""
    patch.setattr(tokens, "share_factor", lambda *args: 1)


@mutant
def gradient_of_other_tokens(patch):
    """After a gather each rank takes the gradient as if it held the first tokens."""

    def backward(ctx, *grads):
        layout, rank, dim, factor = ctx.back
        return grads[0].narrow(dim, 0, layout.num_slots(rank)) * factor, None, None, None, None

    patch.setattr(tokens.Gathered, "backward", staticmethod(backward))


@mutant
def sums_of_one_rank(patch):
    """No all-reduce: every rank has its own tokens' sums."""
    patch.setattr(tokens, "all_summed", lambda x, group: x)


@mutant
def mean_of_means(patch):
    """Each rank divides by its own count, before the sum over ranks."""
    summed = tokens.Summed.apply

    def mean_first(terms, group, factor):
        own = terms[1].clamp(min=1.0)
        return summed(torch.stack((terms[0] / own, terms[1] / own)), group, factor)

    patch.setattr(tokens.Summed, "apply", mean_first)


@mutant
def gradient_summed_over_ranks(patch):
    """Every rank's loss is taken for a share, although it is the whole loss."""

    def backward(ctx, *grads):
        return grads[0] * ctx.factor * 2, None, None

    patch.setattr(tokens.Summed, "backward", staticmethod(backward))


@mutant
def gradients_of_numbers_stay_where_they_are(patch):
    """What other ranks' tokens say of a sequence's number is forgotten."""
    patch.setattr(loss_without_logits.SumHere, "apply", lambda factor, *parts: [part / 1 for part in parts])


@mutant
def numbers_gradients_not_divided(patch):
    """Shares that were multiplied for FSDP are multiplied once more."""
    apply = loss_without_logits.SumHere.apply
    patch.setattr(loss_without_logits.SumHere, "apply", lambda factor, *parts: apply(1, *parts))


@mutant
def mask_ignored(patch):
    """Every token counts."""
    patch.setattr(tokens, "as_bool", lambda mask, *_: torch.ones_like(mask))


@mutant
def rows_share_documents(patch):
    """The first document of each row is the same."""
    index = tokens._index

    def shared(cut, rank, rows):
        found, total = index(cut, rank, rows)
        return cut.numbers[:, cut.layout.positions(rank)[: found.shape[1]]].repeat(rows // len(cut.numbers), 0), total

    patch.setattr(tokens, "_index", shared)


@mutant
def local_places(patch):
    """The first tokens of a rank are taken for the first of the sequence."""
    index = tokens._index

    def local(cut, rank, rows):
        found, total = index(cut, rank, rows)
        starts = found - cut.numbers[:, cut.layout.positions(rank)[: found.shape[1]]]
        return cut.numbers[:, : found.shape[1]] + starts, total

    patch.setattr(tokens, "_index", local)


@mutant
def empty_documents_forgotten(patch):
    """Documents of length 0 have no number of their own."""
    counted = lambda documents, numbers: [int(row[-1]) + 1 if len(row) else 1 for row in numbers]  # noqa: E731
    patch.setattr(batch, "document_counts", counted)


def off(check, seed):
    try:
        return check(seed)
    except (RuntimeError, IndexError, ValueError):
        return np.inf


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_noticed(name, monkeypatch):
    MUTANTS[name](monkeypatch)
    assert any(not off(check, seed) <= TOLERANCE for seed in range(40) for check in CHECKS), MUTANTS[name].__doc__


def test_without_a_mutant_nothing_is_noticed():
    assert all(off(check, seed) <= TOLERANCE for seed in range(40) for check in CHECKS)


# -- the check of layouts ----------------------------------------------------------------------------------------------


def refused():
    """Whether shards of another layout are refused, and whether those of the same are taken."""
    layout, other = ls.layouts.zigzag(8, 2), ls.layouts.contiguous(8, 2)
    x = torch.arange(8)
    try:
        simulate(2, lambda rank: gather_tokens(other.shard(x, rank.rank()), layout, rank))
    except ls.PlanError:
        return all(
            torch.equal(found, x)
            for found in simulate(2, lambda rank: gather_tokens(layout.shard(x, rank.rank()), layout, rank))
        )
    return False


LAYOUT_MUTANTS = {
    "nothing is remembered": lambda patch: patch.setattr("longspan.layouts.layout.remember", lambda *args: None),
    "lengths are compared": lambda patch: patch.setattr(
        validate, "other_tokens", lambda one, two: (one.num_tokens != two.num_tokens).any()
    ),
    "another dim is meant": lambda patch: patch.setattr(
        validate, "carried_layout_of", lambda x: replace(carried.carried_layout_of(x), dim=-7)
    ),
    "all are taken for written into": lambda patch: patch.setattr(validate, "version", lambda x: 1),
}


@pytest.mark.parametrize("name", LAYOUT_MUTANTS)
def test_every_mutant_of_the_check_is_noticed(name, monkeypatch):
    assert refused()
    LAYOUT_MUTANTS[name](monkeypatch)
    assert not refused()
