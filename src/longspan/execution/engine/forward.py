"""Forward: partial results of query rows are merged where they are computed and sent to the rank that owns them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from longspan.execution.engine.flat.recorder import Rows
from longspan.execution.engine.merge import Accumulator, Key
from longspan.execution.engine.runner import Job, Run, Walk
from longspan.execution.engine.token_store import Bools, TokenStore, common_rows, have_all
from longspan.execution.engine.transports import Program
from longspan.execution.kernels.contract import Group
from longspan.execution.tile import as_dtype, wide
from longspan.masks.classifier import runs_of as runs_of_true
from longspan.schedules.steps import Compute, Moved, Piece, PlanStep, Role, Sizes
from longspan.span import Ints, Span, as_spans, as_table, join, union


class ForwardWalk(Walk):
    """One rank's forward steps. Inputs are q, k and v; results are output, lse, and pieces kept for backward."""

    def __init__(self, job: Job, *, saves: bool) -> None:
        super().__init__(job)
        self.mine = self.own(Role.Q)
        self.own(Role.KV)
        self.saves = saves and bool(job.plan.kept(job.rank))
        self.computed = computed_spans(self.steps, self.sizes)
        self.results: dict[Key, tuple[TokenStore, Accumulator]] = {}
        self.kept: list[tuple[Role, TokenStore]] = []

    def compute(self, compute: Compute) -> None:
        q, accumulator = self._result((compute.q.heads, self.form.batch(compute.q)))
        kv = self.get(compute.kv)
        for group, (out, lse) in self.launch(compute, (*q.tensors, *kv.tensors), q, kv):
            at = 0
            for tile in group:
                rows = slice(at, at + tile.rows)
                accumulator.add(tile.q0, tile.q1, out[:, :, rows], lse[:, :, rows])
                at += tile.rows

    def result_shapes(self, group: Group, inputs: Sequence[Rows]) -> list[tuple[int, int, int, int]]:
        b, h, *_ = inputs[0].shape
        rows = sum(tile.rows for tile in group)
        return [(b, h, rows, self.sizes.v_head_dim), (b, h, rows, 1)]

    def _result(self, key: Key) -> tuple[TokenStore, Accumulator]:
        """The query rows of some heads that this rank computes, and their accumulator."""
        if key not in self.results:
            q = self.get(Piece(Role.Q, self.computed[key], *key))
            self.results[key] = (q, Accumulator(q.tensors[0], self.sizes.v_head_dim))
        return self.results[key]

    def fill(self, piece: Piece, targets: Sequence[Rows]) -> None:
        if piece.role is not Role.OUT:
            return super().fill(piece, targets)
        target = self.store(piece, targets)
        for q, accumulator in self.results.values():
            if q.has(target.heads, target.batch) and have_all(q.runs, target.runs):
                source = replace(q, tensors=accumulator.result())
                return source.copy_to(target, common_rows(q.runs, target.runs))
        raise AssertionError(f"{piece!r} was not computed here")

    def arrived(self, transfer: Moved, rows: TokenStore) -> None:
        super().arrived(transfer, rows)
        if self.saves and transfer.piece.role in (Role.Q, Role.KV):
            self.kept.append((transfer.piece.role, rows))

    def finish(self) -> list[Rows]:
        return [*self._own_results(), *(self._kept_messages() if self.saves else [])]

    def _own_results(self) -> tuple[Rows, Rows]:
        """The rank's own rows, from what was computed here and what came home."""
        whole = (Span(0, self.sizes.q_heads), Span(0, self.sizes.batch))
        alone = len(self.results) == 1 and not self.held.get(Role.OUT)
        if alone and whole in self.results and self.results[whole][0].runs is self.mine.runs:
            return self.results[whole][1].result()
        shape = (*self.mine.tensors[0].shape[:3], self.sizes.v_head_dim)
        out, lse = self.recorder.new(shape, self.form.dtype), self.recorder.new((*shape[:3], 1), self.form.wide)
        home = TokenStore(self.mine.runs, *whole, (out, lse))
        found = [
            TokenStore(computed_runs(q.runs, self.computed[key]), *key, accumulator.result())
            for key, (q, accumulator) in self.results.items()
        ]
        found += [store for _, store in self.held.get(Role.OUT, [])]
        self._fill_rest(home, found)
        for store in found:
            place(store, home)
        return out, lse

    def _fill_rest(self, home: TokenStore, stores: Sequence[TokenStore]) -> None:
        """Rows that nobody computes saw nothing."""
        out, lse = home.tensors
        b, h, num_rows, _ = out.shape
        missing = np.ones((b, h, num_rows), dtype=np.bool_)
        for store in stores:
            part = missing[store.batch.start : store.batch.stop, store.heads.start : store.heads.stop]
            for _, there in common_rows(store.runs, home.runs):
                part[:, :, there] = False
        for batch, heads, rows in rectangles(missing):
            out[batch, heads, rows].fill_(0.0)
            lse[batch, heads, rows].fill_(-torch.inf)

    def _kept_messages(self) -> list[Rows]:
        """The pieces that the plan keeps, in its order."""
        self.held = {role: [(self.never, rows) for of, rows in self.kept if of is role] for role in (Role.Q, Role.KV)}
        messages: list[Rows] = []
        for piece in self.job.plan.kept(self.job.rank):
            message = self.recorder.message(piece.num_bytes(self.sizes))
            self._pack_piece(piece, message, 0)
            messages.append(self.recorder.rows(message))
        return messages


class Forward(Run):
    """One rank's forward run on tensors."""

    direction = "forward"

    def __init__(self, job: Job, q: Tensor, k: Tensor, v: Tensor, captured: Sequence[Tensor] = ()) -> None:
        super().__init__(job, (q, k, v), captured)

    def walk(self, *, saves: bool) -> Walk:
        return ForwardWalk(self.job, saves=saves)

    def program(self, *, saves: bool) -> Program[tuple[Tensor, Tensor, list[Tensor]]]:
        """Runs; returns output, lse and, if backward `saves`, the remote pieces that the plan keeps, as messages."""
        out, lse, *kept = yield from self.run(saves=saves)
        out, lse = as_dtype(out, self.job.dtype), as_dtype(lse.squeeze(3), wide(self.job.dtype))
        if self.job.sinks is not None:
            out, lse = self._with_sinks(out, lse, self.job.sinks)
        return out, lse, [message.view(-1) for message in kept]

    def _with_sinks(self, out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        """Results that see sinks, chunk by chunk if there are any: `logaddexp` rounds the end of a row otherwise."""
        chunks = self.job.plan.scheme.problem.chunks
        if chunks is None:
            return with_sinks(out, lse, sinks)
        parts = zip(out.split(chunks.length, 2), lse.split(chunks.length, 2), strict=True)
        made = [with_sinks(part.contiguous(), stat.contiguous(), sinks) for part, stat in parts]
        return torch.cat([part for part, _ in made], 2), torch.cat([stat for _, stat in made], 2)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that also see one key of no value, whose score is the head's sink. Backward needs nothing but this lse."""
    whole = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    share = (lse - whole.masked_fill(whole.isneginf(), 0.0)).exp()  # -inf minus -inf is nan, not 0
    return (out * share.unsqueeze(-1)).to(out.dtype), whole


def place(source: TokenStore, target: TokenStore) -> None:
    """Copies rows that both have from one store into the other, which has more heads or batch rows, or as many."""
    part = TokenStore(target.runs, source.heads, source.batch, target.part(source.heads, source.batch))
    source.copy_to(part, common_rows(source.runs, target.runs))


def rectangles(missing: Bools) -> list[tuple[slice, slice, slice]]:
    """Batch rows, heads and tokens that are missing; heads together where all miss the same.

    >>> rectangles(np.array([[[True, False], [True, False]]]))
    [(slice(0, 1, None), slice(0, 2, None), slice(0, 1, None))]
    """
    made: list[tuple[slice, slice, slice]] = []
    if not missing.any():
        return made
    if (missing == missing[:1, :1]).all():
        parts = [(slice(0, missing.shape[0]), slice(0, missing.shape[1]), missing[0, 0])]
    else:
        each = np.ndindex(*missing.shape[:2])
        parts = [(slice(b, b + 1), slice(h, h + 1), missing[b, h]) for b, h in each]
    for batch, heads, flags in parts:
        made += [(batch, heads, slice(start, stop)) for start, stop in runs_of_true(flags)]
    return made


def computed_spans(steps: Sequence[PlanStep], sizes: Sizes) -> dict[Key, tuple[Span, ...]]:
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
