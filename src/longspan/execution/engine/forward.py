"""Forward: partial results of query rows are merged where they are computed and sent to the rank that owns them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from longspan.execution.engine.merge import Accumulator, Key
from longspan.execution.engine.runner import Job, Runner
from longspan.execution.engine.token_store import RowTables, TokenStore
from longspan.execution.engine.transports import Program
from longspan.schedules.steps import Compute, Piece, Role, Sizes, Step, Transfer
from longspan.span import Ints, Span, as_spans, as_table, join, union


class Forward(Runner):
    """One rank's forward run."""

    def __init__(self, job: Job, q: Tensor, k: Tensor, v: Tensor, captured: Sequence[Tensor] = ()) -> None:
        super().__init__(job, q.device, captured)
        self.like = q
        self.mine = self.own(Role.Q, (q,))
        self.own(Role.KV, (k, v))
        self.computed = self.tables.once(computed_spans, self.steps, self.sizes)
        self.results: dict[Key, tuple[TokenStore, Accumulator]] = {}
        self.kept: list[tuple[int, TokenStore]] = []

    def program(self, *, saves: bool) -> Program[tuple[Tensor, Tensor, list[Tensor]]]:
        """Runs; returns output, lse and, if backward `saves`, the remote pieces that the plan keeps, as messages."""
        self.saves = saves and bool(self.job.plan.kept(self.job.rank))
        yield from self.walk()
        out, lse = self._finish()
        if self.job.sinks is not None:
            out, lse = self._with_sinks(out, lse, self.job.sinks)
        return out, lse, self._kept_messages() if self.saves else []

    def compute(self, compute: Compute) -> None:
        q, accumulator = self._result((compute.q.heads, self.form.batch(compute.q)))
        kv = self.get(compute.kv)
        for tile, out, lse in self.job.kernel.forward(self.work(compute, q, kv)):
            accumulator.add(tile.q0, tile.q1, out, lse)

    def _result(self, key: Key) -> tuple[TokenStore, Accumulator]:
        """The query rows of some heads that this rank computes, and their accumulator."""
        if key not in self.results:
            q = self.get(Piece(Role.Q, self.computed[key], *key))
            self.results[key] = (q, Accumulator(q.tensors[0], self.sizes.v_head_dim))
        return self.results[key]

    def fill(self, piece: Piece, targets: Sequence[Tensor]) -> None:
        if piece.role is not Role.OUT:
            return super().fill(piece, targets)
        target = self.store(piece, targets)
        for q, accumulator in self.results.values():
            if q.has(target.heads, target.batch) and self.tables.cover(q.runs, piece):
                out, lse = accumulator.result()
                source = replace(q, tensors=(out, lse.unsqueeze(-1)))
                return source.copy_to(target, self.tables.moves(q.runs, target.runs))
        raise AssertionError(f"{piece!r} was not computed here")

    def arrived(self, transfer: Transfer, rows: TokenStore) -> None:
        super().arrived(transfer, rows)
        if self.saves and transfer.piece.role in (Role.Q, Role.KV):
            self.kept.append((self.never, rows))

    def _finish(self) -> tuple[Tensor, Tensor]:
        """The rank's own rows, from what was computed here and what came home."""
        whole = (Span(0, self.sizes.q_heads), Span(0, self.sizes.batch))
        alone = len(self.results) == 1 and not self.held.get(Role.OUT)
        if alone and whole in self.results and self.results[whole][0].runs is self.mine.runs:
            return self.results[whole][1].result()
        out = self.like.new_zeros((*self.like.shape[:3], self.sizes.v_head_dim))
        lse = torch.full(self.like.shape[:3], -torch.inf, dtype=self.form.wide, device=self.device)
        home = TokenStore(self.mine.runs, *whole, (out, lse.unsqueeze(-1)))
        for key, (q, accumulator) in self.results.items():
            found, stat = accumulator.result()
            rows = self.tables.once(computed_runs, q.runs, self.computed[key])
            place(TokenStore(rows, *key, (found, stat.unsqueeze(-1))), home, self.tables)
        for _, store in self.held.get(Role.OUT, []):
            place(store, home, self.tables)
        return out, lse

    def _with_sinks(self, out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        """Results that see sinks, chunk by chunk if there are any: `logaddexp` rounds the end of a row otherwise."""
        chunks = self.job.plan.scheme.problem.chunks
        if chunks is None:
            return with_sinks(out, lse, sinks)
        parts = zip(out.split(chunks.length, 2), lse.split(chunks.length, 2), strict=True)
        made = [with_sinks(part.contiguous(), stat.contiguous(), sinks) for part, stat in parts]
        return torch.cat([part for part, _ in made], 2), torch.cat([stat for _, stat in made], 2)

    def _kept_messages(self) -> list[Tensor]:
        """The pieces that the plan keeps, in its order."""
        self.held = {role: [] for role in (Role.Q, Role.KV)}
        roles = {1: Role.Q, 2: Role.KV}
        for until, rows in self.kept:
            self.hold(roles[len(rows.tensors)], rows, until)
        messages: list[Tensor] = []
        for piece in self.job.plan.kept(self.job.rank):
            message = torch.empty(piece.num_bytes(self.sizes), dtype=torch.uint8, device=self.device)
            self.form.pack(piece, message, 0, partial(self.fill, piece))
            messages.append(message)
        return messages


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that also see one key of no value, whose score is the head's sink. Backward needs nothing but this lse."""
    whole = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    share = (lse - whole.masked_fill(whole.isneginf(), 0.0)).exp()  # -inf minus -inf is nan, not 0
    return (out * share.unsqueeze(-1)).to(out.dtype), whole


def place(source: TokenStore, target: TokenStore, tables: RowTables) -> None:
    """Copies rows that both have from one store into the other, which has more heads or batch rows, or as many."""
    part = TokenStore(target.runs, source.heads, source.batch, target.part(source.heads, source.batch))
    source.copy_to(part, tables.moves(source.runs, target.runs))


def computed_spans(steps: tuple[Step, ...], sizes: Sizes) -> dict[Key, tuple[Span, ...]]:
    """For each set of heads and batch rows, the query rows that the steps compute."""
    found: dict[Key, list[Ints]] = {}
    for piece in (compute.q for step in steps for compute in step.computes):
        batch = Span(0, sizes.batch) if piece.batch is None else piece.batch
        found.setdefault((piece.heads, batch), []).append(as_table(piece.spans))
    return {key: as_spans(union(np.concatenate(rows))) for key, rows in found.items()}


def computed_runs(runs: Ints, spans: tuple[Span, ...]) -> Ints:
    """The part of the runs that lies in the spans."""
    wanted = as_table(spans)
    i, j = join(runs[:, :2], wanted)
    start, stop = np.maximum(runs[i, 0], wanted[j, 0]), np.minimum(runs[i, 1], wanted[j, 1])
    return np.stack((start, stop, runs[i, 2] + start - runs[i, 0]), axis=1)
