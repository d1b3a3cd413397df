"""Layouts: patterns against their definitions, index maps as inverses, text form, messages."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan import batches, layouts, masks, plan
from longspan.errors import LayoutError, LongspanError
from longspan.layouts import Layout
from longspan.planning.scan_steps import StateSizes

pytestmark = pytest.mark.quick

sizes = st.tuples(st.integers(0, 60), st.integers(1, 9))


def every(total, world, seed=0):
    """Each pattern once, for any length and number of ranks."""
    rng = np.random.default_rng(seed)
    lengths = np.diff(np.sort(np.concatenate(([0, total], rng.integers(0, total + 1, size=4)))))
    mask = masks.documents(lengths) & masks.causal()
    return [
        layouts.contiguous(total, world),
        layouts.like_dtensor(total, world),
        layouts.contiguous(total, world, equal_tokens=True),
        layouts.zigzag(total, world),
        layouts.zigzag(total, world, equal_tokens=True),
        layouts.striped(total, world),
        layouts.striped(total, world, stripe=4),
        layouts.per_document(lengths, world),
        layouts.per_document(lengths, world, equal_tokens=True),
        layouts.round_robin_by_work(mask, world, block=4),
        layouts.balanced(mask, world_size=world),
        layouts.balanced(mask, world_size=world, equal_tokens=True),
    ]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(sizes, st.integers(0, 1000))
def test_every_pattern_holds_each_position_once_and_maps_back(size, seed):
    total, world = size
    whole = np.random.default_rng(seed).normal(size=(2, total, 3))
    for layout in every(total, world, seed):
        shards = [layout.shard(whole, rank, dim=1, fill=-9) for rank in range(world)]
        assert np.array_equal(layout.unshard(shards, dim=1), whole)
        for rank in range(world):
            position = layout.positions(rank)
            real = position[position < total]
            assert (layout.owner(real) == rank).all()
            assert np.array_equal(layout.locate(real)[1], np.arange(len(real)))
            assert (shards[rank][:, len(real) :] == -9).all()
            assert layout.num_padding(rank) == len(position) - len(real)
        padding = np.concatenate([layout.positions(rank) for rank in range(world)])
        assert len(set(padding.tolist())) == len(padding)  # padding has positions of its own, past the end
        if layout.local_len is not None:
            assert all(len(layout.positions(rank)) == -(-total // world) for rank in range(world))
        again = Layout.from_spans(total, [layout.spans(rank) for rank in range(world)], local_len=layout.local_len)
        assert again == layout
        assert hash(again) == hash(layout)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(sizes, st.integers(-70, 70))
def test_the_token_that_stands_shift_places_later_is_found_on_its_rank(size, shift):
    total, world = size
    whole = np.arange(1, total + 1)
    expected = np.zeros_like(whole)
    for p in range(total):
        if 0 <= p + shift < total:
            expected[p] = whole[p + shift]
    for layout in every(total, world):
        shards = [layout.shard(whole, rank) for rank in range(world)]
        rolled = []
        for rank in range(world):
            assert layout.num_slots(rank) == len(shards[rank])
            wanted = layout.positions(rank)
            inside = (wanted < total) & (wanted + shift >= 0) & (wanted + shift < total)
            owner, slot = layout.locate(wanted[inside] + shift)
            rolled.append(np.zeros_like(shards[rank]))
            rolled[rank][inside] = [shards[o][s] for o, s in zip(owner, slot, strict=True)]
            assert np.array_equal(rolled[rank], layout.shard(expected, rank))
        assert np.array_equal(layout.unshard(rolled), expected)


def test_tensors_and_arrays_shard_alike():
    torch = pytest.importorskip("torch")
    layout = layouts.zigzag(11, 3, equal_tokens=True)
    whole = torch.randn(2, 11, requires_grad=True)
    shards = [layout.shard(whole, rank, dim=1, fill=7) for rank in range(3)]
    for rank in range(3):
        assert np.array_equal(shards[rank].detach().numpy(), layout.shard(whole.detach().numpy(), rank, dim=1, fill=7))
    assert torch.equal(layout.unshard(shards, dim=1), whole)
    layout.unshard(shards, dim=1).sum().backward()
    assert torch.equal(whole.grad, torch.ones(2, 11))


def work_per_rank(mask, layout):
    return np.array(
        [
            sum(mask.allows(p, np.arange(layout.seq_len)).sum() for p in layout.positions(r).tolist())
            for r in range(layout.world_size)
        ]
    )


@pytest.mark.parametrize(("lengths", "world"), [([128, 1792, 128], 4), ([64, 64, 896], 8)])
def test_per_document_really_balances(lengths, world):
    """PyTorch's balancer of this name lays documents one after another and does not: see the peers' table."""
    mask = masks.documents(lengths) & masks.causal()
    work = work_per_rank(mask, layouts.per_document(lengths, world))
    assert work.max() / work.mean() < 1.01


def test_zigzag_is_exactly_even_for_a_causal_sequence_that_divides():
    work = work_per_rank(masks.causal(96), layouts.zigzag(96, 4))
    assert (work == work[0]).all()


def test_round_robin_spreads_work_of_any_mask():
    mask = masks.documents([100, 300, 112]) & masks.sliding_window(90)
    work = work_per_rank(mask, layouts.round_robin_by_work(mask, 4, block=16))
    assert work.max() / work.mean() < 1.05


def test_balanced_remembers_equal_masks():
    make = [masks.documents([700, 324]) & masks.causal() for _ in range(2)]
    assert layouts.balanced(make[0], world_size=4) is layouts.balanced(make[1], world_size=4)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: layouts.zigzag(-1, 2), "seq_len must be an integer, at least 0"),
        (lambda: layouts.zigzag(8, 0), "world_size must be an integer, at least 1"),
        (lambda: layouts.striped(8, 2, stripe=0), "must be an integer, at least 1"),
        (lambda: layouts.round_robin_by_work(masks.causal(8), 2, block=0), "must be an integer, at least 1"),
        (lambda: layouts.zigzag(8, 2).spans(2), r"rank must be in \[0, 2\), but got 2"),
        (lambda: layouts.zigzag(8, 2).owner(8), r"must be in \[0, 8\), but got 8"),
        (lambda: layouts.zigzag(8, 2).shard(np.zeros((8, 3)), 0, dim=1), "Pass the dim of the tokens"),
        (lambda: layouts.zigzag(8, 2).unshard([np.zeros(4)]), "all 2 ranks, but got 1"),
        (lambda: layouts.zigzag(8, 2).unshard([np.zeros(4), np.zeros(5)]), "the shard of rank 1"),
        (lambda: Layout.from_spans(4, [[(0, 2)], [(3, 4)]]), "no rank holds position 2"),
        (lambda: Layout.from_spans(4, [[(0, 3)], [(2, 4)]]), "two ranks hold position 2"),
        (lambda: Layout.from_spans(4, [[(0, 4)], []], local_len=3), "rank 0 holds 4 tokens"),
        (lambda: Layout.from_table(4, 1, np.array([[0, 4, 1]]), "x"), "names ranks 1 to 1"),
        (lambda: layouts.balanced(world_size=2), "got none"),
        (lambda: layouts.balanced(masks.causal(), world_size=2), "Pass seq_len="),
        (lambda: layouts.balanced(masks.causal(4), masks.causal(5), world_size=2), "is for 5 tokens"),
    ],
)
def test_messages(call, words):
    with pytest.raises(LongspanError, match=words):
        call()


def test_layout_errors_are_value_errors():
    assert issubclass(LayoutError, ValueError)


@pytest.mark.parametrize("integer", [np.int8, np.int32, torch.tensor])
def test_numbers_of_numpy_and_torch_are_computed_with_as_ints(integer):
    """They overflow, or do not mix with arrays."""
    total, world = integer(96), integer(4)
    for made, expected in zip(every_of_numbers(total, world, integer), every_of_numbers(96, 4, int), strict=True):
        assert made == expected
        assert made.fingerprint == expected.fingerprint
        assert type(made.seq_len) is type(made.world_size) is int
    numbers = {"q_heads": 8, "kv_heads": 8, "head_dim": 64, "batch": 1}
    made, expected = (
        plan(masks.causal(96), layouts.zigzag(96, 4), dtype="float32", scheme="exchange", **each)
        for each in ({name: integer(number) for name, number in numbers.items()}, numbers)
    )
    assert all(type(getattr(made.sizes, name)) is int for name in numbers)
    assert made.bytes_received(0) == expected.bytes_received(0)
    states = StateSizes(*map(integer, (8, 16, 16, 16, 16, 1, 4, 2)))
    assert states.state_bytes == 8 * 16 * 16 * 4
    steps = [batches([90, 60, 100, 20], ranks=number(4), tokens_per_rank=number(100)) for number in (integer, int)]
    assert [len(step) for step in steps[0]] == [len(step) for step in steps[1]]


def every_of_numbers(total, world, integer):
    return (
        layouts.contiguous(total, world),
        layouts.like_dtensor(total, world),
        layouts.zigzag(total, world, equal_tokens=True),
        layouts.striped(total, world, stripe=integer(8)),
        layouts.per_document([90, 6], world),
        layouts.round_robin_by_work(masks.causal(96), world, block=integer(8)),
        layouts.balanced(masks.causal(96), world_size=world),
        layouts.whole_documents([90, 6], world_size=world),
    )
