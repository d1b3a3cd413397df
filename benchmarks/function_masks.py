"""Balance masks that are functions, and compare the work that plans state with the work that kernels do.

    python -m benchmarks.function_masks         # exits with 1 when a bar is missed

Each mask is a function without `within=`, on 2, 4 and 8 ranks. Work is the number of blocks of 128 x 128 pairs that
hold an allowed one. It is counted apart from the functions, from the same masks as bands or tables.

Bars: the busiest rank has at most 1.05 times the mean work, or as little as whole blocks allow. A plan's imbalance, for
`balanced` and for contiguous tokens, differs from the true one by at most 2% where at least 1% of all pairs are
allowed, and elsewhere by at most the error that the plan states. The work of a plane is found in at most 0.3 s on one
core.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

import longspan as ls
from benchmarks.workloads import document_lengths
from longspan.layouts import Layout
from longspan.masks import Mask, causal, documents, prefix_lm, sliding_window
from longspan.masks.bands import rectangles
from longspan.masks.functions import MaskMod
from longspan.masks.tiles import tile_pairs
from longspan.masks.work import BLOCK, block_work

Bools = NDArray[np.bool_]

LENGTHS, RANKS = (1 << 12, 1 << 17), (2, 4, 8)
MOST, OFF, FEW, SECONDS = 1.05, 0.02, 0.01, 0.3


@dataclass(frozen=True)
class Case:
    """A mask as a function, its blocks for each head or batch row, and the share of pairs that it allows."""

    mask: Mask
    opened: tuple[Bools, ...]
    share: float

    @property
    def rows(self) -> NDArray[np.float64]:
        """The number of opened blocks in each row of blocks, all planes together."""
        return np.sum(self.opened, axis=(0, 2), dtype=np.float64)


def blocks_of(bands: NDArray[np.int64], seq_len: int) -> tuple[Bools, float]:
    edges = np.arange(0, seq_len + 1, BLOCK, dtype=np.int64)
    pairs = tile_pairs(bands, edges, edges)
    return pairs > 0, float(pairs.sum()) / seq_len**2


def as_case(function: MaskMod, seq_len: int, twins: Iterable[Mask | NDArray[np.int64]], **planes: int) -> Case:
    """Return the case of a function and of the same planes as bands."""
    found = [blocks_of(twin.plane().sure if isinstance(twin, Mask) else twin, seq_len) for twin in twins]
    mask = ls.masks.from_mask_mod(function, seq_len, **planes)
    return Case(mask, tuple(opened for opened, _ in found), float(np.mean([share for _, share in found])))


def draft(seq_len: int) -> Case:
    """Blocks of 16 draft tokens see the context up to their anchor, and themselves; the context is keys only."""
    size, context = 16, 3 * seq_len // 4
    anchors = np.sort(np.random.default_rng(0).permutation(context - size)[: (seq_len - context) // size])
    known = torch.from_numpy(anchors)

    def sees(_b, _h, i, j):
        block, other = ((x - context).clamp(min=0) // size for x in (i, j))
        return (i >= context) & torch.where(j < context, j <= known[block], block == other)

    starts = context + size * np.arange(len(anchors))
    bands = rectangles(starts, starts + size, 0, anchors + 1), rectangles(starts, starts + size, starts, starts + size)
    return as_case(sees, seq_len, [np.concatenate(bands)])


def block_diffusion(seq_len: int) -> Case:
    """A noisy half, of which blocks see themselves and the clean blocks before, and a clean half, causal by blocks."""
    half, size = seq_len // 2, 64

    def sees(_b, _h, i, j):
        noisy_i, noisy_j, block_i, block_j = i < half, j < half, i % half // size, j % half // size
        return ((block_i == block_j) & (noisy_i == noisy_j)) | (~noisy_j & (block_i > block_j))

    at = size * np.arange(half // size)
    noisy, clean = (at, at + size), (half + at, half + at + size)
    bands = rectangles(*noisy, *noisy), rectangles(*noisy, half, clean[0]), rectangles(*clean, half, clean[1])
    return as_case(sees, seq_len, [np.concatenate(bands)])


def tree(seq_len: int) -> Case:
    """Segments of a tree see themselves, causally, and the segments above them."""
    num, rng = 63, np.random.default_rng(0)
    edges = np.concatenate(([0], np.sort(rng.permutation(seq_len - 1)[: num - 1] + 1), [seq_len]))
    segment = torch.repeat_interleave(torch.arange(num), torch.from_numpy(np.diff(edges)))
    above = np.eye(num, dtype=np.bool_)
    for i in range(1, num):
        above[i] |= above[(i - 1) // 2]
    table = torch.from_numpy(above)

    def sees(_b, _h, i, j):
        return (i >= j) & table[segment[i], segment[j]]

    i, j = np.nonzero(above)
    bands = rectangles(edges[i], edges[i + 1], edges[j], edges[j + 1])
    bands[i == j, 4] = 0
    return as_case(sees, seq_len, [bands])


def strided(seq_len: int) -> Case:
    """Causal: the last 128 tokens, and every 64th before, so that every causal block has an allowed pair."""
    count = 0.5 / 64 + BLOCK / seq_len

    def sees(_b, _h, i, j):
        return (i >= j) & ((i - j < BLOCK) | ((i - j) % 64 == 0))

    return Case(ls.masks.from_mask_mod(sees, seq_len), (blocks_of(causal(seq_len).plane().sure, seq_len)[0],), count)


def heads(seq_len: int) -> Case:
    """Four heads with windows of a half, a quarter, ... of the sequence."""
    twins = [causal(seq_len) & sliding_window((seq_len >> h + 1) - 1) for h in range(4)]
    return as_case(lambda b, h, i, j: (i >= j) & (i - j < seq_len >> h + 1), seq_len, twins, heads=4)


def batch_rows(seq_len: int) -> Case:
    """Two batch rows of other documents."""
    lengths = [document_lengths("longtail", seq_len, seed) for seed in (1, 2)]
    ids = torch.stack([torch.repeat_interleave(torch.arange(len(one)), torch.from_numpy(one)) for one in lengths])
    twins = [documents(one) & causal() for one in lengths]
    return as_case(lambda b, h, i, j: (i >= j) & (ids[b, i] == ids[b, j]), seq_len, twins, rows=2)


def random_blocks(seq_len: int) -> Case:
    """Random blocks of 64, in some rows more than in others."""
    rng = np.random.default_rng(0)
    table = rng.random((seq_len // 64, seq_len // 64)) < rng.random((seq_len // 64, 1)) / 2
    known = torch.from_numpy(table)
    side = seq_len // BLOCK
    opened = table.reshape(side, 2, side, 2).any(axis=(1, 3))
    mask = ls.masks.from_mask_mod(lambda b, h, i, j: known[i // 64, j // 64], seq_len)
    return Case(mask, (opened,), float(table.mean()))


def prefix(seq_len: int) -> Case:
    """All see a prefix, the rest is causal."""
    length = seq_len // 3
    return as_case(lambda b, h, i, j: (j < length) | (i >= j), seq_len, [prefix_lm(length, seq_len=seq_len)])


def window_with_holes(seq_len: int) -> Case:
    """A causal window without every third stretch of 192 keys."""
    window = causal(seq_len) & sliding_window(seq_len // 8 - 1)
    starts = np.arange(0, seq_len, 3 * 192)
    kept = Mask.of_bands(rectangles(0, seq_len, starts + 192, np.minimum(starts + 3 * 192, seq_len)), seq_len, "kept")
    return as_case(lambda b, h, i, j: (i >= j) & (i - j < seq_len // 8) & (j // 192 % 3 != 0), seq_len, [window & kept])


def document_table(seq_len: int) -> Case:
    """Causal documents by a table of their numbers."""
    lengths = document_lengths("longtail", seq_len)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.from_numpy(lengths))
    twin = documents(lengths) & causal()
    return as_case(lambda b, h, i, j: (i >= j) & (ids[i] == ids[j]), seq_len, [twin])


def everything(seq_len: int) -> Case:
    """All pairs."""
    return as_case(lambda b, h, i, j: (i >= 0) & (j >= 0), seq_len, [ls.masks.full(seq_len)])


def almost_nothing(seq_len: int) -> Case:
    """Every token sees its ancestors in a binary tree over all tokens: 12 or 17 keys."""
    above = np.arange(seq_len)
    opened = np.zeros((seq_len // BLOCK, seq_len // BLOCK), dtype=np.bool_)
    depth = int(seq_len).bit_length()
    for _ in range(depth):
        opened[np.arange(seq_len) // BLOCK, above // BLOCK] = True
        above = np.maximum(above - 1, 0) // 2

    def sees(_b, _h, i, j):
        found = i == j
        for _ in range(depth - 1):
            i = (i - 1).clamp(min=0) // 2
            found = found | (i == j)
        return found

    return Case(ls.masks.from_mask_mod(sees, seq_len), (opened,), depth / seq_len)


CASES: dict[str, Callable[[int], Case]] = {
    "draft model": draft,
    "block diffusion": block_diffusion,
    "tree": tree,
    "strided": strided,
    "per head": heads,
    "per row": batch_rows,
    "random blocks": random_blocks,
    "prefix": prefix,
    "window with holes": window_with_holes,
    "document table": document_table,
    "all": everything,
    "almost nothing": almost_nothing,
}


def true_imbalance(case: Case, layout: Layout) -> float:
    """Return the opened blocks of the busiest rank over the mean; of blocks that ranks share, their share of rows."""
    before = np.concatenate(([0.0], np.cumsum(case.rows)))
    spans = np.interp(layout.table[:, :2] / BLOCK, np.arange(len(before)), before)
    work = np.bincount(layout.table[:, 2], spans[:, 1] - spans[:, 0], layout.world_size)
    return float(work.max() / work.mean())


def least_imbalance(case: Case, ranks: int) -> float:
    """Return a lower bound on the imbalance if ranks hold equal numbers of whole blocks.

    Of the k * ranks + 1 heaviest rows of blocks, one rank has k + 1, and its others are at best the lightest.
    """
    rows = np.sort(case.rows)[::-1]
    each, least = len(rows) // ranks, 1.0
    for k in range(each):
        heavy, light = rows[k * ranks : k * ranks + 1], rows[len(rows) - (each - k - 1) :]
        least = max(least, float((heavy.sum() * (k + 1) + light.sum()) / rows.sum() * ranks))
    return least


@dataclass(frozen=True)
class Found:
    """The true imbalance and that of a plan, with its error."""

    layout: str
    true: float
    stated: float
    error: float

    def is_met(self, share: float) -> bool:
        off = abs(self.stated - self.true)
        return off <= OFF * self.true if share >= FEW else off <= max(self.error, 1e-3)


def measure(case: Case, ranks: int) -> Iterator[Found]:
    """Yield what a plan over `balanced`, and one over contiguous tokens, states."""
    mask, seq_len = case.mask, case.mask.length()
    sizes = {"q_heads": 4, "kv_heads": 4, "head_dim": 64, "dtype": "bfloat16", "batch": mask.num_rows}
    for layout in (ls.layouts.balanced(mask, world_size=ranks), ls.layouts.contiguous(seq_len, ranks)):
        plan = ls.plan(mask, layout, **sizes, scheme="exchange")
        yield Found(layout.name, true_imbalance(case, layout), plan.imbalance, plan.imbalance_error)


def seconds_of_a_plane(case: Case, repeats: int = 3) -> float:
    """Return the least processor time of a few runs in which the work of one plane is found."""
    times: list[float] = []
    for _ in range(repeats):
        plane = case.mask.plane()
        plane.measured.clear()
        begin = time.process_time()
        block_work(plane)
        times.append(time.process_time() - begin)
    return min(times)


def main() -> int:
    torch.set_num_threads(1)
    missed = 0
    print(f"{'mask':18s} {'tokens':>7s} {'open':>6s} {'s':>5s}  ranks: true imbalance (least of whole blocks), stated")
    for seq_len in LENGTHS:
        for name, make in CASES.items():
            case, texts = make(seq_len), list[str]()
            took = seconds_of_a_plane(case)
            misses = [f"{took:.2f} s"] if took > SECONDS else []
            for ranks in RANKS:
                balanced, contiguous = measure(case, ranks)
                least = least_imbalance(case, ranks)
                texts.append(
                    f"{ranks}: {balanced.true:.3f} ({least:.3f}), {balanced.stated:.3f} ± {balanced.error:.3f}"
                )
                misses += [f"imbalance on {ranks}"] if balanced.true > max(MOST, least) else []
                misses += [f"{one.layout} on {ranks}" for one in (balanced, contiguous) if not one.is_met(case.share)]
            missed += len(misses)
            print(f"{name:18s} {seq_len:7d} {100 * case.share:5.1f}% {took:5.2f}  {'   '.join(texts)}", *misses)
    print("all bars met" if not missed else f"{missed} bars MISSED")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
