"""Score functions, named extras, sinks, dropout and masks that are functions, against a dense float64 oracle."""

import functools
import itertools
import random

import numpy as np
import pytest
import torch

import longspan as ls
from longspan import layouts, masks
from longspan.scoring.biases import RelativeBias, alibi_slopes
from longspan.scoring.pipeline import Dropout
from longspan.testing import run_loopback
from tests.score_cases import (
    MASKS,
    SCHEMES,
    SCORES,
    B,
    G,
    H,
    Problem,
    Score,
    any_layout,
    dense,
    dense_answer,
    kept_pairs,
    learns,
    made_plan,
    masked,
    problem,
    random_inputs,
    relative_errors,
    seen_pairs,
    t5_bucket,
)

WORLDS = (2, 3, 4)
SOMETIMES = {"t5_decoder_table", "bias_tensor", "documents_by_sum", "by_batch_row", "dropped", "everything"}
SOMETIMES |= {"blind_rows", "opaque_rows_heads"}
"""Of these functions and masks every scheme is run on one number of ranks, in turn; of all others, on all three."""


@functools.cache
def plans_of(name):
    """(scheme, world, plan) of a mask, over a layout that is drawn anew for each."""
    number = list(MASKS).index(name)
    rng, tokens = np.random.default_rng(number), 24 + number
    mask, found = masked(name, tokens), []
    most = 1 if mask.num_rows * mask.num_heads > 1 else 2  # several planes are work enough
    for scheme, world in itertools.product(SCHEMES, WORLDS):
        found.append((scheme, world, made_plan(mask, any_layout(rng, mask, tokens, world, most), scheme)))
    return found


def chosen(name, score):
    """The plans with which a score function is run on a mask."""
    turn = list(SCORES).index(score) + list(MASKS).index(name)
    for number, found in enumerate(plans_of(name)):
        if not SOMETIMES & {name, score} or (turn + number // 3) % 3 == number % 3:
            yield found


def test_cases_cover_what_they_should():
    cases = [(mask, score, *found) for mask in MASKS for score in SCORES for found in chosen(mask, score)]
    whole = {mask for mask in MASKS if mask not in SOMETIMES}, {score for score in SCORES if score not in SOMETIMES}
    assert len(whole[0]) >= 8
    assert len(whole[1]) >= 12
    assert len(cases) >= 12 * 8 * len(SCHEMES) * len(WORLDS)
    for mask, score in itertools.product(*whole):
        found = {(scheme, world) for m, s, scheme, world, _ in cases if (m, s) == (mask, score)}
        assert found == set(itertools.product(SCHEMES, WORLDS))
    for mask, score in itertools.product(MASKS, SCORES):
        assert {scheme for m, s, scheme, _, _ in cases if (m, s) == (mask, score)} == set(SCHEMES)
    used = {(plan.layout.name, plan.layout.world_size) for *_, plan in cases}
    assert {name for name, _ in used} >= {"contiguous", "zigzag", "striped", "balanced", "scattered", "per_document"}
    assert any(plan.layout.num_padding(rank) for *_, plan in cases for rank in range(plan.layout.world_size))


@pytest.mark.share(10)
@pytest.mark.parametrize("name", MASKS)
def test_exact(name):
    """Output, lse and every gradient: 18 score functions, 5 schemes, 2 to 4 ranks, any layout."""
    for number, score in enumerate(SCORES):
        tokens = 24 + list(MASKS).index(name)
        given = problem(score, name, tokens, seed=1000 * tokens + number)
        for _, _, plan in chosen(name, score):
            given.check(plan)


# -- narrower dtypes ---------------------------------------------------------------------------------------------------


@pytest.mark.share(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["causal", "opaque"])
def test_narrow_dtypes_are_as_good_as_dense(dtype, name):
    """At most twice the error of the dense computation in the same dtype, over all functions taken together."""
    ours, theirs = np.zeros(6), np.zeros(6)  # the last one is for what learns
    for number, score in enumerate(SCORES):
        draw, tokens = torch.Generator().manual_seed(number), 40
        given = SCORES[score](draw, tokens)
        inputs = [t.to(dtype).double() for t in random_inputs(draw, tokens)]
        right = Problem.of(given, masked(name, tokens), inputs)
        narrow = [t.to(dtype) for t in inputs]
        plan = made_plan(right.mask, layouts.zigzag(tokens, 2), SCHEMES[number % 5], str(dtype).removeprefix("torch."))
        found = run_loopback(plan, *narrow, scale=right.scale, sinks=given.detached_sinks, extras=given.extras)
        for squares, run, nothing in ((ours, found, right.nothing), (theirs, _in_dtype(right, dtype), None)):
            errors = np.square(relative_errors(run, right.answer, nothing))
            squares[:5] += errors[:5]
            squares[5] += errors[5:].sum()
    assert (ours <= 2**2 * theirs).all(), f"{np.sqrt(ours / theirs)} x the errors of the dense computation"


def _in_dtype(given, dtype):
    """The dense computation with all scores and probabilities in a dtype."""
    q, k, v, dout = (t.to(dtype) for t in given.inputs)
    leaves = [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), *given.score.learned]
    batch, heads, tokens = q.shape[:3]
    arguments = dict(given.score.arguments)
    for key in {"alibi", "bias", "sinks"} & set(arguments):
        arguments[key] = arguments[key].to(dtype)
    if "relative_bias" in arguments:
        bias = arguments["relative_bias"]
        arguments["relative_bias"] = RelativeBias(bias.table.to(dtype), bias.bidirectional, bias.max_distance)
    if "score_mod" in arguments:
        score_mod = arguments["score_mod"]
        arguments["score_mod"] = lambda s, *at: score_mod(s, *at).to(dtype)
    kept = kept_pairs(given.score, batch, heads, tokens)
    out, lse = dense(q, k, v, seen_pairs(given.mask, tokens), given.scale, kept=kept, **arguments)
    return out, lse, *torch.autograd.grad(out, leaves, dout)


# -- numbers against derivatives ---------------------------------------------------------------------------------------

TINY = {"q_heads": 2, "kv_heads": 1, "head_dim": 2, "v_head_dim": 3, "batch": 1}


def _tiny(tokens=5):
    draw = torch.Generator().manual_seed(5)
    inputs = random_inputs(draw, tokens, batch=1, heads=(2, 1), dims=(2, 3))[:3]
    return draw, [t.requires_grad_() for t in inputs]


CHECKED = {  # name: shape of what learns, and how it is passed
    "captured": ((2,), lambda t: {"score_mod": lambda s, b, h, q, kv: s * t[h] - t.exp()[h] * (q - kv).abs()}),
    "captured by pairs": ((2, 5, 5), lambda t: {"score_mod": lambda s, b, h, q, kv: s + t[h, q, kv] * t[h, kv, q]}),
    "mixing": ((3,), lambda t: {"score_mod": lambda s, b, h, q, kv: s + t[(q >= torch.tensor([2, 3])).sum()] * kv}),
    "sinks": ((2,), lambda t: {"sinks": t}),
    "bias": ((1, 1, 5, 5), lambda t: {"bias": t}),
    "alibi": ((2,), lambda t: {"alibi": t}),
    "t5": ((8, 2), lambda t: {"relative_bias": RelativeBias(t, max_distance=5)}),
    "softcap and dropout": ((2,), lambda t: {"softcap": 1.1, "dropout": 0.25, "seed": 3, "sinks": t, "alibi": t.abs()}),
}


@pytest.mark.share(3)
@pytest.mark.parametrize("name", CHECKED)
def test_gradcheck(name):
    shape, arguments = CHECKED[name]
    draw, inputs = _tiny()
    learned = learns(draw, *shape)
    mask = masks.causal(5) if name != "mixing" else masks.from_mask_mod(lambda b, h, q, kv: (q + kv) % 3 < 2, 5)

    def run(q, k, v, t):
        out, lse = ls.attention(q, k, v, mask, return_lse=True, **arguments(t))
        return out, lse.masked_fill(lse.isneginf(), 0.0)

    assert torch.autograd.gradcheck(run, (*inputs, learned), fast_mode=False)


# -- random compositions -----------------------------------------------------------------------------------------------


def random_atom(rng, tokens):
    first, step = rng.randrange(tokens), rng.randrange(2, 6)
    cut = rng.randrange(1, tokens)
    return rng.choice(
        [
            lambda: masks.causal(tokens),
            lambda: masks.sliding_window(rng.randrange(tokens), rng.randrange(3)),
            lambda: masks.documents([cut, tokens - cut]),
            lambda: masks.prefix_lm([min(3, cut), 0], [cut, tokens - cut]),
            lambda: masks.chunked(rng.randrange(1, tokens + 1), tokens),
            lambda: masks.from_mask_mod(lambda b, h, q, kv: (q + step * kv) % 7 < 4, tokens),
            lambda: masks.from_mask_mod(lambda b, h, q, kv: (q - kv) % step == 0, within=masks.causal(tokens)),
            lambda: masks.from_mask_mod(lambda b, h, q, kv: (q < first) | (kv >= first), tokens),
            lambda: varying(rng, step, tokens) if rng.random() < 0.6 else masks.full(tokens),
        ]
    )()


def varying(rng, step, tokens):
    """Masks that differ by batch row or head cost most, for they are several."""
    options = masks.causal(tokens), masks.sliding_window(step, 1), masks.full(tokens)
    return rng.choice(
        [
            lambda: masks.from_mask_mod(lambda b, h, q, kv: (q + kv + b) % step < 2, tokens, rows=B),
            lambda: masks.from_mask_mod(lambda b, h, q, kv: (q * h + kv) % step < 2, tokens, heads=H),
            lambda: masks.per_row(*rng.sample(options, B)),
            lambda: masks.per_head(*(rng.choice(options) for _ in range(H))),
        ]
    )()


def random_composition(rng, tokens):
    made = random_atom(rng, tokens).resized(tokens)
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        other = random_atom(rng, tokens).resized(tokens)
        other = ~other if rng.random() < 0.3 else other
        made = made & other if rng.random() < 0.5 else made | other
    return made


def random_score(rng, draw, tokens):
    """One to three of them; functions are applied one after the other, of two equal arguments the first one counts."""
    names = rng.sample([name for name in SCORES if name != "everything"], rng.randrange(1, 4))
    names.sort(key=lambda name: name == "lookahead")  # last: what comes after it would have to calculate with -inf
    picked = [SCORES[name](draw, tokens) for name in names]
    arguments = {key: value for one in reversed(picked) for key, value in one.arguments.items()}
    named = {key: {id(_tensor(one.arguments[key])) for one in picked if key in one.arguments} for key in TENSORS}
    learned = [_tensor(arguments[key]) for key in TENSORS[:-1] if key in arguments]  # in the order of first use
    learned += [t for one in picked for t in one.learned if not any(id(t) in found for found in named.values())]
    learned += [arguments["sinks"]] if "sinks" in arguments else []
    functions = [one.arguments["score_mod"] for one in picked if "score_mod" in one.arguments]
    if functions:
        arguments["score_mod"] = lambda s, *at: functools.reduce(lambda s, function: function(s, *at), functions, s)
    return Score(" then ".join(one.name for one in picked), arguments, tuple(learned))


TENSORS = ("alibi", "relative_bias", "bias", "sinks")


def _tensor(value):
    return value.table if isinstance(value, RelativeBias) else value


RANDOM_CASES, CHUNKS = 1000, 10


@pytest.mark.share(10)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_compositions(chunk):
    """By a random plan, and every fourth on one device through the public function."""
    for seed in range(chunk * RANDOM_CASES // CHUNKS, (chunk + 1) * RANDOM_CASES // CHUNKS):
        rng, draw = random.Random(seed), torch.Generator().manual_seed(seed)
        tokens = rng.randrange(6, 14)
        mask = random_composition(rng, tokens)
        heads, dims = (H, rng.choice([1, 2, 4])), (rng.randrange(2, 6), rng.randrange(2, 6))
        given = Problem.of(
            random_score(rng, draw, tokens), mask, random_inputs(draw, tokens, heads=heads, dims=dims), scale=0.7
        )
        if seed % 4 == 0:
            given.compare(one_device(given), f"one device, seed {seed}")
        world = rng.choice((2, 2, 2, 2, 3, 4))
        layout = any_layout(np.random.default_rng(seed), mask, tokens, world, most=1)
        sizes = {"kv_heads": heads[1], "head_dim": dims[0], "v_head_dim": dims[1]}
        given.check(made_plan(mask, layout, rng.choice(SCHEMES), **sizes))


def one_device(given):
    """All results of `longspan.attention` with a mask, in the order of the oracle."""
    q, k, v, dout = given.inputs
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    arguments = given.score.arguments
    out, lse = ls.attention(*leaves, given.mask, scale=given.scale, return_lse=True, **arguments)
    found = torch.autograd.grad(out, (*leaves, *given.score.learned), dout, allow_unused=True)
    whole = (*leaves, *given.score.learned)
    return out, lse, *(torch.zeros_like(t) if g is None else g for g, t in zip(found, whole, strict=True))


# -- dropout and named extras on 1, 2 and 4 ranks ----------------------------------------------------------------------


@functools.cache
def _pattern(tokens=64, p=0.3, seed=11, heads=4, batch=3):
    at = [torch.arange(n) for n in (batch, heads, tokens, tokens)]
    return Dropout(p, seed).keeps(*(t.view([-1 if i == d else 1 for i in range(4)]) for d, t in enumerate(at)))


def test_dropout_drops_at_its_rate_everywhere():
    p, kept = 0.3, _pattern()
    assert kept.shape == (3, 4, 64, 64)

    def usual(share, count):
        assert abs(share - (1 - p)) <= 4 * (p * (1 - p) / count) ** 0.5

    usual(kept.double().mean().item(), kept.numel())
    for dim in range(4):  # no row, column, head or batch row is drawn another way
        rest = [d for d in range(4) if d != dim]
        shares = kept.double().mean(rest)
        count = kept.numel() // kept.shape[dim]
        assert ((shares - (1 - p)).abs() <= 5 * (p * (1 - p) / count) ** 0.5).all()


def test_dropout_is_decorrelated_and_differs_by_seed():
    p, flat = 0.3, _pattern().double() - 0.7

    def independent(a, b):
        covariance = (a * b).mean().item()
        assert abs(covariance) <= 4.5 * p * (1 - p) / a.numel() ** 0.5

    for a, b in itertools.combinations(range(3), 2):
        independent(flat[a], flat[b])
    for a, b in itertools.combinations(range(4), 2):
        independent(flat[:, a], flat[:, b])
    for shift in (1, 2, 32):
        independent(flat, flat.roll(shift, 2))
        independent(flat, flat.roll(shift, 3))
        independent(flat, flat.roll((shift, shift), (2, 3)))
    below = torch.tril_indices(64, 64, offset=-1).unbind()
    independent(flat[..., below[0], below[1]], flat[..., below[1], below[0]])
    independent(flat, _pattern(seed=12).double() - 0.7)
    assert torch.equal(_pattern(), _pattern.__wrapped__())
    assert torch.equal(_pattern(tokens=64)[..., :20, :20], _pattern.__wrapped__(tokens=20))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_dropout_is_the_same_on_any_number_of_ranks(scheme):
    """With v = identity and no scores the output is the pattern itself."""
    tokens = 24
    mask = masks.documents([9, 15]) & masks.causal()
    zero = torch.zeros(B, H, tokens, 2, dtype=torch.float64)
    value = torch.eye(tokens, dtype=torch.float64).expand(B, G, tokens, tokens)
    at = [torch.arange(n) for n in (B, H, tokens, tokens)]
    kept = Dropout(0.4, 5).keeps(*(t.view([-1 if i == d else 1 for i in range(4)]) for d, t in enumerate(at)))
    sizes = {"head_dim": 2, "v_head_dim": tokens}
    given = Score("dropped", {"dropout": 0.4, "seed": 5})
    for world in (1, 2, 4):
        for layout in (layouts.zigzag(tokens, world), layouts.striped(tokens, world, stripe=5)):
            name = "hybrid(1,exchange)" if (scheme, world) == ("hybrid", 1) else scheme
            plan = made_plan(mask, layout, name, **sizes)
            out = run_loopback(plan, zero, zero[:, :G], value, zero[..., :1].expand_as(kept), extras=given.extras)[0]
            assert torch.equal(out > 0, kept & seen_pairs(mask, tokens))


@pytest.mark.parametrize("name", ["alibi", "t5_table", "soft_cap", "sinks", "bias_tensor", "dropped", "everything"])
def test_named_extras_are_the_same_on_any_number_of_ranks(name):
    given = problem(name, "documents", 29, seed=4)
    given.compare(one_device(given), "one device")
    for world in (1, 2, 4):
        given.check(made_plan(given.mask, layouts.balanced(given.mask, world_size=world), "exchange"))


def test_t5_buckets_are_those_of_t5():
    position = torch.arange(300)
    for buckets, both, far in itertools.product((8, 32, 64), (True, False), (50, 128, 256)):
        found = RelativeBias(torch.zeros(buckets, 1), both, far).bucket(position[:, None], position[None, :])
        distances = position[:, None] - position
        wanted = {d: t5_bucket(d, buckets, both, far) for d in range(-299, 300)}
        assert torch.equal(found, torch.tensor([[wanted[d] for d in row] for row in distances.tolist()]))


def test_alibi_slopes_are_those_of_the_paper():
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    twelve = alibi_slopes(12).tolist()
    assert twelve[:8] == alibi_slopes(8).tolist()
    assert twelve[8:] == pytest.approx(alibi_slopes(16).tolist()[::2][:4])


# -- what others get wrong ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["quadratic_distance", "t5_table", "document_relative"])
def test_positions_are_global_where_flex_context_parallel_passes_local_ones(name):
    """PyTorch's context parallelism for FlexAttention calls score_mod with local query positions.

    The same function called with the positions inside a rank's shard changes the result by more than 0.1 (see
    test_scores_gloo.py for PyTorch itself); ours equals the oracle.
    """
    tokens, world = 32, 2
    given = problem(name, "full", tokens, seed=7)
    layout = layouts.contiguous(tokens, world)
    assert given.check(made_plan(given.mask, layout, "all_gather")) <= 1e-12
    bucket = RelativeBias.bucket
    local = torch.cat([torch.arange(int(n)) for n in layout.num_tokens])
    arguments = dict(given.score.arguments)
    if "score_mod" in arguments:
        score_mod = arguments["score_mod"]
        arguments["score_mod"] = lambda s, b, h, q, kv: score_mod(s, b, h, local[q], kv)
    else:
        bias = arguments.pop("relative_bias")
        arguments["score_mod"] = lambda s, b, h, q, kv: s + bias.table[bucket(bias, local[q], kv), h]
    wrong = dense_answer(*given.inputs, seen_pairs(given.mask, tokens), given.scale, Score("local", arguments))
    assert (wrong[0] - given.answer[0]).abs().max() > 0.1
    assert (wrong[0] - given.answer[0])[:, :, : tokens // world].abs().max() < 1e-12  # rank 0 is right by luck
