"""Any model, proved when it is first used: what is right is accepted, what is wrong is named, and it costs once."""

import pytest
import torch

from tests.hosts import hf_proof_work as work
from tests.pool import pool

hf = pytest.importorskip("transformers")

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore::DeprecationWarning")]
TIMEOUT = 200.0


def proved(name, form=None, **changes):
    from longspan.huggingface.prove.check import prove
    from longspan.huggingface.rules import Form

    kind = getattr(hf, name)
    return prove(kind, kind.config_class(**changes), form or Form())


RIGHT = {
    "LlamaForCausalLM": ("count", "own"),
    "NemotronForCausalLM": ("count", "own"),
    "StableLmForCausalLM": ("count", "own"),
    "RobertaForCausalLM": ("after padding", "own"),
    "XLMRobertaForMaskedLM": ("after padding", "in place"),
    "OPTForCausalLM": ("count", "own"),
    "BertForSequenceClassification": ("count", "pooled"),
    "ModernBertForMaskedLM": ("count", "in place"),
    "DeepseekV3ForCausalLM": ("count", "own"),
    "Qwen3NextForCausalLM": ("count", "own"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_models_that_are_right_are_accepted(name):
    proof = proved(name)
    assert proof.ok, proof.reason
    assert proof.error <= 1e-10
    assert (proof.rules.positions, proof.rules.loss) == RIGHT[name]


def test_padded_and_packed_batches_have_proofs_of_their_own():
    from longspan.huggingface.rules import Form

    for form in (Form(padding="right"), Form(padding="left"), Form(packed="position_ids", positions=True)):
        assert proved("LlamaForCausalLM", form).ok
        assert proved("Qwen3NextForCausalLM", form).ok
    opt = proved("OPTForCausalLM", Form(padding="left"))
    assert opt.ok, opt.reason
    assert opt.rules.positions == "real tokens"
    assert opt.rules.exact_at_padding
    assert "does not pass them to transformers' masks" in proved("OPTForCausalLM", form).reason


WRONG = {
    "RecurrentGemmaForCausalLM": "RecurrentGemma",
    "ZayaForCausalLM": "conv_qk",
    "MiniMaxForCausalLM": "MiniMaxLightningAttention",
    "BartForCausalLM": "embed_positions",
    "MobileBertForMaskedLM": "mobilebert.embeddings (MobileBertEmbeddings)",
    "JambaForCausalLM": "mamba_selective_scan",
    "DeepseekV32ForCausalLM": "computes with its mask as with a tensor",
    "T5ForSequenceClassification": "has an encoder and a decoder",
    "BloomForCausalLM": "attention in code of its own",
}


@pytest.mark.parametrize("name", WRONG)
def test_models_that_are_wrong_are_refused_with_the_place(name):
    proof = proved(name, **({"is_encoder_decoder": False} if name.startswith("Bart") else {}))
    assert not proof.ok
    assert WRONG[name] in proof.reason, proof.reason
    assert "None" not in proof.reason


def test_a_proof_takes_seconds():
    """Nemotron-H has four kinds of layers: Mamba-2, attention, experts and plain ones."""
    proof = proved("NemotronHForCausalLM", layers_block_type=["mamba", "moe", "attention", "mlp"] * 4)
    assert proof.ok, proof.reason
    assert proof.seconds <= 10


def test_one_answer_from_packed_documents_has_no_meaning_with_recurrences():
    from longspan.huggingface.rules import Form

    packed = Form(packed="position_ids", positions=True)
    assert "one answer from a row" in proved("Zamba2ForSequenceClassification", packed).reason
    assert proved("LlamaForSequenceClassification", packed).ok


def test_nothing_of_the_caller_is_disturbed():
    state, mode = torch.random.get_rng_state(), torch.is_grad_enabled()
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert proved("LlamaForCausalLM").ok
        assert torch.is_inference_mode_enabled()
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.is_grad_enabled() == mode
    assert torch.ones(1).float().dtype == torch.float32


def test_float32_inside_of_a_proof_is_float64():
    from longspan.huggingface.prove.trials import Float64Mode

    with Float64Mode():
        made = torch.ones(2).float(), torch.zeros(2, dtype=torch.float32), torch.ones(2).to(torch.float32)
        halves = torch.ones(2).to(torch.bfloat16)
    assert {x.dtype for x in made} == {torch.float64}
    assert halves.dtype == torch.bfloat16


@pytest.mark.share(2)
@pytest.mark.parametrize("world", [2, 3])
def test_what_was_widened_is_exact_over_ranks(world):
    for found in pool(world).run(work.widened, timeout=TIMEOUT):
        assert len(found) == 5
        assert not {name: error for name, error in found.items() if not error <= 1e-6}


@pytest.mark.share(2)
@pytest.mark.parametrize("world", [2, 3])
def test_images_over_ranks(world):
    for found in pool(world).run(work.images, timeout=TIMEOUT):
        assert len(found) == 8
        assert not {name: error for name, error in found.items() if not error <= 1e-6}


def test_videos_and_packed_images_are_refused():
    from longspan.huggingface.batches import read_batch
    from longspan.training import BatchError

    batch = {"input_ids": torch.ones(1, 8, dtype=torch.long), "pixel_values": torch.ones(4, 4)}
    assert read_batch(batch).seq_len == 8
    for other in ({"pixel_values_videos": torch.ones(1)}, {"cu_seq_lens_q": torch.tensor([0, 4, 8])}):
        with pytest.raises(BatchError, match=f"{next(iter(other))}"):
            read_batch(batch | other)


def test_one_rank_proves_and_tells_the_others():
    found = pool(2).run(work.first_use, timeout=TIMEOUT)
    for rank, (first, again, other) in enumerate(found):
        assert [first[1], again[1], other[1]] == ([1, 1, 1] if rank == 0 else [0, 0, 0])
        assert first[2] == again[2] == other[2] == found[0][0][2]
        assert again[0] <= 0.01


def test_what_is_wrong_is_refused_on_all_ranks_and_trust_is_loud():
    for said, told in pool(2).run(work.refused, timeout=TIMEOUT):
        assert len(said) == 2
        assert said[0] == said[1]
        assert said[0].startswith("BartForCausalLM cannot be used over ranks:")
        assert "embed_positions (BartLearnedPositionalEmbedding)" in said[0]
        assert len(told) == 1
        assert told[0].startswith("trust_model=True: LlamaForCausalLM")


HEADS = {
    "LlamaForCausalLM": ({}, ("lm_head", "", "")),
    "Gemma2ForCausalLM": ({}, ("lm_head", "", "final_logit_softcapping")),
    "GraniteForCausalLM": ({"logits_scaling": 8.0}, ("lm_head", "1 / logits_scaling", "")),
    "CohereForCausalLM": ({}, ("lm_head", "logit_scale", "")),
    "BertForMaskedLM": ({}, ("cls.predictions.decoder", "", "")),
    "LlamaForSequenceClassification": ({"pad_token_id": 0}, (None, "", "")),
}


@pytest.mark.parametrize("name", HEADS)
def test_how_logits_come_from_the_head_is_found(name):
    changes, expected = HEADS[name]
    rules = proved(name, **changes).rules
    assert (rules.head, rules.scale, rules.soft_cap) == expected
    assert bool(rules.head_reason) == (rules.head is None)


class _Odd(hf.LlamaForCausalLM):
    """Logits that are neither scaled nor capped, but squared: they are needed."""

    def forward(self, *args, labels=None, shift_labels=None, num_items_in_batch=None, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits.square()
        if labels is not None:
            words = {"shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch}
            output.loss = self.loss_function(output.logits, labels, self.config.vocab_size, **words)
        return output


def test_other_logits_are_computed_and_the_model_is_accepted():
    from longspan.huggingface.prove.check import prove

    proof = prove(_Odd, hf.LlamaConfig())
    assert proof.ok, proof.reason
    assert proof.rules.head is None
    assert "something else to logits" in proof.rules.head_reason


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["llama", "--forms", "plain"], 0, "Loss without logits: yes, from lm_head."),
        (["bloom", "--forms", "plain"], 1, "attention in code of its own"),
    ],
)
def test_the_command_says_it_and_its_status_too(words, status, said, capsys):
    from longspan.cli.command import main

    assert main(["prove", *words]) == status
    assert said in " ".join(capsys.readouterr().out.split())
