"""What models of transformers do beside attention, over ranks: right, or refused before it counts."""

import pytest
import torch

from tests.hosts import hf_structure_work as work
from tests.pool import pool

pytest.importorskip("transformers")
from longspan.huggingface.structure import find_unverified_module
from tests.hosts import hf_used_work, hf_versions

TIMEOUT = 200.0
LIMIT = 2e-5
pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def run(function, *args):
    return pool(2).run(function, *args, timeout=TIMEOUT)


@pytest.mark.share(3)
@pytest.mark.parametrize(
    ("function", "count"), [(work.per_token_heads, 8), (work.positions, 9), (work.pooled_heads, 11)]
)
def test_heads_and_positions_that_are_right(function, count):
    for found in run(function):
        assert len(found) == count
        assert not {name: error for name, error in found.items() if not error <= LIMIT}


def test_double_backward_behind_a_gather_is_refused():
    """Gradients of gradients would need those of other ranks."""
    assert all("must not be differentiated again" in error for error in run(work.gathered_penalty))


def test_a_copy_of_a_used_model_computes_what_the_model_does():
    for found in run(hf_used_work.copies):
        assert len(found) == 4 + hf_versions.HAS_HYBRIDS
        assert not {name: what for name, what in found.items() if what}


def test_a_used_model_is_let_go():
    assert run(hf_used_work.is_let_go) == [True, True]


def test_towers_may_be_made_of_anything():
    """They run whole on every rank; what is beside them does not."""
    model = torch.nn.Sequential(hf_used_work.Mean(torch.nn.Identity()), torch.nn.Linear(2, 2))
    assert find_unverified_module(model, ()) == "0 (Mean)"
    assert find_unverified_module(model, (), apart=[model[0]]) is None
    assert find_unverified_module(model, (), apart=[model[1]]) == "0 (Mean)"


CHANGED = {
    "a layer of the user's": "cannot be used over ranks: it has model.layers.0.mlp (Mean)",
    "another forward": "it has model.layers.0.mlp (LlamaMLP), whose forward was replaced",
    "token by token": "",
}
BESIDE = {
    "labels": "labels= must be in the batch of shard_inputs",
    "shift_labels": "shift_labels= must be in the batch",
    "seq_idx": "seq_idx= must be in the batch",
    "logits_to_keep": "logits_to_keep must be 0",
    "output_attentions": "output_attentions is not supported",
    "hidden states": "",
    "all logits": "",
    "labels of sequences": "",
    "after refusals": "",
}


@pytest.mark.parametrize(("function", "messages"), [(hf_used_work.changed, CHANGED), (hf_used_work.beside, BESIDE)])
def test_what_is_put_into_a_model_or_beside_its_inputs_is_refused(function, messages):
    for found in run(function):
        assert found.keys() == messages.keys()
        wrong = {
            name: said
            for name, said in found.items()
            if messages[name] not in said or bool(said) != bool(messages[name])
        }
        assert not wrong


MESSAGES = {
    "unlisted head": ("Mine cannot be used over ranks", "trust_model=True"),
    "encoder and decoder": ("has an encoder and a decoder",),
    "no position_ids": (
        "BartForCausalLM cannot be used over ranks",
        "embed_positions (BartLearnedPositionalEmbedding)",
    ),
    "recurrent layers": ("RecurrentGemmaForCausalLM cannot be used over ranks", "attention in code of its own"),
    "trigrams": ("mobilebert.embeddings (MobileBertEmbeddings)",),
    "layers left out": ("layerdrop must be 0 over ranks, but got 0.1",),
    "packed opt": ("OPTForCausalLM does not pass them to", "seq_idx"),
    "packed afmoe": ("AfmoeForCausalLM does not pass them",),
    "packed bert": ("BertLMHeadModel does not pass them",),
    "packed both ways": ("LlamaForCausalLM does not pass them",),
}


def test_what_would_be_wrong_is_refused():
    for found in run(work.refusals):
        assert found.keys() == MESSAGES.keys()
        if not hf_versions.HAS_HYBRIDS:
            assert hf_versions.REFUSED_BEFORE in found.pop("recurrent layers")
        wrong = {name: said for name, said in found.items() if not all(part in said for part in MESSAGES[name])}
        assert not wrong


@pytest.mark.share(2)
@pytest.mark.parametrize("wrapper", work.WRAPPERS)
def test_layers_that_do_not_listen_are_refused_in_any_loop(wrapper):
    for right, *deaf in run(work.listening, wrapper):
        assert right == "not refused, not refused"
        assert "no attention layer of" in deaf[0]
        assert "has seen longspan=" in deaf[0]
        if wrapper != "shortened":
            assert "only 1 of the 2 layers of" in deaf[1]
        assert all("whose forward was replaced" in said for said in deaf)  # what a proof does not speak of


def test_types_that_do_not_hand_it_down_are_told_by_their_masks():
    for found in run(work.without_keywords):
        assert not {name: error for name, error in found.items() if not error <= LIMIT}


def test_masks_are_no_tensors_and_say_so():
    from longspan.huggingface.masks import LayerMask, layer_mask

    made = layer_mask(1, 8, 8)
    assert isinstance(made, LayerMask)
    assert not hasattr(made, "dtype")
    assert made.contiguous() is made
    for use in (
        lambda: made[:, :, :4],
        lambda: made.dtype,
        lambda: torch.where(made, 0.0, 1.0),
        lambda: made.to("cpu"),
    ):
        with pytest.raises(ValueError, match="computes with its mask as with a tensor"):
            use()
