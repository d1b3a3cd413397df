"""Backward: gradients of query rows stay where they are computed until they go home; those of keys travel as sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from longspan.execution.engine.chunk_sums import Branch, Terms, push, total
from longspan.execution.engine.forward import computed_spans
from longspan.execution.engine.merge import Key, Stretch, Sum, SumByHeads
from longspan.execution.engine.runner import Job, Runner
from longspan.execution.engine.token_store import TokenStore
from longspan.execution.engine.transports import Program
from longspan.execution.kernels.contract import Upstream
from longspan.schedules.steps import Compute, Piece, Role, Transfer


class Saved(NamedTuple):
    """What a rank's forward leaves for backward: its own rows, messages that are kept, values of captured tensors."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    kept: list[Tensor]
    captured: Sequence[Tensor] = ()


class Backward(Runner):
    """One rank's backward run."""

    direction = "backward"

    def __init__(self, job: Job, saved: Saved, dout: Tensor, dlse: Tensor | None = None) -> None:
        q, k, v, out, lse, kept, captured = saved
        super().__init__(job, q.device, captured)
        wide = self.form.wide
        delta = (dout * out if dout.dtype == wide else dout.to(wide).mul_(out)).sum(-1, keepdim=True)
        if dlse is not None:  # a score's gradient is p * (dp - delta + dlse)
            delta = delta - dlse.to(wide).unsqueeze(-1)
        self.own(Role.Q, (q,))
        self.mine = self.own(Role.KV, (k, v))
        self.rows = self.own(Role.DOUT, (dout, lse.unsqueeze(-1), delta))
        self.out = TokenStore(self.rows.runs, self.rows.heads, self.rows.batch, (out,))
        for piece, message in zip(job.plan.kept(job.rank), kept, strict=True):
            tensors, _ = self.form.tensors(piece, message, 0)
            self.hold(piece.role, self.store(piece, tensors), self.never)
        self.computed = self.tables.once(computed_spans, self.steps, self.sizes)
        self.queries: dict[Key, tuple[TokenStore, TokenStore, Tensor, Sum]] = {}
        heads, batch = self.rows.heads, self.rows.batch
        self.home_q = SumByHeads((q,), heads, batch, self.form.wide)
        self.home = SumByHeads((k, v), self.mine.heads, batch, self.form.wide)
        self.others: list[tuple[TokenStore, Sum]] = []  # gradients of other ranks' keys, until they are sent
        chunks = job.plan.scheme.problem.chunks
        self.terms = None if chunks is None else Terms(chunks.length)

    def program(self) -> Program[tuple[Tensor, Tensor, Tensor]]:
        """Runs; returns the gradients of the rank's own q, k and v."""
        yield from self.walk()
        for key, (q, dout, _, dq) in self.queries.items():
            if dout.runs is not self.rows.runs:
                self._add(q, dq, self.rows, self.home_q.of(key), key)
        for kv, sums in self.others:  # own rows of what was put together from several owners' keys
            key = (kv.heads, kv.batch)
            self._add(kv, sums, self.mine, self.home.of(key), key)
        if self.terms is not None:
            self._add_terms(self.terms)
        keys = self.home.result(self.job.dtype)
        if self.terms is not None:  # a message has 0.0 where a branch adds nothing, and -0.0 + 0.0 is another zero
            keys = tuple(t + 0.0 for t in keys)
        return *self.home_q.result(self.job.dtype), *keys  # type: ignore[return-value]

    def compute(self, compute: Compute) -> None:
        q, dout, out, dq = self._query((compute.q.heads, self.form.batch(compute.q)))
        kv = self.get(compute.kv)
        from_above, lse, delta = dout.tensors
        upstream = Upstream(from_above, out, lse.squeeze(-1), delta.squeeze(-1))
        found = self.job.kernel.backward(self.work(compute, q, kv), upstream)
        target = self._target(kv) if self.terms is None else Sum(kv.tensors, self.form.wide)
        for tile, dq_tile, dk_tile, dv_tile in found:
            dq.add(tile.q0, tile.q1, dq_tile)
            target.add(tile.k0, tile.k1, dk_tile, dv_tile)
        if self.terms is not None:
            firsts = compute.q.spans[0].start, compute.kv.spans[0].start
            self.terms.add(compute.kv.apart[0], *firsts, kv, target)

    def _query(self, key: Key) -> tuple[TokenStore, TokenStore, Tensor, Sum]:
        """Query rows of some heads with their output gradients, outputs, and the gradient that is being summed."""
        if key not in self.queries:
            spans = self.computed[key]
            q, dout = self.get(Piece(Role.Q, spans, *key)), self.get(Piece(Role.DOUT, spans, *key))
            assert np.array_equal(q.runs, dout.runs), "queries and their gradients lie in different orders"
            if dout.runs is self.rows.runs:
                out, dq = self.out.part(*key)[0], self.home_q.of(key)
            else:
                out, dq = stand_in(dout.tensors[0], dout.tensors[2]), Sum(q.tensors, self.form.wide)
            self.queries[key] = (q, dout, out, dq)
        return self.queries[key]

    def _target(self, kv: TokenStore) -> Sum:
        """Where gradients of these keys are summed, row for row."""
        if kv.runs is self.mine.runs:
            return self.home.of((kv.heads, kv.batch))
        for rows, sums in self.others:
            if rows.runs is kv.runs and (rows.heads, rows.batch) == (kv.heads, kv.batch):
                return sums
        self.others.append((replace(kv, tensors=()), Sum(kv.tensors, self.form.wide)))
        return self.others[-1][1]

    def fill(self, piece: Piece, targets: Sequence[Tensor]) -> None:
        if piece.role not in (Role.DQ, Role.DKV):
            return super().fill(piece, targets)
        wanted = self.store(piece, targets)
        key, whole = (wanted.heads, wanted.batch), Sum(wanted.tensors, self.form.wide)
        if piece.role is Role.DQ:
            found = (q for q in self.queries.values() if q[0].has(*key) and self.tables.cover(q[0].runs, piece))
            q, _, _, dq = next(found)
            self._add(q, dq, wanted, whole, key)
            return whole.write(targets)
        if self.terms is not None:
            for kv, sums in self.terms.take(piece.apart[0], wanted):
                self._add(kv, sums, wanted, whole, key)
            return whole.write(targets)
        sources = [(kv, sums) for kv, sums in self.others if (kv.heads, kv.batch) == key]
        if len(sources) > 1:  # sum in the message itself
            for target in targets:
                target.zero_()
            whole.begin_with(wanted.tensors)
        for kv, sums in sources:
            self._add(kv, sums, wanted, whole, key)
            for here, _ in self.tables.moves(kv.runs, wanted.runs).pairs:
                sums.drop(here.start, here.stop)  # what is passed on is no longer held here
        self.others = [(kv, sums) for kv, sums in self.others if sums.any()]
        return whole.write(targets) if len(sources) <= 1 else None

    def arrived(self, transfer: Transfer, rows: TokenStore) -> None:
        piece = transfer.piece
        if piece.role not in (Role.DQ, Role.DKV):
            return super().arrived(transfer, rows)
        sums, key = Sum(rows.tensors, self.form.wide), (rows.heads, rows.batch)
        if piece.role is Role.DKV:
            sums.begin_with(rows.tensors)
            if self.terms is not None:
                branch = piece.apart[0]
                return self.terms.add(branch, branch.start, piece.spans[0].start, rows, sums)
        else:
            sums.add(0, piece.num_tokens, *rows.tensors)
        mine, home = (self.rows, self.home_q) if piece.role is Role.DQ else (self.mine, self.home)
        self._add(rows, sums, mine, home.of(key), key)
        for here, _ in self.tables.moves(rows.runs, mine.runs).pairs:
            sums.drop(here.start, here.stop)
        if sums.any():
            self.others.append((replace(rows, tensors=()), sums))
        return None

    def _add(self, source: TokenStore, found: Sum, target: TokenStore, total: Sum, key: Key) -> None:
        """Adds what was found for some heads of rows that source and target both have to a total of the target's."""
        for here, there in self.tables.moves(source.runs, target.runs).pairs:
            shift = there.start - here.start
            for part in found.within(here.start, here.stop):
                tensors = TokenStore(source.runs, source.heads, source.batch, part.tensors).part(*key)
                total.take(Stretch(part.start + shift, part.stop + shift, tensors, part.is_state))

    def _add_terms(self, terms: Terms) -> None:
        """Gradients of own keys from all branches of queries, which are complete by now."""
        for key, branches in terms.rest():
            parts: Branch = []
            for number, found in branches:
                sums = Sum(self.mine.part(*key), self.form.wide)
                for kv, part in found:
                    self._add(kv, part, self.mine, sums, key)
                push(parts, number, sums)
            self.home.of(key).plus(total(parts))

    def shared_gradients(self) -> list[Tensor]:
        """What this rank adds, in float32, to gradients of what all ranks share: captured tensors and sinks."""
        found = self.totals.sums
        if self.job.sinks is None:
            return found
        # A sink is a key of no value: its score's gradient is minus probability times delta.
        _, lse, delta = self.rows.tensors
        sinks = self.job.sinks.to(lse.dtype)[:, None, None]
        share = (sinks - lse.masked_fill(lse.isneginf(), torch.inf)).exp()  # -inf: neither key nor sink was seen
        return [*found, -(share * delta).sum((0, 2, 3))]


def stand_in(dout: Tensor, delta: Tensor) -> Tensor:
    """Some `out` with rowsum(dout * out) = delta, for kernels that ask for `out` where only `delta` has travelled.

    It is the multiple of dout that has this product, which is never longer than the real output.
    """
    unit = dout.to(delta.dtype, copy=True)
    size = torch.maximum(unit.amax(-1, keepdim=True), -unit.amin(-1, keepdim=True))
    unit /= torch.where(size > 0, size, 1.0)  # squares of very large or small numbers would leave the range
    length = (unit * unit).sum(-1, keepdim=True)
    factor = torch.where(size > 0, delta / torch.where(size > 0, size * length, 1.0), 0.0)
    return unit.mul_(factor).to(dout.dtype)
