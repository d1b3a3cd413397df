"""Numbers of tokens and of sequences over ranks: cut, gathered, summed by document and handed back, with gradients,
against one device in float64; and batches that know how they were cut."""

import pytest
import torch

import longspan as ls
from longspan.errors import PlanError
from longspan.run.simulated import simulate
from longspan.training import (
    Batch,
    BatchError,
    gather_outputs,
    gather_tokens,
    per_sequence,
    per_token,
    relayout,
    shard_batch,
    shard_like,
)
from tests.token_cases import TOLERANCE, TokenCase, gathered_off, sequences_off, side_tensors_off, weighed_off

# -- side tensors ------------------------------------------------------------------------------------------------------


@pytest.mark.share(3)
@pytest.mark.parametrize("first", range(0, 100, 10))
def test_side_tensors_line_up_with_labels(first):
    for seed in range(first, first + 10):
        assert side_tensors_off(seed) == 0, seed


def test_side_tensors_of_one_row_keep_their_gradients():
    whole = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    layout = ls.layouts.contiguous(6, 4, equal_tokens=True)  # two slots each, and a rank of padding
    parts = [shard_like(whole, layout, rank, shift=1, dim=0, documents=[4, 2]) for rank in range(4)]
    assert torch.equal(torch.cat(parts)[:6, 0], whole[[1, 2, 3, 0, 5, 0], 0] * torch.tensor([1, 1, 1, 0, 1, 0]))
    torch.cat(parts).sum().backward()
    assert torch.equal(whole.grad, torch.tensor([0.0, 1, 1, 1, 0, 1]).double()[:, None].expand(6, 2))


# -- whole sequences on every rank -------------------------------------------------------------------------------------


@pytest.mark.share(3)
@pytest.mark.parametrize("first", range(0, 200, 10))
def test_gathered_tokens_give_each_rank_the_gradient_of_its_own(first):
    for seed in range(first, first + 10):
        assert gathered_off(seed) <= TOLERANCE, seed


def test_gathering_without_gradients_is_gather_outputs():
    layout, x = ls.layouts.zigzag(8, 2), torch.arange(16).view(2, 8)

    def work(rank):
        part = layout.shard(x, rank.rank(), 1)
        return (
            gather_tokens(part, layout, rank),
            gather_outputs(part, layout, rank, 1),
            gather_tokens(part > 3, layout, rank),
        )

    for both in simulate(2, work):
        assert torch.equal(both[0], x)
        assert torch.equal(both[1], x)
        assert torch.equal(both[2], x > 3)


# -- numbers of sequences ----------------------------------------------------------------------------------------------


@pytest.mark.share(3)
@pytest.mark.parametrize("first", range(0, 500, 10))
def test_numbers_of_sequences_are_those_of_one_device(first):
    for seed in range(first, first + 10):
        assert sequences_off(seed) <= TOLERANCE, seed


@pytest.mark.share(3)
@pytest.mark.parametrize("first", range(0, 200, 10))
def test_numbers_of_sequences_weigh_tokens_and_gradients_come_back_from_all_ranks(first):
    for seed in range(first, first + 10):
        assert weighed_off(seed) <= TOLERANCE, seed


def test_cases_have_what_they_are_for():
    cases = [TokenCase(seed) for seed in range(100)]
    kept = [[int(c.layout.shard(c.counts, rank, 1).sum()) for rank in range(c.world)] for c in cases]
    assert sum(0 in ranks and any(ranks) for ranks in kept) > 10  # a rank without a token that counts
    assert sum(0 in c.layout.num_tokens for c in cases) > 5  # a rank without a token
    empty = [any(not part.any() for part in c.documents_of(c.counts)) for c in cases]
    assert sum(empty) > 20  # a document without a token that counts, some without any
    assert sum(c.rows > 1 for c in cases) > 40


def test_tokens_that_do_not_count_may_be_anything():
    values = torch.tensor([1.0, float("inf"), float("nan"), 2.0], requires_grad=True)
    one, counts = ls.layouts.contiguous(4, 1), torch.tensor([1, 0, 0, 1])
    for documents, expected in (([2, 2], [1.0, 2.0]), ([1, 2, 1], [1.0, 0.0, 2.0]), ([0, 4, 0], [0.0, 3.0, 0.0])):
        found = per_sequence(values, one, None, documents=documents, mask=counts, gradients="sum")
        assert found.tolist() == expected
        found.sum().backward()
    assert values.grad.tolist() == [3.0, 0.0, 0.0, 3.0]


def test_documents_are_told_in_any_way():
    values, one = torch.arange(5.0), ls.layouts.contiguous(5, 1)
    for documents in ([2, 3], (2, 3), torch.tensor([2, 3]), ls.masks.documents([2, 3]) & ls.masks.causal(), [[2, 3]]):
        assert per_sequence(values, one, None, documents=documents).tolist() == [1.0, 9.0]
        assert per_token(torch.tensor([1.0, 9.0]), one, None, documents=documents).tolist() == [[1, 1, 9, 9, 9]]
        assert shard_like(values, one, 0, shift=1, documents=documents).tolist() == [1, 0, 3, 4, 0]
    assert per_sequence(values, one, None).tolist() == [10.0]
    assert per_sequence(torch.ones(2, 5), one, None).tolist() == [5.0, 5.0]
    assert per_sequence(torch.ones(0), ls.layouts.contiguous(0, 1), None, documents=[]).tolist() == []


def test_sums_of_short_numbers_are_kept_in_long_ones():
    values = torch.full((4096,), 1 / 3, dtype=torch.bfloat16)
    (found,) = per_sequence(values, ls.layouts.contiguous(4096, 1), None).unbind()
    assert found.dtype == torch.float32
    assert float(found) == float(values[0]) * 4096


def test_a_gradient_of_a_gradient_is_refused():
    layout = ls.layouts.zigzag(8, 2)

    def work(rank):
        x = torch.randn(4, requires_grad=True)
        calls = (
            lambda: gather_tokens(x, layout, rank, gradients="sum").square().sum(),
            lambda: per_sequence(x, layout, rank, gradients="sum").square().sum(),
        )
        for call in calls:
            (gradient,) = torch.autograd.grad(call(), x, create_graph=True)
            with pytest.raises(PlanError, match="must not be differentiated again"):
                gradient.sum().backward()

    simulate(2, work)


# -- batches and tensors that know their layout ------------------------------------------------------------------------

IDS = torch.arange(16).view(2, 8)
ZIGZAG, CONTIGUOUS = ls.layouts.zigzag(8, 2), ls.layouts.contiguous(8, 2)
SIZES = {"q_heads": 2, "kv_heads": 2, "head_dim": 4, "dtype": "float32"}
MASK = ls.masks.documents([5, 3]) & ls.masks.causal()
PLAN = ls.plan(MASK, ZIGZAG, batch=2, **SIZES)


def test_a_plan_cuts_by_its_own_layout():
    for rank in range(2):
        expected = shard_batch({"labels": IDS}, ZIGZAG, rank, documents=[5, 3], positions="document")
        for mine in (
            PLAN.shard({"labels": IDS}, rank, documents=[5, 3], positions="document"),
            PLAN.shard({"labels": IDS}, rank, mask=PLAN.mask, positions="document"),
            shard_batch({"labels": IDS}, PLAN, rank, mask=MASK, positions="document"),
            shard_batch({"labels": IDS}, expected, rank, documents=MASK, positions="document"),
        ):
            assert isinstance(mine, dict)
            assert mine.layout == ZIGZAG
            assert all(torch.equal(mine[name], x) for name, x in expected.items())
            assert mine.keys() == expected.keys()
            PLAN.check(mine, mine.to("cpu", torch.int32), mine["shift_labels"], PLAN, ZIGZAG)
            assert torch.equal(shard_like(IDS, mine, shift=1, fill=-100), mine["shift_labels"])
        assert torch.equal(PLAN.shard(IDS, rank, dim=1), ZIGZAG.shard(IDS, rank, 1))


@pytest.mark.parametrize("cut", ["batch", "moved", "tensor", "layout", "plan"])
def test_a_plan_refuses_a_batch_of_another_layout(cut):
    mine = shard_batch({"labels": IDS}, CONTIGUOUS, 1)
    other = ls.plan(MASK, CONTIGUOUS, batch=2, **SIZES)
    value = {
        "batch": mine,
        "moved": mine.to(torch.int32),
        "tensor": mine["shift_labels"],
        "layout": CONTIGUOUS,
        "plan": other,
    }[cut]
    other.check(value)
    with pytest.raises(ls.PlanError, match=r"<layout contiguous, 8 tokens on 2 ranks>"):
        PLAN.check(value)


def test_what_forgot_its_layout_is_not_taken_for_right():
    mine = shard_batch({"labels": IDS}, ZIGZAG, 0)
    for forgot in (dict(mine), Batch(mine), mine["shift_labels"].clone()):
        with pytest.raises(ls.PlanError, match="layout"):
            PLAN.check(forgot)
    for forgot in (dict(mine), Batch(mine)):
        with pytest.raises(BatchError, match="cut"):
            shard_like(IDS, forgot, shift=1)


def whole_tensors():
    torch.manual_seed(0)
    return [torch.randn(2, 2, 8, 4) for _ in range(3)]


def run_over(layout, change=lambda x: x):
    """Attention by PLAN over what `layout` cut, and what one device gives, both in whole."""
    whole = whole_tensors()

    def work(rank):
        q, k, v = (change(layout.shard(x, rank.rank(), 2).requires_grad_()) for x in whole)
        return ls.attention(q, k, v, PLAN, group=rank)

    return layout.unshard(simulate(2, work), 2), ls.attention(*whole, MASK)


def test_tensors_cut_by_another_layout_are_refused_and_all_others_are_taken():
    with pytest.raises(ls.PlanError, match=r"q .*<layout contiguous.*plan\.shard"):
        run_over(CONTIGUOUS)
    out, expected = run_over(ZIGZAG)
    assert torch.allclose(out, expected, atol=1e-6)
    equal = ls.layouts.Layout.from_spans(8, [[(0, 2), (6, 8)], [(2, 6)]], name="by hand", local_len=4)
    out, expected = run_over(equal)  # another name for the same slots
    assert torch.allclose(out, expected, atol=1e-6)


def test_what_is_not_caught():
    """The page says so: what was computed from a shard is another tensor, and nobody knows where it came from."""
    out, expected = run_over(CONTIGUOUS, change=lambda x: x * 1)
    assert (out - expected).abs().max() > 0.1


def test_a_shard_that_was_written_into_is_another_tensor():
    def change(x):
        with torch.no_grad():
            return x.copy_(x.detach().clone())

    run_over(CONTIGUOUS, change)


def test_batch_rows_and_shards_of_other_sequences_are_no_matter():
    rows = ls.layouts.contiguous(2, 2).shard(torch.randn(2, 2, 8, 4), 1, 0)  # batch rows, dealt out
    plan = ls.plan(ls.masks.causal(8), ls.layouts.contiguous(8, 1), **SIZES)
    assert ls.attention(rows, rows, rows, plan).shape == rows.shape
    part = ls.layouts.zigzag(16, 2).shard(torch.randn(1, 2, 16, 4), 1, 2)  # a part, as a sequence of its own
    assert ls.attention(part, part, part, plan).shape == part.shape


def test_other_calls_refuse_them_too():
    x = torch.randn(1, 8, 4)

    def work(rank):
        part = CONTIGUOUS.shard(x, rank.rank(), 1)
        conv = ls.conv_plan([5, 3], ZIGZAG, channels=4, width=3, dtype="float32")
        scan = ls.scan_plan([5, 3], ZIGZAG, heads=1, keys=4, values=4, maps="scalar")
        heads = CONTIGUOUS.shard(x.unsqueeze(2), rank.rank(), 1)
        calls = (
            lambda: ls.causal_conv1d(part, torch.ones(4, 3), plan=conv, group=rank),
            lambda: ls.linear_attention(heads, heads, heads, torch.zeros(1), plan=scan, group=rank),
            lambda: relayout(part, ZIGZAG, CONTIGUOUS, rank, 1),
            lambda: gather_tokens(part, ZIGZAG, rank, 1),
            lambda: gather_outputs(part, ZIGZAG, rank, 1),
            lambda: per_sequence(CONTIGUOUS.shard(x[..., 0], rank.rank(), 1), ZIGZAG, rank),
        )
        for call in calls:
            with pytest.raises(ls.PlanError, match="<layout contiguous"):
                call()
        return relayout(part, CONTIGUOUS, ZIGZAG, rank, 1)

    for rank, moved in enumerate(simulate(2, work)):
        assert torch.equal(moved, ZIGZAG.shard(x, rank, 1))


def test_a_tensor_is_saved_as_any_other(tmp_path):
    part = ZIGZAG.shard(torch.arange(8), 0)
    torch.save(part, tmp_path / "part.pt")
    assert torch.equal(torch.load(tmp_path / "part.pt", weights_only=True), part)


BAD = [
    (lambda g: shard_like(IDS, ZIGZAG, shift=0), "without a rank"),
    (lambda g: shard_like(IDS, ZIGZAG, 0, shift=-1), "shift must be"),
    (lambda g: shard_like(IDS, PLAN.shard({"labels": IDS}, 0), 0, shift=0), "no rank or documents with a batch"),
    (lambda g: shard_like([1], ZIGZAG, 0, shift=0), "values must be a tensor, but got list"),
    (lambda g: shard_like(IDS[:1].T, ZIGZAG, 0, shift=1, dim=0, documents=[[8], [4, 4]]), "has one"),
    (lambda g: shard_like(IDS, "zigzag", 0, shift=0), "but got str"),
    (lambda g: shard_batch({"labels": IDS}, ZIGZAG, 0, documents=[8], mask=MASK), "Leave one of them out"),
    (lambda g: shard_batch({"labels": IDS}, ZIGZAG, 0, mask=IDS > 3), "mask must be one of longspan.masks"),
    (lambda g: gather_tokens(torch.ones(4, requires_grad=True), ZIGZAG, g), "needs gradients="),
    (lambda g: gather_tokens(torch.ones(4), ZIGZAG, g, gradients="mean"), "gradients must be"),
    (lambda g: gather_tokens(torch.ones(4), ls.layouts.zigzag(12, 3), g), "a group of 2 ranks"),
    (lambda g: per_sequence(torch.ones(4, requires_grad=True), ZIGZAG, g), "needs gradients="),
    (lambda g: per_sequence(torch.ones(4), ZIGZAG, None), "a group of 1 ranks"),
    (lambda g: per_sequence(torch.ones(4).long(), ZIGZAG, g), "floating-point tensor, but got torch.int64"),
    (lambda g: per_sequence(torch.ones(1, 4, 2), ZIGZAG, g), "one number per token"),
    (lambda g: per_sequence(torch.ones(4), ZIGZAG, g, reduce="max"), "reduce must be"),
    (lambda g: per_sequence(torch.ones(4), ZIGZAG, g, mask=torch.ones(1, 4)), "mask must have the shape"),
    (lambda g: per_sequence(torch.ones(4), ZIGZAG, g, mask=MASK), "as documents="),
    (lambda g: per_sequence(torch.ones(4), ZIGZAG, g, mask=torch.full((4,), 0.5)), "0 and 1 only"),
    (lambda g: per_sequence(torch.ones(3, 4), ZIGZAG, g, documents=[[8], [4, 4]]), "got 2 lists for"),
    (lambda g: per_sequence(torch.ones(2, 4), PLAN.shard({"labels": IDS}, 1 - g.rank()), g), "but this is rank"),
    (lambda g: per_sequence(torch.ones(2, 4), PLAN.shard({"labels": IDS}, g.rank()), g, documents=[8]), "Leave them"),
    (lambda g: per_token(torch.ones(3), ZIGZAG, g, documents=[5, 3]), "a multiple of 2"),
    (lambda g: per_token(torch.ones(3), ZIGZAG, g, documents=[[5, 3], [8], [8]]), "number of sequences is 4"),
    (lambda g: per_token(torch.ones(2, 1), ZIGZAG, g, documents=[5, 3]), "of one dim, but got shape (2, 1)"),
    (lambda g: per_token(torch.ones(2, requires_grad=True), ZIGZAG, g, documents=[5, 3]), "needs gradients="),
]


@pytest.mark.parametrize(("call", "said"), BAD, ids=[said for _, said in BAD])
def test_refusals(call, said):
    with pytest.raises(BatchError) as caught:
        simulate(2, call)
    assert said in str(caught.value)
