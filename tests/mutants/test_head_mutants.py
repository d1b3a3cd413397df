"""Mutants of losses without logits: each breaks one thing, and a few random cases or a probe must notice it.

A mutant is a function whose source has some words replaced.
"""

import pytest
import torch

from longspan.run.simulated import simulate
from longspan.training import BatchError, Head, loss
from longspan.training import loss_without_logits as head
from longspan.training.loss import LossTerms, PerToken, SlabLoss
from longspan.training.loss_without_logits import Gradients, SlabWork, SumHere
from tests.head_cases import BAR, check
from tests.mutants.test_scan_mutants import plant

SEEDS = (0, 1, 2, 3, 6, 7, 11, 14, 21, 30, 41, 53)


def first_failure():
    """What notices first that something is wrong; None if nothing does."""
    for probe in PROBES:
        if not probe():
            return probe.__name__
    for seed in SEEDS:
        try:
            error, name = check(seed)
        except Exception as raised:
            return f"case {seed}: {type(raised).__name__}: {raised}"
        if not error <= BAR:
            return f"case {seed}: {name} is off by {error:.1e}"
    return None


def impossible_words_count_nothing():
    logits = torch.tensor([[0.0, -torch.inf, 0.0]], requires_grad=True)
    found = loss.token_logprobs(logits, torch.tensor([2]))
    (grad,) = torch.autograd.grad(sum(found), logits)
    return bool(found.entropies.isfinite().all() and grad.isfinite().all() and abs(float(grad[0, 2]) - 0.5) < 1e-6)


def ranks_with_impossible_words_only_add_nothing():
    """As vocabularies that are padded for tensor parallelism have them."""
    hidden, labels = torch.randn(3, 2), torch.tensor([0, 1, 1])

    def work(rank):
        bias = torch.full((2,), -torch.inf if rank.rank() else 0.0)
        found = Head(torch.ones(2, 2), bias, group=rank)
        return loss.token_loss(hidden, labels, group=None, gradients="sum", head=found)

    return all(abs(float(one) - 0.6931472) < 1e-6 for one in simulate(2, work))


def labels_that_are_no_words_are_refused():
    try:
        loss.token_loss(torch.zeros(2, 3), torch.tensor([0, 5]), group=None, gradients="sum", head=torch.zeros(5, 3))
    except BatchError:
        return True
    return False


def small_labels_are_not_taken_for_ignored_ones():
    labels = torch.tensor([156, 3], dtype=torch.uint8)
    found = loss.token_loss(torch.zeros(2, 200), labels, group=None, gradients="sum")
    return abs(float(found) - 5.2983174) < 1e-5


def other_tokens_are_not_taken_for_other_words():
    def work(rank):
        labels = torch.tensor([rank.rank()])
        return loss.token_logprobs(torch.zeros(1, 2), labels, head=Head(torch.zeros(2, 2), group=rank))

    try:
        simulate(2, work)
    except BatchError:
        return True
    return False


def bfloat16_sums_are_those_of_float32():
    """Two hundred words' gradients, each from 300 slabs of one token, all of one sign."""
    hidden, weight = torch.ones(300, 4, dtype=torch.bfloat16), torch.zeros(200, 4, dtype=torch.bfloat16)
    weight.requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "LEAST", 1)
        patch.setattr(head, "PARTS", 300)
        labels = torch.zeros(300, dtype=torch.int64)
        loss.token_loss(hidden, labels, group=None, gradients="sum", head=weight, reduction="sum").backward()
    return abs(float(weight.grad[0, 0]) + 300 * 199 / 200) < 2


PROBES = (
    impossible_words_count_nothing,
    ranks_with_impossible_words_only_add_nothing,
    labels_that_are_no_words_are_refused,
    small_labels_are_not_taken_for_ignored_ones,
    other_tokens_are_not_taken_for_other_words,
    bfloat16_sums_are_those_of_float32,
)

MUTANTS = {
    # -- facts of all words
    "sums of ranks have each their own maximum": (head, "_merge_ranks", "(powers * shift.exp())", "(powers)"),
    "entropy of ranks has each its own maximum": (head, "_merge_ranks", "weighted + shift * powers", "weighted"),
    "the first rank's logits are all": (head, "_merge_ranks", "total.sum(0)", "total[0]"),
    "the first rank has the label": (head, "_merge_ranks", "label.sum(0)", "label[0]"),
    "words of a rank begin at zero": (head, "_locate_labels", "labels - work.first", "labels"),
    "words are cut evenly": (loss, "call_of", "first=sum(sizes[:rank])", "first=rank * max(sizes)"),
    "0 * -inf": (head, "_finite", "x.clamp_(min=torch.finfo(x.dtype).min)", "x"),
    "-inf minus -inf": (loss, "facts_of", "most.masked_fill(most.isneginf(), 0.0)", "most"),
    # -- the form of logits
    "temperature of a soft cap is forgotten": (
        loss, "logits_of", "(work.soft_cap / work.temperature)", "(work.soft_cap)",
    ),
    "temperature comes before the soft cap": (
        loss, "logits_of",
        ".mul_(work.scale / work.soft_cap).tanh_().mul_(work.soft_cap / work.temperature)",
        ".mul_(work.scale / work.soft_cap / work.temperature).tanh_().mul_(work.soft_cap)",
    ),
    "the slope of a soft cap is 1": (head, "to_gradients", "value=-1", "value=0"),
    "the gradient is not scaled": (head, "to_gradients", "factor = work.scale / work.temperature", "factor = 1"),
    # -- losses
    "smoothing has no gradient": (LossTerms, "slopes", "-self.smoothing / max(num_words, 1)", "0.0"),
    "smoothing is over a rank's own words": (
        loss, "call_of",
        'Inputs(sum_gradients(flat_values, group, "a head"), weight, bias), work, num_words',
        'Inputs(sum_gradients(flat_values, group, "a head"), weight, bias), work, local',
    ),
    "smoothing leaves the label its whole share": (LossTerms, "slopes", "self.smoothing - 1)", "-1.0)"),
    "the slope of a square is one": (LossTerms, "slopes", "2 * self.z_loss * lse", "self.z_loss * lse"),
    "z-loss is not in the loss": (LossTerms, "losses", "losses + self.z_loss * facts.lse.square()", "losses"),
    "labels of other ranks are not counted": (
        loss, "token_loss",
        "all_summed(sums, members)",
        "sums[0] = all_summed(sums.clone(), members)[0]",
    ),
    "labels of eight bits are compared as they are": (
        loss, "token_loss", "labels.reshape(-1).long()", "labels.reshape(-1)",
    ),
    "labels are not looked at": (head, "check_range", "labels.numel() and", "False and"),
    # -- gradients
    "the label's own gradient is lost": (
        head, "to_gradients", "torch.where(own, slopes.label, 0)", "torch.zeros_like(slopes.label)",
    ),
    "the last slab's bias is all": (Gradients, "add", "self.bias += grad.sum(0)", "self.bias = grad.sum(0)"),
    "the last slab's weight is all": (
        Gradients, "add", "addmm_(grads.t(), rows)", "addmm_(grads.t(), rows, beta=0)",
    ),
    "weights are summed in their own dtype": (
        Gradients, "__init__", "dtype=accumulation_dtype(x.dtype)", "dtype=x.dtype",
    ),
    "rows of tokens without labels are taken": (
        SlabWork, "rows_of", "tensor.index_select(0, self.places[span])", "tensor[span]",
    ),
    "gradients go to tokens without labels": (
        SlabWork, "put", "target.index_copy_(0, self.places[span], rows.to(target.dtype))", "target[span] = rows",
    ),
    "a second backward takes what the first has scaled": (
        SlabLoss, "backward", "ready, ctx.ready = ctx.ready, None", "ready = ctx.ready",
    ),
    "what comes in is not multiplied": (SlabLoss, "backward", "x.mul_(grads[0])", "x"),
    "entropy has no gradient of its own": (
        PerToken, "backward", "log_p=None if of_entropy is None else -of_entropy", "log_p=None",
    ),
    "entropy has no gradient by its sum": (
        PerToken, "backward", "plain - of_entropy * work.rows_of(entropies, everything)", "plain",
    ),
    "hidden states have the gradient of a rank's own words": (
        SumHere, "backward", "*(total.to(grad.dtype) for grad in grads)", "*grads",
    ),
    "ranks with other tokens are taken for ranks with other words": (
        head, "_sizes", "if len(set(tokens)) > 1 or len(set(sums)) > 1", "if len(set(tokens)) > 1",
    ),
}  # fmt: skip


def test_without_a_mutant_nothing_fails():
    assert first_failure() is None


def test_there_are_enough():
    assert len(MUTANTS) >= 25


@pytest.mark.share(5)
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_killed(name, monkeypatch):
    plant(monkeypatch, *MUTANTS[name])
    assert first_failure(), f"{name}: nothing noticed it"
