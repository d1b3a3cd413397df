"""prove_model: a right step over simulated ranks passes, each planted fault is found and named, its twin is not."""

import copy
import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
import torch.utils.checkpoint
from torch import nn

import longspan as ls
from longspan.errors import LongspanError, PlanError
from longspan.run.simulated import NotSimulatedError, simulate
from longspan.training import BatchError, check_same, gather_outputs, relayout, shard_batch, token_loss
from longspan.verification import prove_model, verify, verify_model
from tests.score_cases import any_layout

pytestmark = pytest.mark.timeout(60)

TOKENS, LENGTHS, VOCABULARY = 37, [11, 7, 19], 23
MASK = ls.masks.documents(LENGTHS) & ls.masks.causal()


class Way:
    """How tokens meet: on one device, or on one rank."""

    def __init__(self, layout=None, group=None, dtype="float64"):
        self.group, self.plans = group, {}
        if layout is not None:
            self.plans = {
                "plan": ls.plan(MASK, layout, q_heads=2, kv_heads=1, head_dim=4, dtype=dtype, batch=2),
                "conv": ls.conv_plan(LENGTHS, layout, channels=8, width=3, dtype=dtype, batch=2),
            }

    def attend(self, q, k, v):
        return ls.attention(q, k, v, self.plans.get("plan", MASK), group=self.group)

    def convolve(self, x, weight):
        where = {"plan": self.plans["conv"], "group": self.group} if self.plans else {"documents": LENGTHS}
        return ls.causal_conv1d(x, weight, **where)


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 3))

    def forward(self, x, way):
        return way.convolve(x, self.weight)


class OwnConv(Conv):
    """Over the tokens that are here, documents apart or not."""

    def forward(self, x, way):
        return ls.causal_conv1d(x, self.weight)


class Mean(nn.Module):
    def forward(self, x, way):
        return x - x.mean(1, keepdim=True)


class OverFeatures(nn.Module):
    def forward(self, x, way):
        return x - x.mean(2, keepdim=True)


class Block(nn.Module):
    def __init__(self, local_attention=False):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(8, 8)
        self.local_attention = local_attention

    def forward(self, x, way):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (4, 4)).transpose(1, 2).split([2, 1, 1], 1)
        if self.local_attention:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            out = way.attend(q, k, v)
        return x + self.out(out.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, mix=None, **options):
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.place = nn.Embedding(VOCABULARY, 8), nn.Embedding(TOKENS, 8)
        self.first, self.mix, self.second = Block(), mix or Conv(), Block(**options)
        self.head = nn.Linear(8, VOCABULARY)
        self.calls = 0

    def forward(self, ids, positions, way):
        self.calls += 1
        x = self.embed(ids) + self.place(positions)
        return self.head(self.second(self.mix(self.first(x, way), way), way))


def drawn(seed=0):
    ids = torch.randint(0, VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[:, : TOKENS // 3] = -100  # a prompt: ranks hold different numbers of labels
    return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(TOKENS).expand(2, -1)}


ONE = ls.layouts.contiguous(TOKENS, 1)


def whole(model, batch):
    mine = shard_batch(batch, ONE, 0, documents=LENGTHS)
    logits = model(mine["input_ids"], mine["position_ids"], Way())
    return token_loss(logits, mine["shift_labels"], group=None, gradients="sum"), logits


def local(model, batch, layout, group, *, dtype="float64", gradients="sum"):
    check_same(batch, group)
    mine = shard_batch(batch, layout, group.rank(), documents=LENGTHS)
    logits = model(mine["input_ids"], mine["position_ids"], Way(layout, group, dtype))
    return token_loss(logits, mine["shift_labels"], group=group, gradients=gradients), logits


def local_positions(model, batch, layout, group):
    mine = shard_batch(batch, layout, group.rank(), documents=LENGTHS)
    here = torch.arange(mine["input_ids"].shape[1]).expand(2, -1)
    logits = model(mine["input_ids"], here, Way(layout, group))
    return token_loss(logits, mine["shift_labels"], group=group, gradients="sum"), logits


def own_labels(model, batch, layout, group):
    mine = shard_batch(batch, layout, group.rank(), documents=LENGTHS)
    logits = model(mine["input_ids"], mine["position_ids"], Way(layout, group))
    return token_loss(logits, mine["shift_labels"], group=None, gradients="sum"), logits


def late_shift(model, batch, layout, group):
    mine = {name: layout.shard(value, group.rank(), 1) for name, value in batch.items()}
    logits = model(mine["input_ids"], mine["position_ids"], Way(layout, group))
    labels = F.pad(mine["labels"][:, 1:], (0, 1), value=-100)
    return token_loss(logits, labels, group=group, gradients="sum"), logits


def whole_shift(model, batch):
    """One device without documents in labels, which `late_shift` is to be compared with."""
    logits = model(batch["input_ids"], batch["position_ids"], Way())
    labels = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    return token_loss(logits, labels, group=None, gradients="sum"), logits


def test_a_right_model_is_right_and_not_touched():
    model = Model()
    before = copy.deepcopy(model.state_dict())
    began = time.process_time()
    report = prove_model(model, drawn(), local=local, whole=whole)
    assert time.process_time() - began < 3
    assert report.ok, report
    assert report.notes == ()
    assert {check.tensor for check in report.checks} == {
        "loss",
        "logits",
        *(f"gradient of {name}" for name, _ in model.named_parameters()),
    }
    assert all(check.error <= 1e-12 for check in report.checks)  # float64, though budgets are those of float32
    assert "RIGHT: Model over" in str(report)
    assert model.calls == 0
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


FAULTS = {
    "local positions": (Model, local_positions, whole, "positions local", "place (Embedding)"),
    "a mean over tokens": (lambda: Model(Mean()), local, whole, None, "mix (Mean)"),
    "a convolution over tokens": (lambda: Model(OwnConv()), local, whole, None, "mix (OwnConv)"),
    "local labels": (Model, own_labels, whole, "mean of the ranks' means", None),
    "a late shift": (Model, late_shift, whole_shift, "labels shifted late", None),
    "attention over local tokens": (lambda: Model(local_attention=True), local, whole, None, "second (Block)"),
}
LAYOUTS = ("zigzag", "contiguous", "striped")


@pytest.mark.share(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found_and_named(fault, layout):
    made, step, one, cause, module = FAULTS[fault]
    report = prove_model(
        made(), drawn(), local=step, whole=lambda m, b, mask: one(m, b), layouts=(layout,), ranks=3, mask=MASK
    )
    assert not report.ok
    if cause is not None:
        assert report.causes == (cause,), report
    else:
        assert report.causes == ("a module computes something else over ranks",), report
    for finding in report.findings:
        if module is None:
            assert "first in" not in finding.what
            assert "Every module's output is one device's" in finding.evidence
        else:
            assert finding.what == f"differs, first in {module}"
    assert report.notes[-1].startswith("detected with <layout")


@pytest.mark.share(3)
@pytest.mark.parametrize(
    ("made", "one"), [(lambda: Model(OverFeatures()), whole), (Model, whole), (lambda: Model(Conv()), whole)]
)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_healthy_twins_are_right(made, one, ranks):
    assert prove_model(made(), drawn(ranks), local=local, whole=one, ranks=ranks).ok


@pytest.mark.parametrize("seed", range(4))
def test_any_layout_and_a_mask(seed):
    layout = any_layout(np.random.default_rng(seed), MASK, TOKENS, 2 + seed % 3)
    balanced = ls.layouts.balanced(MASK, world_size=2)
    report = prove_model(
        Model(), drawn(seed), local=local, whole=lambda m, b, mask: whole(m, b), layouts=[layout, balanced], mask=MASK
    )
    assert report.ok, report


def test_masks_are_recognised_where_one_device_uses_them():
    class Plain(Way):
        def __init__(self, mask, layout=None, group=None):
            self.group, self.given = group, mask
            if layout is not None:
                self.given = ls.plan(mask, layout, q_heads=2, kv_heads=1, head_dim=4, dtype="float64", batch=2)

        def attend(self, q, k, v):
            return ls.attention(q, k, v, self.given, group=self.group)

    def one(model, batch, mask):
        logits = model(batch["input_ids"], batch["position_ids"], Plain(mask))
        return token_loss(logits, batch["labels"], group=None, gradients="sum"), logits

    def over(mask):
        def step(model, batch, layout, group):
            ids, positions = (layout.shard(batch[n], group.rank(), 1) for n in ("input_ids", "position_ids"))
            labels = layout.shard(batch["labels"], group.rank(), 1, -100)
            logits = model(ids, positions, Plain(mask, layout, group))
            return token_loss(logits, labels, group=group, gradients="sum"), logits

        return step

    model = Model(OverFeatures())
    assert prove_model(model, drawn(), local=over(MASK), whole=one, mask=MASK).ok
    report = prove_model(model, drawn(), local=over(ls.masks.causal()), whole=one, mask=MASK)
    assert report.causes == ("mask replaced by plain causal",)
    assert report.findings[0].what.endswith("first in first (Block)")


# -- how a step may be written -----------------------------------------------------------------------------------------


def test_gradients_that_are_averaged_and_losses_that_are_shares():
    def average(*given):
        return local(*given, gradients="average")

    assert prove_model(Model(), drawn(), local=average, whole=whole, gradients="average", ranks=3).ok
    report = prove_model(Model(), drawn(), local=average, whole=whole, ranks=3)
    assert report.causes == ("gradients scaled",)

    def share(model, batch, layout, group):
        mine = shard_batch(batch, layout, group.rank(), documents=LENGTHS)
        logits = model(mine["input_ids"], mine["position_ids"], Way(layout, group))
        count = (shard_batch(batch, ONE, 0, documents=LENGTHS)["shift_labels"] != -100).sum()
        return F.cross_entropy(logits.flatten(0, 1), mine["shift_labels"].flatten(), reduction="sum") / count, logits

    assert prove_model(Model(), drawn(), local=share, whole=whole, loss="share").ok
    assert prove_model(Model(), drawn(), local=share, whole=whole).causes == ("loss not reduced",)


@pytest.mark.parametrize("made", [Model, lambda: Model(OwnConv())])
def test_a_plan_in_the_models_dtype_is_no_reason_to_refuse(made):
    def narrow(*given):
        return local(*given, dtype="float32")

    report = prove_model(made(), drawn(), local=narrow, whole=whole)
    assert report.ok == (type(made().mix) is Conv), report
    assert "local does not run in float64 (PlanError" in report.notes[0]


def test_what_the_caller_is_in_the_middle_of_does_not_matter():
    with torch.no_grad(), torch.autocast("cpu"):
        assert prove_model(Model(), drawn(), local=local, whole=whole).ok
    model, batch = Model(), drawn()
    state = torch.random.get_rng_state()
    with torch.inference_mode():
        assert prove_model(model, batch, local=local, whole=whole).ok
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("made", [Model, lambda: Model(OwnConv())])
def test_bfloat16_and_compiled_models_are_proved_in_float64(made):
    is_right = type(made().mix) is Conv
    for model in (made().bfloat16(), torch.compile(made(), backend="eager"), made().double()):
        report = prove_model(model, drawn(), local=local, whole=whole)
        assert report.ok == is_right, report
        assert report.notes == () or not is_right
        assert not is_right or all(check.error <= 1e-12 for check in report.checks)
        assert all(check.budget < 1e-4 for check in report.checks)


def test_parts_in_float32_are_no_false_alarm():
    class Narrow(nn.Module):
        """Attention and a norm in float32, as many models have them."""

        def forward(self, x, way):
            return F.rms_norm(x.float(), (8,)).to(x.dtype)

    class NarrowWay(Way):
        def attend(self, q, k, v):
            return super().attend(q.float(), k.float(), v.float()).to(q.dtype)

    def step(model, batch, layout, group):
        mine = shard_batch(batch, layout, group.rank(), documents=LENGTHS)
        logits = model(mine["input_ids"], mine["position_ids"], NarrowWay(layout, group, "float32"))
        return token_loss(logits, mine["shift_labels"], group=group, gradients="sum"), logits

    for seed in range(4):
        report = prove_model(Model(Narrow()), drawn(seed), local=step, whole=whole)
        assert report.ok, report
    assert not prove_model(Model(Mean()), drawn(), local=step, whole=whole).ok


class Scaled(nn.Module):
    """Adds tokens times frozen, quantized weights; over ranks 2% more if `factor` says so."""

    def __init__(self, factor=1.0, dtype=torch.int8):
        super().__init__()
        weight = torch.arange(1, 9).to(dtype)
        self.weight, self.factor = nn.Parameter(weight, requires_grad=dtype.is_complex), factor

    def forward(self, x, way):
        factor = self.factor if way.plans else 1.0
        weight = torch.view_as_real(self.weight).sum(-1) if self.weight.is_complex() else self.weight
        return x * weight.to(x.dtype) * factor


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.complex64])
def test_parameters_that_are_quantized_or_complex_do_not_widen_budgets(dtype):
    assert prove_model(Model(Scaled(dtype=dtype)), drawn(), local=local, whole=whole).ok
    report = prove_model(Model(Scaled(1.02, dtype)), drawn(), local=local, whole=whole)
    assert report.findings, report
    assert all(check.budget < 1e-2 for check in report.checks)


def test_imaginary_parts_of_gradients_are_compared():
    class Turned(Scaled):
        """Over ranks the imaginary parts get no gradient."""

        def forward(self, x, way):
            real, imaginary = torch.view_as_real(self.weight).unbind(-1)
            imaginary = imaginary.detach() if way.plans and self.factor else imaginary
            return x * (real + imaginary).to(x.dtype)

    assert prove_model(Model(Turned(0.0, torch.complex64)), drawn(), local=local, whole=whole).ok
    report = prove_model(Model(Turned(1.0, torch.complex64)), drawn(), local=local, whole=whole)
    assert [finding.tensor for finding in report.findings] == ["gradient of mix.weight"]


class Padded(Model):
    """Logits of vocabulary entries that do not exist are constants."""

    def __init__(self, fill, factor=1.0):
        super().__init__()
        self.fill, self.factor = fill, factor

    def forward(self, ids, positions, way):
        logits = super().forward(ids, positions, way)
        fill = torch.finfo(logits.dtype).min if self.fill is None else self.fill
        columns = torch.full_like(logits[..., :2], fill)
        return torch.cat((logits + (self.factor - 1) * bool(way.plans), columns), -1)


@pytest.mark.parametrize("fill", [None, -torch.inf, -1e9])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_constant_logits_of_padding_neither_fail_nor_hide_mistakes(fill, dtype):
    def step(model, *given):
        if model.head.weight.dtype != dtype:
            raise TypeError("another dtype")
        return local(model, *given, dtype=str(dtype).removeprefix("torch."))

    report = prove_model(Padded(fill), drawn(), local=step, whole=whole)
    assert report.ok, report
    # The same number more for every entry does not change the loss.
    report = prove_model(Padded(fill, 1.02), drawn(), local=step, whole=whole)
    assert [finding.tensor for finding in report.findings] == ["logits"]


def test_numbers_that_overflow_in_the_models_dtype_are_refused():
    class Narrow(nn.Module):
        def forward(self, x, way):
            return x * 1e6 * 1e-6 if x.dtype == torch.float64 else x.half().mul(1e6).to(x.dtype)

    def step(model, *given):
        if model.head.weight.dtype == torch.float64:
            raise TypeError("no float64 here")
        return local(model, *given, dtype="float32")

    with pytest.raises(PlanError, match=r"one-device step into infinite ones, or into nan \(loss, logits"):
        prove_model(Model(Narrow()), drawn(), local=step, whole=whole)


def test_frozen_models_are_compared_by_loss_and_logits():
    model = Model().requires_grad_(False)
    report = prove_model(model, drawn(), local=local, whole=whole)
    assert [check.tensor for check in report.checks] == ["loss", "logits"]
    assert not prove_model(Model(Mean()).requires_grad_(False), drawn(), local=local, whole=whole).ok
    with pytest.raises(PlanError, match="the loss of the one-device step must require gradients"):
        prove_model(
            Model(),
            drawn(),
            local=lambda *given: local(*given, dtype="float32"),
            whole=lambda m, b: whole(m, b)[0].detach(),
        )


def test_gradients_that_cancel_are_no_false_alarm():
    """The gradient of a key's bias is 0 but for rounding, and attention is in float32 over ranks only."""

    class Keys(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x, way):
            q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
            return way.attend(q, k, v).transpose(1, 2).flatten(2)

    def step(model, batch, layout, group):
        mine = shard_batch(batch, layout, group.rank(), documents=LENGTHS)
        way = Way(layout, group, "float32")
        way.attend = lambda q, k, v: Way.attend(way, q.float(), k.float(), v.float()).to(q.dtype)
        logits = model(mine["input_ids"], mine["position_ids"], way)
        return token_loss(logits, mine["shift_labels"], group=group, gradients="sum"), logits

    report = prove_model(Model(Keys()), drawn(), local=step, whole=whole)
    assert report.ok, report


def test_activation_checkpointing_is_refused_in_words():
    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()

        def forward(self, x, way):
            return torch.utils.checkpoint.checkpoint(self.block, x, way, use_reentrant=False)

    with pytest.raises(LongspanError, match="checkpointing"):
        prove_model(Model(Again()), drawn(), local=local, whole=whole)


def test_what_a_run_remembers_is_not_given_to_the_ranks():
    """The run on one device is right because of a table of positions; ranks fill it themselves."""

    class Remembers(nn.Module):
        table = None

        def forward(self, x, way):
            if self.table is None:
                self.table = torch.arange(x.shape[1], dtype=x.dtype)[None, :, None]
            return x * (1 + self.table[:, : x.shape[1]])

    report = prove_model(Model(Remembers()), drawn(), local=local, whole=whole)
    assert report.findings[0].what == "differs, first in mix (Remembers)"


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_what_cannot_be_meant_is_refused():
    model, batch = Model(), drawn()

    def wrong(words, **options):
        with pytest.raises(PlanError, match=words):
            prove_model(model, options.pop("batch", batch), **{"local": local, "whole": whole, **options})

    wrong("gradients must be 'sum' or 'average'", gradients="done")
    wrong("loss must be", loss="mine")
    wrong("layouts must be a list", layouts="zigzag")
    wrong("layouts must each be one of zigzag, contiguous, striped", layouts=["spiral"])
    wrong("the batch must have input_ids", batch={"x": torch.zeros(3)})
    wrong("logits were returned by local only", whole=lambda m, b: whole(m, b)[0])
    wrong("logits were returned by whole only", local=lambda *given: local(*given)[0])
    wrong(
        r"logits were returned by ranks \[0\] of 2 only",
        local=lambda *given: local(*given)[0] if given[3].rank() else local(*given),
    )
    wrong(
        "gives other numbers when it runs again", whole=lambda m, b: (whole(m, b)[0] * torch.rand(()), whole(m, b)[1])
    )
    model.lock = threading.Lock()
    wrong("every simulated rank needs a copy of the model, and Model cannot be copied")


def test_logits_of_all_tokens_are_told():
    def all_of_them(model, batch, layout, group):
        loss, logits = local(model, batch, layout, group)
        return loss, torch.cat((logits, logits), 1)

    report = prove_model(Model(), drawn(), local=all_of_them, whole=whole)
    assert report.causes == ("logits of another shape",)
    equal_rows = {name: value[:1].repeat(2, 1) for name, value in drawn().items()}
    for at in ((slice(0, 1),), (..., slice(0, 5))):

        def part(*given, at=at):
            loss, logits = local(*given)
            return loss, logits[at]

        report = prove_model(Model(), equal_rows, local=part, whole=whole)
        assert report.causes == ("logits of another shape",)

    def only_zigzag(model, batch, layout, group):
        loss, logits = local(model, batch, layout, group)
        return (loss, logits) if layout.name == "zigzag" else loss

    with pytest.raises(PlanError, match="logits were returned by whole only"):
        prove_model(Model(), drawn(), local=only_zigzag, whole=whole)


def test_errors_of_the_step_come_out_with_their_place():
    def broken(model, batch, layout, group):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        prove_model(Model(), drawn(), local=broken, whole=whole)
    assert "on simulated ranks" in caught.value.__notes__[0]


CALLS = {
    "all_reduce": lambda x, group: dist.all_reduce(x, group=group),
    "all_gather": lambda x, group: dist.all_gather([x, x], x, group=group),
    "broadcast": lambda x, group: dist.broadcast(x, 0, group=group),
    "barrier": lambda x, group: dist.barrier(group),
    "get_rank": lambda x, group: dist.get_rank(group),
    "all_to_all_single": lambda x, group: dist.all_to_all_single(x, x, group=group),
    "reduce_scatter": lambda x, group: dist.reduce_scatter(x, [x, x], group=group),
    "send": lambda x, group: dist.send(x, 0, group=group),
}


@pytest.mark.parametrize("is_initialised", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_calls_of_torch_are_refused_in_words(call, is_initialised, tmp_path):
    if is_initialised:
        dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        with pytest.raises(NotSimulatedError, match=rf"called torch.distributed\.{call}, .*group.rank\(\)") as caught:
            simulate(2, lambda rank: CALLS[call](torch.ones(2), rank))
        assert caught.value.__cause__ is not None
    finally:
        if is_initialised:
            dist.destroy_process_group()


def test_the_number_of_ranks_is_known():
    assert simulate(3, lambda rank: (rank.size(), dist.get_world_size(rank))) == [(3, 3)] * 3


def test_errors_that_are_not_torchs_stay_what_they_are():
    with pytest.raises(ZeroDivisionError):
        simulate(2, lambda rank: 1 // rank.rank())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        simulate(2, lambda rank: F.linear(torch.ones(2, 2), torch.ones(3, 3)))
    assert not isinstance(caught.value, LongspanError)


# -- longspan.training on simulated ranks ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_relayout_and_gather_outputs(seed):
    x = torch.randn(2, TOKENS, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()
    source, target = ls.layouts.zigzag(TOKENS, 3), ls.layouts.contiguous(TOKENS, 3)
    weights = torch.randn(2, TOKENS, 3, generator=torch.Generator().manual_seed(9), dtype=torch.float64)

    def work(rank):
        moved = relayout(source.shard(x, rank.rank(), 1), source, target, rank, 1)
        with torch.no_grad():
            gathered = [gather_outputs(moved, target, rank, 1, to=to) for to in (None, 1)]
        return moved, gathered

    found = simulate(3, work)
    for rank, (moved, (everywhere, there)) in enumerate(found):
        assert torch.equal(moved, target.shard(x, rank, 1))
        assert torch.equal(everywhere, x.detach())
        assert (there is None) if rank != 1 else torch.equal(there, x.detach())
    total = sum((moved * target.shard(weights, rank, 1)).sum() for rank, (moved, _) in enumerate(found))
    assert torch.equal(torch.autograd.grad(total, x)[0], weights)
    everywhere = [gathered[0] for _, gathered in found]
    everywhere[0].zero_()  # every rank has one of its own
    assert everywhere[1].any()


def test_relayout_to_an_equal_layout_clears_padding():
    layout = ls.layouts.zigzag(5, 2, equal_tokens=True)
    shards = [torch.full((3,), 7.0, requires_grad=True) for _ in range(2)]
    outs = simulate(2, lambda rank: relayout(shards[rank.rank()], layout, layout, rank, 0))
    kept = torch.tensor([[1.0] * int(n) + [0.0] * (3 - int(n)) for n in layout.num_tokens])
    assert torch.equal(torch.stack(outs), 7 * kept)
    assert torch.equal(torch.stack(torch.autograd.grad(torch.stack(outs).sum(), shards)), kept)


ODD = {
    "texts": np.array(["a", "bc"]), "dates": np.array(["2026-11-19"], dtype="datetime64[D]"), 3: 1,
    "reversed": np.arange(6)[::-2], "big": np.arange(3, dtype=">i4"), "conj": torch.ones(2, dtype=torch.cfloat).conj(),
}  # fmt: skip


def test_check_same_compares_arrays_of_all_kinds_and_reports_others_on_all_ranks():
    assert simulate(2, lambda rank: check_same(ODD, rank)) == [None] * 2
    for key, other in (("reversed", np.arange(6)[::2]), ("texts", np.array(["a", "bd"])), ("conj", torch.ones(2) * 1j)):
        with pytest.raises(BatchError, match=key):
            simulate(2, lambda rank, k=key, o=other: check_same(ODD if rank.rank() else {**ODD, k: o}, rank))
    with pytest.raises(BatchError, match="the batch has values of other types"):
        simulate(2, lambda rank: check_same({"x": np.ones(2, dtype=np.longdouble)} if rank.rank() else {"x": 1}, rank))


def test_check_same_tells_who_differs():
    assert simulate(3, lambda rank: check_same({"ids": torch.arange(3)}, rank)) == [None] * 3
    with pytest.raises(BatchError, match=r"'ids' on ranks \[2\]"):
        simulate(3, lambda rank: check_same({"ids": torch.arange(3) + rank.rank() // 2}, rank))


def test_calls_that_need_processes_say_so():
    layout = ls.layouts.zigzag(8, 2)
    plan = ls.plan(ls.masks.causal(), layout, q_heads=1, kv_heads=1, head_dim=4, dtype="float32")

    for call in (
        lambda rank: verify(lambda q, k, v: q, None, plan, group=rank),
        lambda rank: verify_model(Model(), drawn(), local=local, whole=whole, layout=layout, group=rank),
    ):
        with pytest.raises(BatchError, match="process group"):
            simulate(2, call)
