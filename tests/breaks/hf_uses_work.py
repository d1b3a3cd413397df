"""Uses of transformers' models over ranks beside plain training: images, classes, wrappers, dtypes, odd sizes."""

import contextlib
import gc
import os
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.breaks.hf_models_work import (
    BASE,
    MODELS,
    VOCAB,
    batch_of,
    errors_of,
    gradients,
    model_of,
    one_device,
    over_ranks,
    precision,
    said,
)

STILL = {"attention_dropout": 0.0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def build(name, config, dtype=torch.float64):
    """A model of this class with random weights, longspan's attention inside."""
    import transformers

    import longspan.huggingface  # noqa: F401  (registers the attention)

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    torch.manual_seed(7)
    config._experts_implementation = "eager"  # the grouped matmul has no float64
    model = getattr(transformers, name)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.set_attn_implementation("longspan")
    return model.to(dtype).train()


def against_one_device(model, batch, attention="sdpa", **options):
    """Errors of loss and gradients over ranks, of the whole batch on one device with transformers' own attention."""
    model.set_attn_implementation(attention)
    model.zero_grad(set_to_none=True)
    with precision(model.dtype):
        loss = model(
            **batch, **({"use_cache": False} if hasattr(model.config.get_text_config(), "use_cache") else {})
        ).loss
        loss.backward()
    wanted = float(loss.detach()), gradients(model)
    model.set_attn_implementation("longspan")
    return errors_of(over_ranks(model, batch, **options), wanted)


def outcome(call):
    """What a call returns, or the words of Longspan's refusal."""
    found = []
    words = said(lambda: found.append(call()))
    return words if words is not None else found[0]


# -- images ------------------------------------------------------------------------------------------------------------

IMAGE = 40
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}


def image_model(family):
    import transformers as hf

    text = {name: value for name, value in BASE.items() if name != "tie_word_embeddings"}
    if family == "llava":
        config = hf.LlavaConfig(
            vision_config=hf.CLIPVisionConfig(**VISION, image_size=16, projection_dim=16),
            text_config=hf.LlamaConfig(**text), image_token_id=IMAGE, vision_feature_layer=-1,
        )  # fmt: skip
        return build("LlavaForConditionalGeneration", config), 16
    if family == "gemma3":
        config = hf.Gemma3Config(
            vision_config=hf.SiglipVisionConfig(**VISION, image_size=16).to_dict(), mm_tokens_per_image=4,
            text_config=hf.Gemma3TextConfig(**text, sliding_window=9, query_pre_attn_scalar=8,
                                            layer_types=["sliding_attention", "full_attention"]).to_dict(),
            image_token_id=IMAGE, boi_token_index=41, eoi_token_index=42,
        )  # fmt: skip
        return build("Gemma3ForConditionalGeneration", config), 4
    ids = {"image_token_id": IMAGE, "video_token_id": 43, "vision_start_token_id": 41, "vision_end_token_id": 42}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    tower = {"depth": 1, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
    if family == "qwen2_vl":
        config = hf.Qwen2VLConfig(
            text_config={**text, "rope_parameters": rope},
            vision_config={**tower, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}, **ids,
        )  # fmt: skip
        return build("Qwen2VLForConditionalGeneration", config), 4
    config = hf.Qwen2_5_VLConfig(
        text_config={**text, "rope_parameters": rope},
        vision_config={**tower, "hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24, "window_size": 16,
                       "fullatt_block_indexes": [0]}, **ids,
    )  # fmt: skip
    return build("Qwen2_5_VLForConditionalGeneration", config), 4


def image_batch(family, case, per_image):
    """One or two images in the first row and one in the second; over ranks they lie across the borders."""
    batch, _ = batch_of(case, tokens=45)
    ids, draw = batch["input_ids"], torch.Generator().manual_seed(5)
    ids[(ids >= IMAGE) & (ids <= 43)] = 3
    for row, start in ((0, 12), (0, 22), (1, 15)) if per_image < 10 else ((0, 12), (1, 15)):
        ids[row, start : start + per_image] = IMAGE
        batch["labels"][row, start : start + per_image] = -100
    images = int((ids == IMAGE).sum()) // per_image
    if family.startswith("qwen"):
        batch["pixel_values"] = torch.randn(16 * images, 2 * 3 * 16, generator=draw, dtype=torch.float64)
        batch["image_grid_thw"] = torch.tensor([[1, 4, 4]] * images)
        batch["mm_token_type_ids"] = (ids == IMAGE).int()
    else:
        batch["pixel_values"] = torch.randn(images, 3, 16, 16, generator=draw, dtype=torch.float64)
    if family == "gemma3":
        batch["token_type_ids"] = (ids == IMAGE).long()
    if "attention_mask" in batch:
        ids[batch["attention_mask"] == 0] = 0
    return batch


def images(family, case, layout):
    model, per_image = image_model(family)
    batch = image_batch(family, case, per_image)
    return outcome(lambda: against_one_device(model, batch, layout=layout))


# -- refusals ----------------------------------------------------------------------------------------------------------


def encoder_decoders():
    """What is said of models with two sequences, by class."""
    import transformers as hf

    t5 = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4}
    bart = {
        "vocab_size": VOCAB, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "pad_token_id": 0,
    }  # fmt: skip
    kinds = {
        "T5ForConditionalGeneration": hf.T5Config(**t5, decoder_start_token_id=0),
        "MT5ForConditionalGeneration": hf.MT5Config(**t5, decoder_start_token_id=0),
        "T5EncoderModel": hf.T5Config(**t5),
        "BartForConditionalGeneration": hf.BartConfig(**bart),
        "MarianMTModel": hf.MarianConfig(**bart, decoder_start_token_id=0),
        "PegasusForConditionalGeneration": hf.PegasusConfig(**bart),
    }
    ids = torch.randint(3, VOCAB, (2, 24), generator=torch.Generator().manual_seed(1))
    found = {}
    for name, config in kinds.items():
        model = getattr(hf, name)(config)
        with contextlib.suppress(ValueError):  # T5 has no attention that could be replaced
            model.set_attn_implementation("longspan")
        found[name] = outcome(partial(over_ranks, model, {"input_ids": ids, "labels": ids}))
    dist.barrier()  # every rank has come here
    return found


def unusual(family):
    """Models that count positions or mix tokens in ways of their own: errors, or the refusal."""
    import transformers as hf

    small = {**BASE, "num_hidden_layers": 4}
    configs = {
        "stablelm": lambda: hf.StableLmConfig(**small),
        "nemotron": lambda: hf.NemotronConfig(**small),
        "recurrent_gemma": lambda: hf.RecurrentGemmaConfig(**small, lru_width=32, attention_window_size=9),
        "jamba": lambda: hf.JambaConfig(
            **small, attn_layer_period=2, attn_layer_offset=1, num_experts=2, mamba_d_state=8, use_mamba_kernels=False
        ),
        "roberta": lambda: hf.RobertaConfig(
            **{name: value for name, value in small.items() if name not in ("num_key_value_heads", "head_dim")},
            **STILL, is_decoder=True,
        ),
        "opt": lambda: hf.OPTConfig(
            vocab_size=VOCAB, hidden_size=32, ffn_dim=32, num_hidden_layers=2, num_attention_heads=4,
            word_embed_proj_dim=32, pad_token_id=0, dropout=0.0,
        ),
    }  # fmt: skip
    config = configs[family]()
    model = build(hf.AutoModelForCausalLM._model_mapping[type(config)].__name__, config)
    batch = batch_of("left" if family == "opt" else "plain")[0]
    return outcome(
        lambda: against_one_device(model, batch, "longspan" if family in ("jamba", "recurrent_gemma") else "sdpa")
    )


# -- classes -----------------------------------------------------------------------------------------------------------


def classifiers(name, case):
    import transformers as hf

    encoder = {n: v for n, v in BASE.items() if n not in ("num_key_value_heads", "head_dim")}
    configs = {
        "LlamaForSequenceClassification": lambda: hf.LlamaConfig(**BASE, num_labels=5, classifier_dropout=0.0),
        "Qwen3ForSequenceClassification": lambda: hf.Qwen3Config(**BASE, num_labels=1),
        "MixtralForSequenceClassification": lambda: hf.MixtralConfig(**MODELS["mixtral"], num_labels=3),
        "LlamaForTokenClassification": lambda: hf.LlamaConfig(**BASE, num_labels=5, classifier_dropout=0.0),
        "LlamaForQuestionAnswering": lambda: hf.LlamaConfig(**BASE),
        "BertForSequenceClassification": lambda: hf.BertConfig(**encoder, **STILL, num_labels=4),
        "GPT2ForSequenceClassification": lambda: hf.GPT2Config(
            vocab_size=VOCAB, n_embd=32, n_head=4, n_layer=2, pad_token_id=0, num_labels=3, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0,
        ),
    }  # fmt: skip
    config = configs[name]()
    model = build(name, config)
    batch = batch_of(case)[0]
    draw = torch.Generator().manual_seed(2)
    if "mask" not in " ".join(batch) and "Token" not in name:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["input_ids"] = batch["input_ids"].masked_fill(batch.get("attention_mask", torch.tensor(1)) == 0, 0)
    if "Token" in name:
        batch["labels"] = torch.where(batch["labels"] == -100, -100, batch["labels"] % 5)
    elif "Question" in name:
        batch.pop("labels")
        batch.update(start_positions=torch.tensor([11, 13]), end_positions=torch.tensor([15, 20]))
    elif config.num_labels == 1:
        batch["labels"] = torch.randn(2, generator=draw, dtype=torch.float64)
    else:
        batch["labels"] = torch.randint(0, config.num_labels, (2,), generator=draw)
    return outcome(lambda: against_one_device(model, batch))


# -- wrappers and dtypes -----------------------------------------------------------------------------------------------


def wrapped(family, wrapper):
    """Errors of loss and gradients under FSDP2 or DDP, which average gradients."""
    from longspan import huggingface

    batch, _ = batch_of("packed")
    wanted = one_device(family, "packed", dtype=torch.float32)
    model = model_of(family, dtype=torch.float32)
    if wrapper == "FSDP2":
        for layer in model.model.layers:
            fully_shard(layer)
        called = fully_shard(model)
    else:
        called = DistributedDataParallel(model, find_unused_parameters=True)
    inputs = huggingface.shard_inputs(called, batch, dist.group.WORLD)
    loss = huggingface.full_loss(called(**inputs).loss, inputs, gradients="average")
    loss.backward()
    full = {
        name: torch.zeros(p.shape) if p.grad is None else p.grad.full_tensor() if wrapper == "FSDP2" else p.grad
        for name, p in model.named_parameters()
    }
    exact = one_device(family, "packed")
    return errors_of((float(loss.detach()), full), exact)[:2], errors_of(wanted, exact)[:2]


def low_precision(family, is_autocast, case="packed"):
    """(errors over ranks, errors of one device) in bfloat16, of one device in float64."""
    from longspan import huggingface

    exact = one_device(family, case)
    dtype = torch.float32 if is_autocast else torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_autocast):
        alone = one_device(family, case, dtype)
        model = model_of(family, dtype=dtype)
        inputs = huggingface.shard_inputs(model, batch_of(case)[0], dist.group.WORLD)
        loss = huggingface.full_loss(model(**inputs).loss, inputs)
    loss.backward()
    summed = {name: gradient.float() for name, gradient in gradients(model).items()}
    for gradient in summed.values():
        dist.all_reduce(gradient)
    return _relative((float(loss.detach()), summed), exact), _relative(alone, exact)


def _relative(found, exact):
    """Errors of the loss, and of all gradients together: single entries of bfloat16 are noise."""
    off = sum(float((found[1][name].double() - right).square().sum()) for name, right in exact[1].items())
    return abs(found[0] - exact[0]), (off / sum(float(right.square().sum()) for right in exact[1].values())) ** 0.5


# -- odd sizes ---------------------------------------------------------------------------------------------------------


def few_tokens(family, tokens, layout):
    batch = batch_of("plain", tokens=tokens)[0]
    batch["labels"] = batch["input_ids"].clone()
    model = model_of(family)
    return outcome(lambda: against_one_device(model, batch, layout=layout))


def head_dims(head_dim):
    import transformers as hf

    config = hf.GPT2Config(
        vocab_size=VOCAB, n_embd=2 * head_dim, n_head=2, n_layer=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return outcome(lambda: against_one_device(build("GPT2LMHeadModel", config), batch_of("right")[0]))


def nested():
    """Errors of a model in whose forward pass other models run: over ranks, on one device, and itself again."""
    from longspan import huggingface

    outer, teacher = model_of("llama"), model_of("lfm2")
    batch, other = batch_of("plain")[0], batch_of("packed", seed=4, tokens=33)[0]
    wanted = one_device("llama", "plain")
    right = float(one_device("lfm2", "packed", seed=4, tokens=33)[0])
    inputs = huggingface.shard_inputs(teacher, other, dist.group.WORLD)
    found = []

    def run_others(module, args, kwargs, output):
        if len(found) < 2:  # the last one runs this layer again
            with torch.no_grad():
                loss = teacher(**inputs).loss
                dist.all_reduce(loss)
                found.append(abs(float(loss) - right))
                teacher.set_attn_implementation("sdpa")
                found.append(float(teacher(**batch, use_cache=False).loss))
                teacher.set_attn_implementation("longspan")

    huggingface.shard_inputs(outer, batch, dist.group.WORLD)  # accepted before the hook is there
    outer.model.layers[0].register_forward_hook(run_others, with_kwargs=True)
    errors = outcome(lambda: errors_of(over_ranks(outer, batch), wanted)[:2])
    alone = one_device("lfm2", "plain")[0]
    return errors, found[0], abs(found[1] - alone) if len(found) > 1 else None


def resident():
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as lines:
        return int(lines.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def many_shapes(family, steps, warm_up):
    """Bytes by which memory grows after `warm_up` steps, each with other lengths and documents; live sequences at the
    end; live plans at the end."""
    from longspan.huggingface.sequence import ShardedSequence
    from longspan.planning.plan import Plan

    model = model_of(family, dtype=torch.float32)
    before = 0
    for step in range(steps):
        tokens = 24 + (step * 7) % 61
        over_ranks(model, batch_of(("plain", "packed", "right")[step % 3], step, tokens)[0])
        if step == warm_up:
            gc.collect()
            before = resident()
    gc.collect()
    live = gc.get_objects()
    return (
        resident() - before,
        sum(isinstance(thing, ShardedSequence) for thing in live),
        sum(isinstance(thing, Plan) for thing in live),
    )
