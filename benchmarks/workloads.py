"""Packed sequences to measure layouts and schedules on: document lengths by kind, and target figures."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longspan.masks import Mask, causal, documents, sliding_window


@dataclass(frozen=True, slots=True)
class Workload:
    """One packed sequence on so many ranks, and the largest imbalance and remote rows of a good layout."""

    name: str
    kind: str
    seq_len: int
    world_size: int
    window: int | None
    imbalance: float
    rows: float

    def lengths(self, seed: int = 0) -> NDArray[np.int64]:
        return document_lengths(self.kind, self.seq_len, seed)

    def mask(self, seed: int = 0) -> Mask:
        """Return the mask, causal inside documents; with a window, a token sees itself and the `window - 1` tokens
        before it."""
        within = documents(self.lengths(seed)) & causal()
        return within if self.window is None else within & sliding_window(self.window - 1)


MI = 1 << 20

WORKLOADS = (
    Workload("one-1M-8", "one", MI, 8, None, 1.001, 0.657),
    Workload("one-1M-64", "one", MI, 64, None, 1.001, 0.739),
    Workload("short-1M-8", "short", MI, 8, None, 1.02, 0.004),
    Workload("short-1M-64", "short", MI, 64, None, 1.03, 0.008),
    Workload("mixed-1M-8", "mixed", MI, 8, None, 1.02, 0.012),
    Workload("mixed-1M-64", "mixed", MI, 64, None, 1.03, 0.045),
    Workload("longtail-1M-8", "longtail", MI, 8, None, 1.02, 0.07),
    Workload("longtail-1M-64", "longtail", MI, 64, None, 1.03, 0.16),
    Workload("longtail-8M-256", "longtail", 8 * MI, 256, None, 1.03, 0.025),
    Workload("window4k-1M-8", "one", MI, 8, 4096, 1.01, 0.0035),
    Workload("window4k-1M-64", "one", MI, 64, 4096, 1.01, 0.0039),
)


def document_lengths(kind: str, seq_len: int, seed: int = 0) -> NDArray[np.int64]:
    """Return lengths that add up to `seq_len`: of one document, of short ones, of a wide mix, or of many short and few
    long.

    >>> int(document_lengths("mixed", 1000).sum())
    1000
    """
    if kind == "one":
        return np.array([seq_len], dtype=np.int64)
    rng = np.random.default_rng(seed)
    left = seq_len
    lengths: list[int] = []
    while left:
        lengths.append(int(min(max(_draw(kind, rng), 16), left)))
        left -= lengths[-1]
    return np.array(lengths, dtype=np.int64)


def _draw(kind: str, rng: np.random.Generator) -> float:
    if kind == "short":
        return rng.lognormal(7.0, 1.0)
    if kind == "mixed":
        return rng.lognormal(7.5, 1.8)
    if kind != "longtail":
        raise ValueError(f"kind must be one, short, mixed or longtail, but got {kind!r}.")
    which = rng.random()
    center, spread = (6.8, 1.0) if which < 0.80 else (9.0, 0.8) if which < 0.97 else (11.5, 0.6)
    return rng.lognormal(center, spread)
