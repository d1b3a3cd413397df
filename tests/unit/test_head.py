"""Losses and log-probabilities from hidden states and a head: against one device, in every dtype, and their memory."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from longspan.errors import PlanError
from longspan.run.simulated import simulate
from longspan.training import BatchError, Head, token_logprobs, token_loss
from longspan.training import loss_without_logits as slabs
from longspan.training.loss_without_logits import head_of
from tests.gpu.programs import MemoryLedger
from tests.head_cases import BAR, check

ONE = {"group": None, "gradients": "sum"}


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def labelled(tokens, words, share=1.0, seed=1):
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, words, (tokens,), generator=draw)
    return torch.where(torch.rand(tokens, generator=draw) < share, labels, -100)


@pytest.fixture
def tiny(monkeypatch):
    """Slabs of a few tokens."""
    monkeypatch.setattr(slabs, "LEAST", 1)
    monkeypatch.setattr(slabs, "PARTS", 7)


# -- exact -------------------------------------------------------------------------------------------------------------


@pytest.mark.share(3)
@pytest.mark.parametrize("first", range(0, 200, 20))
def test_random_cases_are_those_of_one_device(first):
    for seed in range(first, first + 20):
        error, name = check(seed)
        assert error <= BAR, f"case {seed}: {name}"


def errors(dtype, call, seed):
    """Errors of value and gradients of `call(hidden, weight)` in a dtype, against float64 on the same numbers."""
    hidden, weight = drawn(60, 24, seed=seed, dtype=dtype), drawn(301, 24, seed=seed + 1, dtype=dtype)
    found = []
    for kind in (dtype, torch.float64):
        leaves = [x.clone().to(kind).requires_grad_() for x in (hidden, weight)]
        value = call(*leaves)
        value.backward()
        found.append([value.detach().double(), *(x.grad.double() for x in leaves)])
    return torch.stack([(a - b).norm() / b.norm() for a, b in zip(*found, strict=True)])


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errors_are_those_of_the_plain_head(dtype):
    labels = labelled(60, 301, 0.8)

    def plain(hidden, weight):
        logits = F.linear(hidden, weight).to(torch.promote_types(hidden.dtype, torch.float32))
        return F.cross_entropy(logits, labels, label_smoothing=0.1)

    def ours(hidden, weight):
        return token_loss(hidden, labels, head=weight, label_smoothing=0.1, **ONE)

    def of_tokens(hidden, weight):
        found = token_logprobs(hidden, labels, head=weight)
        return -(0.9 * found.logprobs.sum() + 0.01 * found.entropies.sum()) / (labels >= 0).sum()

    def of_tokens_plain(hidden, weight):
        log_p = F.linear(hidden, weight).to(torch.promote_types(hidden.dtype, torch.float32)).log_softmax(-1)
        kept = labels >= 0
        entropies = -(log_p.exp() * log_p).sum(-1)[kept]
        return -(0.9 * log_p[kept, labels[kept]].sum() + 0.01 * entropies.sum()) / kept.sum()

    for mine, theirs in ((ours, plain), (of_tokens, of_tokens_plain)):
        own = torch.stack([errors(dtype, mine, seed) for seed in range(4)]).mean(0)
        other = torch.stack([errors(dtype, theirs, seed) for seed in range(4)]).mean(0)
        # the loss is a sum in which errors cancel or do not; 2 eps is what it may have in any case
        room = torch.tensor([2 * torch.finfo(dtype).eps, 0.0, 0.0])
        assert (own <= 1.5 * other + room).all(), (own, other)


@pytest.mark.usefixtures("tiny")
def test_logits_far_from_zero_and_words_that_are_impossible():
    logits = drawn(9, 13, dtype=torch.float64) + torch.arange(-4, 5)[:, None] * 1e4
    logits[:, 3] = -torch.inf
    labels = labelled(9, 3)
    left = [x for x in range(13) if x != 3]
    whole, some = logits.clone().requires_grad_(), logits[:, left].clone().requires_grad_()
    found, right = token_logprobs(whole, labels), token_logprobs(some, labels)
    for one, other in zip(found, right, strict=True):
        assert (one - other).abs().max() <= 1e-11  # of 1e4
    torch.stack(found).sum().backward()
    torch.stack(right).sum().backward()
    assert (whole.grad[:, left] - some.grad).abs().max() <= 1e-10
    assert not whole.grad[:, 3].any()


def test_the_entropy_of_a_sure_word_is_small_and_not_noise():
    found = token_logprobs(torch.tensor([[1e4, 1e4 - 30.0, 0.0]], dtype=torch.float64), torch.tensor([0]))
    right = 31 * torch.exp(torch.tensor(-30.0, dtype=torch.float64))
    assert (found.entropies - right).abs().max() <= 1e-3 * right


# -- ranks and labels --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("tiny")
def test_nothing_to_predict_is_a_gradient_of_zero_for_every_parameter():
    hidden, linear = drawn(6, 4).requires_grad_(), nn.Linear(4, 11)
    token_loss(hidden, torch.full((6,), -100), head=linear, **ONE).backward()
    found = token_logprobs(hidden, torch.full((6,), -100), head=linear)
    assert not torch.stack(found).any()
    torch.stack(found).sum().backward()
    for x in (hidden, linear.weight, linear.bias):
        assert x.grad is not None
        assert not x.grad.any()
    empty = token_loss(drawn(0, 4), torch.zeros(0, dtype=torch.int64), head=linear, **ONE)
    assert empty.item() == 0.0


def test_tokens_without_a_label_are_not_computed():
    hidden, weight, labels = drawn(50, 4), drawn(11, 4).requires_grad_(), labelled(50, 11, 0.3)
    kept = labels >= 0
    right = token_loss(hidden[kept], labels[kept], head=weight, **ONE)
    hidden[~kept] = torch.nan
    hidden.requires_grad_()
    found = token_loss(hidden, labels, head=weight, **ONE)
    assert torch.equal(found, right)
    found.backward()
    assert not hidden.grad[~kept].any()
    assert weight.grad.isfinite().all()
    per_token = token_logprobs(hidden, labels, head=weight)
    assert not torch.stack(per_token)[:, ~kept].any()


def test_labels_of_eight_bits_are_words():
    labels = torch.tensor([156, 3], dtype=torch.uint8)  # 156 is what -100 is in eight bits
    for head in (None, torch.zeros(200, 2)):
        values = torch.zeros(2, 200 if head is None else 2)
        assert abs(token_loss(values, labels, head=head, **ONE).item() - 5.2983174) < 1e-5
        assert abs(token_logprobs(values, labels, head=head).logprobs[0].item() + 5.2983174) < 1e-5


def test_ranks_of_a_head_hold_the_same_tokens():
    def work(rank, labels):
        return token_loss(torch.zeros(2, 3), labels, head=Head(torch.zeros(4, 3), group=rank), **ONE)

    with pytest.raises(BatchError, match="labels differ between them"):
        simulate(2, lambda rank: work(rank, torch.tensor([0, rank.rank()])))
    assert simulate(2, lambda rank: round(work(rank, torch.tensor([0, 7])).item(), 4)) == [2.0794, 2.0794]


# -- autograd ----------------------------------------------------------------------------------------------------------


def test_gradients_are_computed_only_where_they_are_wanted(monkeypatch):
    asked = []
    made = slabs.Gradients.__init__
    monkeypatch.setattr(slabs.Gradients, "__init__", lambda s, *a: asked.append(a[-1]) or made(s, *a))
    hidden, linear, labels = drawn(6, 4), nn.Linear(4, 11), labelled(6, 11)
    with torch.no_grad():
        without = token_loss(hidden.clone().requires_grad_(), labels, head=linear, **ONE)
    assert not asked
    linear.requires_grad_(False)
    assert token_loss(hidden, labels, head=linear, **ONE) == without
    assert not asked
    token_loss(hidden.requires_grad_(), labels, head=linear, **ONE).backward()
    token_logprobs(hidden, labels, head=linear).logprobs.sum().backward()
    assert asked == [(True, False, False)] * 2
    assert linear.weight.grad is None


@pytest.mark.usefixtures("tiny")
def test_backward_again_and_never_more_than_once_without_saying_so():
    hidden, weight, labels = drawn(20, 4).requires_grad_(), drawn(11, 4).requires_grad_(), labelled(20, 11, 0.7)
    loss = token_loss(hidden, labels, head=weight, **ONE)
    first = [g.clone() for g in torch.autograd.grad(2 * loss, (hidden, weight), retain_graph=True)]
    second = torch.autograd.grad(loss, (hidden, weight))
    for one, other in zip(first, second, strict=True):
        assert torch.allclose(one, 2 * other, rtol=1e-5, atol=1e-9)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, (hidden, weight))


def test_derivatives_of_derivatives_are_refused():
    hidden, weight, labels = drawn(5, 4).requires_grad_(), drawn(11, 4).requires_grad_(), labelled(5, 11)
    values = (
        token_loss(hidden, labels, head=weight, **ONE),
        token_logprobs(hidden, labels, head=weight).entropies.sum(),
    )
    for value in values:
        (grad,) = torch.autograd.grad(value, hidden, create_graph=True)
        with pytest.raises(PlanError, match="must not be differentiated again"):
            (grad.square().sum() + hidden.sum()).backward(retain_graph=True)
    logits = drawn(5, 11).requires_grad_()  # plain logits are plain PyTorch
    (grad,) = torch.autograd.grad(token_loss(logits, labels, **ONE), logits, create_graph=True)
    grad.square().sum().backward()
    assert logits.grad.any()


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")
@pytest.mark.parametrize("which", ["hidden", "weight", "bias"])
def test_forward_mode_is_refused(which):
    given = {"hidden": drawn(5, 4), "weight": drawn(11, 4), "bias": drawn(11)}
    with forward_ad.dual_level():
        given[which] = forward_ad.make_dual(given[which], torch.ones_like(given[which]))
        for call in (lambda *a, **k: token_loss(*a, **k, **ONE), token_logprobs):
            with pytest.raises(NotImplementedError, match="forward mode AD"):
                call(given["hidden"], labelled(5, 11), head=Head(given["weight"], given["bias"]))


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_change_nothing(reentrant):
    hidden, linear, labels = drawn(20, 4).requires_grad_(), nn.Linear(4, 11), labelled(20, 11, 0.7)

    def step(x):
        x = x.tanh()
        found = token_logprobs(x, labels, head=linear)
        return token_loss(x, labels, head=linear, **ONE) + 0.1 * found.logprobs.mean() + found.entropies.square().mean()

    plain = torch.autograd.grad(step(hidden), (hidden, *linear.parameters()))
    checkpoint(step, hidden, use_reentrant=reentrant).backward()
    for x, right in zip((hidden, *linear.parameters()), plain, strict=True):
        assert torch.allclose(x.grad, right, rtol=1e-6, atol=1e-8)


def test_autocast_does_what_it_does_to_linear():
    hidden, linear, labels = drawn(30, 8).requires_grad_(), nn.Linear(8, 50), labelled(30, 50)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        right = F.cross_entropy(linear(hidden), labels)
        found = token_loss(hidden, labels, head=linear, **ONE)
        other = -token_logprobs(hidden.bfloat16(), labels, head=linear).logprobs.mean()
    assert found.dtype == other.dtype == torch.float32
    leaves = (hidden, *linear.parameters())
    for one in (found, other):
        assert abs(one.item() - right.item()) <= 1e-6 * right.item()
    for one, mine in zip(torch.autograd.grad(right, leaves), torch.autograd.grad(found, leaves), strict=True):
        assert mine.dtype == torch.float32
        assert (mine - one).norm() <= 2e-2 * one.norm()


def test_backward_under_autocast_is_that_of_forward():
    hidden, weight, labels = drawn(30, 8).requires_grad_(), drawn(50, 8).requires_grad_(), labelled(30, 50)
    value = token_logprobs(hidden, labels, head=weight).logprobs.sum()
    right = torch.autograd.grad(value, (hidden, weight), retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = torch.autograd.grad(value, (hidden, weight))
    for one, other in zip(found, right, strict=True):
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # hidden by dynamo, unless warnings are errors
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # and so is this
def test_compiled_code_stops_and_goes_on():
    hidden, linear, labels = drawn(12, 4).requires_grad_(), nn.Linear(4, 11), labelled(12, 11, 0.7)

    def step(x):
        x = x.tanh()
        return token_loss(x, labels, head=linear, **ONE) * 2 + token_logprobs(x, labels, head=linear).entropies.sum()

    leaves = (hidden, *linear.parameters())
    right = torch.autograd.grad(step(hidden), leaves)
    found = torch.autograd.grad(torch.compile(step, backend="aot_eager")(hidden), leaves)
    for one, other in zip(found, right, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-7)
    logits = drawn(12, 11).requires_grad_()  # of logits there is one graph
    whole = torch.compile(lambda x: token_loss(x, labels, z_loss=0.1, **ONE), backend="aot_eager", fullgraph=True)
    assert torch.allclose(whole(logits), token_loss(logits, labels, z_loss=0.1, **ONE))


# -- heads as they are given -------------------------------------------------------------------------------------------


def test_a_linear_layer_that_does_more_is_refused():
    class Adapted(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    watched, patched = nn.Linear(4, 11), nn.Linear(4, 11)
    watched.register_forward_hook(lambda *_: None)
    patched.forward = lambda x: x
    for linear in (Adapted(4, 11), watched, patched):
        with pytest.raises(BatchError, match="would not be called"):
            head_of(linear)
    plain = nn.utils.parametrizations.weight_norm(nn.Linear(4, 11))  # its weight is computed when it is asked for
    hidden, labels = drawn(5, 4), labelled(5, 11)
    right = F.cross_entropy(plain(hidden), labels)
    assert torch.allclose(token_loss(hidden, labels, head=plain, **ONE), right)


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.share(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [1.0, 0.6])
def test_memory_is_a_slab(monkeypatch, dtype, share):
    """What there is at once beyond inputs and gradients; logits of all tokens are 24 slabs."""
    monkeypatch.setattr(slabs, "LEAST", 1)
    tokens, words, width = 2400, 4000, 16
    hidden, weight = (
        drawn(tokens, width, dtype=dtype).requires_grad_(),
        drawn(words, width, dtype=dtype).requires_grad_(),
    )
    bias, labels = drawn(words, dtype=dtype).requires_grad_(), labelled(tokens, words, share)
    head = Head(weight, bias, soft_cap=9.0)
    slab = slabs.rows_for(int((labels >= 0).sum()), words, 4) * words * 4
    given = (tokens * width + words * (width + 1)) * weight.itemsize  # as many bytes as their gradients
    results = given + tokens * width * weight.itemsize + 4 * words * (width + 1)
    small = 8 * tokens * 16  # labels, their places, and a few numbers per token

    def peak(call):
        with MemoryLedger() as ledger:
            call()
        return ledger.peak - results - small

    def of_tokens():
        found = token_logprobs(hidden, labels, head=head)
        torch.autograd.grad(torch.stack(found).sum(), (hidden, weight, bias))

    def of_loss():
        loss = token_loss(hidden, labels, head=head, label_smoothing=0.1, z_loss=0.1, **ONE)
        torch.autograd.grad(loss, (hidden, weight, bias))

    for call in (of_loss, of_tokens):
        assert 0.8 * slab <= peak(call) <= 1.2 * slab
        assert peak(call) <= tokens * words * 4 / 20


def test_log_probabilities_of_logits_take_no_copy_of_them():
    logits, labels = drawn(2400, 2000, dtype=torch.bfloat16).requires_grad_(), labelled(2400, 2000)
    with pytest.MonkeyPatch.context() as patch, MemoryLedger() as ledger:
        patch.setattr(slabs, "LEAST", 1)
        found = token_logprobs(logits, labels)
        torch.autograd.grad(torch.stack(found).sum(), logits)
    assert ledger.peak <= 2.2 * logits.numel() * logits.itemsize  # they, their gradients, and a slab
