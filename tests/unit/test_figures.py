"""The figures of a plan: bytes over all ranks equal the sum over everybody's steps, and sums over all steps at once
equal what one step after another gives."""

import json

import numpy as np
import pytest

import longspan as ls
from longspan.cli.command import main
from longspan.planning import MACHINES, Problem, Sizes
from longspan.planning.backward_plan import reverse
from longspan.planning.cost import live_bytes
from longspan.planning.machine import rank_seconds, steps_work
from longspan.planning.planners import PLANNERS, VOLUMES, ring, scheme
from longspan.planning.steps import Role
from tests.step_times import move_seconds

SEQ = 360
CAUSAL = ls.masks.causal(SEQ)
WINDOW = CAUSAL & ls.masks.sliding_window(40)
MASKS = {
    "causal": CAUSAL,
    "documents": ls.masks.documents([7, 130, 1, 90, 132]) & ls.masks.causal(),
    "window": WINDOW,
    "prefix": WINDOW | ls.masks.global_prefix(9),
    "per head": ls.masks.per_head(*[CAUSAL] * 3, *[WINDOW] * 3),
    "per row": ls.masks.per_row(CAUSAL, WINDOW),
    "function": ls.masks.from_mask_mod(lambda b, h, q, kv: (q - kv) % 5 != 3) & CAUSAL,
    "rows that see nothing": CAUSAL & ~ls.masks.documents([200, 160]),
}
LAYOUTS = {
    "balanced": lambda mask, ranks: ls.layouts.balanced(mask, world_size=ranks, seq_len=SEQ),
    "contiguous": lambda mask, ranks: ls.layouts.contiguous(SEQ, ranks),
    "striped": lambda mask, ranks: ls.layouts.striped(SEQ, ranks, stripe=7),
    "lopsided": lambda mask, ranks: ls.layouts.Layout.from_spans(
        SEQ, [[(0, 11)], [(300, 360), (11, 150)], *[[]] * (ranks - 3), [(150, 300)]]
    ),
}
SIZES = Sizes(6, 2, 16, 8, 2, batch=2)


def problem(mask, layout, ranks, **options):
    mask = MASKS[mask]
    return Problem.make(mask, LAYOUTS[layout](mask, ranks), SIZES, **options)


def schemes(ranks):
    hybrids = [f"hybrid({heads},{inner})" for heads in (2, 4, 6) if ranks % heads == 0 for inner in PLANNERS]
    return [*PLANNERS, "all_to_all", *hybrids]


def passes(chosen, rank, keep):
    forward = chosen.steps(rank)
    backward, kept = reverse(forward, rank, keep=keep)
    return ("forward", forward, ()), ("backward", backward, kept)


def arrived(steps, rank):
    """Bytes that a rank receives, transfer by transfer."""
    return sum(t.piece.num_bytes(SIZES) for step in steps for t in step.transfers if t.dst == rank)


@pytest.mark.share(3)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("layout", "ranks", "options"),
    [("balanced", 6, {}), ("contiguous", 8, {"node": 4}), ("striped", 8, {"node": 2, "max_rows": 90}),
     ("lopsided", 6, {"node": 3})],
)  # fmt: skip
def test_bytes_in_closed_form_are_those_of_every_ranks_steps(mask, layout, ranks, options):
    for name in schemes(ranks):
        chosen = scheme(name, problem(mask, layout, ranks, **options))
        steps = [chosen.steps(rank) for rank in range(ranks)]
        for keep in (False, True):
            assert chosen.received_bytes("forward", keep=keep).tolist() == [*map(arrived, steps, range(ranks))], name
            back = [arrived(reverse(steps[rank], rank, keep=keep)[0], rank) for rank in range(ranks)]
            assert chosen.received_bytes("backward", keep=keep).tolist() == back, (name, keep)


def test_a_planner_without_a_closed_form_is_added_up(monkeypatch):
    chosen = scheme("hybrid(2,ring)", problem("causal", "contiguous", 6))
    expected = [chosen.received_bytes(direction, keep=False).tolist() for direction in ("forward", "backward")]
    monkeypatch.delitem(VOLUMES, ring)
    again = scheme("hybrid(2,ring)", problem("causal", "contiguous", 6))
    assert [again.received_bytes(direction, keep=False).tolist() for direction in ("forward", "backward")] == expected


@pytest.mark.share(3)
@pytest.mark.parametrize("docs", ["causal", "longtail", "900,40,5000,2300"])
@pytest.mark.parametrize("scheme_name", ["auto", "ring", "exchange", "all_gather", "all_to_all", "hybrid(4,exchange)"])
def test_what_the_command_prints_is_the_most_of_any_rank(docs, scheme_name, capsys):
    lengths = None if "," not in docs else [int(word) for word in docs.split(",")]
    words = ["--docs", docs, "--q-heads", "8", "--kv-heads", "4", "--head-dim", "64", "--machine", "h100"]
    words += ["--seq", "8k"] if lengths is None else []
    assert main(["plan", *words, "--ranks", "16", "--scheme", scheme_name, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    if docs == "causal":
        mask = ls.masks.causal(8192)
    else:
        from longspan.cli.workload import drawn_lengths

        mask = ls.masks.documents(lengths or drawn_lengths(docs, 8192)) & ls.masks.causal()
    layout = ls.layouts.balanced(mask, world_size=16)
    shape = {"q_heads": 8, "kv_heads": 4, "head_dim": 64, "dtype": "bfloat16", "machine": "h100"}
    for reason in found["reasons"]:
        if "at_least_seconds" in reason:
            continue
        plan = ls.plan(mask, layout, scheme=reason["scheme"], **shape)
        each = [[plan.bytes_received(rank, way) for rank in range(16)] for way in ("forward", "backward")]
        assert reason["bytes_received"] == max(map(sum, zip(*each, strict=True)))
        if reason["chosen"]:
            assert [found[f"{way}_bytes_received"] for way in ("forward", "backward")] == list(map(max, each))


@pytest.mark.parametrize("machine", ["h100", "a100", "b200-fa4", "cpu"])
@pytest.mark.parametrize("mask", ["documents", "per head", "function"])
def test_all_steps_at_once_take_as_long_as_one_after_another(mask, machine):
    for name in schemes(6):
        if "staged" in name:  # a step has messages that other steps wait for
            continue
        chosen = scheme(name, problem(mask, "balanced", 6))
        for direction, steps, _ in passes(chosen, 4, keep=False):
            seconds, later, queued = 0.0, False, MACHINES[machine].call_seconds
            for step in steps:
                (work,) = steps_work((step,), 4, SIZES, MACHINES[machine], direction, later)
                moving = move_seconds(step, 4, SIZES, MACHINES[machine])
                queued += work.host_seconds(MACHINES[machine])
                pack, compute, unpack = work.parts(MACHINES[machine], direction)
                assert pack + compute + unpack == pytest.approx(work.seconds(MACHINES[machine], direction))
                seconds = max(seconds + pack + max(compute, moving) + unpack, queued)
                later = later or bool(step.computes)
            assert rank_seconds(steps, 4, SIZES, MACHINES[machine], direction) == pytest.approx(seconds, rel=1e-12)


def positions(piece):
    return {position for span in piece.spans for position in range(span.start, span.stop)}


def weight(piece):
    return len(piece.heads) * (SIZES.batch if piece.batch is None else len(piece.batch))


def live_by_position(steps, rank, layout, direction, kept):
    """`live_bytes`, told position by position and step by step."""
    own = set(layout.positions(rank)[: int(layout.num_tokens[rank])].tolist())
    live = np.zeros(len(steps), dtype=np.int64) + sum(piece.num_bytes(SIZES) for piece in kept)
    here = [(-1, len(steps), piece) for piece in kept]
    for number, step in enumerate(steps):
        for t in step.transfers:
            last = t.until if t.dst == rank else number + t.early
            live[number : last + 1] += t.piece.num_bytes(SIZES)
            here += [(number + t.early, t.until, t.piece)] if t.dst == rank else []
    for number, step in enumerate(steps):
        there = [own, *(positions(p) for a, b, p in here if p.role is Role.KV and a < number <= b)]
        copies = [c.kv.num_bytes(SIZES) for c in step.computes if not any(positions(c.kv) <= one for one in there)]
        live[number] += max(copies, default=0)
    for side in ("q", "kv"):
        uses: dict[object, list[tuple[int, object, list[object]]]] = {}
        for number, step in enumerate(steps):
            for compute in step.computes:
                piece = getattr(compute, side)
                bands = [getattr(band, side) for band in (*compute.bands, *compute.maybe)]
                uses.setdefault((piece.heads, piece.batch), []).append((number, piece, bands))
        for key, found in uses.items():
            add = _add_queries if side == "q" else _add_keys
            if side == "q" or direction == "backward":
                add(live, steps, rank, own, key, found, direction)
    if direction == "backward":
        start = sum(piece.num_bytes(SIZES) for piece in kept)
        products = int(layout.num_slots(rank)) * SIZES.batch * SIZES.q_heads * SIZES.v_head_dim * 4
        live[0] = max(live[0], start + products)
    return live


def _merged(live, found, per_row):
    """Rows met for the second time count twice, later ones once; the largest compute of a step decides."""
    seen: dict[int, int] = {}
    most: dict[int, int] = {}
    for number, piece, _ in found:
        brought = 0
        for position in positions(piece):
            seen[position] = seen.get(position, 0) + 1
            brought += {1: 0, 2: 2}.get(seen[position], 1)
        most[number] = max(most.get(number, 0), brought)
    for number, brought in most.items():
        live[number] += brought * weight(found[0][1]) * per_row


def _row_bytes(found, single, merged):
    """The bytes of each row: those of a state, if several computes, or bands of one, have rows in common."""
    times: dict[int, int] = {}
    for _, piece, bands in found:
        several = 1 + (sum(len(band) for band in bands) > len(positions(piece)))
        for position in positions(piece):
            times[position] = times.get(position, 0) + several
    return {position: merged if number > 1 else single for position, number in times.items()}


def _is_result(own, found, of_row, heads):
    is_all = set(of_row) == own and weight(found[0][1]) == heads * SIZES.batch
    return is_all and len(found) == len(found[0][2]) == 1


def _add_queries(live, steps, rank, own, key, found, direction):
    if direction == "forward":
        result, state, copied = SIZES.row_bytes(Role.OUT), (SIZES.v_head_dim + 2) * 4, SIZES.row_bytes(Role.Q)
        _merged(live, found, result + SIZES.v_head_dim * 4)
    else:
        result, state = SIZES.row_bytes(Role.DQ), SIZES.head_dim * 4
        copied = SIZES.row_bytes(Role.Q) + SIZES.row_bytes(Role.DOUT) + SIZES.v_head_dim * SIZES.itemsize
        _merged(live, found, result)
    of_row = _row_bytes(found, result, state)
    if not _is_result(own, found, of_row, SIZES.q_heads):
        live[found[0][0] :] += sum(of_row.values()) * weight(found[0][1])
    if not set(of_row) <= own:
        live[found[0][0] : found[-1][0] + 1] += len(of_row) * weight(found[0][1]) * copied


def _add_keys(live, steps, rank, own, key, found, direction):
    _merged(live, found, SIZES.row_bytes(Role.KV))
    each, of_row = weight(found[0][1]), _row_bytes(found, SIZES.row_bytes(Role.KV), SIZES.row_bytes(Role.DKV))
    returned = [t for step in steps for t in step.transfers if t.piece.role is Role.DKV]
    if returned or not _is_result(own, found, of_row, SIZES.kv_heads):
        live[found[0][0] :] += sum(size for position, size in of_row.items() if position in own) * each
    seen: set[int] = set()
    for number, piece, _ in found:
        live[number:] += sum(of_row[position] for position in positions(piece) - own - seen) * each
        seen |= positions(piece) - own
    for number, step in enumerate(steps):
        for t in step.transfers:
            if t.src == rank and t.piece.role is Role.DKV and (t.piece.heads, t.piece.batch) == key:
                live[number + 1 :] -= sum(of_row[position] for position in positions(t.piece) & seen) * each


@pytest.mark.share(3)
@pytest.mark.parametrize("mask", ["causal", "documents", "per head", "function"])
@pytest.mark.parametrize("layout", ["balanced", "striped", "lopsided"])
def test_memory_of_all_steps_at_once_is_that_of_every_position(mask, layout):
    for name in schemes(6):
        chosen = scheme(name, problem(mask, layout, 6, node=3))
        for keep in (False, True):
            for rank in (1, 5):
                for direction, steps, kept in passes(chosen, rank, keep):
                    found = live_bytes(steps, rank, chosen.problem.layout, SIZES, direction, kept)
                    expected = live_by_position(steps, rank, chosen.problem.layout, direction, kept)
                    assert found.tolist() == expected.tolist(), (name, keep, rank, direction)
