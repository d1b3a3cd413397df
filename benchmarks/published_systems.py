"""Model how the published systems run, step by step, on top of our own schedules.

The pairs of a step and the rows on each link come from our planners, with the layout of those systems. Additional work
of these systems is added here as counted work: nothing in this file is fitted. The counts were read from public code:
exps/dist_attn of SandAI-org/MagiAttention (ring_attn.py, ulysess.py, utils_cp.py, run_benchmark.py) and hopper/ of
Dao-AILab/flash-attention (tile_size.h, flash_bwd_launch_template.h).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.published_points import MODEL_DIM, NODE, SIZES, TOKENS_PER_RANK
from longspan.layouts import Layout, contiguous
from longspan.masks import Mask
from longspan.masks import bands as bd
from longspan.planning import Problem, Role, Step, scheme
from longspan.planning.fetch import by_taker
from longspan.planning.machine import H100_FITTED, Work, tile_work
from longspan.planning.problem import cells, cut_to_rows
from longspan.spans import Ints

Q_ROW = SIZES.q_heads * SIZES.head_dim * SIZES.itemsize
K_ROW = SIZES.kv_heads * SIZES.head_dim * SIZES.itemsize
"""Bytes of one token of Q (or out, dout, dq), and of K alone (or V, dk, dv: the published gradients travel in bf16)."""
DUPLEX = 2.0
"""The ring's send and receive are two unbatched operations, even ranks sending first: they do not run together."""
WEIGHT_GRADIENTS = 2.0 * TOKENS_PER_RANK * (SIZES.q_heads + 2 * SIZES.kv_heads) * SIZES.head_dim * MODEL_DIM
"""FLOP of the projections' weight gradients, which the published backward timing includes (run_benchmark.py)."""


@dataclass(frozen=True, slots=True)
class Leg:
    """Work of one step on one rank: device work, plain matmul FLOP, bytes over NVLink and over the card."""

    work: Work
    near: float = 0.0
    far: float = 0.0
    matmul: float = 0.0
    exposed: bool = False
    """Whether the bytes move before or after the work, instead of concurrently."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the variable-length kernel: one band for each document with pairs in it."""

    bands: Ints
    num_docs: int
    q_heads: int
    kv_heads: int

    @property
    def num_q(self) -> float:
        return float((self.bands[:, bd.Q1] - self.bands[:, bd.Q0]).sum())

    @property
    def num_kv(self) -> float:
        return float((self.bands[:, bd.K1] - self.bands[:, bd.K0]).sum())

    @property
    def pairs(self) -> int:
        return int(bd.area(self.bands).sum())


# -- geometry -------------------------------------------------------------------------------------------------------


def padded_problem(lengths: Ints, world_size: int) -> Problem:
    """Documents padded to 2 * world_size equal chunks, chunk c and its mirror on rank c (utils_cp.py).

    Padding has positions but no pairs: it is sent and copied, but not computed.
    """
    num = 2 * world_size
    chunk = -(-np.asarray(lengths, dtype=np.int64) // num)
    starts = np.cumsum(chunk * num) - chunk * num
    number = np.arange(num, dtype=np.int64)
    begin = starts[:, None] + chunk[:, None] * number
    rank = np.broadcast_to(np.minimum(number, num - 1 - number), begin.shape)
    rows = np.stack((begin, begin + chunk[:, None], rank), axis=2).reshape(-1, 3)
    seq_len = int((chunk * num).sum())
    layout = Layout.from_table(seq_len, world_size, rows, "padded")
    stops = starts + np.asarray(lengths, dtype=np.int64)
    zero = np.zeros_like(starts)
    bands = np.stack((starts, stops, starts, stops, zero, zero + bd.LIMIT), axis=1)
    return Problem.make(Mask.of_bands(bands, seq_len, "padded documents"), layout, SIZES, node=NODE)


def plain_problem(lengths: Ints, world_size: int) -> Problem:
    """Concatenated documents, one run for each rank."""
    stops = np.cumsum(np.asarray(lengths, dtype=np.int64))
    starts, zero = stops - lengths, np.zeros_like(stops)
    bands = np.stack((starts, stops, starts, stops, zero, zero + bd.LIMIT), axis=1)
    layout = contiguous(int(stops[-1]), world_size)
    return Problem.make(Mask.of_bands(bands, layout.seq_len, "documents"), layout, SIZES, node=NODE)


def kernel_calls(bands: Ints, stretches: Ints, heads: tuple[int, int], count: int = 1) -> tuple[Call, ...]:
    """Return the bands of computes as `count` calls of a variable-length kernel, with so many query and key/value
    heads.

    `stretches` lists (start, stop) query rows, `count` for each document, one for each call; pieces of a document in
    one call are adjacent.
    """
    bands, at = cut_to_rows(bands, stretches)
    bands = bd.tighten(bands)  # splitting queries leaves keys that no query sees
    num_docs = len(stretches) // count
    mine = [at % count == number for number in range(count)]
    return tuple(Call(_side_by_side(bands[m], at[m] // count, num_docs), num_docs, *heads) for m in mine)


def _side_by_side(bands: Ints, doc: Ints, num_docs: int) -> Ints:
    """Return one band per document: its query and key rows closed up, the last query on the last key if causal."""
    limit = int(bands[:, [bd.Q1, bd.K1]].max(initial=0))
    q, kv = (_lengths(bands[:, columns], doc, num_docs, limit) for columns in (slice(0, 2), slice(2, 4)))
    pairs = np.zeros(num_docs, dtype=np.int64)
    np.add.at(pairs, doc, bd.area(bands))
    low = np.where(pairs == q * kv, -bd.LIMIT, 0)
    rows = np.stack((kv - q, kv, np.zeros_like(kv), kv, low, np.full_like(kv, bd.LIMIT)), axis=1)[pairs > 0]
    assert np.array_equal(bd.area(rows), pairs[pairs > 0]), "a kernel call is neither full nor causal"
    return rows


def _lengths(spans: Ints, doc: Ints, num_docs: int, limit: int) -> Ints:
    """Count the different rows of each document in the spans."""
    rows = by_taker(np.column_stack((spans, doc)), limit)
    sizes = np.zeros(num_docs, dtype=np.int64)
    np.add.at(sizes, rows[:, 2], rows[:, 1] - rows[:, 0])
    return sizes


def link_bytes(step: Step, rank: int) -> tuple[float, float]:
    """Return bytes over NVLink and over the card, the larger of in and out; everything in bf16 and without row sums."""
    sums = np.zeros((2, 2))
    for t in step.transfers:
        tensors = 2 if t.piece.role in (Role.KV, Role.DKV) else 1
        size = t.piece.num_tokens * len(t.piece.heads) * SIZES.head_dim * SIZES.itemsize * tensors
        sums[H100_FITTED.level(t.src, t.dst), int(t.dst == rank)] += size
    near, far = sums.max(axis=1).tolist()
    return near, far


# -- the kernel -----------------------------------------------------------------------------------------------------


def kernel_work(call: Call, direction: str) -> Work:
    """Estimate FlashAttention-3's variable-length kernel on one call."""
    tiles = tile_work(call.bands, call.q_heads, call.kv_heads, 2 * SIZES.head_dim, H100_FITTED, direction)
    if direction == "forward" or not len(call.bands):
        return tiles
    rows, width = H100_FITTED.backward_tiling.rows, H100_FITTED.backward_tiling.cut_width
    longest_q = int((call.bands[:, bd.Q1] - call.bands[:, bd.Q0]).max())
    longest_kv = int((call.bands[:, bd.K1] - call.bands[:, bd.K0]).max())
    # The grid has a block for every tile of the longest document, in every document and head, used or not; the kernels
    # before and after it have such grids too, of blocks so light that 8 and 4 of them share an SM.
    kv_tiles, q_tiles = -(-longest_kv // rows), -(-longest_q // width)
    light = q_tiles * call.q_heads * (1 / 8 + 1 / 4) + 2 * kv_tiles * call.kv_heads / 4
    slots = (kv_tiles * call.q_heads + light) * call.num_docs
    # out and dout are read; float32 dq is cleared, read and rounded, and so are dk and dv where query heads share them.
    copied = 14.0 * call.num_q * call.q_heads
    copied += 20.0 * call.num_kv * call.kv_heads if call.q_heads > call.kv_heads else 0.0
    return Work(tiles.flop, slots, copied * SIZES.head_dim)


# -- one rank's run, as our planners see it -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """Computation and messages of a rank of a published system, without its overheads."""

    rank: int
    tokens: float
    """Slots of the rank, padding included."""
    whole: float
    """Slots of all ranks."""
    calls: tuple[Call, ...]
    moved: tuple[tuple[float, float], ...]
    """Bytes over NVLink and over the card in each step."""


def runs(name: str, lengths: Ints, world_size: int) -> list[Run]:
    """Return the runs of the candidates for the slowest rank: ends and middle; in an all-to-all all ranks are equal."""
    problem = (plain_problem if name == "all_to_all" else padded_problem)(lengths, world_size)
    ranks = (0,) if name == "all_to_all" else (0, world_size // 2, world_size - 1)
    if name == "ring":
        return [ring_run(problem, rank) for rank in ranks]
    steps = scheme(name, problem).steps
    return [planned_run(problem, rank, steps(rank), in_two=name == "all_gather") for rank in ranks]


def planned_run(problem: Problem, rank: int, steps: Sequence[Step], in_two: bool) -> Run:
    """Return the run of our planner's steps: all their computes in one kernel call, or in two (head and tail)."""
    computes = [compute for step in steps for compute in step.computes]
    bands = bd.as_array(tuple(band for compute in computes for band in compute.bands))
    heads = (len(computes[0].q.heads), len(computes[0].kv.heads))
    stretches = _documents(problem)
    if in_two:
        start, stop = stretches[:, :1], stretches[:, 1:]
        size = problem.layout.world_size
        middle = start + -(-(stop - start) // (2 * size)) * size
        stretches = np.concatenate((start, middle, middle, np.maximum(stop, middle)), axis=1).reshape(-1, 2)
    calls = kernel_calls(bands, stretches, heads, 2 if in_two else 1)
    moved = tuple(link_bytes(step, rank) for step in steps)
    return Run(rank, float(problem.layout.num_tokens[rank]), float(problem.layout.seq_len), calls, moved)


def ring_run(problem: Problem, rank: int) -> Run:
    """Return the run of a ring, one call per step, straight from the problem.

    With every document on every rank our planner takes a second for the steps of three ranks of 64, and a benchmark
    needs eighty such packs. A test compares this with the planner's own steps.
    """
    layout, size, docs = problem.layout, problem.layout.world_size, _documents(problem)
    bands = problem.lanes[0].parts[0].queries.bands(rank)[0]
    calls: list[Call] = []
    moved: list[tuple[float, float]] = []
    for i in range(size):
        here = cells(bands, problem.held_rows((rank - i) % size))
        calls += kernel_calls(here, docs, (SIZES.q_heads, SIZES.kv_heads))
        level = [0.0, 0.0]
        for src in {rank, (rank - 1) % size} if i < size - 1 else ():
            place = H100_FITTED.level(src, (src + 1) % size)
            level[place] = max(level[place], 2.0 * K_ROW * int(layout.num_tokens[(src - i) % size]))
        moved.append((level[0], level[1]))
    return Run(rank, float(layout.num_tokens[rank]), float(layout.seq_len), tuple(calls), tuple(moved))


def _documents(problem: Problem) -> Ints:
    """Return (start, stop) of every document, without its padding."""
    return problem.lanes[0].parts[0].plane.sure[:, :2]


# -- the systems ----------------------------------------------------------------------------------------------------


def ring(run: Run, direction: str) -> list[Leg]:
    """Model P steps; each takes its halves, unpads, calls the kernel, pads and merges, while K and V are sent on."""
    legs: list[Leg] = []
    before = (0.0, 0.0)
    for i, (call, hop) in enumerate(zip(run.calls, run.moved, strict=True)):
        # Later ranks' blocks meet only our tail chunk; earlier ranks' blocks only lend their head chunk.
        halves = (1.0, 1.0) if i == 0 else ((1.0, 0.5) if i <= run.rank else (0.5, 1.0))
        work = kernel_work(call, direction) + _ring_copies(call, run.tokens, *halves, direction)
        # In backward K and V go round again, and the gradient of a block follows it one step behind.
        near, far = hop if direction == "forward" else (hop[0] + before[0], hop[1] + before[1])
        matmul = WEIGHT_GRADIENTS if direction == "backward" and i == 0 else 0.0
        legs.append(Leg(work, DUPLEX * near, DUPLEX * far, matmul))
        before = hop
    return legs


def _ring_copies(call: Call, tokens: float, q_half: float, kv_half: float, direction: str) -> Work:
    """Return bytes read and written around one call, and the operations issued (counted in ring_attn.py)."""
    q, kv = call.num_q * Q_ROW, 2 * call.num_kv * K_ROW
    q_padded, kv_padded = tokens * q_half * Q_ROW, 2 * tokens * kv_half * K_ROW
    tensors = 1 if direction == "forward" else 3  # q; or q, out and dout
    copied = (2 * tensors * q_padded if q_half < 1 else 0.0) + (2 * kv_padded if kv_half < 1 else 0.0)
    copied += 2 * tensors * q + 2 * kv  # removed from their padding
    copied += q_padded + 2 * q + 3 * q_padded  # out, or dq: cleared, written, accumulated
    if direction == "backward":
        copied += kv_padded + 2 * kv + 5 * kv_padded  # dk, dv: the same, and added to the travelling sum
    return Work(copied=copied, ops=20 if direction == "forward" else 26)


def all_gather(run: Run, direction: str) -> list[Leg]:
    """Model a gather of K and V of the whole sequence first, not overlapped; then one call for the head and one for the
    tail chunks."""
    whole = run.whole * K_ROW  # all of K; V is as large
    near, far = (sum(part) for part in zip(*run.moved, strict=True))
    legs = [Leg(Work(copied=4.0 * whole, ops=4), near, far, exposed=True)]  # gathered, then put in order
    if direction == "backward":  # dk and dv of the whole length are cleared
        legs.append(Leg(Work(copied=2.0 * whole, ops=2), matmul=WEIGHT_GRADIENTS))
    half = run.tokens / 2 * Q_ROW
    legs += [Leg(kernel_work(call, direction) + _gather_copies(call, half, whole, direction)) for call in run.calls]
    if direction == "backward":  # put back in order, then summed onto their owners
        legs.append(Leg(Work(copied=6.0 * whole, ops=4), near, far, exposed=True))
    return legs


def _gather_copies(call: Call, half: float, whole: float, direction: str) -> Work:
    """Return bytes and operations around one of the two calls; they run on two streams, so each counts half the
    operations."""
    q, kv = call.num_q * Q_ROW, 2 * call.num_kv * K_ROW
    if direction == "forward":  # q taken twice (half, unpadded); k, v unpadded; out padded and placed
        return Work(copied=4 * q + 2 * kv + half + 2 * q + 2 * half, ops=11 / 2)
    copied = 4 * q + 6 * q + 2 * kv  # halves of q and dout; q, out, dout and k, v unpadded
    copied += half + 2 * q + 2 * half  # dq padded and placed
    copied += 2 * whole + 2 * kv + 6 * whole  # dk and dv padded to the whole length and added
    return Work(copied=copied, ops=24 / 2)


def all_to_all(run: Run, direction: str) -> list[Leg]:
    """Model an exchange of tokens for heads, one call on whole documents, and an exchange of heads for tokens.

    Beyond 8 ranks K and V are repeated to one head per rank (run_benchmark.py), which is what our planner sends too:
    a head that several ranks need goes to each of them.
    """
    world_size = round(run.whole / run.tokens)
    repeats = max(SIZES.kv_heads, world_size) / SIZES.kv_heads
    q, kv = run.tokens * Q_ROW, 2 * run.tokens * K_ROW * repeats
    (call,) = run.calls
    # Every tensor is permuted, exchanged and permuted back, not overlapped.
    inward = Leg(Work(copied=4 * (q + kv), ops=9), *run.moved[0], exposed=True)
    outward = Leg(Work(copied=4 * q, ops=3), *run.moved[-1], exposed=True)
    work = kernel_work(call, direction)
    if direction == "forward":  # contiguous copies of q, k, v; out cleared, written, moved
        return [inward, Leg(work + Work(copied=2 * q + 2 * kv + 3 * q, ops=9)), outward]
    # contiguous copies of q, out, dout and k, v; dq, dk, dv cleared, written, moved
    body = work + Work(copied=6 * q + 2 * kv + 3 * q + 3 * kv, ops=19)
    legs = [outward, Leg(body, matmul=WEIGHT_GRADIENTS), inward]
    if repeats > 1:  # gradients of the repeated heads are summed
        legs.append(Leg(Work(copied=3 * kv, ops=2)))
    return legs


SYSTEMS: dict[str, Callable[[Run, str], list[Leg]]] = {"ring": ring, "all_gather": all_gather, "all_to_all": all_to_all}
