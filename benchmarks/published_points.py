"""Facts about published runs of context-parallel attention on H100s: systems, documents, speed.

Throughputs were read off the charts of the MagiAttention v1.1 benchmark (SandAI-org/MagiAttention,
docs/source/blog/cp_benchmark.md at be3dd55), about 3% either way; how they were taken is in its exps/dist_attn. None
was measured by us.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from longspan.planning import Sizes
from longspan.spans import Ints

SIZES = Sizes(q_heads=64, kv_heads=8, head_dim=128, v_head_dim=128, itemsize=2)
TOKENS_PER_RANK = 8192
NODE = 8
WORLD_SIZES = (8, 16, 32, 64)
FIT_SIZES = (8, 32)
"""The half of the points that constants are fitted to; 16 and 64 are held out."""
NUM_PACKS = 20
DIRECTIONS = ("forward", "backward")
SCHEMES = ("all_to_all", "ring", "all_gather")

MODEL_DIM = 1024
"""Width of the projections whose weight gradients the published backward timing includes (run_benchmark.py)."""
HBM = 3.35e12
"""Bytes per second of an H100 SXM's memory (vendor data sheet)."""
NVLINK, CARD = 450e9, 50e9
"""Bytes per second and direction: NVLink 4, and one 400 Gb/s card per GPU (the card count is assumed, not stated)."""

_TFLOPS = {
    ("causal", "forward"): ((601, 556, 581, 585), (421, 454, 452, 447), (600, 590, 592, 580)),
    ("causal", "backward"): ((582, 561, 573, 585), (433, 475, 469, 457), (516, 525, 522, 523)),
    ("documents", "forward"): ((278, 199, 186, 163), (89, 69, 48, 29), (288, 292, 240, 180)),
    ("documents", "backward"): ((332, 294, 276, 249), (97, 86, 57, 29), (178, 155, 104, 54)),
}
BEST_MEASURED = {"forward": (459, 426, 315, 237), "backward": (360, 371, 333, 264)}
"""MagiAttention itself, documents: the fastest published system at every size, by world size."""


@dataclass(frozen=True, slots=True)
class Point:
    """One published figure: TFLOP/s per device."""

    mask: str
    direction: str
    scheme: str
    world_size: int
    tflops: float

    @property
    def fitted(self) -> bool:
        return self.world_size in FIT_SIZES


def points() -> Iterator[Point]:
    """Return all 48 points."""
    for (mask, direction), table in _TFLOPS.items():
        for scheme, row in zip(SCHEMES, table, strict=True):
            for size, tflops in zip(WORLD_SIZES, row, strict=True):
                yield Point(mask, direction, scheme, size, float(tflops))


def flop_per_rank(lengths: Ints, world_size: int, direction: str) -> float:
    """Return the FLOP of the published throughput: causal pairs of every document; backward is 2.5 times forward."""
    docs = np.asarray(lengths, dtype=np.float64)
    pairs = float((docs * (docs + 1) / 2).sum())
    return pairs * 4 * SIZES.q_heads * SIZES.head_dim / world_size * (2.5 if direction == "backward" else 1.0)


# Documents by length bin (datasets/default/doc_length_distribution.csv of the benchmark): lower, upper, how many.
_BINS = np.array(
    [
        (0, 10, 30254),
        (11, 50, 391188),
        (51, 100, 699596),
        (101, 200, 1377757),
        (201, 500, 3794735),
        (501, 1024, 3316785),
        (1025, 2048, 2106566),
        (2049, 4096, 988525),
        (4097, 8192, 410002),
        (8193, 16384, 173574),
        (16385, 32768, 115007),
        (32769, 65536, 18428),
        (65537, 131072, 22513),
        (131073, 196608, 18284),
    ],
    dtype=np.int64,
)


def packs(world_size: int, count: int = NUM_PACKS, cap: int | None = None) -> list[Ints]:
    """Return the first `count` packs of document lengths, generated as in the benchmark's utils.py.

    Every document has the middle length of its bin; documents beyond the cap (by default a quarter of the sequence) are
    truncated; all are shuffled with numpy's seed 42 and concatenated, and the sequences split from that are shuffled.
    """
    total = TOKENS_PER_RANK * world_size
    cap = total // 4 if cap is None else cap
    lengths, counts = (_BINS[:, 0] + _BINS[:, 1]) // 2, _BINS[:, 2]
    rest = lengths % cap
    whole = np.full(int((lengths // cap * counts).sum()), cap, dtype=np.int32)
    line = np.concatenate((whole, np.repeat(rest[rest > 0], counts[rest > 0]).astype(np.int32)))
    rng = np.random.default_rng(42)
    rng.shuffle(line)
    ends = np.cumsum(line, dtype=np.int64)
    order = np.arange(int(ends[-1] // total))
    rng.shuffle(order)
    packs: list[Ints] = []
    for start in (order[:count] * total).tolist():
        first, last = np.searchsorted(ends, start, side="right"), np.searchsorted(ends, start + total, side="left")
        edges = np.array([start, *ends[first:last].tolist(), start + total], dtype=np.int64)
        sizes: Ints = edges[1:] - edges[:-1]
        packs.append(sizes[sizes > 0])
    return packs
