"""The forward and backward pass of attention: the computes, merges and messages of every step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from longspan.kernels.contract import Group
from longspan.masks.tiles import runs_of as runs_of_true
from longspan.planning.steps import Compute, Moved, Piece, PlanStep, Role, Sizes
from longspan.run import fused
from longspan.run.merge import (
    Accumulator,
    Key,
    Stretch,
    Sum,
    SumByHeads,
    SumInto,
    are_disjoint,
)
from longspan.run.packing import Bools, TokenStore, common_rows, have_all
from longspan.run.recorder import Rows, Run
from longspan.run.transports import Program
from longspan.run.walk import Job, Walk
from longspan.run.walk import Run as TensorRun
from longspan.spans import Ints, Span, as_spans, as_table, join, union
from longspan.tile import accumulation_dtype, as_dtype

# -- Forward: merge partial results where they are computed, and send them to the rank that owns the rows --------------


class ForwardWalk(Walk):
    """One rank's forward steps. Inputs: q, k and v. Results: output, lse, and pieces kept for backward."""

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
            for start, at, num in packed_runs((tile.q0, tile.rows) for tile in group):
                accumulator.add(start, start + num, out.part(at, at + num), lse.part(at, at + num))

    def result_shapes(self, group: Group, inputs: Sequence[Rows]) -> list[tuple[int, int, int, int]]:
        b, h, *_ = inputs[0].shape
        rows = sum(tile.rows for tile in group)
        return [(b, h, rows, self.sizes.v_head_dim), (b, h, rows, 1)]

    def _result(self, key: Key) -> tuple[TokenStore, Accumulator]:
        """Return the query rows of some heads that this rank computes, and their accumulator."""
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

    def store_arrival(self, transfer: Moved, rows: TokenStore) -> None:
        super().store_arrival(transfer, rows)
        if self.saves and transfer.piece.role in (Role.Q, Role.KV):
            self.kept.append((transfer.piece.role, rows))

    def finish(self) -> list[Rows]:
        return [*self._own_results(), *(self._kept_messages() if self.saves else [])]

    def _own_results(self) -> tuple[Rows, Rows]:
        """Return output and lse of the rank's own rows, computed here or received."""
        whole = (Span(0, self.sizes.q_heads), Span(0, self.sizes.batch))
        alone = len(self.results) == 1 and not self.held.get(Role.OUT)
        if alone and whole in self.results and self.results[whole][0].runs is self.mine.runs:
            return self.results[whole][1].result()
        shape = (*self.mine.tensors[0].shape[:3], self.sizes.v_head_dim)
        out, lse = self.recorder.new(shape, self.form.dtype), self.recorder.new((*shape[:3], 1), self.form.wide)
        home = TokenStore(self.mine.runs, *whole, (out, lse))
        stores = [
            TokenStore(computed_runs(q.runs, self.computed[key]), *key, accumulator.result())
            for key, (q, accumulator) in self.results.items()
        ]
        stores += [store for _, store in self.held.get(Role.OUT, [])]
        self._fill_rest(home, stores)
        for store in stores:
            part = TokenStore(home.runs, store.heads, store.batch, home.part(store.heads, store.batch))
            store.copy_to(part, common_rows(store.runs, home.runs))
        return out, lse

    def _fill_rest(self, home: TokenStore, stores: Sequence[TokenStore]) -> None:
        """Fill rows that no rank computes, because they see no key, with (0, -inf)."""
        out, lse = home.tensors
        b, h, num_rows, _ = out.shape
        keys = [(store.heads, store.batch) for store in stores]
        counts = [sum([num for _, _, num in common_rows(store.runs, home.runs)]) for store in stores]
        sizes = [len(heads) * len(batch) * count for (heads, batch), count in zip(keys, counts, strict=True)]
        if sum(sizes) == b * h * num_rows and are_disjoint(keys):
            return
        missing = np.ones((b, h, num_rows), dtype=np.bool_)
        for store in stores:
            part = missing[store.batch.start : store.batch.stop, store.heads.start : store.heads.stop]
            for there, _, num in common_rows(store.runs, home.runs):
                part[:, :, there : there + num] = False
        for batch, heads, rows in rectangles(missing):
            out[batch, heads, rows].fill_(0.0)
            lse[batch, heads, rows].fill_(-torch.inf)

    def _kept_messages(self) -> list[Rows]:
        """Return the pieces that the plan keeps, in its order."""
        self.held = {role: [(self.never, rows) for of, rows in self.kept if of is role] for role in (Role.Q, Role.KV)}
        messages: list[Rows] = []
        for piece in self.job.plan.kept(self.job.rank):
            message = self.recorder.message(piece.num_bytes(self.sizes))
            self._pack_piece(piece, message, 0)
            messages.append(self.recorder.rows(message))
        return messages


def packed_runs(rows: Iterable[tuple[int, int]]) -> list[Run]:
    """Return the runs of rows, each (start, number), that lie one after another in a kernel's result; neighbours that
    follow each other are one run.

    >>> packed_runs([(0, 4), (4, 2), (9, 3)])
    [(0, 0, 6), (9, 6, 3)]
    """
    runs: list[Run] = []
    at = 0
    for start, num in rows:
        if runs and runs[-1][0] + runs[-1][2] == start:
            runs[-1] = *runs[-1][:2], runs[-1][2] + num
        else:
            runs.append((start, at, num))
        at += num
    return runs


class Forward(TensorRun):
    """One rank's forward run on tensors."""

    direction = "forward"

    def __init__(self, job: Job, q: Tensor, k: Tensor, v: Tensor, captured: Sequence[Tensor] = ()) -> None:
        super().__init__(job, (q, k, v), captured)

    def walk(self, *, saves: bool) -> Walk:
        return ForwardWalk(self.job, saves=saves)

    def program(self, *, saves: bool) -> Program[tuple[Tensor, Tensor, list[Tensor]]]:
        """Run; return output, lse and, with `saves`, the remote pieces that the plan keeps, as messages."""
        program, memory = self.start(saves)
        alone = self.job.plan.layout.world_size == 1
        yield from program.run(memory, self.attend, self.direction, self.job.rank, alone=alone)
        out, lse, *kept = self.results(program, memory)
        del program, memory
        out, lse = as_dtype(out, self.job.dtype), as_dtype(lse.squeeze(3), accumulation_dtype(self.job.dtype))
        if self.job.sinks is not None:
            out, lse = with_sinks(out, lse, self.job.sinks)
        return out, lse, [message.view(-1) for message in kept] if kept else []


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Add to every row a key without value whose score is the head's sink. Backward needs only the returned lse."""
    whole = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    share = (lse - whole.masked_fill(whole.isneginf(), 0.0)).exp()  # -inf minus -inf is nan, not 0
    return torch.mul(out, share.unsqueeze(-1), out=torch.empty_like(out)), whole  # no product in lse's dtype on GPUs


def rectangles(missing: Bools) -> list[tuple[slice, slice, slice]]:
    """Return the missing batch rows, heads and tokens as rectangles; one for all heads if they miss the same tokens.

    >>> rectangles(np.array([[[True, False], [True, False]]]))
    [(slice(0, 1, None), slice(0, 2, None), slice(0, 1, None))]
    """
    if not missing.any():
        return []
    if (missing == missing[:1, :1]).all():
        parts = [(slice(0, missing.shape[0]), slice(0, missing.shape[1]), missing[0, 0])]
    else:
        each = np.ndindex(*missing.shape[:2])
        parts = [(slice(b, b + 1), slice(h, h + 1), missing[b, h]) for b, h in each]
    return [(batch, heads, slice(*run)) for batch, heads, flags in parts for run in runs_of_true(flags)]


def computed_spans(steps: Sequence[PlanStep], sizes: Sizes) -> dict[Key, tuple[Span, ...]]:
    """Return the query rows that the steps compute, by heads and batch rows."""
    tables: dict[Key, list[Ints]] = {}
    for piece in (compute.q for step in steps for compute in step.computes):
        batch = Span(0, sizes.batch) if piece.batch is None else piece.batch
        tables.setdefault((piece.heads, batch), []).append(as_table(piece.spans))
    return {key: as_spans(union(np.concatenate(rows))) for key, rows in tables.items()}


def computed_runs(runs: Ints, spans: tuple[Span, ...]) -> Ints:
    """Return the part of the runs inside the spans."""
    wanted = as_table(spans)
    i, j = join(runs[:, :2], wanted)
    start, stop = np.maximum(runs[i, 0], wanted[j, 0]), np.minimum(runs[i, 1], wanted[j, 1])
    return np.stack((start, stop, runs[i, 2] + start - runs[i, 0]), axis=1)


# -- Backward: gradients of queries are sent to their owner at the end, those of keys as sums --------------------------


class Saved(NamedTuple):
    """Tensors of a rank's forward for its backward: own rows, kept messages, values of captured tensors."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    kept: list[Tensor]
    captured: Sequence[Tensor] = ()


class BackwardWalk(Walk):
    """One rank's backward steps. Inputs: q, k, v, dout, lse, delta, out and kept messages. Results: dq, dk and dv."""

    direction = "backward"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.own(Role.Q)
        self.mine = self.own(Role.KV)
        self.rows = self.own(Role.DOUT)
        out = self.recorder.new(self.rows.tensors[0].shape, job.dtype)
        self.out = TokenStore(self.rows.runs, self.rows.heads, self.rows.batch, (out,))
        kept = job.plan.kept(job.rank)
        messages = [self.recorder.message(piece.num_bytes(self.sizes)) for piece in kept]
        for piece, message in zip(kept, messages, strict=True):
            tensors, _ = self.form.tensors(self.recorder, piece, message, 0)
            self.hold(piece.role, self.store(piece, tensors), self.never)
        self.computed = computed_spans(self.steps, self.sizes)
        self.queries: dict[Key, tuple[TokenStore, TokenStore, Rows, Sum]] = {}
        heads, batch, wide = self.rows.heads, self.rows.batch, self.form.wide
        self.home_q = SumByHeads(self.held[Role.Q][0][1].tensors, heads, batch, wide)
        self.home = SumByHeads(self.mine.tensors, self.mine.heads, batch, wide)
        self.others: list[tuple[TokenStore, Sum]] = []  # gradients of other ranks' keys, until they are sent

    def finish(self) -> list[Rows]:
        """Return the gradients of the rank's own q, k and v."""
        for key, (q, dout, _, dq) in self.queries.items():
            if dout.runs is not self.rows.runs:
                self._add(q, dq, self.rows, self.home_q.of(key), key)
        for kv, sums in self.others:  # own rows among keys gathered from several owners
            key = (kv.heads, kv.batch)
            self._add(kv, sums, self.mine, self.home.of(key), key)
        return [*self.home_q.result(self.form.dtype), *self.home.result(self.form.dtype)]

    def compute(self, compute: Compute) -> None:
        q, dout, out, dq = self._query((compute.q.heads, self.form.batch(compute.q)))
        kv = self.get(compute.kv)
        grad_out, lse, delta = dout.tensors
        inputs = (*q.tensors, *kv.tensors, grad_out, out, lse, delta)
        target = self._target(kv)
        for group, (tile_dq, tile_dk, tile_dv) in self.launch(compute, inputs, q, kv):
            for start, at, num in packed_runs((tile.q0, tile.rows) for tile in group):
                dq.add(start, start + num, tile_dq.part(at, at + num))
            for start, at, num in packed_runs((tile.k0, tile.cols) for tile in group):
                target.add(start, start + num, tile_dk.part(at, at + num), tile_dv.part(at, at + num))

    def result_shapes(self, group: Group, inputs: Sequence[Rows]) -> list[tuple[int, int, int, int]]:
        (b, h, _, d), (_, g, *_), (*_, e) = (rows.shape for rows in inputs[:3])
        rows, cols = sum(tile.rows for tile in group), sum(tile.cols for tile in group)
        return [(b, h, rows, d), (b, g, cols, d), (b, g, cols, e)]

    def _query(self, key: Key) -> tuple[TokenStore, TokenStore, Rows, Sum]:
        """Return query rows of some heads, their output gradients and outputs, and the running sum of dq."""
        if key not in self.queries:
            spans = self.computed[key]
            q, dout = self.get(Piece(Role.Q, spans, *key)), self.get(Piece(Role.DOUT, spans, *key))
            assert np.array_equal(q.runs, dout.runs), "queries and their gradients lie in different orders"
            if dout.runs is self.rows.runs:
                out, dq = self.out.part(*key)[0], self.home_q.of(key)
            else:
                grad_out, _, delta = dout.tensors
                out = self.recorder.call(stand_in, (grad_out, delta), grad_out.shape)
                dq = Sum(q.tensors, self.form.wide)
            self.queries[key] = (q, dout, out, dq)
        return self.queries[key]

    def _target(self, kv: TokenStore) -> Sum:
        """Return the running sum of the gradients of these keys."""
        if kv.runs is self.mine.runs:
            return self.home.of((kv.heads, kv.batch))
        for rows, sums in self.others:
            if rows.runs is kv.runs and (rows.heads, rows.batch) == (kv.heads, kv.batch):
                return sums
        self.others.append((replace(kv, tensors=()), Sum(kv.tensors, self.form.wide)))
        return self.others[-1][1]

    def fill(self, piece: Piece, targets: Sequence[Rows]) -> None:
        if piece.role not in (Role.DQ, Role.DKV):
            return super().fill(piece, targets)
        wanted = self.store(piece, targets)
        key = (wanted.heads, wanted.batch)
        if piece.role is Role.DQ:
            queries = (q for q in self.queries.values() if q[0].has(*key) and have_all(q[0].runs, wanted.runs))
            q, _, _, dq = next(queries)
            return self._send([(q, dq)], wanted, key)
        sources = [(kv, sums) for kv, sums in self.others if (kv.heads, kv.batch) == key]
        self._send(sources, wanted, key)
        for kv, sums in sources:
            # sent, so not held here any more
            sums.drop([(here, here + num) for _, here, num in common_rows(kv.runs, wanted.runs)])
        self.others = [(kv, sums) for kv, sums in self.others if sums.any()]
        return None

    def _send(self, sources: Sequence[tuple[TokenStore, Sum]], wanted: TokenStore, key: Key) -> None:
        """Sum gradients for the rows of a message, in the message itself."""
        if len(sources) == 1:
            rows, sums = sources[0]
            runs = common_rows(rows.runs, wanted.runs)
            written = sums.copy_to(wanted.tensors, runs, lambda tensors: replace(rows, tensors=tensors).part(*key))
            return self._fill_gaps(wanted, written)
        whole = SumInto(wanted.tensors, self.form.wide)
        for rows, sums in sources:
            self._add(rows, sums, wanted, whole, key)
        return whole.finish()

    def _fill_gaps(self, wanted: TokenStore, written: Sequence[Run]) -> None:
        """Fill rows of a message without a contribution with zeros."""
        at = 0
        for start, _, num in (*sorted(written), (wanted.tensors[0].shape[2], 0, 0)):
            if at < start:
                for target in wanted.tensors:
                    target[:, :, at:start].fill_(0.0)
            at = start + num

    def store_arrival(self, transfer: Moved, rows: TokenStore) -> None:
        piece = transfer.piece
        if piece.role not in (Role.DQ, Role.DKV):
            return super().store_arrival(transfer, rows)
        sums, key = Sum(rows.tensors, self.form.wide), (rows.heads, rows.batch)
        if piece.role is Role.DKV:
            sums.begin_with(rows.tensors)
        else:
            sums.add(0, piece.num_tokens, *rows.tensors)
        mine, home = (self.rows, self.home_q) if piece.role is Role.DQ else (self.mine, self.home)
        self._add(rows, sums, mine, home.of(key), key)
        own = [(here, here + num) for _, here, num in common_rows(rows.runs, mine.runs)]
        if sum([stop - start for start, stop in own]) < piece.num_tokens:  # mostly, all rows are the rank's own
            sums.drop(own)
            if sums.any():
                self.others.append((replace(rows, tensors=()), sums))
        return None

    def _add(self, source: TokenStore, sums: Sum, target: TokenStore, total: Sum, key: Key) -> None:
        """Add a sum of the source's rows, for some heads, to a sum of the target's, for rows that both have."""
        is_part = key != (source.heads, source.batch)
        for there, here, num in common_rows(source.runs, target.runs):
            shift = there - here
            for part in sums.within(here, here + num):
                tensors = replace(source, tensors=part.tensors).part(*key) if is_part else part.tensors
                total.take(Stretch(part.start + shift, part.stop + shift, tensors, part.is_state))


READ_DELTA = ("reference", "flex")
"""Kernels that read delta; the others compute it from dout and `out`."""


class Backward(TensorRun):
    """One rank's backward run on tensors."""

    direction = "backward"

    def __init__(self, job: Job, saved: Saved, dout: Tensor, dlse: Tensor | None = None) -> None:
        q, k, v, out, lse, kept, captured = saved
        dtype = accumulation_dtype(job.dtype)
        delta = row_sums(dout, out, dtype)
        if dlse is not None:  # a score's gradient is p * (dp - delta + dlse); lse is a constant if there is no key
            dlse = dlse.to(dtype).masked_fill(lse.isneginf(), 0.0).unsqueeze(-1)
            delta = delta - dlse
            if job.kernel.name not in READ_DELTA:
                dout, out = with_lse_gradient(dout, out, dlse)
        super().__init__(job, (q, k, v, dout, lse.unsqueeze(-1), delta, out, *kept), captured)
        self.of_sinks = None if job.sinks is None else (lse, delta.squeeze(-1))

    def walk(self, *, saves: bool) -> Walk:  # noqa: ARG002
        return BackwardWalk(self.job)

    def program(self) -> Program[tuple[Tensor, Tensor, Tensor]]:
        """Run; return the gradients of the rank's own q, k and v."""
        dq, *keys = yield from self.run()
        dk, dv = (as_dtype(t, self.job.dtype) for t in keys)
        return as_dtype(dq, self.job.dtype), dk, dv

    def shared_gradients(self) -> list[Tensor]:
        """Return this rank's share, in float32, of the gradients of captured tensors and sinks."""
        shared = self.totals.sums
        if self.job.sinks is None or self.of_sinks is None:
            return shared
        # A sink is a key without value: the gradient of its score is minus probability times delta.
        lse, delta = self.of_sinks
        sinks = self.job.sinks.to(lse.dtype)[:, None]
        share = (sinks - lse.masked_fill(lse.isneginf(), torch.inf)).exp()  # lse is -inf if there is no key nor sink
        return [*shared, -(share * delta).sum((0, 2))]


def row_sums(dout: Tensor, out: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rowsum(dout * out), (B, H, T, 1), computed in this dtype; on GPUs without a copy of dout in it."""
    if fused.is_fused(dout.device):
        return fused.sum_products(dout, out, dtype)
    return (dout * out if dout.dtype == dtype else dout.to(dtype).mul_(out)).sum(-1, keepdim=True)


def with_lse_gradient(dout: Tensor, out: Tensor, dlse: Tensor) -> tuple[Tensor, Tensor]:
    """Return a dout and an `out` whose rowsum(dout * out) is less by dlse, for kernels that compute delta from them.

    A multiple of dout is subtracted from `out`. Where dout is 0, or too small to divide by, its first number becomes
    2^-60 of dlse: less than the rounding of dq and dk. It adds 2^-60 of dlse to dv, which would be 0 if all of dout is.
    """
    floor = (dlse.abs() * 2.0**-60).clamp_(min=2.0**-100)
    size = torch.linalg.vector_norm(dout, torch.inf, -1, keepdim=True, dtype=dlse.dtype)
    small = (size < floor) & (dlse != 0) & dlse.isfinite()
    first = torch.where(small, floor.to(dout.dtype), dout[..., :1])
    dout = torch.cat([first, dout[..., 1:]], -1)
    unit, length = _unit(dout, dlse.dtype)
    return dout, (out - unit.mul_(dlse / length)).to(out.dtype)


def _unit(dout: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return multiples u of the rows of dout, and numbers n with rowsum(dout * u) = n; rows of zeros stay zeros."""
    size = torch.linalg.vector_norm(dout, torch.inf, -1, keepdim=True, dtype=wide)
    size += size == 0
    unit = dout / size  # squares of very large or small numbers would overflow or underflow
    length = torch.linalg.vecdot(unit, unit).unsqueeze(-1).clamp_(min=1.0)  # the largest element of a row is 1 or -1
    return unit, length.mul_(size)


def stand_in(dout: Tensor, delta: Tensor) -> Tensor:
    """Return some `out` with rowsum(dout * out) = delta, for kernels that need `out` where only `delta` was sent.

    It is the multiple of dout with this product, which is never longer than the real output.
    """
    unit, length = _unit(dout, delta.dtype)
    return unit.mul_(delta / length).to(dout.dtype)
