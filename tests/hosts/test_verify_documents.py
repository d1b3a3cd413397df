"""verify_documents: models of transformers and plain modules that keep packed documents apart, or not, on one device.

Reverse of every promise: what keeps documents apart is never flagged, whatever experts, padding and dtype it has.
"""

import json

import pytest
import torch
from torch import nn

from longspan.errors import PlanError
from longspan.verification import VerifyError, verify_documents
from longspan.verification.documents import DOCUMENTS_LEAK, read_documents
from tests.hosts import hf_hybrid_work, verify_documents_work
from tests.pool import pool

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore::DeprecationWarning")]
LEAKS = {
    "qwen3_next": "model.layers.0.linear_attn (Qwen3NextGatedDeltaNet)",
    "bamba": "model.layers.0.mamba (BambaMixer)",
    "lfm2": "model.layers.0.conv (Lfm2ShortConv)",
    "kimi_linear": "model.layers.0.self_attn (KimiLinearDeltaAttention)",
    "falcon_h1": "model.layers.0.mamba (FalconH1Mixer)",
    "nemotron_h": "model.layers.0.mixer (NemotronHMamba2Mixer)",
}


def require(model_type, over_ranks=False):
    """Skips what the installed transformers does not have."""
    pytest.importorskip("transformers")
    from tests.hosts import hf_versions

    hf_versions.skip_unknown(model_type)
    if over_ranks and not hf_versions.has_hybrid(model_type):
        pytest.skip(hf_versions.NO_HYBRIDS)
    if not hf_versions.HAS_HYBRIDS and model_type == "nemotron_h":
        pytest.skip("before 5.15, transformers had other names for kinds of layers")


# -- models of transformers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", LEAKS)
def test_hybrids_leak_and_their_layer_is_named(model_type):
    require(model_type)
    model = hf_hybrid_work.model_of(model_type, "sdpa").float()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    report = verify_documents(model, hf_hybrid_work.batch_of("packed")[0])
    assert report.causes == (DOCUMENTS_LEAK,)
    (finding,) = report.findings
    assert finding.what == f"mixes documents, first in {LEAKS[model_type]}"
    assert LEAKS[model_type] in str(report)
    assert "shard_inputs(model, batch, group)" in finding.advice
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert not any(part._forward_hooks for part in model.modules())
    json.dumps(report.as_dict())
    with pytest.raises(VerifyError, match="documents leak on one device"):
        report.raise_if_wrong()


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "mixtral", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_alone_does_not_leak(model_type, dtype):
    pytest.importorskip("transformers")
    for attention in ("sdpa", "longspan"):
        model = verify_documents_work.model_of(model_type, attention).to(dtype)
        report = verify_documents(model, hf_hybrid_work.batch_of("packed")[0])
        assert report.ok, report


def test_a_cache_makes_attention_leak():
    """transformers looks for documents in position_ids only without one; who asks for it is told."""
    pytest.importorskip("transformers")
    batch = {**hf_hybrid_work.batch_of("packed")[0], "use_cache": True}
    report = verify_documents(verify_documents_work.model_of("llama", "sdpa"), batch)
    assert report.findings[0].what == "mixes documents, first in model.layers.0.self_attn (LlamaAttention)"


@pytest.mark.parametrize("model_type", ["qwen3_next", "bamba", "lfm2"])
def test_a_group_of_one_does_not_leak(model_type):
    """What the advice says: the same model and batch through `shard_inputs`."""
    require(model_type, over_ranks=True)
    ok, text = pool(1).run(verify_documents_work.through_shard_inputs, model_type, timeout=200)[0]
    assert ok, text


def test_a_step_whose_one_device_run_leaks():
    """verify_model: ranks that keep documents apart differ from one device that does not, and that is the cause."""
    require("lfm2", over_ranks=True)
    for said in pool(2).run(verify_documents_work.steps, timeout=250):
        (ok, causes, what), right = said
        assert not ok
        assert causes == (DOCUMENTS_LEAK,)
        assert what == "mixes documents, first in model.layers.0.conv (Lfm2ShortConv)"
        assert right == (True, ())


# -- plain modules -----------------------------------------------------------------------------------------------------


class Before(nn.Module):
    """Adds the token before; of documents as these numbers say, or of anything."""

    def __init__(self, numbers=None, ahead=1):
        super().__init__()
        self.numbers, self.ahead = numbers, ahead

    def forward(self, x):
        other = x.roll(self.ahead, 1)
        if self.numbers is None:
            return x + other
        return x + other * (self.numbers == self.numbers.roll(self.ahead, 1))[..., None]


class Mean(nn.Module):
    def forward(self, x):
        return x + 1e-3 * x.mean(1, keepdim=True)


class Rounds(nn.Module):
    """Adds something of all documents and takes it away: what is left of them is rounding."""

    def forward(self, x):
        return x + 100 * x.mean(1, keepdim=True) - 100 * x.mean(1, keepdim=True)


def stack(*layers):
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 6), *layers, nn.Linear(6, 11))


def run(model, batch):
    return model(batch["input_ids"])


LENGTHS = [5, 1, 4, 6]
NUMBERS = torch.arange(4).repeat_interleave(torch.tensor(LENGTHS))[None]


@pytest.mark.parametrize(
    ("layers", "name"),
    [
        ((Before(),), "2 (Before)"),
        ((nn.SiLU(), Before()), "3 (Before)"),
        ((nn.Sequential(nn.Linear(6, 6), Before(ahead=-1)),), "2.1 (Before)"),  # the document after it
        ((Mean(),), "2 (Mean)"),
        ((Before(ahead=7),), "2 (Before)"),  # past the neighbour
        ((Before(NUMBERS), nn.Tanh(), Before()), "4 (Before)"),
        ((Before(NUMBERS),), None),
        ((nn.Dropout(0.0), nn.LayerNorm(6)), None),
    ],
)
@pytest.mark.parametrize("rows", [1, 3])
def test_the_first_module_that_leaks_is_named(layers, name, rows):
    torch.manual_seed(3)
    batch = {"input_ids": torch.randint(0, 11, (rows, 16))}
    report = verify_documents(stack(*layers), batch, run=run, documents=LENGTHS)
    assert report.ok == (name is None), report
    if name is not None:
        assert report.findings[0].what == f"mixes documents, first in {name}"
        assert "Pass documents to this layer" in report.findings[0].advice


def test_rounding_is_no_leak():
    batch = {"input_ids": torch.randint(0, 11, (2, 16))}
    report = verify_documents(stack(Rounds()), batch, run=run, documents=LENGTHS)
    assert report.ok, report
    assert report.checks[0].error > 0


def test_any_two_documents_are_apart_in_some_probe_both_ways():
    given = read_documents({"input_ids": torch.zeros(1, 16, dtype=torch.long)}, NUMBERS.numpy())
    pairs = {
        (int(a), int(b))
        for replaced, watched in given.probes()
        for a in NUMBERS[0][replaced[0]]
        for b in NUMBERS[0][watched[0]]
    }
    assert pairs == {(a, b) for a in range(4) for b in range(4) if a != b}


def test_padding_is_not_judged():
    """Tokens of padding may be anything: their positions jump, and they are no documents."""
    mask = torch.ones(1, 16, dtype=torch.long)
    mask[:, :5] = 0
    batch = {"input_ids": torch.arange(16)[None] % 11, "attention_mask": mask, "position_ids": NUMBERS}
    given = read_documents(batch)
    for replaced, watched in given.probes():
        assert not replaced[0, :5].any()
        assert not watched[0, :5].any()


def test_embeddings_in_place_of_ids():
    x = torch.randn(2, 16, 6)
    for layer, ok in ((Before(), False), (nn.SiLU(), True)):
        report = verify_documents(
            nn.Sequential(layer), {"inputs_embeds": x}, run=lambda m, b: m(b["inputs_embeds"]), documents=LENGTHS
        )
        assert report.ok == ok


@pytest.mark.parametrize(
    ("model", "batch", "options", "message"),
    [
        (stack(), {"input_ids": torch.zeros(1, 16, dtype=torch.long)}, {}, "every row of the batch is one document"),
        (stack(), {"labels": torch.zeros(1, 16)}, {}, "This one has labels."),
        ("model", {"input_ids": torch.zeros(1, 16)}, {}, "but got str"),
        (
            stack(nn.Dropout(0.5)),
            {"input_ids": torch.zeros(1, 16, dtype=torch.long)},
            {"documents": LENGTHS},
            "Turn dropout off",
        ),
        (
            nn.Sequential(stack(), nn.Flatten(0)),
            {"input_ids": torch.zeros(1, 16, dtype=torch.long)},
            {"documents": LENGTHS},
            "but the model returned a tensor of shape (176,)",
        ),
    ],
)
def test_what_cannot_be_judged_is_refused(model, batch, options, message):
    with pytest.raises(PlanError) as refused:
        verify_documents(model, batch, run=run, **options)
    assert message in str(refused.value)


class Fill(nn.Module):
    """One more column with a constant."""

    def __init__(self, fill):
        super().__init__()
        self.fill = fill

    def forward(self, x):
        fill = torch.finfo(x.dtype).min if self.fill is None else self.fill
        return torch.cat((x, torch.full_like(x[..., :1], fill)), -1)


@pytest.mark.parametrize("fill", [None, -torch.inf, 0.0])
@pytest.mark.parametrize("ids", [[0] * 8, [4] * 8, [0, 1, 2, 3, 4, 5, 6, 7]])
def test_leaks_show_with_constant_logits_equal_tokens_and_quantized_weights(fill, ids):
    for layer, is_right in ((Before(), False), (nn.SiLU(), True)):
        model = nn.Sequential(nn.Embedding(9, 4), layer, nn.Linear(4, 9), Fill(fill))
        model.scale = nn.Parameter(torch.arange(1, 11, dtype=torch.uint8), requires_grad=False)
        report = verify_documents(
            model,
            {"input_ids": torch.tensor([ids])},
            run=lambda model, batch: model(batch["input_ids"]) * model.scale.double(),
            documents=[5, 3],
        )
        assert report.ok == is_right, report


def test_embeddings_of_0_are_replaced_too():
    model = nn.Sequential(nn.Linear(4, 4), Before())
    batch = {"inputs_embeds": torch.zeros(1, 8, 4)}
    assert not verify_documents(model, batch, run=lambda m, b: m(b["inputs_embeds"]), documents=[5, 3]).ok
