"""Halo exchange: fetch the rows before a rank's segments from their owners, and send their gradients back.

Forward returns the rank's rows with their halos in one tensor, in the order of `longspan.planning.conv_plan`. Backward
is the transpose: the gradient of a row is the sum over all places to which it was copied, on any rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspan.planning.conv_plan import ConvPlan
from longspan.planning.plan import Plan
from longspan.planning.steps import Compute, Moved, Piece, Role
from longspan.run.merge import Key, Stretch, Sum, SumByHeads, SumInto
from longspan.run.packing import Format, TokenStore, common_rows, laid_out
from longspan.run.recorder import Rows
from longspan.run.transports import Program
from longspan.run.walk import RowRun, RowWalk
from longspan.spans import Ints, Span, subtract, total, union

HEAD = Span(0, 1)


@dataclass(frozen=True)
class HaloTask:
    """The halo exchange of one rank: a plan of a convolution, its rank and dtype."""

    conv: ConvPlan
    rank: int
    dtype: torch.dtype

    @property
    def plan(self) -> Plan:
        return self.conv.halo

    @property
    def format(self) -> Format:
        return Format(self.plan.sizes, self.dtype)


class HaloWalk(RowWalk):
    """Shared by both directions: the tensor of rows and halos."""

    def __init__(self, task: HaloTask) -> None:
        super().__init__(task)
        self.conv, self.haloed = task.conv, task.conv.haloed(task.rank)
        self.num_rows = task.conv.num_rows(task.rank)

    def compute(self, compute: Compute) -> None:
        """Do nothing: the convolution runs after the exchange."""

    def new_rows(self) -> Rows:
        """Return new rows for the rank's tokens with their halos."""
        return self.recorder.new((self.sizes.batch, 1, self.num_rows, self.sizes.head_dim), self.form.dtype)


class HaloForwardWalk(HaloWalk):
    """One rank's forward steps. Input: its rows. Result: its rows with their halos."""

    def __init__(self, task: HaloTask) -> None:
        super().__init__(task)
        self.own(Role.KV)

    def store_arrival(self, transfer: Moved, rows: TokenStore) -> None:
        self.hold(transfer.piece.role, rows, self.never)

    def finish(self) -> list[Rows]:
        result = self.new_rows()
        for part in self.haloed:
            target = TokenStore(part.runs, HEAD, part.batch, (result[part.batch.start : part.batch.stop, :],))
            left = total(target.runs)
            for _, store in self.held[Role.KV]:
                if store.has(HEAD, part.batch):
                    moves = common_rows(store.runs, target.runs)
                    store.copy_to(target, moves)
                    left -= sum(num for *_, num in moves)
            assert left == 0, f"{left} rows before segments are not held, or are held twice"
            for zeros in part.zeros(self.conv.width, self.num_rows):
                target.tensors[0][:, :, zeros].fill_(0.0)
        return [result]


class HaloBackwardWalk(HaloWalk):
    """One rank's backward steps. Input: gradients of rows and halos. Result: gradients of its own rows.

    Gradients of halos are sent and summed in float32.
    """

    direction = "backward"

    def __init__(self, task: HaloTask) -> None:
        super().__init__(task)
        gradients = self.new_rows()
        slots = int(self.job.plan.layout.num_slots(self.job.rank))
        shape, batch = (self.sizes.batch, 1, slots, self.sizes.head_dim), Span(0, self.sizes.batch)
        like = self.recorder.new(shape, self.form.dtype)  # never filled: shape and dtype of the sums
        self.home = SumByHeads((like,), HEAD, batch, self.form.wide)
        self.away: dict[Key, tuple[Ints, Sum]] = {}
        """Gradients of other ranks' rows: their runs and the sum."""
        for part in self.haloed:
            key, gradient = (HEAD, part.batch), gradients[part.batch.start : part.batch.stop, :]
            self._add(gradient, part.runs, self.own_runs, self.home.of(key))
            away = laid_out(subtract(union(part.runs[:, :2]), union(self.own_runs[:, :2])))
            shape = (len(part.batch), 1, total(away), self.sizes.head_dim)
            self.away[key] = away, Sum((self.recorder.new(shape, self.form.wide),), self.form.wide)
            self._add(gradient, part.runs, *self.away[key])

    def _add(self, gradient: Rows, runs: Ints, targets: Ints, sums: Sum) -> None:
        """Add gradients of rows that are among the targets, in the order of the tensor."""
        for there, here, num in common_rows(targets, runs):
            sums.add(here, here + num, gradient[:, :, there : there + num])

    def fill(self, piece: Piece, targets: Sequence[Rows]) -> None:
        wanted = self.store(piece, targets)
        whole = SumInto(wanted.tensors, self.form.wide)
        self._move(*self.away[wanted.heads, wanted.batch], wanted.runs, whole)
        whole.finish()

    def store_arrival(self, transfer: Moved, rows: TokenStore) -> None:  # noqa: ARG002
        sums = Sum(rows.tensors, self.form.wide)
        sums.begin_with(rows.tensors)
        self._move(rows.runs, sums, self.own_runs, self.home.of((rows.heads, rows.batch)))

    def _move(self, source: Ints, gradients: Sum, target: Ints, sums: Sum) -> None:
        """Add a sum of the source's rows to a sum of the target's, for rows that both have."""
        for there, here, num in common_rows(source, target):
            shift = there - here
            for part in gradients.within(here, here + num):
                sums.take(Stretch(part.start + shift, part.stop + shift, part.tensors, part.is_state))

    def finish(self) -> list[Rows]:
        return [*self.home.result(self.form.dtype)]


class HaloRun(RowRun):
    """A run of one direction on tensors of shape (batch, tokens, channels)."""

    walks: type[HaloWalk]

    def __init__(self, task: HaloTask, rows: Tensor) -> None:
        super().__init__(task, (rows.unsqueeze(1),))
        self.halo_task = task
        self.direction = self.walks.direction

    def walk(self, *, saves: bool) -> RowWalk:  # noqa: ARG002
        return self.walks(self.halo_task)

    @property
    def program_key(self) -> tuple[Any, object]:
        return self.halo_task.conv.width, None  # short documents have one plan for many widths

    def program(self) -> Program[Tensor]:
        """Run; return the rank's rows with their halos, or the gradients of its rows."""
        (rows,) = yield from self.run()
        return rows.to(self.task.dtype).squeeze(1)


class HaloForward(HaloRun):
    """One rank's forward run."""

    walks = HaloForwardWalk


class HaloBackward(HaloRun):
    """One rank's backward run."""

    walks = HaloBackwardWalk
