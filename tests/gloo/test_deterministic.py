"""Bitwise equality: across runs, across orders of arrival, and across world sizes that cut the sequence alike.

Merging follows the schedule, not arrival, so the first two hold for every scheme and kernel. World sizes share their
chunks of the sequence when the added ranks are spent on heads: `all_to_all` on any number of ranks that divides the
key/value heads (one chunk: the whole sequence), and `hybrid(H, ring)` on H times as many ranks as `ring`. There the
same rows meet in the same order in calls of the same shape; an exchange may fetch in other stages. Kernels must then
take `delta`, as `reference` does: fused ones take `out` and are given a stand-in for it where rows were computed away
from home, which rounds dq and dk otherwise.

Plans in `chunks` are the same on every number of ranks whose layout cuts no chunk, with any of these kernels.
"""

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import longspan as ls
from longspan import layouts, masks, plan
from longspan.errors import KernelError, PlanError
from longspan.layouts import Layout
from longspan.planning import Problem, Sizes, planners, validate
from longspan.planning import backward as reversal
from longspan.planning.planners import scheme
from longspan.run import merge as terms
from longspan.run import passes as run_backward
from longspan.scoring.biases import Extras
from longspan.spans import as_table, intersect
from longspan.testing import run_loopback
from tests.cases import random_mask
from tests.gloo import chunk_work
from tests.pool import pool
from tests.simulation.network import Network

torch.set_num_threads(1)
NAMES = ("out", "lse", "dq", "dk", "dv")
MASKS = {"causal": masks.causal(96), "packed": masks.documents([40, 30, 26]) & masks.causal()}
DTYPES = (torch.float32, torch.bfloat16)


def inputs(dtype, q_heads=8, kv_heads=4, tokens=96):
    draw = torch.Generator().manual_seed(7)
    heads = (q_heads, kv_heads, kv_heads, q_heads)
    return [torch.randn(1, h, tokens, 16, generator=draw).to(dtype) for h in heads]


def run(mask, world, scheme, dtype, kernel="reference", layout="contiguous", transport=None):
    made = plan(
        mask, getattr(layouts, layout)(96, world), q_heads=8, kv_heads=4, head_dim=16, dtype=dtype, scheme=scheme
    )
    transport = None if transport is None else Network(transport, plans=made.fingerprint, slow=1.0 + transport % 3)
    return run_loopback(made, *inputs(dtype), kernel=kernel, transport=transport)


def different(a, b):
    """Names of tensors that are not bit for bit the same."""
    return [name for name, x, y in zip(NAMES, a, b, strict=True) if not torch.equal(x, y)]


@pytest.mark.share(3)
@pytest.mark.parametrize("kernel", ["reference", "auto"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", ["ring", "exchange", "staged", "hybrid(2,ring)"])
def test_arrival_orders_change_nothing(scheme, dtype, kernel):
    expected = run(MASKS["packed"], 4, scheme, dtype, kernel, "zigzag")
    for seed in range(20):
        assert not different(expected, run(MASKS["packed"], 4, scheme, dtype, kernel, "zigzag", seed)), f"seed {seed}"


@pytest.mark.share(2)
@pytest.mark.parametrize("scheme", ["ring", "exchange", "all_gather", "all_to_all", "hybrid(2,exchange)"])
def test_runs_repeat(scheme):
    first = run(MASKS["causal"], 4, scheme, torch.bfloat16, "auto", "zigzag")
    assert not different(first, run(MASKS["causal"], 4, scheme, torch.bfloat16, "auto", "zigzag"))


@pytest.mark.share(3)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", MASKS)
def test_world_sizes_of_one_chunk_agree(mask, dtype, layout):
    """All tokens of a head are computed on one rank, whichever that is."""
    alone = run(MASKS[mask], 1, "all_to_all", dtype)
    assert not different(alone, run(MASKS[mask], 1, "exchange", dtype))  # what attention(q, k, v, mask) runs
    for world in (2, 4):
        assert not different(alone, run(MASKS[mask], world, "all_to_all", dtype, layout=layout)), world


@pytest.mark.share(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", MASKS)
def test_world_sizes_of_equal_chunks_agree(mask, dtype):
    """Two and four chunks of the sequence, on one, two and four ranks each."""
    for chunks in (2, 4):
        expected = run(MASKS[mask], chunks, "ring", dtype)
        for heads in (2, 4):
            found = run(MASKS[mask], chunks * heads, f"hybrid({heads},ring)", dtype)
            assert not different(expected, found), (chunks, heads)


@pytest.mark.parametrize("mask", MASKS)
def test_fused_kernels_agree_but_for_what_a_stand_in_rounds(mask):
    alone, two, four = (run(MASKS[mask], world, "all_to_all", torch.float32, "auto") for world in (1, 2, 4))
    assert not different(two, four)
    assert set(different(alone, two)) <= {"dq", "dk"}
    for a, b in zip(alone, two, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_other_world_sizes_do_not_agree():
    """Chunks that differ are summed in another order: nobody should expect the same bits there."""
    assert different(*(run(MASKS["causal"], world, "exchange", torch.float32) for world in (1, 4)))


# -- chunks ------------------------------------------------------------------------------------------------------------

PLACES = [("contiguous", world) for world in (1, 2, 4, 8)] + [("zigzag", world) for world in (2, 4)]
CHUNKED = {
    **MASKS,
    "full": masks.full(96),
    "window": masks.causal(96) & masks.sliding_window(17),
    "holes": masks.documents([5, 3, 30, 6, 44, 8]),
    "heads": masks.per_head(*[masks.causal(96), masks.documents([33, 63])], *[masks.full(96)] * 6),
    "apart": masks.causal(96) & ~masks.Mask.of_bands(np.array([[0, 96, 52, 55, -96, 96]]), 96, "keys 52:55"),
    "rows": masks.per_row(masks.documents([40, 56]), masks.causal(96)),
    "opaque": masks.from_mask_mod(lambda b, h, q, k: (q * k) % 5 != 1, within=masks.causal(96)),
}
SHAPES = {"q_heads": 8, "kv_heads": 4, "head_dim": 20, "v_head_dim": 16, "batch": 2}


def chunk_inputs(dtype, tokens=96):
    draw = torch.Generator().manual_seed(9)
    shapes = (8, 20), (4, 20), (4, 16), (8, 16)
    return [torch.randn(2, heads, tokens, dim, generator=draw).to(dtype) for heads, dim in shapes]


def in_chunks(mask, layout, dtype, chunks=8, **options):
    made = plan(mask, layout, **SHAPES, dtype=dtype, chunks=chunks)
    return run_loopback(made, *chunk_inputs(dtype, layout.seq_len), **options)


def other_bits(a, b):
    """Names of tensors whose bits differ, signs of zeros included."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    pairs = [(x.view(kinds[x.itemsize]), y.view(kinds[y.itemsize])) for x, y in zip(a[:5], b[:5], strict=True)]
    return [name for name, (x, y) in zip(NAMES, pairs, strict=True) if not torch.equal(x, y)]


KINDS = [
    *((mask, "auto", dtype) for mask in ("causal", "packed", "window") for dtype in DTYPES),
    *((mask, "auto", DTYPES[i % 2]) for i, mask in enumerate(("full", "holes", "heads", "apart", "rows", "opaque"))),
    ("holes", "reference", torch.float32),
    ("opaque", "reference", torch.bfloat16),
]


@pytest.mark.share(5)
@pytest.mark.parametrize(("mask", "kernel", "dtype"), KINDS)
def test_chunks_give_the_same_bits_on_every_number_of_ranks(mask, kernel, dtype):
    alone, *others = [
        in_chunks(CHUNKED[mask], getattr(layouts, layout)(96, world), dtype, kernel=kernel) for layout, world in PLACES
    ]
    for place, found in zip(PLACES[1:], others, strict=True):
        assert not other_bits(alone, found), place
    right = run_loopback(plan(CHUNKED[mask], layouts.contiguous(96, 1), **SHAPES, dtype=dtype), *chunk_inputs(dtype))
    for a, b in zip(alone, right, strict=True):  # and they are those of attention
        torch.testing.assert_close(a, b, rtol=0, atol=0.06 if dtype == torch.bfloat16 else 2e-5)


@pytest.mark.share(5)
@pytest.mark.parametrize("kernel", ["reference", "auto"])
@pytest.mark.parametrize("length", [3, 4, 8, 24])
@pytest.mark.parametrize("kind", ["one mask", "per head", "tokens before heads"])
def test_bits_do_not_depend_on_how_rows_lie_in_memory(kind, length, kernel):
    """Own rows are slices of what the user gave, others' come in messages: strides differ, bits must not."""
    tokens, draw = 4 * length, torch.Generator().manual_seed(1)
    mask = masks.causal(tokens)
    if kind == "per head":
        mask = masks.per_head(mask, *[mask & masks.sliding_window(tokens // 2)] * 2)
    tensors = [torch.randn(2, 3, tokens, 64, generator=draw) for _ in range(4)]
    found = []
    for world in (1, 4):
        layout = layouts.contiguous(tokens, world)
        made = plan(mask, layout, q_heads=3, kv_heads=3, head_dim=64, batch=2, dtype=torch.float32, chunks=4)
        given = tensors
        if kind == "tokens before heads" and world == 1:
            given = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors]
        found.append(run_loopback(made, *given, kernel=kernel))
    assert not other_bits(*found)


def scattered(rng, chunks, length, world):
    """Chunks dealt out at random, in any local order; neighbours on a rank may lie apart there."""
    spans = [[] for _ in range(world)]
    for chunk in rng.permutation(chunks).tolist():
        spans[int(rng.integers(world))].append((chunk * length, (chunk + 1) * length))
    return Layout.from_spans(chunks * length, spans, name="scattered")


@pytest.mark.share(5)
@pytest.mark.parametrize("seed", range(14))
def test_chunks_agree_however_they_are_dealt(seed):
    rng = np.random.default_rng(seed)
    chunks, length = int(rng.integers(1, 14)), int(rng.integers(1, 12))
    total, sizes, dtype = chunks * length, Sizes(8, 4, 20, 16, 4, 2), DTYPES[seed % 2]
    kinds = ("causal", "full", "documents", "window", "prefix", "sinks", "opaque", "per_head", "per_row", "empty")
    mask = random_mask(rng, kinds[seed % len(kinds)], total, sizes)
    alone = in_chunks(mask, layouts.contiguous(total, 1), dtype, chunks)
    for world in (2, 5):
        layout = scattered(rng, chunks, length, world)
        problem = Problem.make(mask, layout, sizes, chunks=chunks)
        forward = scheme("exchange", problem).schedule()
        for schedule in (forward, reversal(forward, keep=False), reversal(forward, keep=True)):
            validate(schedule, mask)
        assert not other_bits(alone, in_chunks(mask, layout, dtype, chunks)), layout.text()


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_chunks_agree(dtype):
    """As long as the fused kernel takes its larger blocks, and leaves bfloat16 in bfloat16."""
    mask = masks.documents([1500, 572]) & masks.causal()
    found = [in_chunks(mask, layouts.contiguous(2072, world), dtype, chunks=2) for world in (1, 2)]
    assert not other_bits(*found)


def test_chunks_agree_with_functions_and_sinks_and_other_arrivals():
    slopes = torch.linspace(0.1, 0.8, 8)
    options = {"extras": Extras(None, 20.0, slopes, None, None, 0.2, 3), "sinks": torch.linspace(-1, 1, 8)}
    alone = in_chunks(CHUNKED["packed"], layouts.contiguous(96, 1), torch.float32, **options)
    for seed, (layout, world) in enumerate(PLACES[1:]):
        made = plan(CHUNKED["packed"], getattr(layouts, layout)(96, world), **SHAPES, dtype="float32", chunks=8)
        network = Network(seed, plans=made.fingerprint, slow=2.0)
        found = run_loopback(made, *chunk_inputs(torch.float32), transport=network, **options)
        assert not other_bits(alone, found), (layout, world)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_chunks_bits_differ(dtype):
    """The promise is not kept by chance: other orders do round otherwise on these inputs."""
    alone, *others = [
        run_loopback(
            plan(MASKS["causal"], layouts.zigzag(96, world), **SHAPES, dtype=dtype, scheme="exchange"),
            *chunk_inputs(dtype),
        )
        for world in (1, 2, 4)
    ]
    assert all({"out", "dq", "dk", "dv"} <= set(other_bits(alone, found)) for found in others)


def one_after_another(parts, number, sums):
    if parts:
        return parts[0][1].plus(sums)
    return parts.append((number, sums))


def exact_rows(lane, pairs, chunks, rank, whole=planners._chunk_transfers):
    """Transfers without the rows that nobody sees, between those that somebody does."""
    ranks = range(int(chunks.owner.max()) + 1)
    seen = {r: [c.kv.spans for _, c in planners._chunk_computes(lane, chunks, r)] for r in ranks}
    made = []
    for t in whole(lane, pairs, chunks, rank):
        rows = planners.union(as_table(span for spans in seen[t.dst] for span in spans))
        kept = planners.as_spans(intersect(as_table(t.piece.spans), rows))
        made.append(replace(t, piece=replace(t.piece, spans=kept)))
    return made


def in_order_of_forward(steps, rank, *, keep, reverse=sys.modules["longspan.planning.plan"].reverse):
    """Computes of a step in the order of forward, also those in chunks."""
    backward, kept = reverse(steps, rank, keep=keep)
    orders = [(), *(step.computes for step in reversed(steps))]
    return tuple(replace(step, computes=work) for step, work in zip(backward, orders, strict=True)), kept


MUTANTS = {
    "sums of branches in the order of queries": lambda patch: (
        patch.setattr(terms, "push", one_after_another),
        patch.setattr(run_backward, "push", one_after_another),
    ),
    "backward in the order of forward": lambda patch: patch.setattr(
        sys.modules["longspan.planning.plan"], "reverse", in_order_of_forward
    ),
    "own keys before others'": lambda patch: patch.setattr(
        planners, "_chunk_computes", lambda lane, chunks, rank, found=planners._chunk_computes: sorted(
            found(lane, chunks, rank), key=lambda pair: chunks.owner[pair[0][1]] != rank
        )
    ),
    "rows that lie apart sent as neighbours": lambda patch: patch.setattr(planners, "_chunk_transfers", exact_rows),
}  # fmt: skip


@pytest.mark.share(2)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_other_orders_are_noticed(mutant, monkeypatch):
    remembered = sys.modules["longspan.planning.plan"]._build_plan  # plans that know their steps already
    remembered.cache_clear()
    MUTANTS[mutant](monkeypatch)
    noticed = []
    for mask in (CHUNKED["full"], CHUNKED["apart"]):
        alone, *others = [
            in_chunks(mask, getattr(layouts, name)(96, n), torch.float32) for name, n in PLACES[:2] + PLACES[5:]
        ]
        noticed += [other_bits(alone, found) for found in others]
    remembered.cache_clear()
    assert any(noticed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_agree_on_gloo(dtype):
    alone = chunk_work.shards("contiguous", 1, dtype)
    for layout, world in (("contiguous", 2), ("zigzag", 4)):
        parts = pool(world).run(chunk_work.shards, layout, world, dtype)
        spread = chunk_work.plan_of(layout, world, dtype).layout
        for name, whole, *shares in zip(NAMES, alone, *parts, strict=True):
            assert np.array_equal(spread.unshard(shares, 2), whole), (layout, world, name)


def test_ranks_that_plan_in_other_chunks_are_told():
    for said in pool(2).run(chunk_work.disagreement):
        assert (
            "scheme: exchange, chunks = 4, threads = 1 on rank 0, exchange, chunks = 8, threads = 1 on rank 1" in said
        )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"chunks": 7}, r"7 equal chunks.*leaves 5 over\. Pad the sequence to 98"),
        ({"chunks": 4}, r"chunks of 24 positions, but .*zigzag.* begins a span at 12, inside of one\. Use a layout"),
        ({"chunks": 0}, "chunks = 0"),
        ({"chunks": 5000}, "at most 1024"),
        ({"scheme": "ring"}, r"'exchange' or 'auto' with chunks = 8, but got 'ring'"),
        ({"scheme": "hybrid(2,exchange)"}, "keeps queries on their rank"),
        ({"fetch_bytes": 1 << 20}, "fetch_bytes must be None with chunks = 8"),
    ],
)
def test_chunks_that_cannot_be_are_refused(change, says):
    with pytest.raises(PlanError, match=says):
        plan(MASKS["causal"], layouts.zigzag(96, 4), **SHAPES, dtype="float32", **{"chunks": 8, **change})


def test_chunks_are_part_of_the_plan():
    made = [
        plan(MASKS["causal"], layouts.zigzag(96, 2), **SHAPES, dtype="float32", scheme="exchange", chunks=chunks)
        for chunks in (None, 4, 8)
    ]
    assert len({one.fingerprint for one in made}) == 3
    assert "chunks     8 of 12: the same bits" in str(made[2])
    assert "chunks" not in str(made[0])
    assert [one.chunks for one in made] == [None, 4, 8]


def test_what_chunks_cannot_promise_is_refused():
    made = plan(MASKS["causal"], layouts.contiguous(96, 1), **SHAPES, dtype="float32", chunks=8)
    q, k, v, _ = chunk_inputs(torch.float32)
    sinks = torch.zeros(8, requires_grad=True)
    with pytest.raises(PlanError, match=r"chunks must be None .* gradients, but got 8.*plan without chunks"):
        ls.attention(q, k, v, made, sinks=sinks)
    ls.attention(q, k, v, made, sinks=sinks.detach())
    with pytest.raises(PlanError, match="need gradients"):
        ls.attention(q, k, v, made, alibi=torch.zeros(8, requires_grad=True))
    with pytest.raises(KernelError, match=r"its bits may depend on more than the tile.*Use 'cpu_flash' or 'reference'"):
        ls.attention(q, k, v, made, kernel="flex")
