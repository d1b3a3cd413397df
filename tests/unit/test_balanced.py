"""balanced(): the figures of benchmarks.workloads, any lengths, worlds and masks, the count itself, and time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.layouts import best_ms, count, fresh, judged, load_judge
from benchmarks.workloads import MI, WORKLOADS, Workload, document_lengths
from longspan import masks
from longspan.errors import LayoutError, MaskError
from longspan.layouts import Layout, contiguous, zigzag
from longspan.layouts.balance import balanced, largest, remote_rows, segments_of
from longspan.layouts.profile import View
from longspan.masks import Mask, causal, documents, sliding_window

JUDGE = Path(__file__).parents[3] / "shared" / "judges" / "layout.py"

by_name = pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)


def random_lengths(rng: np.random.Generator, seq_len: int) -> list[int]:
    cuts = rng.integers(0, seq_len + 1, size=rng.integers(0, 30)) if rng.random() < 0.8 else []
    edges = np.unique(np.concatenate((cuts, [0, seq_len])).astype(np.int64))
    return np.diff(edges).tolist()


def owner_of(layout: Layout) -> np.ndarray:
    """The rank of every position, found the slow way; every position must have exactly one."""
    owner = np.full(layout.seq_len, -1)
    for rank in range(layout.world_size):
        for span in layout.spans(rank):
            assert (owner[span.start : span.stop] == -1).all()
            owner[span.start : span.stop] = rank
    assert (owner >= 0).all()
    return owner


def fewest_rows(lengths: np.ndarray, world_size: int) -> float:
    """Remote rows that causal documents need at least if work is even, as a mean share of the sequence.

    Of a document with the work of w ranks, w - k ranks' work lies in rows before length * sqrt(1 - k / w); so at least
    k + 1 ranks hold rows after that one and need all keys before it, and only one of them holds each key.
    """
    size = lengths.astype(np.float64)
    works = size**2 / (size**2).mean() * world_size / len(size)
    ends = [length * np.sqrt(1 - np.arange(1, np.ceil(work)) / work) for length, work in zip(size, works, strict=True)]
    return float(np.concatenate(ends).sum() / world_size / size.sum())


def dense(mask: Mask, seq_len: int) -> np.ndarray:
    q = np.arange(seq_len)
    return mask.allows(q[:, None], q[None, :])


# -- the figures ------------------------------------------------------------------------------------------------------


@by_name
def test_meets_its_figures(workload: Workload) -> None:
    mask = workload.mask()
    score = count(balanced(mask, world_size=workload.world_size), mask)
    assert score.imbalance <= workload.imbalance
    assert score.rows_mean <= workload.rows
    assert score.tokens <= 1.01


@pytest.mark.parametrize("seed", range(1, 10))
def test_other_documents_are_as_balanced(seed: int) -> None:
    for workload in WORKLOADS:
        if workload.kind == "one" or (workload.seq_len > MI and seed > 3):
            continue
        mask = workload.mask(seed)
        layout = balanced(mask, world_size=workload.world_size)
        score = count(layout, mask)
        assert score.imbalance <= workload.imbalance, workload.name
        assert score.tokens <= 1.01, workload.name
        assert score.rows_mean <= 1.5 * fewest_rows(workload.lengths(seed), workload.world_size) + 0.003, workload.name


@pytest.mark.share(3)
@pytest.mark.skipif(not JUDGE.exists(), reason=f"the judge {JUDGE} is not part of the repository")
@by_name
def test_counts_as_the_judge_does(workload: Workload) -> None:
    judge = load_judge(str(JUDGE))
    mask, world_size = workload.mask(), workload.world_size
    assert workload.lengths().tolist() == judge.document_lengths(workload.kind, workload.seq_len).tolist()
    for layout in (balanced(mask, world_size=world_size), zigzag(workload.seq_len, world_size)):
        ours, theirs = count(layout, mask), judged(judge, layout, workload)
        for name in ("imbalance", "tokens", "rows_mean", "rows_max"):
            assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=1e-9)


def test_one_causal_document_is_the_zigzag_fold() -> None:
    for world_size in (2, 8, 64):
        layout = balanced(causal(1 << 16), world_size=world_size)
        assert np.array_equal(layout.table, zigzag(1 << 16, world_size).table)


def test_one_window_is_contiguous() -> None:
    mask = causal(1 << 20) & sliding_window(4095)
    assert np.array_equal(balanced(mask, world_size=8).table, contiguous(1 << 20, 8).table)


def test_spans_are_few_and_long() -> None:
    for workload in WORKLOADS:
        layout = balanced(workload.mask(), world_size=workload.world_size)
        assert len(layout.table) <= 15 * workload.world_size
        sizes = layout.table[:, 1] - layout.table[:, 0]
        assert (sizes < 64).sum() <= 0.02 * len(sizes) + (workload.lengths() < 64).sum()


# -- any input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_any_lengths_and_worlds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    seq_len = int(rng.choice([0, 1, 2, 5, 17, 100, 1000, 30_000, 300_000]))
    world_size = int(rng.choice([1, 2, 3, 5, 7, 8, 48, 1000]))
    mask = documents(random_lengths(rng, seq_len)) & causal()
    if rng.random() < 0.3:
        mask = mask & sliding_window(int(rng.integers(0, 500)))
    layout = balanced(mask, world_size=world_size)
    tokens = np.bincount(owner_of(layout), minlength=world_size)
    assert layout.world_size == world_size
    assert tokens.max() <= max(1.01 * seq_len / world_size, -(-seq_len // world_size))
    equal = balanced(mask, world_size=world_size, equal_tokens=True)
    tokens = np.bincount(owner_of(equal), minlength=world_size)
    assert equal.local_len == -(-seq_len // world_size)
    assert tokens.max() <= equal.local_len
    assert tokens.min() >= seq_len // world_size


@pytest.mark.parametrize("world_size", [2, 3, 5, 7, 48])
def test_documents_are_balanced_on_odd_worlds(world_size: int) -> None:
    for kind in ("short", "mixed", "longtail"):
        mask = documents(document_lengths(kind, MI, seed=5)) & causal()
        for equal_tokens in (False, True):
            score = count(balanced(mask, world_size=world_size, equal_tokens=equal_tokens), mask)
            assert score.imbalance <= 1.03, kind


def many_masks(seq_len: int) -> dict[str, Mask]:
    lengths = random_lengths(np.random.default_rng(3), seq_len)
    packed = documents(lengths)
    window = causal(seq_len) & sliding_window(seq_len // 50)
    return {
        "full": masks.full(seq_len),
        "bidirectional documents": packed,
        "window": window,
        "window both ways": masks.sliding_window(200, 200, seq_len=seq_len),
        "chunks": masks.chunked(seq_len // 37, seq_len) & causal(),
        "tiny chunks": masks.chunked(16, seq_len),
        "global prefix": (window | masks.global_prefix(64)) & causal(),
        "documents and global prefix": (packed | masks.global_prefix(64)) & causal(),
        "prefix": masks.prefix_lm(seq_len // 4, seq_len=seq_len),
        "against time": ~causal(seq_len),
        "opaque": masks.from_mask_mod(lambda b, h, q, kv: (q - kv) % 3 == 0) & packed & causal(),
        "heads": masks.per_head(causal(seq_len), window, window),
    }


@pytest.mark.parametrize("name", many_masks(1000))
@pytest.mark.parametrize("world_size", [3, 8, 48])
def test_any_mask(name: str, world_size: int) -> None:
    mask = many_masks(60_000)[name]
    layout = balanced(mask, world_size=world_size)
    score = count(layout, mask)
    owner_of(layout)
    assert score.tokens <= 1.01
    assert score.imbalance <= 1.03


def test_nothing_allowed_is_still_a_layout() -> None:
    mask = causal(1000) & ~causal(1000)
    layout = balanced(mask, world_size=3)
    assert np.bincount(owner_of(layout)).max() <= 337


@pytest.mark.parametrize("kind", ["one", "short", "mixed", "longtail"])
@pytest.mark.parametrize("world_size", [8, 64])
def test_every_mask_of_a_model_is_balanced(kind: str, world_size: int) -> None:
    packed = documents(document_lengths(kind, MI)) & causal()
    window = packed & sliding_window(1023)
    for equal_tokens in (False, True):
        layout = balanced(packed, window, world_size=world_size, equal_tokens=equal_tokens)
        assert count(layout, packed).imbalance <= 1.03
        assert count(layout, window).imbalance <= 1.08
        assert count(layout, packed).tokens <= 1.01


def test_the_order_and_number_of_equal_masks_do_not_matter() -> None:
    packed = documents(document_lengths("mixed", MI)) & causal()
    window = packed & sliding_window(1023)
    assert balanced(packed, packed, world_size=8) == balanced(packed, world_size=8)
    assert balanced(packed, window, world_size=8) == balanced(window, packed, world_size=8)


# -- the count --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", many_masks(1000))
def test_work_and_remote_rows_equal_the_dense_count(name: str) -> None:
    seq_len, world_size = 600, 5
    mask = many_masks(seq_len)[name]
    if not mask.is_structured:
        mask = Mask.of_bands(mask.plane().region, seq_len, "region")
    view = View.of(mask, seq_len)
    layout = balanced(mask, world_size=world_size)
    owner = owner_of(layout)
    allowed = np.stack([dense(masks.per_head(Mask(((p,),), seq_len, "p")), seq_len) for p in mask.distinct_planes()])
    served = [sum(plane is p for row in mask.grid for plane in row) for p in mask.distinct_planes()]
    pairs = (allowed.sum(axis=2) * np.array(served)[:, None]).sum(axis=0)
    before = view.profile(seq_len).before(np.arange(seq_len + 1))
    assert before.tolist() == [0, *(2 * np.cumsum(pairs)).tolist()]
    found = remote_rows(view.bands, layout.by_position, world_size, seq_len)
    for rank in range(world_size):
        needed = allowed[:, owner == rank].any(axis=(0, 1))
        assert found[rank] == (needed & (owner != rank)).sum()


def test_segments_are_what_a_cut_would_part() -> None:
    def edges(mask: Mask, seq_len: int) -> list[int]:
        return segments_of(View.of(mask, seq_len).bands, seq_len, grain=1).edges.tolist()

    packed = documents([40, 60, 100]) & causal()
    assert edges(packed, 200) == [0, 40, 100, 200]
    assert edges(packed & sliding_window(7), 200) == [0, 40, 100, 200]
    assert edges((packed | masks.global_prefix(10)) & causal(), 200) == [0, 40, 100, 200]
    assert edges(causal(200), 200) == [0, 200]
    assert edges(masks.chunked(50, 200), 200) == [0, 50, 100, 150, 200]


def test_short_neighbours_become_one_segment() -> None:
    bands = View.of(documents([10] * 10) & causal(), 100).bands
    assert segments_of(bands, 100, grain=50).edges.tolist() == [0, 50, 100]


@pytest.mark.parametrize("seed", range(20))
def test_largest_is_what_a_scan_finds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps = np.cumsum(rng.integers(0, 50, size=200))
    target = int(rng.integers(steps[0], steps[-1]))
    found = largest(lambda x: int(steps[x]), 0, 199, target, (int(steps[0]), int(steps[-1])), near=0)
    assert steps[found] <= target < steps[found + 1] or steps[found] == target


# -- everybody finds the same, quickly, or is told why not ------------------------------------------------------------


def test_every_process_finds_the_same_layout() -> None:
    program = (
        "from benchmarks.workloads import WORKLOADS\n"
        "from longspan.layouts.balance import balanced\n"
        "print(balanced(WORKLOADS[5].mask(), world_size=64).fingerprint)"
    )
    here = balanced(WORKLOADS[5].mask(), world_size=64).fingerprint
    root = Path(__file__).parents[2]
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}
        found = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        assert found.stdout.strip() == here


@pytest.mark.parametrize(
    ("seq_len", "world_size", "most_ms"), [(MI, 64, 3 * 12), (10 * MI, 1024, 3 * 150)], ids=["1M-64", "10M-1024"]
)
def test_takes_little_time(seq_len: int, world_size: int, most_ms: float) -> None:
    sizes = np.random.default_rng(0).lognormal(6.2, 1.5, size=seq_len // 1000).astype(np.int64)
    edges = np.unique(np.concatenate((np.minimum(np.cumsum(sizes), seq_len), [0, seq_len])))
    mask = documents(np.diff(edges)) & causal()
    assert best_ms(lambda: fresh(mask, world_size), repeats=3) <= most_ms


def test_refusals_say_what_to_do() -> None:
    with pytest.raises(LayoutError, match=r"got none.*balanced\(causal"):
        balanced(world_size=2)
    with pytest.raises(LayoutError, match="world_size"):
        balanced(causal(8), world_size=0)
    with pytest.raises(MaskError, match="Pass seq_len="):
        balanced(causal(), world_size=2)
    with pytest.raises(MaskError, match="is for 9 tokens"):
        balanced(causal(8), causal(9), world_size=2)
    assert balanced(causal(), documents([4, 4]), world_size=2).seq_len == 8
    assert balanced(causal(), world_size=2, seq_len=8).seq_len == 8
