"""Bitwise equality: across runs, across orders of arrival, and across world sizes that cut the sequence alike.

Merging follows the schedule, not arrival, so the first two hold for every scheme and kernel. World sizes share their
chunks of the sequence when the added ranks are spent on heads: `all_to_all` on any number of ranks that divides the
key/value heads (one chunk: the whole sequence), and `hybrid(H, ring)` on H times as many ranks as `ring`. There the
same rows meet in the same order in calls of the same shape; an exchange may fetch in other stages. Kernels must then
take `delta`, as `reference` does: fused ones take `out` and are given a stand-in for it where rows were computed away
from home, which rounds dq and dk otherwise.
"""

import numpy as np
import pytest
import torch

from longspan import attention, layouts, masks, plan
from longspan.testing import run_loopback
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
    transport = None if transport is None else Network(transport, slow=1.0 + transport % 3)
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


# -- Documents that stay whole on one rank -----------------------------------------------------------------------------

LENGTHS = (1, 7, 64, 130, 300, 520, 1100)


def whole_documents(lengths, layout):
    """Spans of the documents that one rank holds all of."""
    ends = np.cumsum(lengths)
    for start, stop in zip(ends - lengths, ends, strict=True):
        if len(set(layout.owner(np.arange(start, stop)).tolist())) == 1:
            yield int(start), int(stop)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", ["cpu_flash", "reference"])
@pytest.mark.parametrize("scheme", ["ring", "exchange", "all_gather", "all_to_all"])
def test_a_whole_document_has_the_bits_that_it_has_alone(scheme, kernel, dtype):
    """In three packings, on one to four ranks, in the layouts of a trainer: output and lse, forward."""
    draw, num_whole, num_cut = torch.Generator().manual_seed(3), 0, 0
    own = [[torch.randn(1, h, n, 24, generator=draw).to(dtype) for h in (4, 4, 4)] for n in LENGTHS]
    alone = [attention(*qkv, masks.causal(), kernel=kernel, return_lse=True) for qkv in own]
    for world in (1, 2, 4):
        for make in (layouts.balanced, lambda mask, world_size: layouts.contiguous(mask.seq_len, world_size)):
            order = torch.randperm(len(LENGTHS), generator=draw).tolist()
            lengths = [LENGTHS[i] for i in order]
            mask = masks.documents(lengths) & masks.causal()
            layout = make(mask, world_size=world)
            made = plan(mask, layout, q_heads=4, kv_heads=4, head_dim=24, dtype=dtype, scheme=scheme)
            q, k, v = (torch.cat(parts, 2) for parts in zip(*(own[i] for i in order), strict=True))
            out, lse, *_ = run_loopback(made, q, k, v, torch.randn(q.shape, generator=draw).to(dtype), kernel=kernel)
            for start, stop in (spans := list(whole_documents(lengths, layout))):
                wanted, wanted_lse = alone[LENGTHS.index(stop - start)]
                assert torch.equal(out[:, :, start:stop], wanted), (world, stop - start)
                assert torch.equal(lse[:, :, start:stop], wanted_lse), (world, stop - start)
            num_whole, num_cut = num_whole + len(spans), num_cut + len(lengths) - len(spans)
    assert num_whole > 20
    assert num_cut, "every document was whole: the layouts show nothing"
