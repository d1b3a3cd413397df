"""Every row of docs/refusals.md, asserted: the named check runs, and what the row quotes is what Longspan says.

A check that returns nothing showed a right answer; one that returns a text was refused with it.
"""

import functools
import re
from pathlib import Path

import pytest
import torch

import longspan as ls
from longspan import layouts, masks
from longspan.scoring.biases import RelativeBias
from longspan.training import shard_batch
from tests.pool import pool
from tests.refusals import refusal_work as work
from tests.refusals.refusal_oracle import (
    LIMIT,
    TOKENS,
    assert_exact,
    assert_same,
    by_ranks,
    dense_mask,
    expected,
    inputs,
)

PAGE = Path(__file__).parents[2] / "docs" / "refusals.md"
CHECKS = {}
DOCUMENTS = [5, 1, 9, 2, 6]
PACKED = masks.documents(DOCUMENTS) & masks.causal()
assert sum(DOCUMENTS) == TOKENS


def check(function):
    CHECKS[function.__name__] = function
    return function


def refused(call):
    with pytest.raises((ls.LongspanError, TypeError)) as found:
        call()
    return str(found.value)


# -- masks -------------------------------------------------------------------------------------------------------------


@check
def packed_documents():
    for world, schedule in ((2, "ring"), (3, "exchange"), (4, "all_gather"), (4, "all_to_all")):
        assert_exact(PACKED, layouts.balanced(PACKED, world_size=world), schedule)


@check
def nothing_leaks_between_documents():
    layout, tensors = layouts.zigzag(TOKENS, 4), inputs()
    before, _ = by_ranks(tensors, PACKED, layout)
    changed = [t.clone() for t in tensors]
    for t in changed:
        t[:, :, 6:15] += 100.0  # the third document, in q, k, v and the gradient of the output
    after, _ = by_ranks(changed, PACKED, layout)
    others = [*range(6), *range(15, TOKENS)]
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a[:, :, others], b[:, :, others])
        assert not torch.equal(a, b)


@check
def sliding_windows():
    for world in (2, 4):
        for mask in (masks.sliding_window(4), masks.documents(DOCUMENTS) & masks.sliding_window(2, 1)):
            for schedule in ("ring", "exchange", "all_to_all"):
                assert_exact(mask, layouts.zigzag(TOKENS, world), schedule)


@check
def any_function_as_mask():
    """A mask that no list of ranges says, over all-to-all: not replaced by causality."""
    seen = torch.rand(TOKENS, TOKENS, generator=torch.Generator().manual_seed(3)) < 0.4
    mask = masks.from_mask_mod(lambda b, h, i, j: seen[i, j], TOKENS)
    for schedule in ("all_to_all", "ring"):
        assert_exact(mask, layouts.zigzag(TOKENS, 4), schedule)


@check
def different_masks_per_head():
    mask = masks.per_head(PACKED, masks.sliding_window(3), masks.causal(), PACKED)
    for layout in (layouts.round_robin_by_work(mask, 2, seq_len=TOKENS, block=2), layouts.zigzag(TOKENS, 4)):
        assert_exact(mask, layout)


@check
def different_documents_per_row():
    mask = masks.per_row(PACKED, masks.documents([10, 13]) & masks.causal())
    assert_exact(mask, layouts.balanced(mask, world_size=4))


@check
def ring_without_causality():
    for world in (2, 3, 4):
        assert_exact(masks.full(), layouts.contiguous(TOKENS, world), "ring")


@check
def attention_mask_in_the_batch():
    ids = torch.arange(8)[None]
    return refused(lambda: shard_batch({"input_ids": ids, "attention_mask": ids}, layouts.zigzag(8, 2), 0))


# -- scores ------------------------------------------------------------------------------------------------------------


@check
def score_functions_by_position():
    place = torch.arange(TOKENS, dtype=torch.float64)
    distance = place[:, None] - place
    mask, tensors = masks.causal(), inputs()
    right = expected(tensors, dense_mask(mask), score=lambda s: s - distance**2 / 64 + (place[:, None] % 3) / 8)
    for layout in (layouts.contiguous(TOKENS, 2), layouts.zigzag(TOKENS, 4)):
        found, _ = by_ranks(tensors, mask, layout, score_mod=lambda s, b, h, i, j: s - (i - j) ** 2 / 64 + (i % 3) / 8)
        assert_same(found, right)


@check
def gradients_of_a_learned_bias():
    table = torch.randn(8, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64).requires_grad_()
    bias = RelativeBias(table, max_distance=16)
    place, tensors = torch.arange(TOKENS), inputs()
    bucket = bias.bucket(place[:, None], place)
    right = expected(tensors, dense_mask(PACKED), table, score=lambda s: s + table[bucket].permute(2, 0, 1))
    for world in (2, 4):
        assert_same(by_ranks(tensors, PACKED, layouts.zigzag(TOKENS, world), relative_bias=bias)[0], right)


@check
def slopes_by_distance():
    slopes, tensors = torch.tensor([0.5, 0.25, 0.1, 0.05], dtype=torch.float64), inputs()
    place = torch.arange(TOKENS)
    far = (place[:, None] - place).abs()
    right = expected(tensors, dense_mask(PACKED), score=lambda s: s - slopes.view(1, -1, 1, 1) * far)
    found, _ = by_ranks(tensors, PACKED, layouts.zigzag(TOKENS, 4), "ring", alibi=slopes)
    assert_same(found[:4], right)


@check
def learned_sinks():
    sinks, tensors = torch.randn(4, dtype=torch.float64, requires_grad=True), inputs()
    right = expected(tensors, dense_mask(PACKED), sinks, sinks=sinks)
    for schedule in ("ring", "exchange", "all_to_all"):
        assert_same(by_ranks(tensors, PACKED, layouts.zigzag(TOKENS, 4), schedule, sinks=sinks.detach())[0], right)


@check
def unknown_arguments():
    q, k, v, _ = inputs()
    return refused(lambda: ls.attention(q, k, v, PACKED, s_aux=torch.zeros(4)))


@check
def soft_caps():
    tensors = [3 * t for t in inputs()]
    right = expected(tensors, dense_mask(PACKED), score=lambda s: 2.0 * torch.tanh(s / 2.0))
    for schedule in ("ring", "all_to_all"):
        found, _ = by_ranks(tensors, PACKED, layouts.zigzag(TOKENS, 4), schedule, softcap=2.0)
        assert_same(found, right, 1e-10)


@check
def dropout_on_any_number_of_ranks():
    tensors, mask = inputs(), PACKED
    found = [
        by_ranks(tensors, mask, layouts.zigzag(TOKENS, world), schedule, dropout=0.4, seed=7)[0]
        for world, schedule in ((1, "exchange"), (2, "ring"), (4, "all_to_all"))
    ]
    for other in found[1:]:
        assert_same(other, found[0])
    # what was dropped in forward is what backward knows: q of one row sees v through the kept weights only
    eye = torch.eye(TOKENS, dtype=torch.float64).expand(2, 2, TOKENS, TOKENS)
    shown = [*tensors[:2], eye, torch.zeros(2, 4, TOKENS, TOKENS, dtype=torch.float64)]
    weights = by_ranks(shown, mask, layouts.zigzag(TOKENS, 2), dropout=0.4, seed=7)[0][0]
    keep = (weights > 0).double() / 0.6
    assert 0.4 < float(keep[dense_mask(mask)].mean()) * 0.6 < 0.8
    assert_same(found[0], expected(tensors, dense_mask(mask), keep=keep))


@check
def dropout_without_a_seed():
    q, k, v, _ = inputs()
    return refused(lambda: ls.attention(q, k, v, PACKED, dropout=0.1))


# -- gradients, rows and numbers ---------------------------------------------------------------------------------------


@check
def gradients_around_the_ring():
    for world in (2, 3, 4):
        for layout in (layouts.contiguous(TOKENS, world), layouts.zigzag(TOKENS, world)):
            assert_exact(masks.causal(), layout, "ring", seed=world)


@check
def rows_that_see_nothing():
    """All rows of rank 1 see nothing, and nobody sees them."""
    mask = masks.from_mask_mod(lambda b, h, i, j: (i >= j) & ((i < 8) | (i >= 16)) & ((j < 8) | (j >= 16)), 24)
    layout = layouts.contiguous(24, 3)
    tensors = inputs(24)
    found, lse = by_ranks(tensors, mask, layout)
    assert_same(found, expected(tensors, dense_mask(mask, 24)))
    assert lse[:, :, 8:16].isneginf().all()
    assert all((t[:, :, 8:16] == 0).all() for t in found)


@check
def log_sums_of_empty_rows():
    """Rows that see nothing on the first ranks of a ring must not weigh in when parts are merged."""
    mask = masks.from_mask_mod(lambda b, h, i, j: i < j, TOKENS)  # the future only: the last row sees nothing
    tensors = inputs()
    found, lse = by_ranks(tensors, mask, layouts.contiguous(TOKENS, 4), "ring")
    assert_same(found, expected(tensors, dense_mask(mask)))
    assert lse[:, :, -1].isneginf().all()
    assert lse[:, :, :-1].isfinite().all()


@check
def odd_lengths():
    for tokens in (7, 15, 23):
        for world in (2, 4):
            for layout in (layouts.zigzag(tokens, world), layouts.contiguous(tokens, world, equal_tokens=True)):
                assert_exact(masks.causal(), layout, "ring")


@check
def fewer_tokens_than_ranks():
    for schedule in ("ring", "exchange", "all_gather", "all_to_all"):
        assert_exact(masks.causal(), layouts.contiguous(3, 4), schedule)


@check
def documents_that_ranks_do_not_divide():
    lengths = [1, 5, 2, 7, 3]
    mask = masks.documents(lengths) & masks.causal()
    for world in (2, 4):
        assert_exact(mask, layouts.per_document(lengths, world))
    assert mask == masks.from_cu_seqlens(torch.tensor([0, 1, 6, 8, 15, 18])) & masks.causal()


@check
def few_heads_on_many_ranks():
    assert_exact(PACKED, layouts.zigzag(TOKENS, 4), "all_to_all", q_heads=3, kv_heads=1)
    assert_exact(PACKED, layouts.zigzag(TOKENS, 4), "all_to_all", q_heads=4, kv_heads=2)


@check
def unequal_head_sizes():
    for schedule in ("ring", "all_to_all"):
        assert_exact(PACKED, layouts.zigzag(TOKENS, 2), schedule, dim=12, v_dim=5)


@check
def bfloat16_over_many_ranks():
    tensors = [t.bfloat16() for t in inputs(256, batch=2, seed=2)]
    right = expected([t.double() for t in tensors], dense_mask(masks.causal(), 256))
    one, many = (by_ranks(tensors, masks.causal(), layouts.zigzag(256, world), "ring")[0] for world in (1, 8))
    for a, b, c in zip(one, many, right, strict=True):
        errors = [float((t.double() - c).norm() / c.norm()) for t in (a, b)]
        assert errors[1] <= 1.2 * errors[0]


# -- batches -----------------------------------------------------------------------------------------------------------


def parts_of(batch, layout, **options):
    """The parts of all ranks put together again: what the ranks train on, in the order of the sequence."""
    parts = [shard_batch(batch, layout, rank, **options) for rank in range(layout.world_size)]
    return {name: layout.unshard([part[name] for part in parts], -1) for name in parts[0]}


@check
def labels_at_the_borders_of_shards():
    ids = torch.randint(0, 99, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    wanted = torch.cat((ids[:, 1:], torch.full((2, 1), -100)), 1)
    for layout in (layouts.contiguous(TOKENS, 4), layouts.zigzag(TOKENS, 4), layouts.striped(TOKENS, 3)):
        assert torch.equal(parts_of({"input_ids": ids, "labels": ids}, layout)["shift_labels"], wanted)


@check
def labels_at_the_borders_of_documents():
    ids = torch.arange(TOKENS)[None]
    found = parts_of(
        {"input_ids": ids, "labels": ids}, layouts.zigzag(TOKENS, 4), documents=PACKED, positions="document"
    )
    wanted = ids + 1
    wanted[0, torch.tensor(DOCUMENTS).cumsum(0) - 1] = -100
    assert torch.equal(found["shift_labels"], wanted)
    assert torch.equal(found["position_ids"][0], torch.cat([torch.arange(n) for n in DOCUMENTS]))


@check
def labels_further_ahead():
    ids = torch.arange(TOKENS)[None]
    found = parts_of({"input_ids": ids, "labels": ids}, layouts.striped(TOKENS, 4), num_shifts=3)
    for shift, name in ((1, "shift_labels"), (2, "shift_labels_2"), (3, "shift_labels_3")):
        assert torch.equal(found[name][0, :-shift], ids[0, shift:])
        assert (found[name][0, -shift:] == -100).all()


@check
def positions_of_three_axes():
    """The first dim is as long as the number of ranks could be; the last is cut."""
    places = torch.arange(3 * 2 * TOKENS).view(3, 2, TOKENS)
    ids = torch.zeros(2, TOKENS, dtype=torch.int64)
    found = parts_of({"input_ids": ids, "position_ids": places}, layouts.zigzag(TOKENS, 3))
    assert torch.equal(found["position_ids"], places)


@check
def rotary_positions_of_shards():
    ids = torch.zeros(1, TOKENS, dtype=torch.int64)
    layout = layouts.zigzag(TOKENS, 2)
    for rank in range(2):
        mine = shard_batch({"input_ids": ids}, layout, rank, positions="sequence")["position_ids"]
        assert mine[0].tolist() == layout.positions(rank).tolist()


# -- on two Gloo ranks -------------------------------------------------------------------------------------------------


@functools.cache
def by_gloo():
    """All results of the ranks, by name, from one call."""
    return pool(2).run(work.everything, timeout=200.0)


def over_gloo(name, right_answer):
    def run():
        found = [results[name] for results in by_gloo()]
        assert all(not str(value).startswith("raised ") for value in found), found[0]
        if right_answer:
            assert all(error <= LIMIT for error in found), found
            return None
        assert len(set(found)) == 1, "ranks say different things"
        return found[0]

    run.__name__ = name
    return check(run)


for _name in work.ANSWERS:
    over_gloo(_name, True)
for _name in work.REFUSALS:
    over_gloo(_name, False)


# -- the table ---------------------------------------------------------------------------------------------------------


def rows():
    """(asked, who, what Longspan does, check) of every row."""
    lines = [line for line in PAGE.read_text().splitlines() if re.match(r"\| \d+ \|", line)]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    assert [int(row[0]) for row in cells] == list(range(1, len(cells) + 1))
    return [row[1:] for row in cells]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("row", rows(), ids=lambda row: row[-1].strip("`"))
def test_row(row):
    _, who, does, name = row
    assert re.search(r"\w+#\d+|PyTorch 2\.13|DeepSpeed", who), "no source"
    said = CHECKS[name.strip("`")]()
    if said is None:
        assert does.startswith("right answer"), f"{name} showed a right answer, but the row says: {does}"
        return
    quoted = re.findall(r'"([^"]+)"', does)
    assert does.startswith("refuses"), f"{name} was refused, but the row says: {does}"
    assert quoted
    assert all(part in said for part in quoted), f"the row quotes {quoted}, but Longspan says: {said}"


def test_rows_and_checks_are_the_same():
    named = [row[-1].strip("`") for row in rows()]
    assert len(named) >= 25
    assert sorted(named) == sorted(CHECKS)
