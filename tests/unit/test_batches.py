"""batches(): every document exactly once, whatever is packed where; labels, weights, resuming, and the check."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import longspan as ls
from longspan.errors import LayoutError, MaskError, PlanError
from longspan.planning.batches import Batches, BatchStep

pytestmark = pytest.mark.quick

EPOCH = st.fixed_dictionaries(
    {
        "lengths": st.lists(st.integers(0, 90), max_size=60),
        "ranks": st.integers(1, 6),
        "tokens_per_rank": st.integers(1, 40),
        "tokens_per_step": st.one_of(st.none(), st.integers(1, 400)),
        "seed": st.integers(0, 5),
        "causal": st.booleans(),
    }
)


SEED_7 = [1, 3, 6, 0, 8, 2, 9, 4, 5, 7]


def contents(steps: Batches) -> list[list[tuple[list[int], list[int], list[int], int, float]]]:
    return [
        [(m.documents.tolist(), m.starts.tolist(), m.lengths.tolist(), m.labels, m.weight) for m in step]
        for step in steps
    ]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(EPOCH)
def test_every_token_is_in_one_micro_batch(epoch: dict) -> None:
    steps = ls.batches(**epoch, too_long="cut")
    lengths, most = epoch["lengths"], epoch["ranks"] * epoch["tokens_per_rank"]
    limit = min(most, epoch["tokens_per_step"] or most)
    seen = [np.zeros(length, dtype=np.int64) for length in lengths]
    parts = [0] * len(lengths)
    for step in steps:
        tokens = 0
        for micro in step:
            assert micro.lengths.sum() <= most
            assert micro.layout.seq_len == micro.lengths.sum()
            assert micro.layout.world_size == epoch["ranks"]
            assert micro.mask.seq_len == micro.lengths.sum()
            rows = zip(micro.documents.tolist(), micro.starts.tolist(), micro.lengths.tolist(), strict=True)
            for document, start, length in rows:
                seen[document][start : start + length] += 1
                parts[document] += 1
            assert micro.labels == sum(max(length - 1, 0) for length in micro.lengths.tolist())
            assert micro.weight == micro.labels / max(step.labels, 1)
            tokens += int(micro.lengths.sum())
        assert tokens <= limit * (epoch["tokens_per_step"] or most) // limit + limit  # a step holds at least one
        assert step.labels == sum(micro.labels for micro in step)
        assert all(len(micro.documents) for micro in step)
    assert all((count == 1).all() for count in seen)
    assert parts == [max(-(-length // limit), 1) for length in lengths]
    steps.check(steps)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(EPOCH, st.integers(1, 4))
def test_groups_have_documents_of_their_own(epoch: dict, size: int) -> None:
    """Every document is in one group of its micro-batch, within the group's limit, and weights are shares of labels."""
    num = epoch.pop("ranks")
    steps = ls.batches(**epoch, ranks=num * size, ranks_per_group=size, too_long="cut")
    seen = [np.zeros(length, dtype=np.int64) for length in epoch["lengths"]]
    for step in steps:
        weights = 0.0
        for group in range(num):
            mine = step.of_rank(group * size)
            assert [m.documents.tolist() for m in mine] == [
                m.documents.tolist() for m in step.of_rank((group + 1) * size - 1)
            ]
            assert (mine.number, mine.labels, len(mine)) == (step.number, step.labels, len(step))
            for micro in mine:
                assert micro.lengths.sum() <= size * epoch["tokens_per_rank"]
                assert (micro.layout.world_size, micro.layout.seq_len) == (size, micro.lengths.sum())
                weights += micro.weight
                rows = zip(micro.documents.tolist(), micro.starts.tolist(), micro.lengths.tolist(), strict=True)
                for document, start, length in rows:
                    seen[document][start : start + length] += 1
        assert weights == pytest.approx(1 if step.labels else 0)
    assert all((count == 1).all() for count in seen)
    steps.check(steps)


def test_groups_of_a_micro_batch_cost_about_the_same() -> None:
    rng = np.random.default_rng(4)
    lengths = np.clip(rng.lognormal(6, 1.2, size=800), 1, 8_000).astype(np.int64)
    sizes = {"ranks": 16, "ranks_per_group": 4, "tokens_per_rank": 4096, "tokens_per_step": 1 << 17}
    for step in ls.batches(lengths, **sizes)[:3]:
        for micro in step:
            costs = [float((n + n * n / 2 / 24_576).sum()) for n in (g.lengths.astype(float) for g in micro.groups)]
            assert max(costs) <= 1.05 * np.mean(costs)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(EPOCH, st.integers(0, 30))
def test_same_arguments_give_the_same_steps_and_resume(epoch: dict, first: int) -> None:
    steps = ls.batches(**epoch, too_long="cut")
    first = min(first, len(steps))
    everything = contents(steps)
    assert contents(ls.batches(**epoch, too_long="cut")) == everything
    resumed = ls.batches(**epoch, too_long="cut", start=first)
    assert contents(resumed) == contents(steps[first:]) == everything[first:]
    assert [step.number for step in resumed] == list(range(first, len(steps)))
    for mine, theirs in zip(resumed, steps[first:], strict=True):
        assert [m.layout for m in mine] == [m.layout for m in theirs]


def test_orders() -> None:
    lengths = np.random.default_rng(0).integers(1, 50, size=40)
    sizes = {"ranks": 2, "tokens_per_rank": 64, "tokens_per_step": 256}
    order = np.random.default_rng(1).permutation(40)
    steps = ls.batches(lengths, **sizes, order=order)
    taken = [sorted(np.concatenate([micro.documents for micro in step]).tolist()) for step in steps]
    at = 0
    for documents in taken:  # steps follow the sampler
        assert documents == sorted(order[at : at + len(documents)].tolist())
        at += len(documents)
    by_seed = [contents(ls.batches(lengths, **sizes, seed=seed)) for seed in (0, 1)]
    assert by_seed[0] != by_seed[1]
    # The order of a seed is part of the interface: a run that resumes with another version of numpy must find it again.
    first = ls.batches([1] * 10, ranks=1, tokens_per_rank=10, seed=7)[0].micro_batches[0]
    assert first.documents.tolist() == SEED_7


def test_micro_batches_of_a_step_cost_about_the_same() -> None:
    rng = np.random.default_rng(3)
    lengths = np.clip(rng.lognormal(7, 1.2, size=400), 1, 30_000).astype(np.int64)
    for step in ls.batches(lengths, ranks=8, tokens_per_rank=8192, tokens_per_step=1 << 18)[:3]:
        costs = [float((n + n * n / 2 / 24_576).sum()) for n in (micro.lengths.astype(float) for micro in step)]
        assert len(costs) >= 3
        assert max(costs) <= 1.15 * np.mean(costs)


def test_labels_of_the_user() -> None:
    steps = ls.batches([8, 6, 4], ranks=2, tokens_per_rank=7, tokens_per_step=32, labels=[2, 0, 4])
    (step,) = steps
    assert step.labels == 6
    assert sorted(micro.labels for micro in step) in ([2, 4], [0, 6])
    assert sum(micro.weight for micro in step) == pytest.approx(1)
    steps.check(steps)


def test_labels_are_cut_with_their_documents() -> None:
    rng = np.random.default_rng(7)
    lengths = rng.integers(0, 90, 40)
    labels = [np.where(rng.random(n) < 0.5, -100, rng.integers(0, 9, n)) for n in lengths.tolist()]
    for rows in (labels, [row.tolist() for row in labels]):
        steps = ls.batches(lengths, ranks=2, tokens_per_rank=16, tokens_per_step=64, too_long="cut", labels=rows)
        steps.check(steps)
        for step in steps:
            for micro in step:
                parts = zip(micro.documents.tolist(), micro.starts.tolist(), micro.lengths.tolist(), strict=True)
                own = [(labels[number][start + 1 : start + length] != -100).sum() for number, start, length in parts]
                assert micro.labels == sum(own)
    equal = ls.batches([4, 4], ranks=2, tokens_per_rank=1, labels=[[3, 3, -100, 3]] * 2, too_long="cut")
    assert [micro.labels for step in equal for micro in step] == [1, 1, 1, 1]


def test_plans() -> None:
    (step,) = ls.batches([40, 9, 8, 30], ranks=4, tokens_per_rank=32)
    (micro,) = step
    plan = micro.plan(q_heads=4, kv_heads=2, head_dim=8, dtype="float64", scheme="exchange")
    assert plan.layout is micro.layout
    assert plan.layout.seq_len == 87


def changed(step: BatchStep, **micro: object) -> BatchStep:
    """The step with its last micro-batch changed."""
    *rest, last = step.micro_batches
    return replace(step, micro_batches=(*rest, replace(last, **micro)))


@pytest.mark.parametrize("mistake", ["lost", "doubled", "weight"])
def test_mistakes_in_groups_are_found(mistake: str) -> None:
    lengths = np.random.default_rng(6).integers(2, 60, size=50)
    epoch = ls.batches(lengths, ranks=4, ranks_per_group=2, tokens_per_rank=64, tokens_per_step=900)
    steps = list(epoch)
    *rest, last = steps[0].micro_batches
    first, second = last.groups
    match mistake:
        case "lost":
            first = replace(first, documents=first.documents[:0], starts=first.starts[:0], lengths=first.lengths[:0])
        case "doubled":
            second = first
        case "weight":  # that of the group alone
            first = replace(first, weight=first.labels / last.labels)
    steps[0] = replace(steps[0], micro_batches=(*rest, replace(last, groups=(first, second))))
    with pytest.raises(PlanError, match="must have"):
        epoch.check(steps)


@pytest.mark.parametrize("mistake", ["lost", "doubled", "cut twice", "overlap", "weight", "labels", "step", "missing"])
def test_mistakes_are_found(mistake: str) -> None:
    lengths = np.random.default_rng(5).integers(2, 100, size=50)
    epoch = ls.batches(lengths, ranks=2, tokens_per_rank=64, tokens_per_step=400, too_long="cut")
    steps = list(epoch)
    epoch.check(steps)
    first = steps[0].micro_batches[-1]
    assert len(first.documents) > 1
    documents, starts, sizes = first.documents, first.starts, first.lengths

    def weighed(keep: np.ndarray, cut: np.ndarray) -> BatchStep:  # labels and weights as consistent as they can be
        return changed(steps[0], documents=documents[keep], starts=starts[keep], lengths=cut)

    every = np.arange(len(documents))
    match mistake:
        case "lost":
            steps[0] = weighed(every[1:], sizes[1:])
        case "doubled":
            steps[0] = weighed(np.append(every[:-1], 0), np.append(sizes[:-1], sizes[0]))
        case "cut twice":
            halves = np.append(sizes[0] // 2, np.append(sizes[1:], sizes[0] - sizes[0] // 2))
            keep = np.append(every, 0)
            begin = starts[keep].copy()
            begin[-1] += sizes[0] // 2
            steps[0] = changed(steps[0], documents=documents[keep], starts=begin, lengths=halves)
        case "overlap":
            moved = starts.copy()
            moved[0] += 1
            steps[0] = changed(steps[0], starts=moved)
        case "weight":
            steps[0] = changed(steps[0], weight=1 / len(steps[0]) + 1e-3)
        case "labels":
            steps[0] = changed(steps[0], labels=first.labels + 1)
        case "step":
            steps[0] = replace(steps[0], labels=steps[0].labels - 1)
        case _:
            steps = steps[1:]
    with pytest.raises(PlanError, match="must have"):
        epoch.check(steps)


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"lengths": [4, 65]}, PlanError, "document 1 has 65 tokens"),
        ({"lengths": [40], "tokens_per_step": 39}, PlanError, "tokens_per_step"),
        ({"lengths": [4, -1]}, MaskError, "length"),
        ({"ranks": 0}, PlanError, "ranks"),
        ({"tokens_per_rank": 0}, PlanError, "tokens_per_rank"),
        ({"ranks_per_group": 0}, PlanError, "ranks_per_group"),
        ({"ranks": 4, "ranks_per_group": 3}, PlanError, "ranks_per_group must be a divisor of ranks, 4"),
        ({"lengths": [4, 33], "ranks_per_group": 1}, PlanError, "document 1 has 33 tokens"),
        ({"tokens_per_step": 0}, PlanError, "tokens_per_step"),
        ({"order": [0, 0]}, PlanError, "order"),
        ({"order": [1]}, PlanError, "order"),
        ({"labels": [5, 1]}, PlanError, "labels"),
        ({"labels": [1]}, PlanError, "labels"),
        (
            {"lengths": [4, 65], "too_long": "cut", "labels": [1, 1]},
            PlanError,
            "but got numbers, and document 1 is cut",
        ),
        ({"labels": [[0] * 4, [0] * 2]}, PlanError, "labels"),
        ({"labels": [[0] * 4]}, PlanError, "labels"),
        ({"labels": [[0] * 4, 3]}, PlanError, "labels"),
        ({"too_long": "drop"}, PlanError, "too_long"),
        ({"start": 2}, PlanError, "start"),
        ({"seed": -1}, PlanError, "seed"),
        ({"order": [[0], [1, 2]]}, PlanError, "order"),
        ({"labels": [[0], [1, 2]]}, PlanError, "labels"),
        ({"pair_cost": "high"}, PlanError, "pair_cost must be a number >= 0, but got 'high'"),
        ({"pair_cost": -1.0}, PlanError, "pair_cost"),
        ({"pair_cost": float("nan")}, PlanError, "pair_cost"),
    ],
)
def test_refusals(change: dict, error: type[Exception], named: str) -> None:
    accepted = {"lengths": [4, 3], "ranks": 2, "tokens_per_rank": 32}
    assert len(ls.batches(**accepted)) == 1
    with pytest.raises(error, match=named):
        ls.batches(**{**accepted, **change})


def test_the_longest_that_is_accepted() -> None:
    (step,) = ls.batches([64], ranks=2, tokens_per_rank=32)
    assert step.micro_batches[0].layout.num_tokens.tolist() == [32, 32]
    with pytest.raises(LayoutError):
        step.micro_batches[0].layout.spans(2)


def test_a_micro_batch_of_several_groups_has_no_layout() -> None:
    (step,) = ls.batches([9, 4], ranks=4, ranks_per_group=2, tokens_per_rank=32)
    with pytest.raises(PlanError, match=r"but this micro-batch has 2.*step\.of_rank\(rank\)"):
        _ = step.micro_batches[0].layout
    assert [step.of_rank(rank).micro_batches[0].layout.seq_len for rank in range(4)] == [9, 9, 4, 4]
    for rank in (-1, 4, "0"):
        with pytest.raises(PlanError, match="rank"):
            step.of_rank(rank)
