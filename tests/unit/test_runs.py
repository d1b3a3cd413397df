"""Runs of rows: which rows of several stores a piece gets, and what is left of a sum."""

import numpy as np
import pytest
import torch

from longspan.run.merge import Sum
from longspan.run.packing import PieceRuns, common_rows, first_rows, have_all, laid_out
from longspan.run.recorder import Recorder
from longspan.spans import Span, join


def drawn_spans(draw, size):
    """Return disjoint spans of some of the positions, in any order."""
    edges = np.unique(draw.integers(0, size + 1, size=draw.integers(2, 12)))
    spans = np.stack((edges[:-1], edges[1:]), axis=1)
    return draw.permutation(spans[draw.random(len(spans)) < 0.7])


def rows_by_position(runs):
    return {start + i: local + i for start, stop, local in runs.tolist() for i in range(stop - start)}


@pytest.mark.parametrize("seed", range(60))
def test_each_row_comes_from_the_first_store_that_has_it(seed):
    draw = np.random.default_rng(seed)
    sources = [laid_out(drawn_spans(draw, 60)) for _ in range(draw.integers(1, 5))]
    held = [rows_by_position(runs) for runs in sources]
    everything = np.array(sorted(set().union(*held)))
    if not len(everything):
        return
    order = draw.permutation(len(everything))[: draw.integers(1, len(everything) + 1)]
    wanted = laid_out(np.stack((everything[order], everything[order] + 1), axis=1))
    expected = [{} for _ in sources]
    for position, there in rows_by_position(wanted).items():
        number = next(n for n, rows in enumerate(held) if position in rows)
        expected[number][there] = held[number][position]
    found = first_rows(wanted, *sources)
    for runs, rows in zip(found, expected, strict=True):
        assert {dst + i: src + i for dst, src, num in runs for i in range(num)} == rows
        assert sum(num for *_, num in runs) == len(rows), "a row is copied twice"
        assert runs == sorted(runs)
    for runs, rows in zip(sources, held, strict=True):
        assert have_all(runs, wanted) == (set(rows_by_position(wanted)) <= set(rows))
        both = {there: rows[at] for at, there in rows_by_position(wanted).items() if at in rows}
        assert {dst + i: src + i for dst, src, num in common_rows(runs, wanted) for i in range(num)} == both


def test_rows_that_no_store_has_are_noticed():
    with pytest.raises(AssertionError):
        first_rows(laid_out(np.array([[0, 5]])), laid_out(np.array([[0, 2]])), laid_out(np.array([[3, 9]])))


@pytest.mark.parametrize("seed", range(20))
def test_join_finds_all_pairs(seed):
    draw = np.random.default_rng(seed)
    a, b = drawn_spans(draw, 40), laid_out(drawn_spans(draw, 40))[:, :2]
    pairs = [(i, j) for i, x in enumerate(a) for j, y in enumerate(b) if x[0] < y[1] and y[0] < x[1]]
    assert [(int(i), int(j)) for i, j in zip(*join(a, b), strict=True)] == pairs


def test_equal_spans_have_the_same_runs():
    runs = PieceRuns(laid_out(np.array([[0, 8]])))
    first, second = ((Span(4, 6), Span(0, 2)) for _ in range(2))
    assert first is not second
    assert runs.of(first) is runs.of(second)
    assert runs.of((Span(0, 2), Span(4, 6))) is not runs.of(first)


@pytest.mark.parametrize("seed", range(40))
def test_dropped_rows_of_a_sum_are_gone(seed):
    draw = np.random.default_rng(seed)
    recorder = Recorder()
    like = recorder.new((1, 1, 50, 4), torch.float32)
    sums, rows = Sum((like,), torch.float32), {}
    for start, stop in drawn_spans(draw, 50).tolist():
        part = recorder.new((1, 1, stop - start, 4), torch.float32)
        sums.add(start, stop, part)
        rows |= {start + i: (part.buffer.number, i) for i in range(stop - start)}
    for _ in range(2):
        spans = [tuple(span) for span in drawn_spans(draw, 50).tolist()]
        sums.drop(spans)
        rows = {row: place for row, place in rows.items() if not any(a <= row < b for a, b in spans)}
    found = {
        stretch.start + i: (stretch.tensors[0].buffer.number, stretch.tensors[0].tokens.start + i)
        for stretch in sums.within(0, 50)
        for i in range(stretch.stop - stretch.start)
    }
    assert found == rows
    assert sums.any() == bool(rows)
