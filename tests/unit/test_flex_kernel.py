"""The `flex` kernel: its graphs run on CPUs, where they must equal `reference`; GPU calls by form only.

What a CPU build of PyTorch allows: the two operators themselves, eagerly; the graphs around them through AOTAutograd;
on fake `cuda` tensors all but the compiler and gradients of score functions; the compiled forward without lse. A
compiled backward it has not.
"""

import math
import random

import numpy as np
import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager
from torch._subclasses.fake_tensor import FakeTensorMode

import longspan as ls
from longspan import _torch
from longspan.errors import KernelError
from longspan.kernels import Features, choose_kernel, flex, kernel_named
from longspan.kernels.contract import TileWork, Upstream
from longspan.layouts import balanced, contiguous, striped, zigzag
from longspan.masks import causal, documents, from_mask_mod, sliding_window
from longspan.masks.functions import Function, Reader
from longspan.scoring import traced
from longspan.scoring.biases import Extras, RelativeBias
from longspan.scoring.pipeline import Scoring, TilePairs, TilePositions, Totals
from longspan.spans import Span
from longspan.testing.loopback import run_loopback
from longspan.tile import Tile
from tests.kernel_models.cases import by_tile

FLEX, REFERENCE = kernel_named("flex"), kernel_named("reference")
LIMIT = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}
S = 198


def dense_answers(b, h, q, kv):
    return (q * 7 + kv * 3) % 5 != 0


def by_row_and_head(b, h, q, kv):
    return (q + kv * (h + 1) + b) % 3 != 0


OPAQUE = from_mask_mod(dense_answers, within=causal(S))
PER_HEAD = from_mask_mod(by_row_and_head, within=causal(S), rows=2, heads=2)
TABLE = torch.arange(S) // 40
DOCUMENTS = from_mask_mod(lambda b, h, q, kv: TABLE[q] == TABLE[kv], seq_len=S)

PACKED = documents([50, 70, 78]) & causal()
FIRST_ROWS_BLIND = from_mask_mod(lambda b, h, q, kv: q >= 30 + kv % 2, within=causal(S))

# mask, layout, scheme
CASES = {
    "causal ring": (causal(S), zigzag(S, 3), "ring"),
    "documents exchange": (PACKED, balanced(PACKED, world_size=3), "exchange"),
    "documents all_to_all": (documents([50, 1, 147]), contiguous(S, 3), "all_to_all"),
    "window ring": (sliding_window(20, 3).resized(S), zigzag(S, 3), "ring"),
    "striped": (causal(S), striped(S, 3), "exchange"),
    "blind rows": (causal(S) & ~sliding_window(20, 0), zigzag(S, 3), "ring"),
    "rows that a function leaves blind": (FIRST_ROWS_BLIND, zigzag(S, 3), "ring"),
    "function": (OPAQUE, zigzag(S, 3), "ring"),
    "function of row and head": (PER_HEAD, zigzag(S, 3), "exchange"),
    "function with a table": (DOCUMENTS & causal(), zigzag(S, 3), "all_to_all"),
    "not, and, or": (~OPAQUE & sliding_window(60, 60) | (DOCUMENTS & documents([100, 98])), zigzag(S, 3), "exchange"),
    "one rank": (OPAQUE, contiguous(S, 1), "exchange"),
}  # fmt: skip


def both(mask, layout, scheme, dtype=torch.float64, make=None, heads=(6, 3), dims=(8, 12), batch=2):
    """Everything that flex and reference give for the same plan; `make` gives fresh extras."""
    sizes = {"q_heads": heads[0], "kv_heads": heads[1], "head_dim": dims[0], "v_head_dim": dims[1], "batch": batch}
    plan = ls.plan(mask, layout, dtype=dtype, scheme=scheme, **sizes)
    draw = torch.Generator().manual_seed(0)
    shapes = [(heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1]), (heads[0], dims[1])]
    q, k, v, dout = (
        torch.randn(batch, h, layout.seq_len, d, generator=draw, dtype=torch.float64).to(dtype) for h, d in shapes
    )
    extras = (None, None) if make is None else (make(), make())
    return (
        run_loopback(plan, q, k, v, dout, kernel="flex", extras=extras[0]),
        run_loopback(plan, q, k, v, dout, kernel="reference", extras=extras[1]),
    )


def same(found, true, dtype):
    assert len(found) == len(true)
    for i, (x, y) in enumerate(zip(found, true, strict=True)):
        assert x.shape == y.shape
        hidden = y.isinf()
        assert torch.equal(x.isinf(), hidden), f"result {i}: blind rows"
        size = 1.0 + y[~hidden].abs().max()
        assert ((x - y)[~hidden].abs().max() / size) < LIMIT[dtype], f"result {i}"


@pytest.mark.share(3)
@pytest.mark.parametrize("name", CASES)
def test_masks_equal_reference(name):
    heads = (2, 1) if CASES[name][0] is PER_HEAD else (6, 3)
    same(*both(*CASES[name], heads=heads), torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes(dtype):
    same(*both(*CASES["not, and, or"], dtype=dtype), dtype)
    same(*both(*CASES["causal ring"], dtype=dtype, heads=(4, 1), dims=(16, 16), batch=1), dtype)


# ---- score functions -------------------------------------------------------------------------------------------------


def tensors(dtype):
    draw = torch.Generator().manual_seed(1)
    make = lambda *shape: torch.randn(*shape, generator=draw, dtype=dtype)  # noqa: E731
    return (
        make(8, 6).requires_grad_(),
        torch.tensor(0.7, dtype=dtype, requires_grad=True),
        make(S).requires_grad_(),
        make(S),
    )


def everything(dtype=torch.float64):
    """Captured: a table, a single number, one tensor used twice, one without gradient, and one never used."""
    table, gain, twice, fixed = tensors(dtype)

    def score_mod(score, b, h, q, kv):
        far = torch.where(q - kv > 50, fixed[q] * 0.1, 0.0)
        return score * gain + twice[q] * twice[kv] + far + (b + 2 * h) * 0.01 + table[0, h] * 0.1

    slopes = ls_slopes(6, dtype)
    return Extras(score_mod=score_mod, softcap=5.0, alibi=slopes, relative_bias=RelativeBias(table, max_distance=32))


def ls_slopes(heads, dtype):
    return (torch.arange(heads, dtype=dtype) / 9 + 0.1).requires_grad_()


SCORED = ("causal ring", "documents all_to_all", "not, and, or")


@pytest.mark.parametrize("name", SCORED)
def test_scores_equal_reference(name):
    found, true = both(*CASES[name], make=everything)
    assert len(found) == 5 + 4, "slopes, table, gain, twice"
    same(found, true, torch.float64)
    assert all(t.abs().sum() > 0 for t in found[5:])


def test_scores_in_float32():
    same(*both(*CASES["causal ring"], dtype=torch.float32, make=lambda: everything(torch.float32)), torch.float32)


def test_bias_by_pair():
    bias = lambda: Extras(bias=torch.linspace(-1, 1, 6 * S * S, dtype=torch.float64).view(1, 6, S, S).requires_grad_())  # noqa: E731
    same(*both(*CASES["documents exchange"], make=bias), torch.float64)


def test_inside_the_operator_with_autograd():
    table, gain, *_ = tensors(torch.float64)
    found = []
    for kernel in ("flex", "reference"):
        draw = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(1, 6, S, 8, generator=draw, dtype=torch.float64, requires_grad=True) for _ in range(3))
        out = ls.attention(
            q, k, v, OPAQUE, kernel=kernel, score_mod=lambda s, b, h, q, kv: s * gain + table[(q - kv) % 8, h]
        )
        found.append((out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v, table, gain))))
    same(*found, torch.float64)


# ---- the kernel itself -----------------------------------------------------------------------------------------------


def random_tiles(rng, num_q, num_k):
    """Disjoint tiles: a band cut at random edges, some left out."""
    edges = [sorted({0, n, *(rng.randint(0, n) for _ in range(3))}) for n in (num_q, num_k)]
    lo, hi = rng.choice((None, rng.randint(-num_k // 2, num_q // 2))), None
    if rng.random() < 0.5:
        hi = (lo or 0) + rng.randint(0, num_q)
    tiles = []
    for a, b in zip(edges[0], edges[0][1:], strict=False):
        for c, d in zip(edges[1], edges[1][1:], strict=False):
            shift = a - c
            tile = Tile(
                a, b, c, d, None if lo is None else lo - shift, None if hi is None else hi - shift, rng.random() < 0.3
            )
            if rng.random() < 0.8 and tile.tight() is not None:
                tiles.append(tile)
    return tiles


def allowed(tile, num_q, num_k):
    i, j = torch.arange(num_q)[:, None] - tile.q0, torch.arange(num_k) - tile.k0
    found = (i >= 0) & (i < tile.rows) & (j >= 0) & (j < tile.cols)
    found &= True if tile.lo is None else i - j >= tile.lo
    return found & (True if tile.hi is None else i - j <= tile.hi)


def pairs_of(num_q, num_k, scoring=None, captured=()):
    """Query i is at position i + 5, key j at j."""
    q, kv = np.arange(num_q) + 5, np.arange(num_k)
    index = torch.zeros(1, 1, 1, 1), torch.arange(2)[:, None, None], torch.tensor(q)[:, None], torch.tensor(kv)
    index = tuple(x.expand([1] * (4 - x.ndim) + list(x.shape)) for x in index)
    where = TilePositions(Span(0, 1), Span(0, 2), q, kv, index)
    return TilePairs(where, scoring, Function(dense_answers, None, None, Reader(dense_answers)), Totals(captured))


def drawn(num_q, num_k, seed=0, dim=8):
    draw = torch.Generator().manual_seed(seed)
    return [
        torch.randn(1, h, n, dim, generator=draw, dtype=torch.float64)
        for h, n in ((2, num_q), (1, num_k), (1, num_k), (2, num_q))
    ]


def tile_cases():
    rng = random.Random(0)
    while True:
        num_q, num_k = rng.choice(((40, 50), (300, 150), (130, 400), (257, 256)))
        if tiles := random_tiles(rng, num_q, num_k):
            yield num_q, num_k, tiles


def test_many_tiles_in_one_call():
    for _, (num_q, num_k, tiles) in zip(range(12), tile_cases(), strict=False):
        (q, k, v, dout), pairs = drawn(num_q, num_k), pairs_of(num_q, num_k)
        asks = torch.stack([allowed(t, num_q, num_k) & torch.tensor(t.asks) for t in tiles]).any(0)
        plain = torch.stack([allowed(t, num_q, num_k) & torch.tensor(not t.asks) for t in tiles]).any(0)
        mask = plain | (asks & dense_answers(0, 0, torch.arange(num_q)[:, None] + 5, torch.arange(num_k)))
        scores = (q @ k.mT * 0.3).masked_fill(~mask, -math.inf)
        ((cover, out, lse),) = by_tile(FLEX, TileWork(q, k, v, tiles, 0.3, pairs))
        rows, keys = slice(cover.q0, cover.q1), slice(cover.k0, cover.k1)
        assert (cover.q0, cover.q1) == (min(t.q0 for t in tiles), max(t.q1 for t in tiles))
        same([lse], [scores.logsumexp(-1)[:, :, rows]], torch.float64)  # natural logarithms
        same([out], [scores.softmax(-1).nan_to_num(0.0)[:, :, rows] @ v], torch.float64)
        assert out[lse.isneginf()].abs().sum() == 0
        # backward from an lse and a delta that no tile has seen: global ones, and a gradient of lse within delta
        whole, delta = lse.new_full((1, 2, num_q), 3.0), torch.randn(1, 2, num_q, dtype=torch.float64)
        whole[:, :, ::7] = -math.inf
        wrong = torch.full_like(dout, math.nan)  # `out` is not looked at
        work, upstream = TileWork(q, k, v, tiles, 0.3, pairs), Upstream(dout, wrong, whole, delta)
        ((dq, dk, dv),) = FLEX.backward(work, upstream)
        sums = [torch.zeros_like(x) for x in (q, k, v)]
        for tile, *parts in by_tile(
            REFERENCE, TileWork(q, k, v, tiles, 0.3, pairs), Upstream(dout, wrong, whole, delta)
        ):
            for total, part, (a, b) in zip(sums, parts, ((tile.q0, tile.q1), *[(tile.k0, tile.k1)] * 2), strict=True):
                total[:, :, a:b] += part
        same([dq, dk, dv], [sums[0][:, :, rows], sums[1][:, :, keys], sums[2][:, :, keys]], torch.float64)


def test_blocks_are_told_apart():
    for _, (num_q, num_k, tiles) in zip(range(40), tile_cases(), strict=False):
        blocks = flex._blocks_of(tuple(tiles), (num_q, num_k), torch.device("cpu"))
        assert (blocks.rows, blocks.cols) == (flex.bucket(num_q), flex.bucket(num_k))
        sure = torch.zeros(blocks.rows, blocks.cols, dtype=torch.int64)
        maybe = sure.clone()
        for tile in tiles:
            (maybe if tile.asks else sure)[:num_q, :num_k] += allowed(tile, num_q, num_k).long()
        sure, maybe = (x.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).sum((1, 3)) for x in (sure, maybe))
        full_ = sure == 128 * 128
        for (counts, order), true in ((blocks.tensors[0:2], (sure + maybe > 0) & ~full_), (blocks.tensors[2:4], full_)):
            listed = torch.zeros_like(true)
            for row, (count, blocks_of_row) in enumerate(zip(counts[0, 0], order[0, 0], strict=True)):
                listed[row, blocks_of_row[:count].long()] = True
            assert torch.equal(listed, true)


def test_nothing_to_do():
    q, k, v, dout = drawn(4, 4)
    assert not list(FLEX.forward(TileWork(q, k, v, [], 1.0)))
    assert not list(FLEX.backward(TileWork(q, k, v, [], 1.0), Upstream(dout, dout, dout[..., 0], dout[..., 0])))


@pytest.mark.parametrize("mutant", ["LN2", "table", "full"])
def test_mutants_are_caught(mutant, monkeypatch):
    monkeypatch.setattr(flex, "_blocks_of", flex._blocks_of.__wrapped__)
    if mutant == "LN2":
        monkeypatch.setattr(flex, "LN2", 1.0)
    if mutant == "table":
        monkeypatch.setattr(
            flex, "_tables", lambda spans, *rest, old=flex._tables: old((*spans[:2], spans[2] - 1), *rest)
        )
    if mutant == "full":
        monkeypatch.setattr(flex, "BLOCK", 64)  # blocks counted in another size than the operator's
        with pytest.raises((AssertionError, IndexError)):
            test_blocks_are_told_apart()
        return
    with pytest.raises(AssertionError):
        test_masks_equal_reference("function")


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_dropout_is_refused():
    plan = ls.plan(causal(16), contiguous(16, 1), q_heads=2, kv_heads=2, head_dim=8, dtype=torch.float32)
    q = torch.zeros(1, 2, 16, 8)
    with pytest.raises(KernelError, match=r"'flex'.*dropout.*'reference'"):
        run_loopback(plan, q, q, q, q, kernel="flex", extras=Extras(dropout=0.5, seed=1))
    assert not FLEX.honours.dropout
    assert REFERENCE.honours.dropout


def test_functions_that_cannot_be_traced_are_refused():
    q = torch.zeros(1, 2, 16, 8)
    weights = torch.ones(16, requires_grad=True)
    out = ls.attention(q, q, q, causal(16), kernel="flex", score_mod=lambda s, b, h, q, kv: s + (weights * 2)[q])
    with pytest.raises(KernelError, match=r"kernel='reference'"):
        out.sum().backward()


def test_on_cpus_it_runs_when_named(monkeypatch):
    q = (torch.zeros(1, 2, 8, 16),) * 3
    scores = Features(score_function=True)
    assert choose_kernel("auto", *q, scores) == "reference"
    assert choose_kernel("flex", *q, scores) == choose_kernel("flex", *q) == "flex"
    with pytest.raises(KernelError, match=r"Use 'reference', or 'auto'"):
        choose_kernel("cpu_flash", *q, scores)
    with pytest.raises(KernelError, match=r"on cpu it takes float64.*float8"):
        choose_kernel("flex", *(x.to(torch.float8_e4m3fn) for x in q))


def test_on_gpus_auto_chooses_it_for_score_functions(monkeypatch):
    scores, dropout = Features(score_function=True), Features(score_function=True, dropout=True)
    with FakeTensorMode():
        new = lambda dim, dtype: (torch.empty(1, 2, 8, dim, dtype=dtype, device="cuda"),) * 3  # noqa: E731
        monkeypatch.setattr(flex, "has_triton", lambda: False)
        assert choose_kernel("auto", *new(64, torch.bfloat16), scores) == "reference"
        monkeypatch.setattr(flex, "has_triton", lambda: True)
        assert choose_kernel("auto", *new(64, torch.bfloat16), scores) == "flex"
        assert choose_kernel("auto", *new(64, torch.bfloat16)) == "varlen"
        assert choose_kernel("auto", *new(64, torch.bfloat16), dropout) == "reference"
        assert choose_kernel("auto", *new(64, torch.float64), scores) == "reference"
        for dims in ((8, torch.float32), (300, torch.float32)):
            with pytest.raises(KernelError, match="16 to 256"):
                choose_kernel("flex", *new(*dims), scores)
        with pytest.raises(KernelError, match="float32, bfloat16, float16"):
            choose_kernel("flex", *new(64, torch.float64), scores)


# ---- what GPUs run: form, AOTAutograd, and the compiled forward ------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gpu_calls_have_the_right_form(dtype, monkeypatch):
    calls = []

    def compiled(graph, inputs):
        calls.append(graph)
        return graph  # whose operators give fake results for fake tensors

    # The Python binding asks for a CUDA build, the operator does not.
    monkeypatch.setattr(torch.Tensor, "copy_", lambda x, y: torch.ops.aten.copy_(x, y))
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda x: torch.ops.aten.contiguous(x))
    monkeypatch.setattr(flex, "has_triton", lambda: True)
    monkeypatch.setattr(flex._torch, "compile_graph", compiled)
    monkeypatch.setattr(flex, "_compiled", {})
    flex._blocks_of.cache_clear()
    tiles = [Tile(0, 40, 0, 40, lo=0), Tile(40, 200, 40, 150, lo=0, asks=True), Tile(0, 200, 150, 300)]
    with FakeTensorMode(allow_non_fake_inputs=True):
        new = lambda *shape, dtype=dtype: torch.empty(*shape, dtype=dtype, device="cuda")  # noqa: E731
        q, k, v, dout = new(2, 6, 200, 20), new(2, 2, 300, 20), new(2, 2, 300, 24), new(2, 6, 200, 24)
        kernel = kernel_named(choose_kernel("flex", q, k, v, Features(True, True)))
        table = new(9, 6, dtype=torch.float32).requires_grad_()
        scoring = Scoring((lambda s, b, h, q, kv: s + table[(q - kv) % 9, h],), (table,))
        pairs = pairs_of(200, 300, scoring, (table,))
        for _ in range(2):  # the second time nothing is compiled
            ((tile, out, lse),) = by_tile(kernel, TileWork(q, k, v, tiles, 0.1, pairs))
            assert (tile.rows, tile.cols) == (200, 300)
            assert (out.shape, out.dtype, out.device.type) == ((2, 6, 200, 24), dtype, "cuda")
            assert (lse.shape, lse.dtype, lse.device.type) == ((2, 6, 200), torch.float32, "cuda")
            bare = pairs_of(200, 300)  # autograd of fake cuda tensors ends the process
            ((dq, dk, dv),) = kernel.backward(TileWork(q, k, v, tiles, 0.1, bare), Upstream(dout, dout, lse, lse))
            assert [x.shape for x in (dq, dk, dv)] == [q.shape, k.shape, v.shape]
            assert {(x.dtype, x.device.type) for x in (dq, dk, dv)} == {(dtype, "cuda")}
    flex._blocks_of.cache_clear()
    operators = [next(n.target for n in g.graph.nodes if n.op == "call_function") for g in calls]
    assert operators == [torch.ops.higher_order.flex_attention, torch.ops.higher_order.flex_attention_backward]
    assert all("aten.item" not in g.code for g in calls)


def test_graphs_pass_through_aotautograd(monkeypatch):
    kinds = []

    def compiled(key, graph, inputs):
        kinds.append(key[0])
        return aot_eager(graph(), inputs)(*inputs)

    monkeypatch.setattr(flex, "_run", compiled)
    same(*both(*CASES["one rank"], make=everything), torch.float64)
    assert set(kinds) == {"forward", "backward"}


def test_equal_code_is_compiled_once(monkeypatch):
    """Layers make their functions anew; what they do is the same."""
    keys = set()
    run = flex._run
    monkeypatch.setattr(flex, "_run", lambda key, graph, inputs: (keys.add(key), run(key, graph, inputs))[1])
    for seed in range(3):
        table = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed), requires_grad=True)
        q = torch.randn(1, 6, 64, 8, requires_grad=True)
        score_mod = lambda s, b, h, q, kv, table=table: s + table[(q - kv) % 8, h]  # noqa: E731
        ls.attention(q, q, q, causal(64), kernel="flex", score_mod=score_mod).sum().backward()
    assert len(keys) == 2
    ls.attention(q, q, q, causal(64), kernel="flex", score_mod=lambda s, b, h, q, kv: s * 2.0)
    ls.attention(q, q, q, causal(64), kernel="flex", score_mod=lambda s, b, h, q, kv: s * 3.0)
    assert len(keys) == 4


def test_tensors_are_told_by_identity_when_a_trial_took_another_way():
    """A trial on the CPU uses tensors in the order of the function; tracing for a GPU moves all of them there first."""
    row, head, idle = torch.tensor(3), torch.tensor(5), torch.tensor(9)
    moves = False

    def function(x):
        if moves:
            _ = idle.to(x.dtype), row.to(x.dtype), head.to(x.dtype)
        return x + 10 * head + 100 * row

    made = traced.program(function, (torch.tensor(1.0),), ())
    moves = True
    assert made.graph(torch.tensor(1.0), *made.values((), ())) == 351.0


@pytest.mark.parametrize("functions", [False, True])
def test_packed_batches_of_one_size_share_what_was_compiled(functions, monkeypatch):
    """20 packings of 2,048 tokens on 4 ranks: a GPU would compile a handful of times, not in every step."""

    def compiled_by(num_batches):
        made, run = set(), flex._run

        def shapes_only(key, graph, inputs):
            made.add(flex.compile_key(key, inputs))
            if key[0] == "forward":
                q, v = inputs[0], inputs[2]
                return q.new_zeros((*q.shape[:3], v.shape[3])), q.new_zeros(q.shape[:3])
            gradients = [None if kind is None else inputs[15 + i].detach() * 0 for i, kind in enumerate(kinds)]
            return *(torch.zeros_like(x) for x in inputs[:3]), *gradients

        kinds = [None] * 4 + [True] if functions else []
        monkeypatch.setattr(flex, "_run", shapes_only)
        rng = np.random.default_rng(0)
        for _ in range(num_batches):
            cuts = np.sort(rng.choice(np.arange(1, 2048), size=int(rng.integers(2, 9)), replace=False))
            lengths = np.diff([0, *cuts, 2048]).tolist()
            mask = ls.masks.documents(lengths) & ls.masks.causal()
            table = torch.randn(9, 2, requires_grad=True)
            extras = Extras(score_mod=lambda s, b, h, q, kv, t=table: s + t[(q - kv).clamp(0, 8), h])
            plan = ls.plan(
                mask,
                ls.layouts.zigzag(2048, 4),
                q_heads=2,
                kv_heads=2,
                head_dim=8,
                dtype="float32",
                scheme="exchange",
            )
            q, k, v, dout = torch.randn(4, 1, 2, 2048, 8)
            run_loopback(plan, q, k, v, dout, kernel="flex", extras=extras if functions else None)
        monkeypatch.setattr(flex, "_run", run)
        return len(made)

    few = compiled_by(20)
    assert few <= 24, few
    monkeypatch.setattr(flex, "bucket", lambda size: size)
    flex._blocks_of.cache_clear()
    assert compiled_by(20) > 4 * few
    flex._blocks_of.cache_clear()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_compiled_forward(monkeypatch):
    """PyTorch's compiler has the forward operator on CPUs, without lse: the graph, compiled, gives the same output."""
    monkeypatch.setattr(_torch, "_FLEX", {**_torch._FLEX, "OUTPUT_LOGSUMEXP": False})
    tiles = [Tile(0, 40, 0, 40, lo=0), Tile(40, 200, 40, 150, lo=0, asks=True), Tile(0, 200, 150, 300)]
    q, k, v, _ = (x.float() for x in drawn(200, 300, dim=16))
    table = torch.randn(3, 2)
    scoring = Scoring((lambda s, b, h, q, kv: torch.tanh(s / 3) * torch.tensor(3.0) + table[0, h] * 0.1,))
    seen = []

    def compiled(key, graph, inputs):
        made = graph()
        out, lse = made(*inputs)
        node = made.graph.output_node()
        node.args = ((node.args[0][0],),)
        made.graph.eliminate_dead_code()
        made.recompile()
        seen.append((out, *_torch.compile_graph(made, inputs)(*inputs)))
        return out, lse

    monkeypatch.setattr(flex, "_run", compiled)
    list(FLEX.forward(TileWork(q, k, v, tiles, 0.25, pairs_of(200, 300, scoring))))
    ((eager, fused),) = seen
    same([fused], [eager], torch.float32)
