"""Hybrid models of transformers, unmodified, over Gloo ranks: loss and every gradient of a training step against one
device that gets every document alone.

Parts of transformers compute in float32 whatever the model's dtype: norms with a gate, A_log and the decays made of it
(Qwen3-Next, Qwen3.5, OLMo, Mamba-2), forget gates (Kimi), logits (Nemotron-H). LFM2 has none of these, and is exact.
"""

import pytest
import torch

from tests.hosts import hf_hybrid_work as work
from tests.pool import pool

pytest.importorskip("transformers")
from tests.hosts import hf_versions

TIMEOUT = 250.0
pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore::DeprecationWarning")]
LIMIT = 1e-6
EXACT = 1e-13
"""Of models that compute in float64 throughout."""
WIDE = 1e-10
"""Of models whose float32 parts are made float64; gradients that cancel to 1e-5 of others' keep eleven digits."""
OLD = () if hf_versions.HAS_HYBRIDS else (hf_versions.REFUSED_BEFORE, "but got 'eager'")
"""What else refusals may say before transformers 5.15."""
LAYOUTS = ("contiguous", "zigzag", "balanced")
_judged = {}


@pytest.fixture(autouse=True)
def _only_what_this_version_has(request):
    given = getattr(request.node, "callspec", None)
    model_type = "qwen3_next" if given is None else given.params.get("model_type", "qwen3_next")
    hf_versions.skip_unknown(model_type)
    if "are_refused" not in request.node.name and not hf_versions.has_hybrid(model_type):
        pytest.skip(hf_versions.NO_HYBRIDS)


def judged(model_type, case):
    if (model_type, case) not in _judged:
        _judged[model_type, case] = work.one_device(model_type, case)
    return _judged[model_type, case]


def check(model_type, case, found, limit):
    compare(found, judged(model_type, case), limit)


def compare(found, wanted, limit):
    loss, gradients = wanted
    assert abs(found[0] - loss) <= limit * max(1.0, abs(loss)), f"loss {found[0]}, should be {loss}"
    assert gradients.keys() <= found[1].keys()
    for name, wanted in gradients.items():
        largest = float(wanted.abs().max())
        off = float((found[1][name] - wanted).abs().max())
        assert off <= limit * max(largest, 1e-9), f"{name}: off by {off:.1e}, largest {largest:.1e}"


@pytest.mark.share(19)  # one on 2 ranks, one on 3
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("model_type", work.MODELS)
def test_ranks_equal_one_device(model_type, world):
    limit = EXACT if model_type.startswith("lfm2") else LIMIT
    for case in work.CASES:
        for layout in LAYOUTS:
            found = pool(world).run(work.step_over_ranks, model_type, case, layout, timeout=TIMEOUT)
            check(model_type, case, found[0], limit)
            assert all(other[0] == found[0][0] for other in found)


@pytest.mark.share(4)
@pytest.mark.parametrize("model_type", work.MODELS)
def test_what_is_left_is_rounding_to_float32(model_type):
    """With the float32 parts of transformers in float64, ranks are exact for every model."""
    wanted = work.widened(work.one_device, model_type, "packed")
    found = pool(3).run(work.widened, work.step_over_ranks, model_type, "packed", "zigzag", timeout=TIMEOUT)
    compare(found[0], wanted, WIDE)


@pytest.mark.parametrize("model_type", ["qwen3_next", "bamba"])
def test_tokens_are_moved_where_spans_are_many(model_type):
    """Striped, every token is a segment of its own, and the plan moves tokens to a contiguous layout and back."""
    found = pool(3).run(work.step_over_ranks, model_type, "packed", "striped", timeout=TIMEOUT)
    check(model_type, "packed", found[0], LIMIT)


@pytest.mark.parametrize("model_type", ["qwen3_next", "nemotron_h", "lfm2"])
def test_checkpointing_changes_nothing(model_type):
    found = pool(2).run(work.step_over_ranks, model_type, "packed", "zigzag", True, timeout=TIMEOUT)
    check(model_type, "packed", found[0], LIMIT)


@pytest.mark.parametrize("model_type", ["qwen3_next", "bamba", "lfm2"])
def test_a_group_of_one_keeps_documents_apart(model_type):
    """Where transformers itself mixes them."""
    found = pool(1).run(work.step_over_ranks, model_type, "packed", "contiguous", timeout=TIMEOUT)
    check(model_type, "packed", found[0], LIMIT)
    assert work.leak(model_type) > 1e-5


@pytest.mark.parametrize("lost", ["states", "gradients of states", "halos", "gradients of halos"])
def test_what_is_lost_is_noticed(lost):
    """The test above can fail."""
    found = pool(3).run(work.step_with_loss, lost, timeout=TIMEOUT)
    with pytest.raises(AssertionError):
        check("qwen3_next", "plain", found[0], 1e-4)


@pytest.mark.parametrize("model_type", work.REFUSED)
def test_other_hybrids_are_refused_by_name(model_type):
    said = pool(1).run(work.refusal, model_type, timeout=TIMEOUT)[0]
    assert said is not None, f"{model_type} ran"
    kind, text = said
    assert kind in ("BatchError", "KernelError", "MaskError"), said
    assert any(words in text for words in (work.REFUSED[model_type], *OLD)), text


@pytest.mark.parametrize("model_type", ["mamba", "mamba2", "rwkv", "xlstm"])
def test_models_without_attention_are_refused_before_it_is_named(model_type):
    """Naming another attention would lead to the next refusal."""
    (said,) = pool(1).run(work.refusal, model_type, "eager", timeout=TIMEOUT)
    assert said[0] == "BatchError"
    assert "set_attn_implementation" not in said[1]
    assert "se one device" in said[1] or "on one device" in said[1]


@pytest.mark.parametrize("model_type", [name for name in work.MODELS if not hf_versions.has_hybrid(name)])
def test_all_are_refused_before_their_layers_can_be_routed(model_type):
    kind, text = pool(1).run(work.refusal_of_old, model_type, timeout=TIMEOUT)[0]
    assert kind == "BatchError"
    assert hf_versions.REFUSED_BEFORE in text


def test_a_label_at_padding_is_refused():
    """Padding in front, whose last token would predict the first real one; without that label all is well."""
    refused, fine = pool(2).run(work.labels_at_padding, timeout=TIMEOUT)[0]
    assert refused[0] == "BatchError"
    assert "token 6 of row 1 is padding, and it has a label" in refused[1]
    assert fine is None


def test_a_layer_that_sees_nothing_is_named():
    """A layer whose mixer does not hand longspan= down is refused after the first forward pass, by its name."""
    kind, text = pool(2).run(work.deaf_layer, timeout=TIMEOUT)[0]
    assert kind == "BatchError"
    assert "model.layers.0.linear_attn (Qwen3NextGatedDeltaNet)" in text
    assert "recurrence" in text


@pytest.mark.parametrize("what", ["cache", "padding inside"])
def test_what_has_no_meaning_over_ranks_is_refused(what):
    kind, text = pool(1).run(work.meaningless, what, timeout=TIMEOUT)[0]
    assert kind == "BatchError"
    assert {"cache": "use_cache", "padding inside": "padding between real tokens"}[what] in text


def test_without_longspan_nothing_changes():
    """A model whose functions were routed computes on one device what it did before, bit for bit."""
    before, after = pool(1).run(work.routed_and_not, timeout=TIMEOUT)[0]
    assert torch.equal(before, after)
