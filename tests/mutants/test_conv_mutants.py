"""Mutants of convolutions over shards: each breaks one thing, and cases of the kind that test_convolution.py draws must
notice every one of them."""

import pytest
import torch
from torch.nn import functional

import longspan as ls
from longspan.mixers import convolution
from longspan.mixers.convolution import OwnRows
from longspan.planning import conv_plan, plan
from longspan.planning.conv_plan import ConvPlan, Haloed
from longspan.run import halo
from longspan.run.recorder import Kind
from longspan.spans import Span
from tests import conv_cases
from tests.conv_cases import NAMES, conv_case, expected, worst

MUTANTS = {}
SEEDS = range(60)


def mutant(function):
    """Enters a mutant: the first line of its docstring says what is wrong."""
    MUTANTS[function.__name__] = function
    return function


def changed_rows(patch, change):
    """Changes what forward gives: `change` is called with the rows of every segment, its halo first."""
    original = halo.HaloForward.program

    def program(self):
        found = yield from original(self)
        for part in self.halo_task.conv.haloed(self.halo_task.rank):
            for start, stop, reach, place in part.table.tolist():
                rows = found[part.batch.start : part.batch.stop, place - reach : place + stop - start]
                change(rows, reach)
        return found

    patch.setattr(halo.HaloForward, "program", program)


@mutant
def halo_lost(patch):
    """Every segment begins as a document does."""
    changed_rows(patch, lambda rows, reach: rows[:, :reach].zero_())


@mutant
def halo_turned(patch):
    """Rows before a segment are in the wrong order."""
    changed_rows(patch, lambda rows, reach: rows[:, :reach].copy_(rows[:, :reach].flip(1)))


@mutant
def halo_of_another_batch_row(patch):
    """The first batch row's halo goes to all."""
    changed_rows(patch, lambda rows, reach: rows[:, :reach].copy_(rows[:1, :reach].clone().expand(len(rows), -1, -1)))


@mutant
def halo_gradient_lost(patch):
    """What other ranks send is not added."""
    patch.setattr(halo.HaloBackwardWalk, "store_arrival", lambda self, transfer, rows: None)


@mutant
def halo_gradient_twice(patch):
    """What other ranks send is added twice."""
    arrived = halo.HaloBackwardWalk.store_arrival

    def twice(self, transfer, rows):
        copy = halo.TokenStore(
            rows.runs, rows.heads, rows.batch, tuple(self.recorder.new(t.shape, t.dtype) for t in rows.tensors)
        )
        rows.copy_to(copy, [(0, 0, rows.tensors[0].shape[2])])
        arrived(self, transfer, copy)
        arrived(self, transfer, rows)

    patch.setattr(halo.HaloBackwardWalk, "store_arrival", twice)


@mutant
def own_halo_gradient_lost(patch):
    """A row before a segment that lies on the same rank gets a gradient from its own place only."""
    add = halo.HaloBackwardWalk._add

    def added(self, gradient, runs, targets, sums):
        if targets is self.own_runs:
            part = next(part for part in self.haloed if (part.runs == runs).all())
            runs = part.table[:, [0, 1, 3]]
        add(self, gradient, runs, targets, sums)

    patch.setattr(halo.HaloBackwardWalk, "_add", added)


@mutant
def gradient_of_a_far_row_overwritten(patch):
    """Of a row that is in several halos of a rank, only the last one's gradient is sent."""
    take = halo.Sum.take

    def taken(self, new):
        self.drop([(new.start, new.stop)])
        take(self, new)

    patch.setattr(halo.Sum, "add", lambda self, start, stop, *part: taken(self, halo.Stretch(start, stop, part)))


@mutant
def halo_one_row_short(patch):
    """The wrong width: one row fewer than there should be before a segment."""
    segments = conv_plan.segments

    def short(spans, edges, width):
        table = segments(spans, edges, width)
        table[:, 2] = table[:, 2].clip(max=max(0, width - 2))
        return table

    patch.setattr(conv_plan, "segments", short)


@mutant
def documents_not_reset(patch):
    """The sequence is one document."""
    planned = conv_plan.build_conv_plan
    patch.setattr(ls.api, "build_conv_plan", lambda numbers, *rest: planned(numbers * 0, *rest))


@mutant
def first_batch_rows_documents(patch):
    """All batch rows have the documents of the first."""
    planned = conv_plan.build_conv_plan
    patch.setattr(ls.api, "build_conv_plan", lambda numbers, *rest: planned(numbers[:1], *rest))


@mutant
def batch_rows_cut_alike(patch):
    """All batch rows are laid out by the documents of the first."""
    patch.setattr(ConvPlan, "_row_groups", property(lambda self: (Span(0, self.batch),)))


@mutant
def activation_before_the_convolution(patch):
    """The activation comes first."""
    convolved = convolution.convolve_with_halos

    def early(rows, weight, bias, own, activation):
        rows = rows if activation is None else functional.silu(rows)
        return convolved(rows, weight, bias, own, None)

    patch.setattr(conv_cases, "convolve_with_halos", early)


@mutant
def padding_counted(patch):
    """Padding slots get an output as if they were tokens of zeros: the bias."""
    convolved = OwnRows.convolve

    def counted(self, rows, weight, bias):
        found = convolved(self, rows, weight, bias)
        if not self.num_padding or bias is None:
            return found
        real = found[:, : found.shape[1] - self.num_padding]
        return torch.cat((real, bias.expand(len(rows), self.num_padding, -1)), 1)

    patch.setattr(OwnRows, "convolve", counted)


@mutant
def rows_in_the_order_of_positions(patch):
    """Own rows come out in the order of positions, not of slots."""
    convolved = OwnRows.convolve
    places = {}
    of = OwnRows.of

    def made(plan, rank, device):
        own = of(plan, rank, device)
        places[id(own)] = torch.from_numpy(plan.layout.positions(rank)[: int(plan.layout.num_tokens[rank])]).argsort()
        return own

    def sorted_rows(self, rows, weight, bias):
        found = convolved(self, rows, weight, bias)
        order = places[id(self)]
        return torch.cat((found[:, : len(order)][:, order], found[:, len(order) :]), 1)

    patch.setattr(OwnRows, "of", staticmethod(made))
    patch.setattr(OwnRows, "convolve", sorted_rows)


@mutant
def weights_turned(patch):
    """The first column of the weight is for the token itself."""
    depthwise = convolution.depthwise
    patch.setattr(convolution, "depthwise", lambda rows, weight, bias: depthwise(rows, weight.flip(1), bias))


@mutant
def bias_of_every_segment_but_the_first_lost(patch):
    """Segments that are convolved one by one forget the bias."""
    own = convolution._convolve_own

    def forgets(rows, which, weight, bias):
        if not isinstance(which, list) or len(which) < 3 or bias is None:
            return own(rows, which, weight, bias)
        parts = rows.split(which, 1)[:-1]
        made = [convolution.depthwise(part, weight, bias if not n else None) for n, part in enumerate(parts)]
        return torch.cat(made, 1)

    patch.setattr(convolution, "_convolve_own", forgets)


@mutant
def rows_in_front_of_documents_are_not_zeros(patch):
    """What stands for nothing is something."""
    patch.setattr(halo.Rows, "fill_", lambda self, value: self.recorder.note(Kind.FILL, self, value=value + 1.0))


@mutant
def halos_from_their_second_row_on(patch):
    """The row furthest away is taken for the one after it."""
    runs = Haloed.runs.fget

    def shifted(self):
        table = runs(self)
        table[:, 0] += (self.table[:, 2] > 0) & (self.table[:, 0] + 1 < self.table[:, 1])
        table[:, 2] += (self.table[:, 2] > 0) & (self.table[:, 0] + 1 < self.table[:, 1])
        return table

    patch.setattr(Haloed, "runs", property(shifted))


def first_failure():
    """What the cases have to say: None, or the first thing that went wrong."""
    conv_plan._build_plan.cache_clear()  # what was remembered about a plan is of no use to mutants of it
    plan._build_plan.cache_clear()
    try:
        for seed in SEEDS:
            case = conv_case(seed)
            x, weight, bias, dout = case.tensors
            found = conv_cases.run_conv_loopback(case.plan, x, weight, bias, dout, activation=case.activation)
            for name, error in zip(NAMES, worst(found, expected(case)), strict=False):
                assert error <= 1e-12, f"{name} is wrong by {error:.1e}, seed {seed}"
    except (AssertionError, RuntimeError, IndexError, KeyError, ls.LongspanError) as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.90}"
    return None


@pytest.fixture(scope="module", autouse=True)
def _forget():
    yield
    conv_plan._build_plan.cache_clear()
    plan._build_plan.cache_clear()


def test_the_cases_pass_without_mutants():
    assert first_failure() is None


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_killed(name, monkeypatch, capsys):
    MUTANTS[name](monkeypatch)
    failure = first_failure()
    with capsys.disabled():
        print(f"\n  {name:42s} {failure}", end=" ")
    assert failure is not None, f"{name} lives"


def test_there_are_enough_mutants():
    assert len(MUTANTS) >= 16
