"""Models of Hugging Face transformers with attn_implementation="longspan": seven families, plain, padded and packed, on
one device and on Gloo ranks, against transformers' own eager attention."""

import json

import numpy as np
import pytest
import torch

from tests.hosts import hf_work as work
from tests.hosts.hf_versions import checkpoint_layers
from tests.pool import pool

pytest.importorskip("transformers")
from tests.hosts import hf_versions

TIMEOUT = 250.0
pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore::DeprecationWarning")]
LIMIT = 1e-6


def run(function, *args, world=2):
    return pool(world).run(function, *args, timeout=TIMEOUT)


def assert_close(found):
    for what, (loss, gradient, _) in found.items():
        assert loss <= LIMIT, f"{what}: loss is off by {loss:.2e}"
        assert gradient <= LIMIT, f"{what}: a gradient is off by {gradient:.2e}"


def on_one_device(model, batch):
    model.set_attn_implementation("longspan")
    model.zero_grad()
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return loss.item(), work.gradients(model)


# -- loss and gradients ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", work.CASES)
@pytest.mark.parametrize("family", work.FAMILIES)
def test_one_device_equals_eager(family, case):
    """GPT-OSS packed: transformers lets documents see each other there; the truth is each document on its own."""
    model, batch = work.model_of(family), work.batch_of(case)
    expected = work.truth(model, batch, apart=family == "gpt_oss" and case == "packed")
    assert_close({f"{family} {case}": work.difference(on_one_device(model, batch), expected)})


@pytest.mark.share(7)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("family", work.FAMILIES)
def test_ranks_equal_one_device(family, world):
    for found in run(work.compare, family, world=world):
        assert len(found) == 6
        assert_close(found)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_ranks_with_gradient_checkpointing(family):
    for found in run(work.compare, family, True):
        assert_close(found)


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_ranks_with_tiles(family):
    for found in run(work.compare_tiled, family):
        assert_close(found)


def test_mistakes_would_be_seen():
    """What people get wrong is far off what the tests above allow."""
    for found in run(work.make_mistakes):
        assert tuple(found) == work.MISTAKES
        loss, gradient, _ = found.pop("none")
        assert max(loss, gradient) <= LIMIT
        for name, (loss, gradient, _) in found.items():
            assert max(loss, gradient) > 1000 * LIMIT, f"{name} moves loss by {loss:.1e}, gradients by {gradient:.1e}"


def test_dropout_does_not_depend_on_ranks():
    for same, other in run(work.dropout):
        assert max(same[:2]) <= LIMIT
        assert other[1] > 1000 * LIMIT


def test_the_same_batch_in_other_words():
    for found in run(work.other_inputs):
        assert len(found) == 6
        assert_close(found)


# -- one device --------------------------------------------------------------------------------------------------------


@pytest.mark.share(3)
@pytest.mark.parametrize("cache", ["dynamic", "static", "none"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gemma3", "gpt_oss", "llama4"])
def test_generate_equals_eager(family, cache):
    """Greedy, with padding on the left, past the window and the chunk."""
    if (family, cache) == ("llama4", "static") and not hf_versions.HAS_CHUNKED_MASKS:
        pytest.skip("before 5.20, transformers itself cannot make masks of chunks ahead")
    model = work.model_of(family).eval()
    ids = work.batch_of("plain")["input_ids"][:, :14]
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    options = {"use_cache": cache != "none", "max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False}
    if cache == "static":
        options["cache_implementation"] = "static"
    found = []
    for attention in ("eager", "longspan"):
        model.set_attn_implementation(attention)
        out = model.generate(
            ids, attention_mask=mask, **options, output_logits=True, return_dict_in_generate=True, pad_token_id=0
        )
        found.append((out.sequences, torch.stack(out.logits)))
    assert torch.equal(found[0][0], found[1][0])
    assert (found[0][1] - found[1][1]).abs().max() <= 2e-5


def test_beams_and_continued_caches_equal_eager():
    model = work.model_of("gemma3").eval()
    ids = work.batch_of("plain")["input_ids"][:, :20]
    found = []
    for attention in ("eager", "longspan"):
        model.set_attn_implementation(attention)
        with torch.no_grad():
            first = model(ids[:, :6], use_cache=True)
            rest = model(ids[:, 6:], past_key_values=first.past_key_values, use_cache=True)
        beams = model.generate(ids[:, :6], attention_mask=torch.ones(2, 6), num_beams=3, max_new_tokens=6)
        found.append((rest.logits, beams))
    assert (found[0][0] - found[1][0]).abs().max() <= 2e-5
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "qwen3"])
def test_packed_documents_are_separate_if_a_cache_is_filled(family):
    """The default call of one device computes what ranks compute, which have no cache."""
    model, batch = work.model_of(family).eval(), work.batch_of("packed")
    asked = {name: batch[name] for name in ("input_ids", "position_ids")}
    with torch.no_grad():
        whole = model(**asked).logits  # eager: transformers searches for no documents
        model.set_attn_implementation("longspan")
        filled, apart = model(**asked), model(**asked, use_cache=False).logits
    assert filled.past_key_values is not None
    assert torch.equal(filled.logits, apart)
    assert (apart - whole).abs().max() > 0.01


def test_positions_start_again_with_every_document_of_every_row():
    from longspan.huggingface.batches import BatchInfo, positions_of

    numbers = np.repeat([[0, 1], [0, 1]], 20, axis=1)
    numbers[0, 20:25], numbers[1, 10:20] = 0, 1
    found = positions_of(BatchInfo({}, 2, 40, None, numbers), "document", "count", None)
    assert found.tolist() == [[*range(25), *range(15)], [*range(10), *range(30)]]


def test_saved_configs_do_not_name_it(tmp_path):
    model = work.model_of("llama", "longspan")
    model.save_pretrained(tmp_path)
    assert "longspan" not in (tmp_path / "config.json").read_text()
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llama"
    again = type(model).from_pretrained(tmp_path)
    assert again.config._attn_implementation != "longspan"
    for key, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], value)


def test_checkpointing_and_dropout_on_one_device():
    """What was dropped in forward is dropped again where backward computes it again."""
    model = work.model_of("llama", "longspan", attention_dropout=0.4)
    batch, found = work.batch_of("packed"), []
    for checkpointing in (False, True):
        if checkpointing:
            checkpoint_layers(model)
        torch.manual_seed(3)
        found.append(on_one_device(model, batch))
    loss, gradient, _ = work.difference(*found)
    assert max(loss, gradient) <= LIMIT
    torch.manual_seed(4)
    assert work.difference(on_one_device(model, batch), found[0])[1] > 1000 * LIMIT


def test_autocast_means_what_it_means_to_eager():
    model, batch = work.model_of("llama"), work.batch_of("padded")
    found = {}
    for attention in ("eager", "longspan"):
        model.set_attn_implementation(attention)
        with torch.autocast("cpu", torch.bfloat16):
            found[attention] = model(**batch, use_cache=False).loss.item()
    assert abs(found["eager"] - found["longspan"]) <= 0.02 * found["eager"]


# -- masks -------------------------------------------------------------------------------------------------------------


def dense(made):
    """A LayerMask as transformers would draw it, (B, 1, q, kv)."""
    rows, (q, kv) = [], made.rows
    for row in range(made.batch):
        grid = np.arange(made.frame.length)
        allowed = made.mask.allows(grid[:, None], grid, row=row)
        rows.append(allowed[q : q + made.q_len, kv : kv + made.kv_len])
        assert allowed.sum() == rows[-1].sum(), "pairs outside of queries and keys"
    return torch.as_tensor(np.stack(rows))[:, None]


def random_masks(seed):
    """Arguments of a mask interface, as transformers would give them."""
    from transformers import masking_utils as hf

    rng = np.random.default_rng(seed)
    batch, kv_len = int(rng.integers(1, 4)), int(rng.integers(1, 40))
    q_len = int(rng.integers(1, kv_len + 1))
    kv_offset = int(rng.choice([0, 0, 5]))
    q_offset = kv_offset + kv_len - q_len if rng.random() < 0.7 else int(rng.integers(0, 9)) + kv_offset
    total = max(kv_len + kv_offset, q_len + q_offset)
    left = torch.as_tensor(rng.integers(0, 6, batch))
    ids = torch.as_tensor(np.sort(rng.integers(0, 4, (batch, total)), axis=1))
    groups = torch.as_tensor(rng.integers(-1, 3, (batch, total)))
    parity = torch.as_tensor(rng.integers(0, 2, (batch, total)))
    kinds = [
        hf.causal_mask_function,
        hf.bidirectional_mask_function,
        hf.sliding_window_causal_mask_function(int(rng.integers(1, 9))),
        hf.sliding_window_bidirectional_mask_function(int(rng.integers(1, 9))),
        hf.chunked_causal_mask_function(int(rng.integers(1, 9)), left),
        hf.and_masks(hf.causal_mask_function, hf.packed_sequence_mask_function(ids)),
        hf.and_masks(hf.sliding_window_causal_mask_function(5), hf.packed_sequence_mask_function(groups)),
        hf.or_masks(hf.causal_mask_function, hf.blockwise_overlay(groups)),
        hf.and_masks(hf.causal_mask_function, lambda b, h, q, kv: (q + kv + parity[b, kv]) % 3 != 1),
    ]
    padding = None
    if rng.random() < 0.5:
        padding = torch.as_tensor(rng.random((batch, int(rng.integers(1, total + 4)))) < 0.7)
    return {
        "batch_size": batch, "q_length": q_len, "kv_length": kv_len, "q_offset": q_offset, "kv_offset": kv_offset,
        "mask_function": kinds[seed % len(kinds)], "attention_mask": padding,
    }  # fmt: skip


def test_masks_equal_transformers_own():
    from transformers.masking_utils import sdpa_mask

    from longspan.huggingface.masks import layer_mask

    for seed in range(180):
        asked = random_masks(seed)
        expected = sdpa_mask(**asked, allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
        made = layer_mask(**asked)
        assert torch.equal(dense(made), expected.expand(-1, 1, -1, -1)), f"seed {seed}: {asked}"
        assert made.mask.is_structured or seed % 9 == 8, f"seed {seed}"


def test_masks_that_are_read_wrongly_are_noticed(monkeypatch):
    """Another version of transformers may mean something else by the same closures."""
    from transformers.masking_utils import sliding_window_causal_mask_function

    from longspan.huggingface import masks as hf_masks
    from longspan.huggingface import masks as hf_terms

    monkeypatch.setattr(hf_terms, "diagonal", lambda low, high, *rest: hf_terms.causal(rest[0]))
    with pytest.raises(hf_masks.MaskError, match="masks that Longspan does not know"):
        hf_masks.layer_mask(1, 32, 32, mask_function=sliding_window_causal_mask_function(4))


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_refusals_on_one_device():
    from transformers import AttentionInterface

    from longspan.huggingface.attention import longspan_attention

    model, batch = work.model_of("llama", "longspan"), work.batch_of("plain")
    refused = {
        "attention weights are never computed": {"output_attentions": True},
        "passed position_bias= to attention": {"position_bias": torch.zeros(1)},
        "passed tree_mask= to attention": {"tree_mask": torch.zeros(1)},
        r"a mask of shape \(2, 1, 52, 52\) reached attention": {"attention_mask": torch.ones(2, 1, 52, 52)},
        "cu_seq_lens run from 0 to 30": {"cu_seq_lens_q": torch.tensor([0, 30])},
        "cu_seq_lens_q and cu_seq_lens_k differ": {
            "cu_seq_lens_q": torch.tensor([0, 30, 52]), "cu_seq_lens_k": torch.tensor([0, 31, 52]),
        },
    }  # fmt: skip
    for message, changes in refused.items():
        with pytest.raises(ValueError, match=message):
            model(**batch, use_cache=False, **changes)
    AttentionInterface.register("longspan_alone", longspan_attention)
    model.set_attn_implementation("longspan_alone")
    with pytest.raises(ValueError, match="registered without its mask function"):
        model(**batch, use_cache=False)


def test_a_window_that_the_mask_does_not_know():
    model, batch = work.model_of("mistral", "longspan"), work.batch_of("plain")
    model.model.layers[0].self_attn.config = work.config("mistral", attn_implementation="longspan")
    model.model.layers[0].self_attn.config.sliding_window = 3
    with pytest.raises(ValueError, match="sliding_window = 3, but its mask has a window of 9"):
        model(**batch, use_cache=False)


MESSAGES = {
    "other attention": "attention must be 'longspan', but got",
    "no model": "takes a model of transformers, but got int",
    "linear layers": "got Qwen3NextConfig without its model",
    "cache": "use_cache is not supported over ranks",
    "weights": "output_attentions is not supported over ranks",
    "last logits": "logits_to_keep must be 0 over ranks, but got 1",
    "no tokens": "a batch has input_ids",
    "layout of another size": "is for 52 tokens on 3 ranks",
    "layout of another length": "is for 53 tokens on 2 ranks",
    "unknown layout": "but got 'diagonal'",
    "empty rank": "which gives rank 1 none",
    "dense mask": "attention_mask must be (batch, tokens)",
    "packed and padded": "documents begin at token 10 of row 0, and there is an attention_mask",
    "borders disagree": "position_ids restart elsewhere",
    "documents without positions": "Say 'document' if they start again",
    "positions twice": "positions must be None",
    "short cu_seq_lens": "cu_seq_lens run from 0 to 30",
    "list of cu_seq_lens": "cu_seq_lens must be",
    "empty cu_seq_lens": "cu_seq_lens must be",
    "falling cu_seq_lens": "cu_seq_lens must be",
    "cu_seq_lens of two rows": "2 rows of 52 tokens",
    "seq_idx of another length": "seq_idx is a tensor of shape (2, 51), but must be",
    "list of position_ids": "position_ids must be a tensor",
    "loss_mask": "Put -100 into labels where it is 0",
    "unnamed tensor": "ticks of shape (2, 52) has a dim as long as the sequence",
    "cache_position": "Take it out of the batch if the model computes the same",
    "mask beside longspan": "a mask of padding reached the layer",
    "config alone": "got LlamaConfig without its model",
    "cache beside longspan": "use_cache is not supported over ranks",
    "labels shifted late": "to match target batch_size (0)",
    "shards of another layout": "of the plan, but got",
    "dropout without seed": "pass shard_inputs(..., dropout_seed=)",
    "dropout without layer": "but LlamaAttention has no layer_idx",
    "loss of nothing": "no attention layer of the model has seen longspan=",
    "loss of other inputs": "full_loss takes a loss, the dict of shard_inputs",
    "mesh of two axes": "mesh of 2 axes",
}


def test_refusals_over_ranks():
    for found in run(work.refusals):
        assert found.keys() == MESSAGES.keys()
        for name, message in MESSAGES.items():
            assert message in found[name], f"{name}: {found[name]}"
