"""Launches of the flex kernel, for whoever generates, interprets or compiles their code."""

from dataclasses import dataclass

import numpy as np
import torch

from longspan.kernels.contract import TileWork
from longspan.masks.functions import Function, Reader
from longspan.scoring.pipeline import Scoring, TilePairs, TilePositions, Totals
from longspan.spans import Span
from longspan.tile import Tile

SCALE = 0.2


def answers(b, h, q, kv):
    return (q * 7 + kv * 3) % 5 != 0


def no_change(tables):
    return None


def learned_table(tables):
    """Takes elements out of two tensors that learn, one of them twice."""
    table, slopes = tables

    def score_mod(score, b, h, q, kv):
        return 8 * torch.tanh(score / 8) + table[(q - kv).clamp(-7, 8) + 7, h] - slopes[h] * (q - kv).abs() * 0.05

    return Scoring((score_mod,), (table, slopes))


@dataclass(frozen=True)
class Case:
    tiles: tuple[Tile, ...]
    q: int
    k: int
    heads: tuple[int, int] = (2, 1)
    dims: tuple[int, int] = (16, 16)
    scores: object = no_change
    asks: bool = False
    dtype: torch.dtype = torch.float32

    def tensors(self, device="cpu", fill=None):
        """q, k, v, dout and what functions capture: random numbers, or without data on another device."""
        (heads, groups), (dim, wide), draw = self.heads, self.dims, torch.Generator().manual_seed(0)
        rows = (heads, self.q, dim), (groups, self.k, dim), (groups, self.k, wide), (heads, self.q, wide)
        shapes = [(1, *shape) for shape in rows] + [(16, heads), (heads,)]
        dtypes = [self.dtype] * 4 + [torch.float32] * 2
        if device != "cpu":
            return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in zip(shapes, dtypes, strict=True)]
        return [torch.randn(shape, generator=draw).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]

    def work(self, q, k, v, *tables) -> TileWork:
        tables = tuple(t.detach().requires_grad_() for t in tables)
        scoring = self.scores(tables)
        captured = () if scoring is None else scoring.captured
        where = TilePositions.of(
            Span(0, 1), Span(0, self.heads[0]), np.arange(self.q), np.arange(self.k), torch.device("cpu")
        )
        predicate = Function(answers, None, None, Reader(answers)) if self.asks else None
        pairs = TilePairs(where, scoring, predicate, Totals(captured))
        return TileWork(q, k, v, list(self.tiles), SCALE, pairs if scoring is not None or self.asks else None)


def documents(asks=False):
    return (
        Tile(0, 70, 0, 70, lo=0, asks=asks),
        Tile(70, 150, 70, 150, lo=0, hi=40),
    )


QUICK = {
    "bands": Case(documents(), 150, 150),
    "scores": Case(
        (Tile(0, 30, 0, 30, lo=0, asks=True), Tile(30, 60, 30, 60, lo=0, hi=20), Tile(126, 130, 20, 132)),
        130,
        132,
        scores=learned_table,
        asks=True,
    ),
}
"""Interpreted in every run of the tests. Two blocks or more each way: single numbers, tensors without data keep."""
MORE = {
    "blind rows": Case((Tile(3, 100, 7, 200), Tile(120, 200, 40, 230, lo=-90, hi=5)), 210, 240, dims=(16, 32)),
    "full blocks": Case((Tile(0, 256, 0, 256), Tile(0, 256, 256, 300)), 256, 300, (2, 2)),
    "half precision": Case(documents(), 150, 150, (4, 2), dtype=torch.float16),
    "scores in half precision": Case(documents(), 150, 150, scores=learned_table, dtype=torch.float16),
    "many spans": Case(tuple(Tile(8 * i, 8 * i + 8, 20 * j, 20 * j + 9) for i in range(9) for j in range(5)), 140, 130),
    "scores of two blocks": Case(
        (*documents(asks=True), Tile(20, 90, 150, 170)), 150, 170, scores=learned_table, asks=True
    ),
    "score function alone": Case((Tile(0, 130, 0, 130, lo=0),), 130, 130, (4, 2), scores=learned_table),
}
"""Interpreted when the tests are asked for all of them."""
CASES = QUICK | MORE
