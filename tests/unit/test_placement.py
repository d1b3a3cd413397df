"""whole_documents(): every document once, balance, few partners inside nodes, the same result everywhere, and time."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.batches import LAWS, lengths_of
from benchmarks.layouts import best_ms
from longspan.errors import LayoutError, MaskError
from longspan.layouts import Layout, whole_documents
from longspan.layouts.placement import divide, most_received
from longspan.planning.splits import Score, score

KI = 1024


def placed(law: str, ranks: int, seed: int) -> Score:
    lengths = lengths_of(law, ranks, seed)
    return score(lengths, whole_documents(lengths, world_size=ranks))


@pytest.mark.parametrize("ranks", [16, 64])
@pytest.mark.parametrize("law", LAWS)
def test_tokens_and_work_are_balanced(law: str, ranks: int) -> None:
    for seed in range(3):
        found = placed(law, ranks, seed)
        assert found.pairs <= 1.03, (law, seed)
        assert found.tokens <= 1.02, (law, seed)
        if found.longest_shares <= 8 and ranks == 64:
            assert found.partners <= 8, (law, seed)


def slow_owner(layout: Layout) -> np.ndarray:
    owner = np.full(layout.seq_len, -1)
    for rank in range(layout.world_size):
        for span in layout.spans(rank):
            assert (owner[span.start : span.stop] == -1).all()
            owner[span.start : span.stop] = rank
    return owner


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 400), max_size=40),
    st.integers(1, 20),
    st.integers(1, 9),
    st.booleans(),
)
def test_any_lengths_and_ranks(lengths: list[int], ranks: int, node: int, causal: bool) -> None:
    layout = whole_documents(lengths, world_size=ranks, ranks_per_node=node, causal=causal)
    assert (layout.seq_len, layout.world_size) == (sum(lengths), ranks)
    assert (slow_owner(layout) >= 0).all()  # each token exactly once: Layout checks it, and so do we
    again = whole_documents(np.array(lengths, dtype=np.int64), world_size=ranks, ranks_per_node=node, causal=causal)
    assert np.array_equal(layout.table, again.table)


def counted(lengths: list[int], layout: Layout, causal: bool) -> tuple[list[set[int]], int]:
    """The ranks that each rank exchanges keys with, and the most rows received, position by position."""
    owner = slow_owner(layout)
    partners: list[set[int]] = [set() for _ in range(layout.world_size)]
    received = [0] * layout.world_size
    start = 0
    for length in lengths:
        ranks = owner[start : start + length]
        for rank in set(ranks.tolist()):
            seen = np.flatnonzero(ranks == rank)[-1] + 1 if causal else length
            for other in ranks[:seen].tolist():
                if other != rank:
                    partners[rank].add(other)
                    partners[other].add(rank)
                    received[rank] += 2
                    received[other] += 2
        start += length
    return partners, max(received)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=12), st.integers(2, 6), st.booleans())
def test_rows_received_are_counted(lengths: list[int], ranks: int, causal: bool) -> None:
    layout = whole_documents(lengths, world_size=ranks, causal=causal)
    edges = np.concatenate(([0], np.cumsum(lengths)))
    spans = np.stack((edges[:-1], edges[1:]), axis=1)
    pieces = np.array(
        [
            (max(a, start), min(b, stop), rank)
            for start, stop, rank in layout.table.tolist()
            for a, b in spans.tolist()
            if max(a, start) < min(b, stop)
        ]
    )
    pieces = pieces[np.random.default_rng(0).permutation(len(pieces))]
    partners, received = counted(lengths, layout, causal)
    assert most_received(pieces, spans, ranks, causal) == received
    if causal:
        found = score(np.array(lengths), layout)
        assert found.partners == max(map(len, partners))
        assert found.received == received


def test_documents_that_fit_are_not_cut() -> None:
    lengths = [KI] * 64
    layout = whole_documents(lengths, world_size=64)
    assert (layout.num_tokens == KI).all()
    assert len(layout.table) == 64
    rng = np.random.default_rng(0)  # shuffled pairs that fill a rank each
    short = rng.integers(100, 900, size=16)
    lengths = rng.permutation(np.concatenate((short, KI - short))).tolist()
    owner = slow_owner(whole_documents(lengths, world_size=8, ranks_per_node=4))
    cut = sum(len(set(part.tolist())) > 1 for part in np.split(owner, np.cumsum(lengths)[:-1]))
    assert cut <= 4


def test_long_documents_stay_in_their_node() -> None:
    lengths = [3 * KI, KI, 3 * KI, KI, 3 * KI, KI, 3 * KI, KI]
    partners, _ = counted(lengths, whole_documents(lengths, world_size=16, ranks_per_node=4), True)
    assert max(map(len, partners)) >= 1
    assert all(other // 4 == rank // 4 for rank, others in enumerate(partners) for other in others)


def test_one_document_is_shared_by_all_ranks() -> None:
    layout = whole_documents([64 * KI], world_size=8)
    assert layout.num_tokens.max() <= 1.02 * 8 * KI
    assert score(np.array([64 * KI]), layout).pairs <= 1.03


def test_full_attention_inside_documents() -> None:
    lengths = lengths_of("sft", 16)
    layout = whole_documents(lengths, world_size=16, causal=False)
    edges = np.concatenate(([0], np.cumsum(lengths)))
    owner = layout.by_position
    work = np.zeros(16)
    for start, stop, rank in owner.tolist():
        first, last = np.searchsorted(edges, [start, stop - 1], side="right") - 1
        for k in range(first, last + 1):
            work[rank] += (min(stop, edges[k + 1]) - max(start, edges[k])) * lengths[k]
    assert work.max() <= 1.03 * work.mean()
    assert layout.num_tokens.max() <= 1.02 * layout.num_tokens.mean()


def test_divide_is_exact_where_it_can_be() -> None:
    rng = np.random.default_rng(1)
    half = rng.uniform(0.01, 0.3, size=40)
    tokens = np.concatenate((half, half))
    group, error = divide(tokens, tokens**2, np.array([4, 4]), (0.01, 0.01))
    assert error <= 1
    for weight in (tokens, tokens**2):
        parts = np.bincount(group, weight)
        assert abs(parts[0] - parts[1]) <= 0.0101 * weight.sum()


def test_processes_agree() -> None:
    """Every rank plans alone: another process, with other hash seeds, has the same table."""
    code = (
        "from benchmarks.batches import lengths_of; from longspan.layouts import whole_documents;"
        "print(whole_documents(lengths_of('rl', 64), world_size=64).fingerprint)"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True,
            check=True, timeout=120,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(runs) == 1


def test_takes_little_time() -> None:
    lengths = lengths_of("sft", 64)
    assert best_ms(lambda: whole_documents(lengths, world_size=64), repeats=3) < 300  # the benchmark's limit is 100


def test_refuses_in_words() -> None:
    assert whole_documents([], world_size=2).seq_len == 0
    with pytest.raises(LayoutError, match="world_size"):
        whole_documents([4], world_size=0)
    with pytest.raises(LayoutError, match="ranks_per_node"):
        whole_documents([4], world_size=2, ranks_per_node=0)
    with pytest.raises(MaskError, match="length"):
        whole_documents([4, -1], world_size=2)
