"""Draft: the folds and transfers of all ranks as rows of numbers, while a planner writes them.

A plan has thousands; they become objects for the one rank that asks, and stay arrays where they are only priced.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from longspan.schedules.scans.words import ChainPiece, Fold, ScanStep, StateTransfer
from longspan.span import Ints, Span

Reach = tuple[int, int]
"""Segments first, ..., end - 1 of a chain."""


class Draft:
    """What planners write. What a rank has already it is neither sent nor folds again."""

    def __init__(self, batches: tuple[Span, ...]) -> None:
        self.batches = batches
        self.sent: list[tuple[int, int, int, int, int, int]] = []  # step, source, target, chain, first, end
        self.folded: list[tuple[int, int, int, int, int, int]] = []  # step, rank, chain, first, middle, end
        self._has: set[tuple[int, int, int, int]] = set()

    def send(self, step: int, ends: tuple[int, int], chain: int, reach: Reach) -> None:
        src, dst = ends
        key = (dst, chain, *reach)
        if src != dst and key not in self._has:
            self._has.add(key)
            self.sent.append((step, src, dst, chain, *reach))

    def fold(self, step: int, rank: int, chain: int, joined: tuple[int, int, int]) -> None:
        first, middle, end = joined
        key = (rank, chain, first, end)
        if first < middle and key not in self._has:
            self._has.add(key)
            self.folded.append((step, rank, chain, first, middle, end))

    @cached_property
    def transfers(self) -> Ints:
        return np.array(self.sent, dtype=np.int64).reshape(-1, 6)

    @cached_property
    def folds(self) -> Ints:
        return np.array(self.folded, dtype=np.int64).reshape(-1, 6)

    @cached_property
    def num_steps(self) -> int:
        """Steps with a transfer, and one more for folds of what the last one brought."""
        last = max(int(self.transfers[:, 0].max(initial=-1)) + 1, int(self.folds[:, 0].max(initial=-1)))
        return last + 1 if len(self.transfers) or len(self.folds) else 0

    def steps(self, rank: int) -> tuple[ScanStep, ...]:
        """One rank's steps."""
        transfers: list[list[StateTransfer]] = [[] for _ in range(self.num_steps)]
        folds: list[list[Fold]] = [[] for _ in range(self.num_steps)]
        mine = (self.transfers[:, 1] == rank) | (self.transfers[:, 2] == rank)
        sent: list[list[int]] = self.transfers[mine].tolist()
        for step, src, dst, chain, first, end in sent:
            piece = ChainPiece.of(chain, first, end, self.batches[chain])
            transfers[step].append(StateTransfer(src, dst, piece, self.num_steps))
        folded: list[list[int]] = self.folds[self.folds[:, 1] == rank].tolist()
        for step, _, chain, first, middle, end in folded:
            batch = self.batches[chain]
            left, right = ChainPiece.of(chain, first, middle, batch), ChainPiece.of(chain, middle, end, batch)
            folds[step].append(Fold(rank, left, right))
        return tuple(ScanStep(tuple(moved), tuple(work)) for moved, work in zip(transfers, folds, strict=True))
