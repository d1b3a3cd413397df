"""Backward: gradients of query rows stay where they are computed until they go home; those of keys travel as sums."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from longspan.execution.forward import computed_rows
from longspan.execution.merge import Sum
from longspan.execution.rows import Rows
from longspan.execution.runner import Job, Key, Runner, place
from longspan.execution.tiles import tiles_of
from longspan.execution.transports import Program
from longspan.schedules.steps import Compute, Piece, Role, Transfer
from longspan.span import Ints, Span, as_rows, as_spans


class Backward(Runner):
    """One rank's backward run."""

    direction = "backward"

    def __init__(
        self,
        job: Job,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        kept: list[Tensor],
    ) -> None:
        super().__init__(job, q.device)
        delta = (dout.to(self.form.wide) * out.to(self.form.wide)).sum(-1, keepdim=True)
        if dlse is not None:  # a score's gradient is p * (dp - delta + dlse)
            delta = delta - dlse.to(self.form.wide).unsqueeze(-1)
        self.own(Role.Q, (q,))
        self.mine = self.own(Role.KV, (k, v))
        self.rows = self.own(Role.DOUT, (dout, lse.unsqueeze(-1), delta))
        self.out = Rows(self.rows.runs, self.rows.heads, self.rows.rows, (out,))
        for piece, message in zip(job.plan.kept(job.rank), kept, strict=True):
            tensors, _ = self.form.tensors(piece, message, 0)
            rows = Rows.of(as_rows(piece.spans), piece.heads, self.form.rows(piece), tensors)
            self.hold(piece.role, rows, self.never)
        self.computed = computed_rows(self.steps, self)
        self.queries: dict[Key, tuple[Rows, Rows, Tensor, Sum]] = {}
        self.home_q = Sum((q,), self.form.wide)
        self.home = Sum((k, v), self.form.wide)
        self.others: list[tuple[Rows, Sum]] = []  # gradients of other ranks' keys, until they are sent

    def program(self) -> Program[tuple[Tensor, Tensor, Tensor]]:
        """Runs; returns the gradients of the rank's own q, k and v."""
        yield from self.walk()
        dtype, whole = self.job.dtype, (Span(0, self.sizes.q_heads), Span(0, self.sizes.batch))
        if list(self.queries) == [whole] and self.queries[whole][1].runs is self.rows.runs and not self.home_q.any():
            self.home_q = self.queries[whole][3]
        else:
            home = self._home_rows(Role.Q)
            for key, (q, _, _, dq) in self.queries.items():
                place(Rows(q.runs, *key, dq.tensors()), home, self.computed[key], add=True)
        for kv, sums in self.others:  # own rows of what was put together from several owners' keys
            place(Rows(kv.runs, kv.heads, kv.rows, sums.tensors()), self._home_rows(Role.KV), self._own(), add=True)
        return *self.home_q.result(dtype), *self.home.result(dtype)  # type: ignore[return-value]

    def compute(self, compute: Compute) -> None:
        q, dout, out, dq = self._query((compute.q.heads, self.form.rows(compute.q)))
        kv = self.get(compute.kv)
        upstream, lse, delta = dout.tensors
        k, v = kv.tensors
        found = self.job.kernel.backward(
            upstream,
            q.tensors[0],
            k,
            v,
            out,
            lse.squeeze(-1),
            tiles_of(compute.bands, q, kv),
            self.job.scale,
            delta.squeeze(-1),
        )
        target = self._target(kv)
        for tile, dq_tile, dk_tile, dv_tile in found:
            dq.add(tile.q0, tile.q1, dq_tile)
            if isinstance(target, Sum):
                target.add(tile.k0, tile.k1, dk_tile, dv_tile)
            else:
                target[0][:, :, tile.k0 : tile.k1] += dk_tile
                target[1][:, :, tile.k0 : tile.k1] += dv_tile

    def _query(self, key: Key) -> tuple[Rows, Rows, Tensor, Sum]:
        """Query rows of some heads with their output gradients, outputs, and the gradient that is being summed."""
        if key not in self.queries:
            spans = self.computed[key]
            q, dout = self.get(Piece(Role.Q, spans, *key)), self.get(Piece(Role.DOUT, spans, *key))
            assert np.array_equal(q.runs, dout.runs), "queries and their gradients lie in different orders"
            mine = dout.runs is self.rows.runs
            out = self.out.part(*key)[0] if mine else stand_in(dout.tensors[0], dout.tensors[2])
            self.queries[key] = (q, dout, out, Sum(q.tensors, self.form.wide))
        return self.queries[key]

    def _target(self, kv: Rows) -> Sum | tuple[Tensor, ...]:
        """Where gradients of these keys are summed, row for row."""
        if kv.runs is self.mine.runs:
            whole = (kv.heads, kv.rows) == (self.mine.heads, self.mine.rows)
            return self.home if whole else self._home_rows(Role.KV).part(kv.heads, kv.rows)
        for rows, sums in self.others:
            if rows.runs is kv.runs and (rows.heads, rows.rows) == (kv.heads, kv.rows):
                return sums
        self.others.append((kv, Sum(kv.tensors, self.form.wide)))
        return self.others[-1][1]

    def _home_rows(self, role: Role) -> Rows:
        """The gradients of the rank's own rows, to be added to."""
        like, sums = (self.rows, self.home_q) if role is Role.Q else (self.mine, self.home)
        return Rows(like.runs, like.heads, like.rows, sums.tensors())

    def _own(self) -> tuple[Span, ...]:
        return as_spans(self.mine.runs[:, :2])

    def source(self, piece: Piece) -> Rows:
        if piece.role is Role.DQ:
            return self._gradient_of_queries(piece)
        if piece.role is not Role.DKV:
            return self.get(piece)
        rows = self.form.rows(piece)
        shape = (len(rows), len(piece.heads), piece.num_tokens)
        sizes = (self.sizes.head_dim, self.sizes.v_head_dim)
        zeros = [torch.zeros((*shape, size), dtype=self.form.wide, device=self.device) for size in sizes]
        made = Rows.of(as_rows(piece.spans), piece.heads, rows, zeros)
        for kv, sums in self.others:
            if (kv.heads, kv.rows) == (made.heads, made.rows):
                found = Rows(kv.runs, kv.heads, kv.rows, sums.tensors())
                place(found, made, piece.spans, add=True)
                clear(found, as_rows(piece.spans))
        return made

    def _gradient_of_queries(self, piece: Piece) -> Rows:
        rows = self.form.rows(piece)
        for key, (q, _, _, dq) in self.queries.items():
            if Rows(q.runs, *key, ()).covers(as_rows(piece.spans), piece.heads, rows):
                whole = Rows(q.runs, *key, dq.tensors())
                return Rows(q.runs, piece.heads, rows, whole.part(piece.heads, rows))
        raise AssertionError(f"{piece!r} was not computed here")

    def arrived(self, transfer: Transfer, rows: Rows) -> None:
        piece = transfer.piece
        if piece.role is Role.DQ:
            place(rows, self._home_rows(Role.Q), piece.spans, add=True)
        elif piece.role is Role.DKV:
            place(rows, self._home_rows(Role.KV), self._own(), add=True)
            clear(rows, self.mine.runs[:, :2])
            if not self.mine.covers(as_rows(piece.spans), piece.heads, self.form.rows(piece)):
                sums = Sum(rows.tensors, self.form.wide)
                sums.add(0, rows.tensors[0].shape[2], *rows.tensors)
                self.others.append((rows, sums))
        else:
            super().arrived(transfer, rows)


def stand_in(dout: Tensor, delta: Tensor) -> Tensor:
    """Some `out` with rowsum(dout * out) = delta, for kernels that ask for `out` where only `delta` has travelled.

    It is the multiple of dout that has this product, which is never longer than the real output.
    """
    wide = dout.to(delta.dtype)
    size = wide.abs().amax(-1, keepdim=True)
    unit = wide / torch.where(size > 0, size, 1.0)
    length = unit.square().sum(-1, keepdim=True)
    factor = torch.where(size > 0, delta / torch.where(size > 0, size * length, 1.0), 0.0)
    return (unit * factor).to(dout.dtype)


def clear(rows: Rows, spans: Ints) -> None:
    """What was passed on is no longer held here."""
    for start, stop, local in rows.pieces(spans):
        for tensor in rows.tensors:
            tensor[:, :, local : local + stop - start] = 0
