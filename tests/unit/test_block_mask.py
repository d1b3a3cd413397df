"""BlockMasks of single ranks against the mask pair by pair, through FlexAttention, compiled, and read back as masks."""

import warnings

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention, noop_mask

from longspan import layouts, masks
from longspan.errors import LayoutError, MaskError
from longspan.layouts import Layout
from longspan.masks.functions import Function
from longspan.run.flex import block_mask, mask_of_block_mask
from longspan.testing import dense_attention
from tests.cases import LAYOUTS, MASKS, random_case

NUM_CASES = len(MASKS) * len(LAYOUTS)
EMPTY, PARTIAL, FULL = 0, 1, 2


def expected(mask, layout, rank, kv):
    """(rows, heads, local query rows, keys), pair by pair; padding is False."""
    mask = mask.resized(layout.seq_len)
    q = layout.positions(rank)
    k = np.arange(layout.seq_len) if kv == "global" else q
    real = (q < layout.seq_len)[:, None] & (k < layout.seq_len)[None, :]
    some_q, some_k = np.where(q < layout.seq_len, q, 0), np.where(k < layout.seq_len, k, 0)
    return np.array(
        [
            [mask.allows(some_q[:, None], some_k[None, :], row=row, head=head) & real for head in range(mask.num_heads)]
            for row in range(mask.num_rows)
        ]
    )


def dense(made, rows, heads):
    """What the mask function of a BlockMask says, pair by pair."""
    return create_mask(made.mask_mod, rows, heads, *made.seq_lengths, device="cpu").numpy()


def listed(counts, indices):
    found = np.zeros(indices.shape, dtype=np.int64)
    for *place, row in np.ndindex(*counts.shape):
        at = (*place, row)
        np.add.at(found[at], indices[at][: counts[at]].numpy(), 1)
    return found


def kinds(pairs, size):
    """EMPTY, PARTIAL or FULL by looking at every pair; what sticks out over the end is not allowed."""
    *lead, num_q, num_k = pairs.shape
    wide = np.zeros((*lead, -(-num_q // size) * size, -(-num_k // size) * size), dtype=bool)
    wide[..., :num_q, :num_k] = pairs
    blocks = wide.reshape(*lead, wide.shape[-2] // size, size, wide.shape[-1] // size, size)
    some, every = blocks.any(axis=(-3, -1)), blocks.all(axis=(-3, -1))
    return np.where(every, FULL, np.where(some, PARTIAL, EMPTY))


def check(mask, layout, rank, kv, size):
    made = block_mask(mask, layout, rank, kv=kv, block_size=size)
    wanted = expected(mask, layout, rank, kv)
    assert made.shape == wanted.shape
    np.testing.assert_array_equal(dense(made, *wanted.shape[:2]), wanted)
    partial, full = listed(made.kv_num_blocks, made.kv_indices), listed(made.full_kv_num_blocks, made.full_kv_indices)
    np.testing.assert_array_equal(partial + 2 * full, kinds(wanted, size))
    for counts, indices, straight in (
        (made.q_num_blocks, made.q_indices, partial),
        (made.full_q_num_blocks, made.full_q_indices, full),
    ):
        np.testing.assert_array_equal(listed(counts, indices).swapaxes(-1, -2), straight)


@pytest.mark.parametrize("kv", ["global", "local"])
def test_pairs_and_blocks_are_those_of_the_mask(kv):
    for seed in range(NUM_CASES):
        case, rng = random_case(seed), np.random.default_rng(seed)
        rank = int(rng.integers(case.layout.world_size))
        check(case.mask, case.layout, rank, kv, int(rng.choice([1, 5, 16, 32, 128])))


def test_every_rank_of_padded_and_unsorted_layouts():
    mask = masks.documents([60, 91, 49]) & masks.causal()
    unsorted = Layout.from_spans(200, [[(120, 200), (0, 30)], [(30, 120)]])
    for layout in (layouts.zigzag(200, 3, equal_tokens=True), unsorted, layouts.contiguous(200, 8, equal_tokens=True)):
        for rank in range(layout.world_size):
            for kv in ("global", "local"):
                check(mask, layout, rank, kv, 16)


def test_functions_get_their_own_row_and_head():
    def mod(b, h, q, kv):
        return (q + kv + b) % (h + 2) == 0

    layout = layouts.zigzag(60, 2)
    by_both = masks.from_mask_mod(mod, 60, rows=2, heads=3)
    check(by_both, layout, 1, "global", 8)
    check(masks.documents([25, 35]) & by_both | masks.sliding_window(3), layout, 0, "global", 8)
    check(~(masks.causal() & by_both), layout, 0, "local", 8)
    # The function was made for row 0 and is used for rows 1 and 2: it must go on seeing row 0.
    moved = masks.per_row(masks.causal(60), *[masks.from_mask_mod(mod, 60, rows=1, heads=3)] * 2)
    check(moved, layout, 1, "global", 8)
    one_row = masks.from_mask_mod(mod, 60, rows=1, heads=3)
    read = mask_of_block_mask(block_mask(one_row, layouts.contiguous(60, 1), 0, block_size=8), batch=4)
    assert read.allows([5], [4], head=1).item() == one_row.allows([5], [4], head=1).item()


def test_planes_with_one_function_share_one_call():
    calls = []

    def mod(b, h, q, kv):
        calls.append(1)
        return (q - kv) % (h + 1) == 0

    mask = masks.from_mask_mod(mod, 64, heads=8) & masks.causal()
    made = block_mask(mask, layouts.zigzag(64, 2), 0, block_size=16)
    calls.clear()
    dense(made, 1, 8)
    assert len(calls) == 1


def test_functions_are_asked_only_where_they_decide(monkeypatch):
    seen, allows = [], Function.allows

    def spy(self, q, kv):
        seen.append((int(kv.min()), int(kv.max())))
        return allows(self, q, kv)

    monkeypatch.setattr(Function, "allows", spy)
    within = masks.documents([64, 64])
    mask = masks.from_mask_mod(lambda b, h, q, kv: q >= kv, within=within) | masks.global_prefix(16)
    made = block_mask(mask, layouts.contiguous(128, 2), 1, block_size=16)
    assert made.full_kv_num_blocks.tolist() == [[[1, 2, 3, 4]]]
    assert seen == [(64, 127)] * 4


def eager(q, k, v, made):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # flex_attention advises to compile it
        return flex_attention(q, k, v, block_mask=made)


@pytest.mark.parametrize("kind", ["balanced", "equal"])
def test_flex_attention_over_gathered_keys_is_the_rank_s_part(kind):
    total, torch_rng = 300, torch.Generator().manual_seed(0)
    mask = masks.per_row(
        masks.documents([100, 50, 150]) & masks.causal(), masks.from_mask_mod(lambda b, h, q, kv: q % 7 >= kv % 5)
    )
    layout = layouts.balanced(mask, world_size=3) if kind == "balanced" else layouts.zigzag(total, 7, equal_tokens=True)
    q, k, v = (torch.randn(2, 2, total, 16, generator=torch_rng, dtype=torch.float64) for _ in range(3))
    out, _ = dense_attention(q, k, v, mask, scale=16**-0.5)
    for rank in range(layout.world_size):
        made = block_mask(mask, layout, rank, block_size=32)
        found = eager(layout.shard(q, rank, dim=2), k, v, made)
        torch.testing.assert_close(found, layout.shard(out, rank, dim=2))


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # PyTorch's compiler uses what it deprecates
def test_compiled_once_for_all_batches():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    total, layout = 256, layouts.zigzag(256, 2)
    attend = torch.compile(flex_attention, fullgraph=True)
    q, k, v = (torch.randn(1, 2, total, 16) for _ in range(3))
    with torch.no_grad():
        for lengths in ([256], [30, 70, 156], [1] * 56 + [200], [128, 128]):
            mask = masks.documents(lengths) & masks.causal()
            out, _ = dense_attention(q, k, v, mask, scale=16**-0.5)
            for rank in range(2):
                made = block_mask(mask, layout, rank, block_size=32)
                found = attend(layout.shard(q, rank, dim=2), k, v, block_mask=made)
                torch.testing.assert_close(found.double(), layout.shard(out, rank, dim=2), rtol=1e-4, atol=1e-5)
                assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, f"compiled again for {lengths}"


def test_rows_and_functions_are_traced_once():
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    def by_ids(ids):
        return lambda _b, _h, q, kv: ids[q] == ids[kv]

    def batches():
        for first, second in (([50, 50], [100]), ([100], [100]), ([20, 80], [1] * 100)):
            yield "rows", masks.per_row(*(masks.documents(row) & masks.causal() for row in (first, second)))
        for size in (30, 50, 100):
            yield "function", masks.from_mask_mod(by_ids(torch.arange(100) // size), 100) & masks.causal()

    torch._dynamo.reset()
    attend = torch.compile(flex_attention, backend=backend, fullgraph=True)
    layout = layouts.zigzag(100, 3, equal_tokens=True)
    q, k, v = (torch.randn(2, 2, 100, 16, dtype=torch.float64) for _ in range(3))
    kinds_seen = set()
    for kind, mask in batches():
        kinds_seen.add(kind)
        out, _ = dense_attention(q, k, v, mask, scale=16**-0.5)
        for rank in range(3):
            made = block_mask(mask, layout, rank, block_size=16)
            found = attend(layout.shard(q, rank, dim=2), k, v, block_mask=made)
            torch.testing.assert_close(found, layout.shard(out, rank, dim=2))
        assert len(graphs) == len(kinds_seen)


def test_equal_masks_give_the_same_object():
    layout = layouts.zigzag(256, 2)
    made = block_mask(masks.documents([100, 156]) & masks.causal(), layout, 0)
    again = block_mask(masks.causal() & masks.documents(np.array([100, 156])), layouts.zigzag(256, 2), 0, device="cpu")
    assert made is again
    assert made is not block_mask(masks.documents([100, 156]) & masks.causal(), layout, 1)
    assert made is not block_mask(masks.documents([101, 155]) & masks.causal(), layout, 0)


@pytest.mark.parametrize("mask", [masks.causal(300), masks.from_mask_mod(lambda b, h, q, kv: q >= kv, 300)])
def test_training_uses_block_masks_that_inference_built(mask):
    with torch.inference_mode():
        made = block_mask(mask, layouts.zigzag(300, 2), 1, kv="local")
    assert block_mask(mask, layouts.zigzag(300, 2), 1, kv="local") is made
    tensors = [part for part in made.as_tuple() if isinstance(part, torch.Tensor)]
    assert len(tensors) == 8
    assert not any(part.is_inference() for part in tensors)  # they could not be saved for backward


def test_functions_are_remembered_by_mask_and_not_by_value():
    ids = torch.arange(64) // 32
    layout = layouts.contiguous(64, 1)

    def mod(_b, _h, q, kv):
        return ids[q] == ids[kv]

    mask = masks.from_mask_mod(mod, 64)
    made = block_mask(mask, layout, 0, block_size=16)
    assert made is block_mask(mask, layout, 0, block_size=16)
    ids.fill_(0)  # the next batch, written into the same tensor
    other = block_mask(masks.from_mask_mod(mod, 64), layout, 0, block_size=16)
    assert int(made.full_kv_num_blocks.sum()) == 8
    assert int(other.full_kv_num_blocks.sum()) == 16


def test_refusals():
    mask, layout = masks.causal(64), layouts.zigzag(64, 2)
    with pytest.raises(LayoutError, match="rank"):
        block_mask(mask, layout, 2)
    with pytest.raises(MaskError, match=r"65 .*64"):
        block_mask(masks.causal(65), layout, 0)
    with pytest.raises(MaskError, match=r"kv .*'global' or 'local'.*'gathered'"):
        block_mask(mask, layout, 0, kv="all")
    with pytest.raises(MaskError, match=r"block_size must be an integer, at least 1.*block_size = 0"):
        block_mask(mask, layout, 0, block_size=0)


# -- read back as masks ---------------------------------------------------------------------------------------------


def check_read(made, rows, heads):
    """The mask of a BlockMask, pair by pair, and that pairs outside it are not allowed."""
    mask = mask_of_block_mask(made, batch=rows, heads=heads)
    q_len, kv_len = made.seq_lengths
    assert mask.seq_len == max(q_len, kv_len)
    position = np.arange(mask.seq_len)
    truth = np.zeros((rows, heads, mask.seq_len, mask.seq_len), dtype=bool)
    truth[..., :q_len, :kv_len] = dense(made, rows, heads)
    for row, head in np.ndindex(rows, heads):
        found = mask.allows(position[:, None], position[None, :], row=row, head=head)
        np.testing.assert_array_equal(found, truth[row, head])
    return mask


@pytest.mark.parametrize("lengths", [(256, 256), (100, 250), (250, 100), (37, 37)])
@pytest.mark.parametrize("size", [128, 32, (32, 64), (64, 16)])
@pytest.mark.parametrize(("rows", "heads"), [(None, None), (2, None), (None, 3), (2, 3)])
def test_reading_a_block_mask_gives_its_function(lengths, size, rows, heads):
    def mod(b, h, q, kv):
        found = (q >= kv) | (kv < 20)
        found = found & ((q - kv) % (b + 2) < 1 + (q < 64)) if rows else found
        return found & ((h > 0) | (q - kv < 50)) if heads else found

    for separate in (True, False):
        made = create_block_mask(
            mod, rows, heads, *lengths, device="cpu", BLOCK_SIZE=size, separate_full_blocks=separate
        )
        mask = check_read(made, rows or 1, heads or 1)
        assert (mask.num_rows, mask.num_heads) == (rows or 1, heads or 1)


def test_reading_what_we_made_gives_the_mask():
    whole = layouts.contiguous(400, 1)
    for seed in range(20):
        lengths = np.diff(np.unique([0, 400, *np.random.default_rng(seed).integers(0, 400, 5)]))
        mask = masks.documents(lengths) & masks.causal()
        read = check_read(block_mask(mask, whole, 0, block_size=32), 1, 1)
        position = np.arange(400)
        np.testing.assert_array_equal(
            read.allows(position[:, None], position[None, :]), mask.allows(position[:, None], position[None, :])
        )


def test_blocks_become_few_bands():
    made = create_block_mask(lambda b, h, q, kv: q // 512 == kv // 512, None, None, 2048, 2048, device="cpu")
    mask = mask_of_block_mask(made)
    assert mask.is_structured
    assert mask.bands() == masks.documents([512] * 4).bands()


def test_blocks_alone_are_sure():
    counts = torch.tensor([[[1, 2]]], dtype=torch.int32)
    indices = torch.tensor([[[[1, 0, 2], [0, 2, 1]]]], dtype=torch.int32)
    made = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=(4, 8), seq_lengths=(7, 20), compute_q_blocks=False)
    assert made.mask_mod is noop_mask
    mask = mask_of_block_mask(made)
    assert mask.seq_len == 20
    assert [repr(band) for band in mask.bands()] == ["0:4x8:16", "4:7x0:8", "4:7x16:20"]


def test_lists_may_be_shorter_than_a_row_of_blocks():
    counts = torch.tensor([[[1, 2]]], dtype=torch.int32)
    indices = torch.tensor([[[[5, 0], [1, 7]]]], dtype=torch.int32)
    made = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=4, seq_lengths=(8, 32), compute_q_blocks=False)
    mask = mask_of_block_mask(made)
    assert [repr(band) for band in mask.bands()] == ["0:4x20:24", "4:8x4:8", "4:8x28:32"]


def test_planes_are_shared_where_nothing_tells_them_apart():
    made = create_block_mask(
        lambda b, h, q, kv: (q // 16 > kv // 16) & (h >= 0), 2, 3, 64, 64, device="cpu", BLOCK_SIZE=16
    )
    assert len(mask_of_block_mask(made).distinct_planes()) == 1


def test_reading_is_remembered_until_the_function_is_replaced():
    made = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 64, 64, device="cpu", BLOCK_SIZE=16)
    mask = mask_of_block_mask(made, batch=4, heads=2)
    assert mask_of_block_mask(made, batch=3, heads=2) is mask
    assert mask_of_block_mask(made, batch=1, heads=2) is not mask
    made.mask_mod = lambda b, h, q, kv: q > kv
    assert not mask_of_block_mask(made, batch=4, heads=2).allows([5], [5]).item()


def test_reading_refuses_what_it_cannot_know():
    made = create_block_mask(lambda b, h, q, kv: (q >= kv) & (h < 2), None, None, 64, 64, device="cpu", BLOCK_SIZE=16)
    assert mask_of_block_mask(made, heads=1).allows([5], [5]).item()
    with pytest.raises(MaskError, match="mask_mod uses h"):
        mask_of_block_mask(made, heads=4).allows([5], [5]).item()
    two = create_block_mask(lambda b, h, q, kv: q >= kv + b, 2, None, 64, 64, device="cpu", BLOCK_SIZE=16)
    with pytest.raises(MaskError, match=r"3 .*2"):
        mask_of_block_mask(two, batch=3)


def test_reading_refuses_blocks_listed_twice_or_nowhere():
    def of(indices, count=2, **more):
        counts = torch.tensor([[[count]]], dtype=torch.int32)
        table = torch.tensor([[[indices]]], dtype=torch.int32)
        return BlockMask.from_kv_blocks(counts, table, BLOCK_SIZE=4, compute_q_blocks=False, **more)

    with pytest.raises(MaskError, match="twice in one row"):
        mask_of_block_mask(of([1, 1, 0]))
    with pytest.raises(MaskError, match="block_mask"):
        mask_of_block_mask(of([0, 3, 1]))
    both = of([0, 1, 2])
    both.full_kv_num_blocks, both.full_kv_indices = both.kv_num_blocks, both.kv_indices
    with pytest.raises(MaskError, match="as full and as partial"):
        mask_of_block_mask(both)
