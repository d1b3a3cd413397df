"""Kernels of recurrences against the recurrence token by token."""

import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from longspan.errors import KernelError
from longspan.mixers.scan_kernels import choose_scan_kernel, scan_kernel_named
from longspan.mixers.scan_reference import Segments, build_chunk_table, fold_inputs
from tests.scan_cases import (
    KINDS,
    distance,
    errors,
    like_output,
    random_states,
    random_work,
    results,
    widened,
    with_leaves,
)
from tests.scan_oracle import recurrence_by_tokens

REFERENCE = scan_kernel_named("reference")
LIMIT = 1e-12


def problem(kind, seed, **asked):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    work = random_work(kind, rng, **asked)
    return work, random_states(work)


@pytest.mark.share(3)
@pytest.mark.parametrize("kind", KINDS)
def test_reference_does_what_the_recurrence_does(kind):
    """60 random problems of each kind: out, states, maps and every gradient."""
    for seed in range(60):
        found = errors(REFERENCE, *problem(kind, seed))
        assert max(found.values()) <= LIMIT, (seed, found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_without_segments(kind):
    work, states = problem(kind, 0, segments=Segments(np.zeros((0, 3), dtype=np.int64)), slots=5, batch=2)
    work, states, leaves = with_leaves(work, states)
    out, after = REFERENCE.local(work, states)
    assert out.shape[:2] == (2, 5)
    assert not out.any()
    assert after.shape == states.shape
    gradients = torch.autograd.grad((out, after), leaves, (torch.randn_like(out), after), materialize_grads=True)
    assert not any(g.any() for g in gradients)
    maps = (0, *work.recurrence.map_shape(work.tokens)), states.shape
    assert tuple(x.shape for x in REFERENCE.summary(work)) == maps


@pytest.mark.parametrize("kind", KINDS)
def test_a_segment_without_tokens_passes_its_state_on(kind):
    work, states = problem(kind, 1, segments=Segments(np.array([[0, 2, 2], [0, 3, 9], [0, 5, 5]])), slots=9, batch=1)
    found = errors(REFERENCE, work, states)
    assert max(found.values()) <= LIMIT, found


@pytest.mark.share(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_narrow_numbers_lose_what_the_recurrence_loses(kind, dtype):
    """Token by token in float32 is the measure. Outputs and gradients in half precision are rounded once more."""
    rounding = torch.finfo(dtype).eps
    for seed in range(5):
        work, states = problem(kind, seed, dtype=dtype, strength=0.1)
        upstream = torch.randn_like(like_output(work)).to(dtype), torch.randn_like(states)
        expected = results(recurrence_by_tokens, widened(work), states, upstream)
        narrow = results(partial(recurrence_by_tokens, dtype=torch.float32), work, states, upstream)
        found = results(REFERENCE.local, work, states, upstream)
        for mine, other, exact in zip(found, narrow, expected, strict=True):
            limit = 8 * max(distance(other, exact), 2**-23) + (0 if dtype == torch.float32 else 2 * rounding)
            assert distance(mine, exact) <= limit, (seed, mine.shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_dtypes_and_shapes_of_results(kind, dtype):
    work, states = problem(kind, 2, dtype=dtype)
    out, after = REFERENCE.local(work, states)
    m, u = REFERENCE.summary(work)
    assert out.dtype == dtype
    assert out.shape == like_output(work).shape
    assert {x.dtype for x in (after, m, u)} == {torch.float64 if dtype == torch.float64 else torch.float32}
    assert after.shape == u.shape == (len(work.segments), *work.recurrence.state_shape(work.tokens))
    assert m.shape == (len(work.segments), *work.recurrence.map_shape(work.tokens))
    assert not m.requires_grad


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_changes_nothing(kind):
    work, states = problem(kind, 3, dtype=torch.float32)
    plain = REFERENCE.local(work, states), REFERENCE.summary(work)
    with torch.autocast("cpu", torch.bfloat16):
        cast = REFERENCE.local(work, states), REFERENCE.summary(work)
    assert all(torch.equal(x, y) for a, b in zip(plain, cast, strict=True) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_padding_is_never_looked_at(kind):
    """What is in slots of no segment may be anything; its output and gradients are 0."""
    work, states = problem(kind, 4, segments=Segments(np.array([[0, 3, 9], [1, 0, 4]])), slots=11, batch=2)
    inside = torch.zeros(2, 11, dtype=torch.bool)
    inside[0, 3:9] = inside[1, :4] = True
    spoilt = replace(work, tokens=tuple(_filled(x, inside, torch.nan) for x in work.tokens))
    upstream = torch.randn_like(like_output(work)), torch.randn_like(states)
    out, *rest = results(REFERENCE.local, spoilt, states, (_filled(upstream[0], inside, 5.0), upstream[1]))
    clean = results(REFERENCE.local, work, states, upstream)
    assert all(torch.equal(x, y) for x, y in zip((out, *rest), clean, strict=True))
    assert not out[~inside].any()
    assert not any(g[~inside].any() for g in rest[1 : 1 + len(work.tokens)])


def _filled(x, inside, value):
    return torch.where(inside.view(*inside.shape, *[1] * (x.ndim - 2)), x, value)


@pytest.mark.parametrize("kind", ["gated_delta", "kda", "linear_attention", "gla"])
def test_decays_that_forget_everything(kind):
    """exp(-inf) = 0, at tokens inside and at the border of chunks: states are as after nothing."""
    work, states = problem(kind, 5, segments=Segments(np.array([[0, 0, 150]])), slots=150, batch=1, strength=0.1)
    g = work.tokens[3].clone()
    g[:, [0, 5, 63, 64, 100]] = -torch.inf
    work = replace(work, tokens=(*work.tokens[:3], g, *work.tokens[4:]))
    upstream = torch.randn_like(like_output(work)), torch.randn_like(states)
    expected = results(recurrence_by_tokens, work, states, upstream)
    for found, other in zip(results(REFERENCE.local, work, states, upstream), expected, strict=True):
        assert distance(found, other.nan_to_num(0.0)) <= LIMIT  # the derivative of exp(-inf) x is 0 x nan by tokens
    assert not REFERENCE.summary(work)[0].any()


@pytest.mark.parametrize("kind", KINDS)
def test_strided_views(kind):
    """Tokens that are parts of one projection, and transposed ones."""
    work, states = problem(kind, 6)
    strided = replace(work, tokens=tuple(torch.stack((x, x), -1)[..., 0] for x in work.tokens))
    turned = replace(work, tokens=tuple(x.transpose(0, 1).contiguous().transpose(0, 1) for x in work.tokens))
    out, after = REFERENCE.local(work, states)
    for other in (strided, turned):
        found = REFERENCE.local(other, states.mT.contiguous().mT)
        assert torch.equal(found[0], out)
        assert torch.equal(found[1], after)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_by_differences(kind):
    segments = Segments(np.array([[0, 4, 7], [0, 0, 3]]))
    work, states = problem(kind, 7, segments=segments, slots=8, batch=1, sizes=(1, 2, 2, 2), strength=0.3)
    shared = [x for x in work.shared if x is not None]

    def run(*leaves):
        rest = iter(leaves[len(work.tokens) :])
        made = tuple(None if x is None else next(rest) for x in work.shared)
        return REFERENCE.local(replace(work, tokens=leaves[: len(work.tokens)], shared=made), next(rest))

    leaves = [x.clone().requires_grad_() for x in (*work.tokens, *shared, states)]
    assert torch.autograd.gradcheck(run, leaves)


def test_short_segments_get_short_chunks():
    def size(lengths):
        edges = np.cumsum([0, *lengths])
        table = np.stack((np.zeros(len(lengths), dtype=np.int64), edges[:-1], edges[1:]), 1)
        work, _ = problem("ssd", 0, segments=Segments(table), slots=int(edges[-1]), batch=1)
        return fold_inputs(work).table.size

    assert size([4096]) == 64
    assert size([5] * 200) == 16
    assert size([1]) == 16
    assert size([1000, *[3] * 4]) == 64


def test_tables_are_made_once_for_the_same_segments():
    table = np.array([[0, 0, 5], [0, 7, 9]])
    asked = 16, 1, 9, torch.device("cpu")
    assert build_chunk_table(Segments(table), *asked) is build_chunk_table(Segments(table.copy()), *asked)
    assert build_chunk_table(Segments(table), *asked) is not build_chunk_table(Segments(table[:1]), *asked)


@pytest.mark.parametrize("name", ["referense", None, 3])
def test_kernels_that_do_not_exist(name):
    with pytest.raises(KernelError, match=r"auto, fla, mamba_ssm, reference, but"):
        scan_kernel_named(name)


def test_cpus_get_the_reference():
    work, _ = problem("ssd", 0)
    assert choose_scan_kernel("auto", work) is REFERENCE
    assert choose_scan_kernel("reference", work) is REFERENCE
