"""Volume: how many rows every rank of a scheme receives, in closed form, without building any rank's steps.

The result is exact and covers all ranks, as a few arrays. Tests check that it equals the sum over every rank's steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np

from longspan.layouts import Layout
from longspan.masks import bands as bd
from longspan.planning.fetch import PORT, START, STOP, TAKER, Fetch, by_taker
from longspan.planning.hybrid import Slices
from longspan.planning.problem import Lane, Part, Problem, in_rows, needed_rows
from longspan.planning.steps import Role, Sizes
from longspan.spans import Ints, by_position, join, on_one_line


@dataclass(frozen=True, slots=True, eq=False)
class Volume:
    """What each rank takes and gives in forward: rows times heads times batch rows."""

    kv_in: Ints
    kv_out: Ints
    again: Ints
    """K/V that is sent to the rank once more in backward, if it was not kept."""
    returned: Ints
    """K/V that the rank handed on and gets back in backward, if it was not kept."""
    q_in: Ints
    """Queries of other ranks: their results go out, the gradients of these come in."""
    q_out: Ints

    @staticmethod
    def none(size: int) -> Volume:
        """Nothing moves yet."""
        return Volume(*(np.zeros(size, dtype=np.int64) for _ in fields(Volume)))

    def received(self, sizes: Sizes, direction: str, *, keep: bool) -> Ints:
        """Bytes that each rank takes from the wire in one pass; backward is forward reversed."""
        kv, q = sizes.row_bytes(Role.KV), sizes.row_bytes(Role.Q)
        if direction == "forward":
            return self.kv_in * kv + self.q_in * q + self.q_out * sizes.row_bytes(Role.OUT)
        gradients = self.kv_out * sizes.row_bytes(Role.DKV) + self.q_out * sizes.row_bytes(Role.DQ)
        gradients = gradients + self.q_in * sizes.row_bytes(Role.DOUT)
        return gradients if keep else gradients + (self.again + self.returned) * kv + self.q_in * q


def _weight(lane: Lane, sizes: Sizes) -> int:
    return len(lane.kv_heads) * (sizes.batch if lane.batch is None else len(lane.batch))


def ring_volume(problem: Problem) -> Volume:
    """Each rank receives every block but its own and passes on every block but the next rank's.

    In backward it gets back those it passed on that are not its own.
    """
    size, own = problem.layout.world_size, problem.layout.num_tokens
    volume = Volume.none(size)
    if size > 1:
        weight, after = sum(_weight(lane, problem.sizes) for lane in problem.lanes), np.roll(own, -1)
        volume.kv_in[:] = weight * (own.sum() - own)
        volume.kv_out[:] = weight * (own.sum() - after)
        volume.returned[:] = weight * (own.sum() - own - after)
    return volume


def exchange_volume(problem: Problem) -> Volume:
    """What the mask needs goes from owner to user, or by way of a port."""
    return _fetched(problem, problem.needed_fetches)


def all_gather_volume(problem: Problem) -> Volume:
    """All rows go to all ranks."""
    return _fetched(problem, (problem.gather_fetch,) * len(problem.lanes))


def alone_volume(problem: Problem) -> Volume:
    """A lone group fetches nothing."""
    return Volume.none(problem.layout.world_size)


def _fetched(problem: Problem, fetches: tuple[Fetch, ...]) -> Volume:
    size, volume = problem.layout.world_size, Volume.none(problem.layout.world_size)
    for lane, fetch in zip(problem.lanes, fetches, strict=True):
        weight = _weight(lane, problem.sizes)
        for rows, taker in ((fetch.near, fetch.near[:, TAKER]), (fetch.far, fetch.far[:, PORT])):
            np.add.at(volume.kv_in, taker, weight * (rows[:, STOP] - rows[:, START]))
            volume.kv_out[:] += weight * lent(rows, problem.layout)
        if problem.node < size:
            port, user, rows = _relayed(fetch, problem.node, problem.layout.seq_len)
            np.add.at(volume.kv_in, user, weight * rows)
            np.add.at(volume.kv_out, port, weight * rows)
    volume.again[:] = volume.kv_in
    return volume


def _relayed(fetch: Fetch, node: int, seq_len: int) -> tuple[Ints, Ints, Ints]:
    """Port, user and number of the rows that go on inside the nodes."""
    ports = by_position(np.column_stack((on_one_line(fetch.far, fetch.far[:, TAKER], seq_len), fetch.far[:, PORT])))
    users = on_one_line(fetch.remote, fetch.remote[:, 2] // node, seq_len)
    i, j = join(users, ports)
    rows = np.minimum(users[i, 1], ports[j, 1]) - np.maximum(users[i, 0], ports[j, 0])
    port, user = ports[j, 2], fetch.remote[i, 2]
    other = port != user
    return port[other], user[other], rows[other]


def lent(needed: Ints, layout: Layout) -> Ints:
    """How many of the needed (start, stop, ...) rows each rank sends; a row counts once per rank that needs it."""
    segments = layout.table
    covered = _rows_before(needed, segments[:, 1]) - _rows_before(needed, segments[:, 0])
    num_rows = np.zeros(layout.world_size, dtype=np.int64)
    np.add.at(num_rows, segments[:, 2], covered)
    return num_rows


def _rows_before(needed: Ints, edges: Ints) -> Ints:
    """For every edge, how many needed rows lie before it, counted once per rank that needs them."""
    total = np.zeros(len(edges), dtype=np.int64)
    for ends, sign in ((needed[:, 0], 1), (needed[:, 1], -1)):
        ordered = np.sort(ends)
        number = np.searchsorted(ordered, edges)
        total += sign * (number * edges - np.concatenate(([0], np.cumsum(ordered)))[number])
    return total


_Inner = Callable[[Problem], Volume]


def hybrid_volume(slices: Slices, inner: _Inner) -> Volume:
    """What the inner planner moves across groups, plus queries and K/V for each rank's heads inside the groups."""
    if slices.heads == 1:
        return inner(slices.problem)
    heads, volume = slices.heads, Volume.none(slices.problem.layout.world_size)
    known: dict[object, tuple[Volume, Ints, Ints]] = {}
    for number in range(heads):
        problem = slices.slice(number)
        key = slices.kind(number)
        if key not in known:
            known[key] = (inner(problem), *_gathered(slices, problem))
        across, q, kv = known[key]
        for name in Volume.__slots__:
            getattr(volume, name)[number::heads] += getattr(across, name)
        for rows, names, given in ((q, ("q_in",), volume.q_out), (kv, ("kv_in", "again"), volume.kv_out)):
            taken = rows.reshape(-1, heads).sum(axis=1) - rows[number::heads]
            for name in names:
                getattr(volume, name)[number::heads] += taken
            given += rows
            given[number::heads] -= rows[number::heads]
    return volume


def _gathered(slices: Slices, problem: Problem) -> tuple[Ints, Ints]:
    """What each rank holds of the queries, and of the K/V, that its group needs for a slice of heads."""
    size, seq_len = slices.problem.layout.world_size, problem.layout.seq_len
    q, kv = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    for lane in problem.lanes:
        rows = needed_rows(lane, seq_len) if problem.layout.world_size == 1 else problem.layout.table
        kv += _weight(lane, problem.sizes) * _held(slices, rows)
        batch = problem.sizes.batch if lane.batch is None else len(lane.batch)
        for part in lane.parts:
            q += len(part.q_heads) * batch * _held(slices, _seeing(part, seq_len))
    return q, kv


def _seeing(part: Part, seq_len: int) -> Ints:
    """(start, stop, group) of the query rows that see anything."""
    q_rows = by_position(part.q_rows)
    seeing: list[Ints] = []
    for bands in (part.plane.sure, part.plane.maybe):
        pieces, row = in_rows(bands, q_rows)
        seeing.append(bd.tighten(np.column_stack((pieces, q_rows[row, 2])))[:, [bd.Q0, bd.Q1, 6]])
    return by_taker(np.concatenate(seeing), seq_len)


def _held(slices: Slices, rows: Ints) -> Ints:
    """How many of its group's (start, stop, group) rows each rank holds."""
    layout = slices.problem.layout
    table, line = layout.table, on_one_line(rows, rows[:, 2], layout.seq_len)
    owners = by_position(
        np.column_stack((on_one_line(table, table[:, 2] // slices.heads, layout.seq_len), table[:, 2]))
    )
    i, j = join(line, owners)
    num_rows = np.zeros(layout.world_size, dtype=np.int64)
    np.add.at(num_rows, owners[j, 2], np.minimum(line[i, 1], owners[j, 1]) - np.maximum(line[i, 0], owners[j, 0]))
    return num_rows
