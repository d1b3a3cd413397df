"""Numbers of tokens and of sequences over ranks: cut, gathered, summed by document and handed back, with gradients,
against one device in float64; and batches that know how they were cut."""

import numpy as np
import pytest
import torch

import longspan as ls
from longspan.execution.simulated import simulate
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
from tests.cases import LAYOUTS, random_layout, random_lengths

TOLERANCE = 1e-12


class TokenCase:
    """Documents, a layout, and tokens with some that do not count, drawn from a seed; ranks may hold none."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        self.total, self.world, self.rows = (int(rng.integers(low, high)) for low, high in ((1, 40), (1, 6), (1, 4)))
        per_row = seed % 3 == 1
        lengths = [random_lengths(rng, self.total) for _ in range(self.rows if per_row else 1)]
        self.documents = None if seed % 5 == 4 else lengths if per_row else lengths[0]
        rows = [np.array([self.total])] if self.documents is None else lengths
        self.lengths = [rows[row % len(rows)] for row in range(self.rows)]
        mask = (ls.masks.documents(lengths[0]) & ls.masks.causal()).resized(self.total)
        self.layout = random_layout(rng, LAYOUTS[seed % len(LAYOUTS)], mask, self.total, self.world)
        self.rng, self.gradients = rng, ("sum", "average")[seed % 2]
        self.values = self.normal(self.rows, self.total).requires_grad_()
        self.counts = torch.as_tensor(rng.random((self.rows, self.total)) < rng.choice([0.2, 0.7, 1.0]))
        if seed % 7 == 0 and self.world > 1:  # whole ranks without a token that counts
            self.counts[:, self.layout.owner(np.arange(self.total)) != 0] = False

    def normal(self, *shape):
        return torch.as_tensor(self.rng.normal(size=shape))

    @property
    def num_sequences(self):
        return sum(map(len, self.lengths))

    def batch(self, rank):
        batch = {"labels": torch.zeros(self.rows, self.total, dtype=torch.int64)}
        return shard_batch(batch, self.layout, rank, documents=self.documents, positions="sequence")

    def documents_of(self, values):
        """A tensor (tokens of the document) for each sequence."""
        return [part for row, lengths in zip(values, self.lengths, strict=True) for part in row.split(lengths.tolist())]

    def shards(self, x):
        """Each rank's part of x, leaves of one graph each, as processes have them."""
        parts = [self.layout.shard(x.detach(), rank, 1) for rank in range(self.world)]
        return [part.requires_grad_() if x.requires_grad else part for part in parts]

    def whole_gradient(self, parts):
        """The gradient of the whole tensor, as parameters before it would see it after the trainer's reduction."""
        grads = [torch.zeros_like(part) if part.grad is None else part.grad for part in parts]
        return self.layout.unshard(grads, 1) / (self.world if self.gradients == "average" else 1)


def worst(*pairs):
    return max(float((a - b).detach().abs().max()) if a.numel() else 0.0 for a, b in pairs)


# -- side tensors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_side_tensors_line_up_with_labels(seed):
    case = TokenCase(seed)
    ids = torch.arange(case.rows * case.total).view(case.rows, case.total)
    features = case.normal(case.rows, case.total, 2)
    shift = seed % 4
    for rank in range(case.world):
        mine = shard_batch(
            {"labels": ids}, case.layout, rank, documents=case.documents, positions="sequence", num_shifts=3
        )
        found = shard_like(ids.double(), mine, shift=shift, fill=-100)
        places = case.layout.positions(rank)
        expected = np.full(found.shape, -100.0)
        for row in range(case.rows):
            document = np.repeat(np.arange(len(case.lengths[row])), case.lengths[row])
            for slot, place in enumerate(places):
                aim = place + shift
                if place < case.total and aim < case.total and document[aim] == document[place]:
                    expected[row, slot] = ids[row, aim]
        assert np.array_equal(found.numpy(), expected)
        if shift:  # what multi-token prediction makes of labels
            assert torch.equal(found.long(), mine["shift_labels" + ("" if shift == 1 else f"_{shift}")])
        more = shard_like(features, case.layout, rank, shift=shift, dim=1, documents=case.documents, fill=-1)
        other = torch.stack([shard_like(features[..., i], mine, shift=shift, fill=-1) for i in range(2)], dim=-1)
        assert torch.equal(more, other)


def test_side_tensors_of_one_row_keep_their_gradients():
    whole = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    layout = ls.layouts.contiguous(6, 4, equal_tokens=True)  # two slots each, and a rank of padding
    parts = [shard_like(whole, layout, rank, shift=1, dim=0, documents=[4, 2]) for rank in range(4)]
    assert torch.equal(torch.cat(parts)[:6, 0], whole[[1, 2, 3, 0, 5, 0], 0] * torch.tensor([1, 1, 1, 0, 1, 0]))
    torch.cat(parts).sum().backward()
    assert torch.equal(whole.grad, torch.tensor([0.0, 1, 1, 1, 0, 1]).double()[:, None].expand(6, 2))


# -- whole sequences on every rank -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_gathered_tokens_give_each_rank_the_gradient_of_its_own(seed):
    case = TokenCase(seed)
    weights = case.normal(case.rows, case.total)
    loss_of = lambda whole: ((whole * weights).sum() + 1) ** 2  # noqa: E731  (every token's gradient depends on all)
    loss_of(case.values).backward()
    parts = case.shards(case.values)

    def work(rank):
        whole = gather_tokens(parts[rank.rank()], case.batch(rank.rank()), rank, 1, gradients=case.gradients)
        return whole.detach(), loss_of(whole)

    found = simulate(case.world, work)
    assert all(torch.equal(whole, case.values.detach()) for whole, _ in found)
    sum(loss for _, loss in found).backward()
    assert worst((case.whole_gradient(parts), case.values.grad)) <= TOLERANCE * float(case.values.grad.abs().max() + 1)


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


def expected_numbers(case, values, reduce):
    kept = [
        part[counts] for part, counts in zip(case.documents_of(values), case.documents_of(case.counts), strict=True)
    ]
    sums = [part.sum() if len(part) else 0 * values.sum() for part in kept]
    return torch.stack([s / max(len(part), 1) if reduce == "mean" else s for s, part in zip(sums, kept, strict=True)])


@pytest.mark.parametrize("seed", range(150))
def test_numbers_of_sequences_are_those_of_one_device(seed):
    case, reduce = TokenCase(seed), ("sum", "mean")[seed // 2 % 2]
    weights = case.normal(case.num_sequences)
    loss_of = lambda numbers: (numbers * weights).sum() + numbers.square().sum() ** 2 / 50  # noqa: E731
    expected = expected_numbers(case, case.values, reduce)
    loss_of(expected).backward()
    parts = case.shards(case.values)

    def work(rank):
        mine, counts = case.batch(rank.rank()), case.layout.shard(case.counts, rank.rank(), 1)
        numbers = per_sequence(parts[rank.rank()], mine, rank, reduce=reduce, mask=counts, gradients=case.gradients)
        return numbers.detach(), loss_of(numbers)

    found = simulate(case.world, work)
    scale = 1 + float(case.values.grad.abs().max())
    assert max(worst((numbers, expected)) for numbers, _ in found) <= TOLERANCE * 10
    sum(loss for _, loss in found).backward()
    assert worst((case.whole_gradient(parts), case.values.grad)) <= TOLERANCE * scale


@pytest.mark.parametrize("seed", range(60))
def test_numbers_of_sequences_weigh_tokens_and_gradients_come_back_from_all_ranks(seed):
    """A ratio of whole sequences, in a loss of tokens: GSPO by token, as one may write it."""
    case = TokenCase(seed)
    factors = case.normal(case.rows, case.total)

    def whole_loss():
        means = expected_numbers(case, case.values, "mean").exp()
        spread = torch.cat([m.expand(int(n)) for m, n in zip(means, np.concatenate(case.lengths), strict=True)])
        return (spread.view(case.rows, case.total) * factors * case.values).sum() ** 2

    expected = whole_loss()
    expected.backward()
    parts = case.shards(case.values)

    def work(rank):
        mine, own = case.batch(rank.rank()), parts[rank.rank()]
        counts = case.layout.shard(case.counts, rank.rank(), 1)
        options = {"gradients": case.gradients}
        means = per_sequence(own, mine, rank, reduce="mean", mask=counts, **options).exp()
        terms = per_token(means, mine, rank, **options) * case.layout.shard(factors, rank.rank(), 1) * own
        return per_sequence(terms, mine, rank, **options).sum() ** 2

    found = simulate(case.world, work)
    scale = 1 + float(case.values.grad.abs().max())
    assert max(worst((loss, expected)) for loss in found) <= TOLERANCE * (1 + expected.item())
    sum(found).backward()
    assert worst((case.whole_gradient(parts), case.values.grad)) <= 10 * TOLERANCE * scale


def test_tokens_that_do_not_count_may_be_anything():
    values = torch.tensor([1.0, float("inf"), float("nan"), 2.0], requires_grad=True)
    one, counts = ls.layouts.contiguous(4, 1), torch.tensor([1, 0, 0, 1])
    for documents, expected in (([2, 2], [1.0, 2.0]), ([1, 2, 1], [1.0, 0.0, 2.0]), ([0, 4, 0], [0.0, 3.0, 0.0])):
        found = per_sequence(values, one, None, documents=documents, mask=counts, gradients="sum")
        assert found.tolist() == expected
        found.sum().backward()
    assert values.grad.tolist() == [3.0, 0.0, 0.0, 3.0]


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
            with pytest.raises(RuntimeError, match="once_differentiable"):
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
    with pytest.raises(ls.PlanError, match=r"<layout contiguous, 8 tokens on 2 ranks> cut the tokens, but the plan is"):
        PLAN.check(value)


def test_what_forgot_its_layout_is_not_taken_for_right():
    mine = shard_batch({"labels": IDS}, ZIGZAG, 0)
    for forgot in (dict(mine), Batch(mine), mine["shift_labels"].clone()):
        with pytest.raises(ls.PlanError, match="does not say which layout cut it"):
            PLAN.check(forgot)
    for forgot in (dict(mine), Batch(mine)):
        with pytest.raises(BatchError, match="does not say how it was cut"):
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
    with pytest.raises(ls.PlanError, match=r"q was cut by <layout contiguous.*plan\.shard"):
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
            with pytest.raises(ls.PlanError, match="was cut by <layout contiguous"):
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
    (lambda g: shard_like(IDS, ZIGZAG, 0, shift=-1), "shift must be a whole number, 0 or more"),
    (lambda g: shard_like(IDS, PLAN.shard({"labels": IDS}, 0), 0, shift=0), "rank or documents beside it"),
    (lambda g: shard_like([1], ZIGZAG, 0, shift=0), "takes a tensor, but list"),
    (lambda g: shard_like(IDS[:1].T, ZIGZAG, 0, shift=1, dim=0, documents=[[8], [4, 4]]), "has one"),
    (lambda g: shard_like(IDS, "zigzag", 0, shift=0), "takes a layout, but str"),
    (lambda g: shard_batch({"labels": IDS}, ZIGZAG, 0, documents=[8], mask=MASK), "Leave one of them out"),
    (lambda g: shard_batch({"labels": IDS}, ZIGZAG, 0, mask=IDS > 3), "mask must be one of longspan.masks"),
    (lambda g: gather_tokens(torch.ones(4, requires_grad=True), ZIGZAG, g), "Say gradients='sum'"),
    (lambda g: gather_tokens(torch.ones(4), ZIGZAG, g, gradients="mean"), "gradients = 'mean'"),
    (lambda g: gather_tokens(torch.ones(4), ls.layouts.zigzag(12, 3), g), "a group of 2 ranks"),
    (lambda g: per_sequence(torch.ones(4, requires_grad=True), ZIGZAG, g), "Say gradients='sum'"),
    (lambda g: per_sequence(torch.ones(4), ZIGZAG, None), "a group of 1 ranks"),
    (lambda g: per_sequence(torch.ones(4).long(), ZIGZAG, g), "floating-point tensor, but torch.int64"),
    (lambda g: per_sequence(torch.ones(1, 4, 2), ZIGZAG, g), "one number per token"),
    (lambda g: per_sequence(torch.ones(4), ZIGZAG, g, reduce="max"), "Choose 'sum' or 'mean'"),
    (lambda g: per_sequence(torch.ones(4), ZIGZAG, g, mask=torch.ones(1, 4)), "so it has their shape"),
    (lambda g: per_sequence(torch.ones(4), ZIGZAG, g, mask=MASK), "go to documents="),
    (lambda g: per_sequence(torch.ones(4), ZIGZAG, g, mask=torch.full((4,), 0.5)), "0 and 1 only"),
    (lambda g: per_sequence(torch.ones(3, 4), ZIGZAG, g, documents=[[8], [4, 4]]), "given for 2 batch rows"),
    (lambda g: per_sequence(torch.ones(2, 4), PLAN.shard({"labels": IDS}, 1 - g.rank()), g), "but this is rank"),
    (lambda g: per_sequence(torch.ones(2, 4), PLAN.shard({"labels": IDS}, g.rank()), g, documents=[8]), "Leave them"),
    (lambda g: per_token(torch.ones(3), ZIGZAG, g, documents=[5, 3]), "a multiple of 2"),
    (lambda g: per_token(torch.ones(3), ZIGZAG, g, documents=[[5, 3], [8], [8]]), "number of sequences is 4"),
    (lambda g: per_token(torch.ones(2, 1), ZIGZAG, g, documents=[5, 3]), "of one dim, but shape (2, 1)"),
    (lambda g: per_token(torch.ones(2, requires_grad=True), ZIGZAG, g, documents=[5, 3]), "Say gradients="),
]


@pytest.mark.parametrize(("call", "said"), BAD, ids=[said for _, said in BAD])
def test_refusals(call, said):
    with pytest.raises(BatchError) as caught:
        simulate(2, call)
    assert said in str(caught.value)
