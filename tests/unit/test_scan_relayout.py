"""Moving tokens instead of states: what it costs, when a plan takes it, and that it is named where it is asked for."""

import numpy as np
import pytest

import longspan as ls
from longspan.errors import PlanError
from longspan.planning.scan_plan import moved_tokens

QWEN = {"heads": 32, "keys": 128, "values": 128, "maps": "matrix"}
TOKEN = (16 * 128 * 2 + 32 * 128 * 2 + 2 * 32) * 2
"""Bytes of q, k, v, g, beta and the output of one token of Qwen3-Next in bfloat16."""


def longtail(total, count, seed=0):
    weights = np.random.default_rng(seed).pareto(1.0, count) + 0.1
    lengths = np.maximum(1, (weights / weights.sum() * total).astype(int))
    lengths[-1] += total - lengths.sum()
    return lengths.tolist()


@pytest.mark.parametrize("seed", range(20))
def test_tokens_that_move_are_those_whose_owner_changes(seed):
    draw = np.random.default_rng(seed)
    length, world = int(draw.integers(1, 60)), int(draw.integers(1, 6))
    cuts = np.unique(np.concatenate(([0], draw.integers(0, length, 7), [length])))
    spans = [[] for _ in range(world)]
    for start, stop in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
        spans[int(draw.integers(world))].append((start, stop))
    source, target = ls.layouts.Layout.from_spans(length, spans), ls.layouts.contiguous(length, world)
    wanted = np.zeros((world, world), dtype=int)
    np.add.at(wanted, (source.owner(np.arange(length)), target.owner(np.arange(length))), 1)
    np.fill_diagonal(wanted, 0)
    found = np.zeros_like(wanted)
    for src, dst, tokens in moved_tokens(source, target).tolist():
        found[src, dst] = tokens
    assert (found == wanted).all()


def test_where_spans_are_many_tokens_move_and_else_states_do():
    length, world = 1 << 18, 16
    lengths = longtail(length, 60)
    mask = ls.masks.documents(lengths) & ls.masks.causal()
    cut = ls.layouts.striped(length, world, stripe=256)
    dealt = ls.layouts.balanced(mask, world_size=world)
    moved, stayed = (ls.scan_plan(lengths, layout, **QWEN, token_bytes=TOKEN) for layout in (cut, dealt))
    assert moved.scheme.startswith("relayout")
    assert moved.source == cut
    assert moved.reasons[0].seconds < min(reason.seconds for reason in moved.reasons[1:])
    assert stayed.source is None
    assert any(reason.scheme.startswith("relayout") for reason in stayed.reasons)
    moved.validate()


def test_without_the_weight_of_tokens_nothing_moves_unless_asked():
    layout = ls.layouts.striped(256, 4)
    assert ls.scan_plan(None, layout, **QWEN).source is None
    assert ls.scan_plan(None, layout, **QWEN, scheme="relayout").source == layout
    with pytest.raises(PlanError, match="token_bytes"):
        ls.scan_plan(None, layout, **QWEN, token_bytes=-1)


def test_plans_that_move_tokens_differ_from_those_that_do_not():
    """Ranks compare fingerprints: the layout that tokens come from is a part of them."""
    plans = [ls.scan_plan(None, ls.layouts.striped(64, 4, stripe=n), **QWEN, scheme="relayout") for n in (1, 2)]
    there = ls.scan_plan(None, ls.layouts.contiguous(64, 4), **QWEN, scheme=plans[0].scheme.partition(", ")[2])
    assert len({plan.fingerprint for plan in (*plans, there)}) == 3


def test_spans_have_a_price_where_states_go_from_span_to_span():
    """Of several ways to deal, the one with fewer spans is taken when a span costs as much as many keys."""
    fewer = 0
    for seed in range(12):
        lengths = longtail(1 << 16, 24, seed)
        mask = ls.masks.documents(lengths) & ls.masks.causal()
        free, priced = (ls.layouts.balanced(mask, world_size=8, span_keys=keys) for keys in (0, 1 << 20))
        assert len(priced.table) <= len(free.table)
        fewer += len(priced.table) < len(free.table)
    assert fewer
