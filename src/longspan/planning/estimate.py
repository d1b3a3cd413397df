"""Estimate a scheme on all ranks at once: its computes and messages as arrays, without the steps of any rank.

`choose` compares schemes for every new batch, so an estimate has to be cheap. Work is priced by the same functions as
the steps of a plan (`machine.kernel_work`, `machine.message_work`), and the passes are simulated step by step as in
`simulator`: a rank packs its messages, computes while they travel, and unpacks. The result differs from a simulation of
the whole schedule only in the order in which a port takes messages that are offered together.

Slices of a hybrid with as many heads of the same rows have equal work, so only one of a kind is evaluated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from longspan.masks import bands as bd
from longspan.masks.work import Pairs, pairs_in
from longspan.planning.fetch import PORT, STAGE, START, STOP, TAKER, Fetch, lead
from longspan.planning.machine import Floats, KernelTable, Machine, kernel_work, message_work
from longspan.planning.planners import Planner, Scheme, all_gather, alone, exchange, gathered_rows, ring, staged
from longspan.planning.problem import Problem, cells
from longspan.planning.steps import Role, Sizes
from longspan.spans import Ints, by_position, join, on_one_line, run_table, union


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """What a planner does on all ranks of a problem: the keys that are computed in each step, and what moves."""

    num_steps: int
    arrived: tuple[Ints, ...]
    """For each lane, (start, stop, rank, step) of the rows whose pairs are computed in a step."""
    moved: Ints
    """(step, source, target, rows times heads and batch rows, `AGAIN`, `RETURNS`, `EARLY`, `BACK`) of each message."""


MOVED_STEP, SRC, DST, ROWS, AGAIN, RETURNS, EARLY, BACK = range(8)
"""AGAIN: the step of backward at whose end the rows have arrived again, or below 0. RETURNS: whether they go back then.
EARLY: how many steps before the step at whose end they have arrived they are sent; BACK: the same when sent again."""


def _fetch_layer(problem: Problem, fetches: tuple[Fetch, ...], stages: int, ahead: int = 0) -> Layer:
    layout, node, size = problem.layout, problem.node, problem.layout.world_size
    num_steps, owners = stages + 1 + 2 * (node < size), layout.by_position
    own = np.column_stack((layout.table, np.zeros(len(layout.table), dtype=np.int64)))
    arrived: list[Ints] = []
    keys: list[Ints] = []
    weights: list[Ints] = []

    def add(due: Ints, lag: int, src: Ints, dst: Ints, rows: Ints) -> None:
        keys.append((((due * 4 + lag) * size + src) * size) + dst)
        weights.append(rows)

    for lane, fetch in zip(problem.lanes, fetches, strict=True):
        weight, near, far = lane.weight(problem.sizes), fetch.near, fetch.far
        parts = [own, np.column_stack((near[:, :STAGE], near[:, STAGE] + 1))]
        i, j = join(near[:, :2], owners[:, :2])
        rows = np.minimum(near[i, STOP], owners[j, 1]) - np.maximum(near[i, START], owners[j, 0])
        add(near[i, STAGE], 1, owners[j, 2], near[i, TAKER], rows * weight)
        if len(far):
            i, j = join(far[:, :2], owners[:, :2])
            rows = np.minimum(far[i, STOP], owners[j, 1]) - np.maximum(far[i, START], owners[j, 0])
            add(far[i, STAGE], 3, owners[j, 2], far[i, PORT], rows * weight)
            # Ports pass rows on to the users in their node.
            ports = by_position(np.column_stack((on_one_line(far, far[:, TAKER], layout.seq_len), far[:, STAGE:])))
            home = fetch.remote[:, 2] // node
            users = on_one_line(fetch.remote, home, layout.seq_len)
            i, j = join(users, ports[:, :2])
            cut = np.stack((np.maximum(users[i, 0], ports[j, 0]), np.minimum(users[i, 1], ports[j, 1])), axis=1)
            rows, step, port, user = cut[:, 1] - cut[:, 0], ports[j, 2] + 1, ports[j, 3], fetch.remote[i, 2]
            parts.append(np.column_stack((on_one_line(cut, -home[i], layout.seq_len), user, step + 1)))
            add(step, RELAYED, port, user, rows * weight * (port != user))
        arrived.append(np.concatenate(parts))
    key, rows = _sums(np.concatenate(keys), np.concatenate(weights))
    lagged, pair = np.divmod(key, size * size)
    due, lag = np.divmod(lagged, 4)
    none, is_staged = np.zeros_like(due), lag != RELAYED
    early, back = (np.where(is_staged, steps, 0) for steps in lead(due, stages, ahead))
    again = num_steps - 1 - due - np.where(is_staged, lag, 1)
    rows = rows.astype(np.int64)
    moved = np.stack((due - early, pair // size, pair % size, rows, again, none, early, back), axis=1)
    return Layer(num_steps, tuple(arrived), moved)


RELAYED = 2
"""In the place of a number of steps for which rows are used: ports passed them on, and they are used for one."""
DENSE = 1 << 22
"""Numbers up to which sums are kept in a table of all of them, which is faster than sorting."""


def _sums(keys: Ints, weights: Ints) -> tuple[Ints, Floats]:
    """Return the different keys, sorted, and the sum of the weights of each, without sums of 0."""
    if keys.max(initial=0) < DENSE:
        sums: Floats = np.bincount(keys, weights).astype(np.float64)
        return np.flatnonzero(sums).astype(np.int64), sums[sums != 0]
    keys, which = np.unique(keys, return_inverse=True)
    sums = np.bincount(which, weights, len(keys)).astype(np.float64)
    return keys[sums != 0], sums[sums != 0]


def _ring_layer(problem: Problem) -> Layer:
    layout, size = problem.layout, problem.layout.world_size
    rank, table = np.repeat(np.arange(size, dtype=np.int64), len(layout.table)), np.tile(layout.table, (size, 1))
    arrived = np.column_stack((table[:, :2], rank, (rank - table[:, 2]) % size))
    weight = sum(lane.weight(problem.sizes) for lane in problem.lanes)
    step, src = (x.ravel() for x in np.mgrid[: size - 1, :size])
    rows = layout.num_tokens[(src - step) % size] * weight
    # The first hop leaves its owner, who needs nothing back; later hops return what they passed on.
    back = np.where(step == 0, -1, size - 1 - step)
    none = np.zeros_like(step)
    moved = np.stack((step, src, (src + 1) % size, rows, back, none + 1, none, none), axis=1)
    return Layer(size, (arrived,) * len(problem.lanes), moved[rows > 0])


def _alone_layer(problem: Problem) -> Layer:
    own = np.column_stack((problem.layout.table, np.zeros(len(problem.layout.table), dtype=np.int64)))
    return Layer(1, (own,) * len(problem.lanes), np.empty((0, 8), dtype=np.int64))


LAYERS: dict[Planner, Callable[[Problem], Layer]] = {
    ring: _ring_layer,
    alone: _alone_layer,
    exchange: lambda p: _fetch_layer(p, p.needed_fetches, p.num_stages),
    staged: lambda p: _fetch_layer(p, p.staged_fetches, p.num_early_stages, ahead=1),
    all_gather: lambda p: _fetch_layer(p, (p.gather_fetch,) * len(p.lanes), min(p.layout.world_size - 1, 1)),
}


def _kernels(problem: Problem, layer: Layer, machine: Machine) -> KernelTable:
    """Return the computes of all ranks, numbered by rank * steps + step."""
    seq_len, num = problem.layout.seq_len, layer.num_steps
    numbers: list[Ints] = []
    sides: list[Ints] = []
    bands: list[Ints] = []
    pairs: list[Pairs] = []
    for lane, arrived in zip(problem.lanes, layer.arrived, strict=True):
        batch = lane.weight(problem.sizes) // len(lane.kv_heads)
        line = on_one_line(arrived, arrived[:, 2], seq_len)
        keys = by_position(np.column_stack((line, arrived[:, 2] * num + arrived[:, 3])))
        # Rows that came through several ports are computed as one.
        is_apart = (keys[1:, 0] != keys[:-1, 1]) | (keys[1:, 2] != keys[:-1, 2])
        first, after = run_table(is_apart, len(keys)).T
        stops = keys[after - 1, 1]
        keys = keys[first]
        keys[:, 1] = stops
        for part in lane.parts:
            pieces, rank = part.queries.pieces
            shift = (rank * (seq_len + 1))[:, None]
            # Queries and keys of a rank are moved by the same distance, so that bounds of q - kv stay.
            cut = bd.tighten(cells(np.column_stack((pieces[:, :4] + shift, pieces[:, 4:])), keys))
            number = cut[:, 6]
            order = np.argsort(number, kind="stable")
            cut, number = cut[order], number[order]
            which, count = np.unique(number, return_counts=True)
            heads = np.array([len(part.q_heads), len(lane.kv_heads)], dtype=np.int64)
            tokens = [_tokens(cut[:, c], number, which) for c in ((bd.Q0, bd.Q1), (bd.K0, bd.K1))]
            side = np.empty((len(which), 6), dtype=np.int64)
            side[:, :2], side[:, 2], side[:, 3], side[:, 4], side[:, 5] = heads, *tokens, batch, count
            numbers.append(which)
            sides.append(side)
            bands.append(cut[:, :6])
            home = (number // num * (seq_len + 1))[:, None]
            pairs.append(pairs_in(part.plane, np.column_stack((cut[:, :4] - home, cut[:, 4:6]))))
    tables = np.concatenate(numbers), np.concatenate(sides), np.concatenate(bands)
    return KernelTable.of(*tables, machine, np.concatenate(pairs))


def _tokens(rows: Ints, number: Ints, which: Ints) -> Ints:
    """Return how many different positions the (start, stop) rows of each number have."""
    width = int(rows[:, 1].max(initial=0)) + 1
    line = union(rows + (number * width)[:, None])
    sizes = (line[:, 1] - line[:, 0]).astype(np.float64)
    return np.bincount(np.searchsorted(which, line[:, 0] // width), sizes, len(which)).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Estimate:
    """The predicted seconds of each pass, and the most seconds that a host is busy queueing both."""

    forward: float
    backward: float
    host_seconds: float

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


def estimate(scheme: Scheme, machine: Machine, *, keep: bool) -> Estimate:
    """Return the scheme's times on the machine. Its planner must be one of `LAYERS`."""
    heads, size, sizes = scheme.heads, scheme.problem.layout.world_size, scheme.problem.sizes
    slices, groups = scheme.slices, size // scheme.heads
    kinds, problems = (slices.kinds, slices.by_kind) if heads > 1 else ((None,), {None: scheme.problem})
    layers = {kind: LAYERS[scheme.inner](problem) for kind, problem in problems.items()}
    kernels = {kind: _kernels(problem, layers[kind], machine) for kind, problem in problems.items()}
    gathered = None if heads == 1 else _Gathered.of(scheme)
    num_inner = layers[kinds[0]].num_steps
    before = int(heads > 1)  # a hybrid gathers heads before the inner planner's first step
    passes: list[tuple[float, float]] = []
    for direction in ("forward", "backward"):
        is_back = direction == "backward"
        inner = num_inner + is_back  # backward has one more, to fetch rows before its first compute
        num_steps = inner + 2 * before
        compute, ops = np.zeros((groups, heads, num_steps)), np.zeros((groups, heads, num_steps))
        sent: list[Ints] = []
        for kind, layer in layers.items():
            numbers = np.array([number for number, other in enumerate(kinds) if other == kind], dtype=np.int64)
            rank, step = np.divmod(kernels[kind].number, num_inner)
            step = num_inner - step if is_back else step
            first = np.full(groups, inner, dtype=np.int64)
            np.minimum.at(first, rank, step)
            table = replace(kernels[kind], number=rank * inner + step)
            work = kernel_work(table, step > first[rank], groups * inner, sizes, machine, direction)
            inside = slice(before, before + inner)
            compute[:, numbers, inside] = _seconds(work, machine, direction).reshape(groups, 1, inner)
            ops[:, numbers, inside] = work[3].reshape(groups, 1, inner)
            for step, due, src, dst, num_bytes, added in _inner_messages(layer, sizes, keep, direction):
                ends = ((end[:, None] * heads + numbers).ravel() for end in (src, dst))
                columns = step + before, due + before, num_bytes
                number, last, weight = (np.repeat(column, len(numbers)) for column in columns)
                sent.append(np.stack((number, *ends, weight, np.full_like(number, added), last)))
        if gathered is not None:
            sent += gathered.messages(num_steps, sizes, keep, direction)
        work = compute.reshape(size, num_steps), ops.reshape(size, num_steps)
        passes.append(_simulate(*work, np.concatenate(sent, axis=1), machine))
    (forward, host), (backward, host_back) = passes
    return Estimate(forward, backward, host + host_back)


def _seconds(work: Floats, machine: Machine, direction: str) -> Floats:
    flop, slots, copied, ops = work
    share = machine.forward_share if direction == "forward" else machine.backward_share
    kernel = flop / (machine.flops * share) + slots * (machine.slot_seconds / machine.slots)
    return kernel + copied / machine.copy_bandwidth + ops * machine.op_seconds


Messages = tuple[Ints, Ints, Ints, Ints, Ints, int]
"""Steps, steps at whose end they have arrived, sources, targets, bytes, and whether the rows are added to the target's
own."""


def _inner_messages(layer: Layer, sizes: Sizes, keep: bool, direction: str) -> Iterator[Messages]:
    """Yield the messages of the inner planner, between groups."""
    step, src, dst, rows, again, returns, early, back = layer.moved.T
    kv = rows * sizes.row_bytes(Role.KV)
    if direction == "forward":
        yield step, step + early, src, dst, kv, 0
        return
    last = layer.num_steps - step
    yield last - early, last, dst, src, rows * sizes.row_bytes(Role.DKV), 1
    if not keep:
        is_sent = again >= 0
        first, last = np.where(returns > 0, (dst, src), (src, dst))[:, is_sent]
        yield (again - back)[is_sent], again[is_sent], first, last, kv[is_sent], 0


@dataclass(frozen=True, slots=True, eq=False)
class _Gathered:
    """What ranks of a group send each other before and after the inner planner's steps: rows by source and taker."""

    src: Ints
    taker: Ints
    q: Ints
    kv: Ints

    @staticmethod
    def of(scheme: Scheme) -> _Gathered:
        heads, size = scheme.heads, scheme.problem.layout.world_size
        rows = {kind: gathered_rows(scheme.slices, problem) for kind, problem in scheme.slices.by_kind.items()}
        src = np.repeat(np.arange(size, dtype=np.int64), heads)
        taker = src // heads * heads + np.tile(np.arange(heads, dtype=np.int64), size)
        q, kv = (np.stack([rows[kind][k] for kind in scheme.slices.kinds], axis=1).ravel() for k in (0, 1))
        is_sent = (src != taker) & (q + kv > 0)
        return _Gathered(src[is_sent], taker[is_sent], q[is_sent], kv[is_sent])

    def messages(self, num_steps: int, sizes: Sizes, keep: bool, direction: str) -> list[Ints]:
        q, kv, first, last = self.q, self.kv, np.zeros_like(self.q), np.full_like(self.q, num_steps - 1)
        inputs = q * sizes.row_bytes(Role.Q) + kv * sizes.row_bytes(Role.KV)
        gather = np.stack((first, self.src, self.taker, inputs, first, first))
        if direction == "forward":
            return [gather, np.stack((last, self.taker, self.src, q * sizes.row_bytes(Role.OUT), first + 1, last))]
        gradients = q * sizes.row_bytes(Role.DQ) + kv * sizes.row_bytes(Role.DKV)
        back = [
            np.stack((first + 1, self.src, self.taker, q * sizes.row_bytes(Role.DOUT), first, first + 1)),
            np.stack((last, self.taker, self.src, gradients, first + 1, last)),
        ]
        return back if keep else [gather, *back]


def _simulate(compute: Floats, ops: Floats, sent: Ints, machine: Machine) -> tuple[float, float]:
    """Return the seconds of one pass, and how long the busiest host queues it.

    `compute`: seconds, (ranks, steps); `ops`: its operations; `sent`: steps, sources, targets, bytes, whether they are
    added, and steps at whose end they have arrived, (6, n). All that one rank sends to another in a step and that
    arrives together is one message.
    """
    size, num = compute.shape
    most = int((sent[5] - sent[0]).max(initial=0)) + 1
    every = ((sent[0] * most + sent[5] - sent[0]) * size + sent[1]) * size + sent[2]
    keys, num_bytes = _sums(every, sent[3])
    batch, pair = np.divmod(keys, size * size)
    step, early = np.divmod(batch, most)
    src, dst = np.divmod(pair, size)
    added = np.zeros(len(keys), dtype=np.bool_)
    added[np.searchsorted(keys, every[(sent[4] > 0) & (sent[3] > 0)])] = True
    starts = [end * num + step for end in (src, dst)]
    sides = [(at, at if most == 1 else at + early, num_bytes, added) for at in starts]
    work = message_work(sides[0], sides[1], size * num, machine)
    count, packed, packs, unpacked, unpacks = work.reshape(5, size, num)
    pack, unpack = (
        a / machine.copy_bandwidth + b * machine.op_seconds for a, b in ((packed, packs), (unpacked, unpacks))
    )
    host = (ops + packs + unpacks) * machine.launch_seconds + count * machine.message_seconds
    queued = machine.call_seconds + np.cumsum(host, axis=1)

    level = machine.levels(src, dst)
    seconds = num_bytes / np.array([link.bandwidth for link in machine.links])[level]
    latency = np.array([link.latency for link in machine.links])[level]
    # Ports have clocks that are further apart than the longest pass, so that all are worked through in one go.
    apart = 2 * float((pack + compute + unpack).max(axis=0).sum() + (seconds + latency).sum() + queued.max())
    ports = [((end * len(machine.links) + level) * apart).astype(np.float64) for end in (src, dst)]
    begins: list[int] = np.searchsorted(batch, np.arange(int(num) * most + 1)).tolist()
    now, free = np.zeros(size), np.zeros(size)
    arrived = np.zeros((size, num))
    for number in range(num):
        ready = now + pack[:, number]
        for ahead in range(most):
            some = slice(begins[number * most + ahead], begins[number * most + ahead + 1])
            if some.stop > some.start:
                a, b, took = src[some], dst[some], seconds[some]
                offer = np.maximum(ready, free)  # a rank's batches run one after another
                start = np.maximum(offer[a], offer[b])
                stop = np.maximum(*(_port_ends(port[some], start, took) for port in ports)) + latency[some]
                for end in (a, b):
                    np.maximum.at(free, end, stop)
                    np.maximum.at(arrived[:, number + ahead], end, stop)
        done = np.maximum(ready + compute[:, number], arrived[:, number])
        now = np.maximum(done + unpack[:, number], queued[:, number])
    return float(max(now.max(), machine.call_seconds)), float(queued.max())


def _port_ends(port: Floats, start: Floats, seconds: Floats) -> Floats:
    """Return when each message has passed its port, which takes one after another in the order of their starts."""
    key = port + start
    order = key.argsort(kind="stable")  # the same order on every host
    took = seconds[order]
    after = took.cumsum()
    ends = np.empty(len(port))
    ends[order] = np.maximum.accumulate(key[order] - (after - took)) + after
    return ends - port
