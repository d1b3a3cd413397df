"""Models that are proved at first use over real ranks; importable by name."""

import logging
import time
import warnings
from functools import partial

import torch
import torch.distributed as dist

from tests.hosts.hf_structure_work import SIZES, STILL, error, made, text
from tests.hosts.hf_versions import checkpoint_layers
from tests.hosts.hf_work import gradients

ENCODER = {name: value for name, value in SIZES.items() if name not in ("num_key_value_heads", "head_dim")}


def _step(model, batch, layout="balanced"):
    """(the whole loss over ranks, gradients added up)."""
    from longspan import huggingface

    model.zero_grad()
    inputs = huggingface.shard_inputs(model, batch, dist.group.WORLD, layout=layout)
    output = model(**inputs)
    output.loss.backward()
    loss = huggingface.full_loss(output.loss.detach(), inputs)
    mine = gradients(model)
    for gradient in mine.values():
        dist.all_reduce(gradient)
    return loss, mine


def _far(model, batch, layout="balanced"):
    """How far loss and gradients are off one device, of each gradient's largest entry."""
    model.double().zero_grad()
    model.config._experts_implementation = "eager"  # grouped products have no float64
    one = model(**batch, use_cache=False).loss
    one.backward()
    right = gradients(model)
    loss, mine = _step(model, batch, layout)
    scales = {name: max(right[name].abs().max().item(), 1e-4) for name in right}
    return max([error(loss, one.detach()), *(error(mine[name], right[name]) / scales[name] for name in right)])


def widened():
    """Models that are treated by rules of their own, and how far they are off."""
    import transformers as hf

    logging.getLogger("transformers").setLevel(logging.ERROR)
    ids = text()
    plain = {"input_ids": ids, "labels": ids}
    padded = {**plain, "attention_mask": (torch.arange(41) < torch.tensor([[41], [30]])).long()}
    padded["labels"] = ids.masked_fill(padded["attention_mask"] == 0, -100)
    ropes = {
        "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0},
        "longrope": {
            "rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4,
            "factor": 2.0, "original_max_position_embeddings": 24,
        },
    }  # fmt: skip
    found = {}
    for name, rope in ropes.items():
        config = hf.LlamaConfig(**{**SIZES, "max_position_embeddings": 24}, rope_parameters=rope)
        found[name] = _far(made("LlamaForCausalLM", config), plain)
    experts = {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.5,
    }
    mixtral = partial(made, "MixtralForCausalLM", hf.MixtralConfig(**SIZES, **experts))
    found["router loss"] = _far(mixtral(), plain, "zigzag")
    found["router loss, padded"] = _far(mixtral(), padded, "contiguous")
    bert = hf.BertConfig(**ENCODER, **STILL, is_decoder=True)
    found["token types"] = _far(made("BertLMHeadModel", bert), {**plain, "token_type_ids": ids % 2})
    return found


def images():
    """Models that see images, and how far they are off: an image lies in one row, over the border between ranks."""
    import transformers as hf

    import longspan.huggingface  # noqa: F401  (registers the attention)
    from longspan.huggingface.prove.batches import random_batch, with_labels
    from longspan.huggingface.prove.tiny import build, tiny_config
    from longspan.huggingface.rules import Form

    logging.getLogger("transformers").setLevel(logging.ERROR)
    kinds = {
        "Qwen2_5_VLForConditionalGeneration": ("image_grid_thw", "mm_token_type_ids", "pixel_values"),
        "Qwen3VLForConditionalGeneration": ("image_grid_thw", "mm_token_type_ids", "pixel_values"),
        "Gemma3ForConditionalGeneration": ("pixel_values", "token_type_ids"),
        "LlavaForConditionalGeneration": ("pixel_values",),
    }
    found = {}
    for name, others in kinds.items():
        kind = getattr(hf, name)
        model = build(kind, tiny_config(kind.config_class()))
        model.set_attn_implementation("longspan")
        form = Form(others=others, padding="right")
        batch = random_batch(form, model)
        batch = with_labels(batch, model(**batch).logits.detach())
        found[name] = _far(model, batch, "contiguous")
        checkpoint_layers(model, {"use_reentrant": False})
        found[f"{name}, checkpointed"] = _far(model, batch, "zigzag")
    return found


def first_use():
    """What happens when a model without an entry is used for the first, second and third time, and one of another
    width: seconds, proofs made on this rank, rules."""
    from unittest import mock

    import transformers as hf

    from longspan.huggingface import first_use as place
    from longspan.huggingface.batches import read_batch
    from longspan.huggingface.prove import check

    counted, prove = [], check.prove
    batch, found = {"input_ids": text(), "labels": text()}, []
    with (
        mock.patch.object(place, "find_entry", return_value=None),
        mock.patch.object(place, "_PROOFS", {}),
        mock.patch.object(check, "prove", lambda *args: counted.append(1) or prove(*args)),
    ):
        one, other = (made("Qwen3ForCausalLM", hf.Qwen3Config(**SIZES)) for _ in range(2))
        for model in (one, one, other):
            began = time.process_time()
            rules = place.get_rules(model, read_batch(batch), dist.group.WORLD, trust_model=False)
            found.append((time.process_time() - began, len(counted), rules))
    return found


def refused():
    """The message about a model that is wrong over ranks; the warning of one that is trusted; its loss then."""
    import transformers as hf

    from longspan import huggingface
    from longspan.training import BatchError

    model = made("BartForCausalLM", hf.BartConfig(
        vocab_size=24, d_model=32, decoder_layers=2, encoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=32,
        encoder_attention_heads=4, encoder_ffn_dim=32, pad_token_id=0, is_encoder_decoder=False,
    ))  # fmt: skip
    batch, said = {"input_ids": text(), "labels": text()}, []
    for _ in range(2):
        try:
            huggingface.shard_inputs(model, batch, dist.group.WORLD)
        except BatchError as wrong:
            said.append(str(wrong))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        huggingface.shard_inputs(
            made("LlamaForCausalLM", hf.LlamaConfig(**SIZES)), batch, dist.group.WORLD, trust_model=True
        )
    return said, [str(warning.message) for warning in told]
