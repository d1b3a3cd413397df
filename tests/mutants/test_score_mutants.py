"""Mutants of what happens to scores: each breaks one thing, and a few problems of test_scores.py must notice it.

As in test_mutants.py, a mutant is a function that patches something.
"""

import dataclasses

import pytest
import torch

import longspan as ls
from longspan import layouts
from longspan.kernels import reference
from longspan.masks.functions import Function
from longspan.run import passes
from longspan.run.merge import Accumulator
from longspan.scoring import biases as extras
from longspan.scoring import pipeline as scores
from longspan.scoring.biases import RelativeBias
from longspan.scoring.pipeline import Dropout, TilePairs, TilePositions
from tests.exact_cases import anew
from tests.flat_rows import changed
from tests.score_cases import made_plan, problem

MUTANTS = {}


def mutant(function):
    """Enters a mutant: the first line of its docstring says what is wrong."""
    MUTANTS[function.__name__] = function
    return function


# -- where a pair is ---------------------------------------------------------------------------------------------------


def indices(patch, change):
    """Functions of scores and dropout see other indices: change(b, h, q, kv) -> the four of them."""
    index = TilePositions.index
    patch.setattr(TilePositions, "index", lambda self, tile: change(*index(self, tile)))


def counted(x, dim):
    """0, 1, 2... in place of the numbers along a dim."""
    shape = [-1 if at == dim else 1 for at in range(4)]
    return torch.arange(x.shape[dim]).view(shape)


@mutant
def local_query_positions(patch):
    """Score functions get the rows of the tile, as those of others' context parallelism do."""
    indices(patch, lambda b, h, q, kv: (b, h, counted(q, 2), kv))


@mutant
def local_key_positions(patch):
    """Score functions get the columns of the tile."""
    indices(patch, lambda b, h, q, kv: (b, h, q, counted(kv, 3)))


@mutant
def head_offset_dropped(patch):
    """Heads are counted from the first of those that a rank computes."""
    indices(patch, lambda b, h, q, kv: (b, counted(h, 1), q, kv))


@mutant
def batch_offset_dropped(patch):
    """Batch rows are counted from the first of those that a compute is for."""
    indices(patch, lambda b, h, q, kv: (counted(b, 0), h, q, kv))


@mutant
def queries_and_keys_swapped(patch):
    """Score functions get (kv, q)."""
    indices(patch, lambda b, h, q, kv: (b, h, kv.mT, q.mT) if q.shape[2] == kv.shape[3] else (b, h, q, kv))


# -- masks that are functions ------------------------------------------------------------------------------------------


@mutant
def mask_function_ignored(patch):
    """Where the mask's function decides, everything is allowed."""
    patch.setattr(TilePairs, "allowed_pairs", lambda self, tile: torch.ones(tile.rows, tile.cols, dtype=torch.bool))


@mutant
def mask_function_of_local_positions(patch):
    """The mask's function gets positions counted from the first of the tile."""
    allows = Function.allows

    def local(self, q, kv):
        return allows(self, q - q.min(), kv) if q.ndim == 2 and q.shape[0] > 1 else allows(self, q, kv)

    patch.setattr(Function, "allows", local)


@mutant
def mask_function_of_the_first_head(patch):
    """All heads use the mask function of the first."""
    patch.setattr(Function, "allows", _first(Function.allows, "head"))


@mutant
def mask_function_of_the_first_row(patch):
    """All batch rows use the mask function of the first."""
    patch.setattr(Function, "allows", _first(Function.allows, "row"))


def _first(allows, name):
    def changed(self, q, kv):
        first = None if getattr(self, name) is None else 0
        return allows(dataclasses.replace(self, **{name: first}), q, kv)

    return changed


@mutant
def mask_function_ignored_in_backward(patch):
    """Backward forgets the mask's function."""
    gradient, hidden_pairs = reference._score_gradient, reference._hidden_pairs

    def forgetting(scores, block, panel):
        return hidden_pairs(scores, dataclasses.replace(block, asks=False), panel)

    def changed(*args):
        reference._hidden_pairs = forgetting
        try:
            return gradient(*args)
        finally:
            reference._hidden_pairs = hidden_pairs

    patch.setattr(reference, "_score_gradient", changed)


@mutant
def lse_of_blind_rows_is_zero(patch):
    """A row that sees nothing gets lse 0."""
    result = Accumulator.result

    def filled(self):
        out, lse = result(self)
        return out, changed(lambda lse: lse.masked_fill(lse.isneginf(), 0.0), lse)

    patch.setattr(Accumulator, "result", filled)


# -- functions of scores -----------------------------------------------------------------------------------------------


@mutant
def functions_never_mapped(patch):
    """A function that adds up what it gets is called with tiles."""

    def on_tile(self, score, index, call=scores.call_plainly):
        return self.apply(score, *index, call=call)

    patch.setattr(scores.Scoring, "on_tile", on_tile)


@mutant
def score_function_not_applied_in_backward(patch):
    """Backward takes the scores as they are."""
    patch.setattr(TilePairs, "pull", lambda self, scores, tile: (scores, lambda gradient: gradient))


@mutant
def derivative_of_the_score_function_missing(patch):
    """The gradient of the changed score is taken for that of the score."""
    pull = TilePairs.pull

    def changed(self, scores, tile):
        found, pulled = pull(self, scores, tile)

        def through(gradient):
            pulled(gradient)  # captured tensors get theirs
            return gradient.clone()

        return found, through

    patch.setattr(TilePairs, "pull", changed)


@mutant
def derivative_of_the_soft_cap_missing(patch):
    """The soft cap passes gradients through unchanged."""

    def straight(cap):
        return lambda score, b, h, q, kv: score + (torch.tanh(score / cap) * cap - score).detach()

    patch.setattr(extras, "soft_cap", straight)


@mutant
def soft_cap_comes_last(patch):
    """The soft cap is applied after everything else."""
    of = scores.Scoring.of

    def turned(functions, *rest, **more):
        return of([*functions[1:], *functions[:1]], *rest, **more)

    patch.setattr(scores.Scoring, "of", staticmethod(turned))


@mutant
def alibi_of_signed_distances(patch):
    """Keys after the query are favoured."""
    patch.setattr(extras, "alibi", lambda slopes, heads: lambda s, b, h, q, kv: s - slopes[h] * (q - kv))


@mutant
def relative_bias_of_the_other_direction(patch):
    """Distances are key minus query."""
    bucket = RelativeBias.bucket
    patch.setattr(RelativeBias, "bucket", lambda self, q, kv: bucket(self, kv, q))


@mutant
def bias_of_the_first_batch_row(patch):
    """Every batch row gets the bias of the first."""
    original = extras.additive_bias

    def changed(bias):
        function = original(bias)
        return lambda s, b, h, q, kv: function(s, torch.zeros_like(b), h, q, kv)

    patch.setattr(extras, "additive_bias", changed)


# -- gradients of what is captured -------------------------------------------------------------------------------------


@mutant
def captured_gradients_not_added_up(patch):
    """Each tile's gradient replaces the one before."""
    add = scores.Totals.add

    def replaced(self, number, gradient):
        self.sums[number].zero_()
        add(self, number, gradient)

    patch.setattr(scores.Totals, "add", replaced)


@mutant
def captured_elements_met_twice_count_once(patch):
    """A number that many pairs of a tile use gets the gradient of one of them."""

    def once(self, number, rows, gradients):
        total = self.sums[number].view(-1, gradients.shape[1])
        found = torch.zeros_like(total)
        found[rows] = gradients.to(total.dtype)
        total += found

    patch.setattr(scores.Totals, "add_rows", once)


@mutant
def captured_gradients_of_one_rank(patch):
    """Shares of other ranks than the first are lost."""
    shared = passes.Backward.shared_gradients

    def lost(self):
        return [t * (self.job.rank == 0) for t in shared(self)]

    patch.setattr(passes.Backward, "shared_gradients", lost)


@mutant
def captured_gradients_swapped(patch):
    """Of two tensors of one shape each gets the other's gradient."""
    shared = passes.Backward.shared_gradients

    def swapped(self):
        found = shared(self)
        if len(found) > 1 and found[0].shape == found[1].shape:
            found[:2] = found[1::-1]
        return found

    patch.setattr(passes.Backward, "shared_gradients", swapped)


@mutant
def captured_gradients_times_the_scale(patch):
    """The scale of scores goes into the gradients of what is captured."""
    pull = TilePairs.pull

    def changed(self, scores, tile):
        found, pulled = pull(self, scores, tile)
        return found, lambda gradient: pulled(gradient * 8**-0.5) * 8**0.5

    patch.setattr(TilePairs, "pull", changed)


# -- sinks and dropout -------------------------------------------------------------------------------------------------


@mutant
def sign_of_the_gradient_of_sinks(patch):
    """Sinks learn in the wrong direction."""
    shared = passes.Backward.shared_gradients

    def turned(self):
        found = shared(self)
        return found if self.job.sinks is None else [*found[:-1], -found[-1]]

    patch.setattr(passes.Backward, "shared_gradients", turned)


@mutant
def sinks_not_in_lse(patch):
    """The output knows of sinks, lse does not."""
    with_sinks = passes.with_sinks
    patch.setattr(passes, "with_sinks", lambda out, lse, sinks: (with_sinks(out, lse, sinks)[0], lse))


@mutant
def sinks_of_every_rank(patch):
    """Sinks join every partial result, not the whole once."""
    result = Accumulator.result

    def joined(self):
        out, lse = result(self)
        if lse.shape[1] != 4:
            return out, lse

        def both(out, lse):
            made, stat = passes.with_sinks(out, lse.squeeze(3), torch.zeros(lse.shape[1], dtype=lse.dtype))
            return made, stat.unsqueeze(3)

        return changed(lambda out, lse: both(out, lse)[0], out, lse), changed(
            lambda lse, out: both(out, lse)[1], lse, out
        )

    patch.setattr(Accumulator, "result", joined)


@mutant
def dropout_forgotten_in_backward(patch):
    """Backward knows of no dropout."""
    gradient, factor = reference._score_gradient, TilePairs.factor

    def changed(*args):
        TilePairs.factor = lambda self, tile, dtype: None
        try:
            return gradient(*args)
        finally:
            TilePairs.factor = factor

    patch.setattr(reference, "_score_gradient", changed)


@mutant
def dropout_forgotten_in_dv(patch):
    """Gradients of values are taken as if nothing had been dropped, kept ones too small."""
    gradient = reference._score_gradient

    def changed(*args):
        ds, used = gradient(*args)
        asked = args[0].pairs
        dropout = None if asked is None or asked.scoring is None else asked.scoring.dropout
        return ds, used if dropout is None else used * (1 - dropout.p)

    patch.setattr(reference, "_score_gradient", changed)


@mutant
def dropout_does_not_rescale(patch):
    """What is kept is not scaled up."""
    patch.setattr(Dropout, "factor", lambda self, b, h, q, kv, dtype: self.keeps(b, h, q, kv).to(dtype))


@mutant
def dropout_the_same_for_all_heads(patch):
    """The head does not enter the pattern."""
    keeps = Dropout.keeps
    patch.setattr(
        Dropout, "keeps", lambda self, b, h, q, kv: keeps(self, b, torch.zeros_like(h), q, kv).expand(
            torch.broadcast_shapes(b.shape, h.shape, q.shape, kv.shape)
        ),
    )  # fmt: skip


@mutant
def dropout_drawn_by_place_in_the_tile(patch):
    """The pattern follows rows and columns of tiles, as a generator's would."""
    keeps = Dropout.keeps
    patch.setattr(Dropout, "keeps", lambda self, b, h, q, kv: keeps(self, b, h, counted(q, 2), counted(kv, 3)))


@mutant
def dropout_changes_the_sum(patch):
    """Dropped pairs are left out of the softmax's sum too."""
    change = TilePairs.change

    def changed(self, scores, tile):
        found, factor = change(self, scores, tile), self.factor(tile, scores.dtype)
        return found if factor is None else found.masked_fill(factor == 0, -torch.inf)

    patch.setattr(TilePairs, "change", changed)


# -- the battery -------------------------------------------------------------------------------------------------------

BATTERY = [  # score function, mask, layout (of a number of tokens and ranks), scheme, ranks
    ("everything", "documents", layouts.zigzag, "ring", 2),
    ("everything", "per_row", layouts.striped, "all_to_all", 2),
    ("alibi", "full", layouts.contiguous, "exchange", 2),
    ("t5_table", "full", layouts.zigzag, "hybrid", 4),
    ("soft_cap", "causal", layouts.zigzag, "all_gather", 3),
    ("sinks", "blind_rows", layouts.contiguous, "ring", 2),
    ("bias_tensor", "window", layouts.contiguous, "exchange", 2),
    ("slopes_by_head", "opaque", layouts.zigzag, "all_to_all", 2),
    ("documents_by_sum", "full", layouts.contiguous, "ring", 2),
    ("by_batch_row", "opaque_rows_heads", layouts.contiguous, "exchange", 2),
    ("pair_bias", "blind_rows", layouts.zigzag, "ring", 2),
    ("temperature", "prefix_lm", layouts.contiguous, "all_to_all", 4),
    ("dropped", "causal", layouts.zigzag, "exchange", 3),
]
TOKENS = 26


@pytest.fixture(scope="module")
def problems():
    made = []
    for seed, (score, mask, layout, scheme, world) in enumerate(BATTERY):
        given = problem(score, mask, TOKENS, seed)
        spread = layout(TOKENS, world) if layout is not layouts.striped else layout(TOKENS, world, stripe=5)
        made.append((given, made_plan(given.mask, spread, scheme)))
    return made


def forget(problems):
    """What mask functions said is remembered by masks."""
    for _, plan in problems:
        plan.mask.known.clear()


def first_failure(problems):
    """What the battery has to say: None, or the first thing that went wrong."""
    try:
        for given, plan in problems:
            fresh = anew(plan)  # what was remembered about a plan is of no use to mutants of it
            fresh._steps.update(plan._steps)
            given.check(fresh)
    except (AssertionError, RuntimeError, IndexError, ls.LongspanError) as error:  # any other is the mutant's mistake
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.90}"
    return None


def test_the_battery_passes_without_mutants(problems):
    assert first_failure(problems) is None


def test_every_mutant_is_killed(problems, monkeypatch, capsys):
    assert len(MUTANTS) >= 30
    found = {}
    for name, mutate in MUTANTS.items():
        with monkeypatch.context() as patch:
            mutate(patch)
            forget(problems)
            found[name] = first_failure(problems)
    forget(problems)
    with capsys.disabled():
        print()
        for name, failure in found.items():
            print(f"  {name:42s} {failure}")
    survivors = [name for name, failure in found.items() if failure is None]
    assert not survivors, f"{len(survivors)} of {len(MUTANTS)} mutants live: {survivors}"
    assert first_failure(problems) is None, "a mutant was not taken back"
