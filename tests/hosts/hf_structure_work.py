"""Heads, positions, packing and layers that do not listen, over ranks; importable by name."""

import logging
import warnings
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.hosts.hf_versions import checkpoint_layers
from tests.hosts.hf_work import SIZES, batch_of, gradients

TOKENS = 41
ENCODER = {name: value for name, value in SIZES.items() if name not in ("num_key_value_heads", "head_dim")}
OPT = {
    "vocab_size": 24, "hidden_size": 32, "ffn_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "word_embed_proj_dim": 32, "pad_token_id": 0, "dropout": 0.0, "max_position_embeddings": 128, "init_std": 0.2,
}  # fmt: skip
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def made(kind, config, training=False):
    """A model that Longspan attends for, the same on every rank."""
    import transformers as hf

    import longspan.huggingface  # noqa: F401  (registers the attention)

    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(11)
    kind = getattr(hf, kind) if isinstance(kind, str) else kind
    return kind._from_config(config, attn_implementation="longspan").float().train(training)


def llama(kind="LlamaForCausalLM", training=False, **changes):
    import transformers as hf

    return made(kind, hf.LlamaConfig(**SIZES, **changes), training)


def text(seed=5, rows=2):
    return torch.randint(3, 24, (rows, TOKENS), generator=torch.Generator().manual_seed(seed))


def shard(model, batch, **options):
    from longspan import huggingface

    return huggingface.shard_inputs(model, batch, dist.group.WORLD, **options)


def gathered(out, inputs):
    from longspan.training import gather_outputs

    return gather_outputs(out, inputs["longspan"].layout, dist.group.WORLD, dim=1)


def error(found, expected):
    return (found - expected).abs().max().item()


# -- what is right -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def per_token_heads():
    """How far heads that give something for each token are off one device."""
    import transformers as hf

    from longspan import huggingface
    from longspan.training import token_loss

    ids, found = text(), {}
    model = llama("LlamaForTokenClassification", num_labels=3)
    labels = ids % 3
    labels[0, 11:] = -100
    whole, inputs = model(input_ids=ids, labels=labels), shard(model, {"input_ids": ids, "labels": labels})
    output = model(**inputs)
    own = inputs["longspan"].layout.shard(labels, dist.get_rank(), 1, -100)
    found["token classes"] = error(gathered(output.logits, inputs), whole.logits)
    found["their loss"] = error(token_loss(output.logits, own, group=dist.group.WORLD, gradients="sum"), whole.loss)
    found["the model's own"] = error(huggingface.full_loss(output.loss, inputs), whole.loss)

    where = {"start_positions": torch.tensor([3, 4]), "end_positions": torch.tensor([7, 20])}
    model = llama("LlamaForQuestionAnswering")
    whole, inputs = model(input_ids=ids, **where), shard(model, {"input_ids": ids, **where})
    output = model(**inputs)
    found["answers"] = error(output.end_logits, whole.end_logits)
    found["loss of answers"] = error(huggingface.full_loss(output.loss, inputs), whole.loss)

    model = llama("LlamaModel")
    inputs = shard(model, {"input_ids": ids})
    found["hidden states"] = error(gathered(model(**inputs)[0], inputs), model(input_ids=ids)[0])

    config = hf.ModernBertConfig(
        **ENCODER, cls_token_id=1, sep_token_id=2, local_attention=8, global_attn_every_n_layers=2
    )
    model = made("ModernBertForMaskedLM", config)
    inputs = shard(model, {"input_ids": ids})
    whole = model(input_ids=ids).logits
    model.set_attn_implementation("eager")
    found["ModernBERT on one device"] = error(model(input_ids=ids).logits, whole)
    model.set_attn_implementation("longspan")
    found["ModernBERT"] = error(gathered(model(**inputs).logits, inputs), whole)
    return found


def gathered_penalty():
    """The error of a gradient penalty behind the gather of a pooler."""
    from types import SimpleNamespace

    from longspan.errors import PlanError
    from longspan.huggingface.hooks import gather_all_tokens
    from longspan.layouts import contiguous

    sequence = SimpleNamespace(layout=contiguous(4, 2), group=dist.group.WORLD)
    x = torch.arange(2.0).view(1, 2, 1).requires_grad_()
    (gradient,) = torch.autograd.grad(gather_all_tokens(x, sequence).pow(3).sum(), x, create_graph=True)
    try:
        gradient.square().sum().backward()
    except PlanError as error:
        return str(error)
    return ""


def pooled_heads():
    """How far loss and gradients of heads that compute with whole sequences are off one device."""
    import transformers as hf

    from longspan import huggingface

    ids, found = text(), {}
    ids[1, 30:] = 0
    mask = (ids != 0).long()
    classes, values = {"labels": torch.tensor([1, 2])}, {"labels": torch.tensor([0.3, -1.2])}
    padded = {"input_ids": ids, "attention_mask": mask}
    bert = hf.BertConfig(**ENCODER, **STILL, num_labels=3)
    cases = {
        "classes": (llama("LlamaForSequenceClassification", num_labels=3), {**padded, **classes}),
        "rewards": (llama("LlamaForSequenceClassification", num_labels=1), {**padded, **values}),
        "bert": (made("BertForSequenceClassification", bert), {**padded, **classes}),
        "masked tokens": (made("BertForMaskedLM", bert), {**padded, "labels": ids.masked_fill(mask == 0, -100)}),
        "roberta": (
            made("RobertaForSequenceClassification", hf.RobertaConfig(**ENCODER, **STILL, num_labels=3)),
            {**padded, **classes},
        ),
    }
    for name, (model, batch) in cases.items():
        model.double()  # the gradient of a key's bias is 0: in float32 it is rounding alone
        whole = model(**batch)
        whole.loss.backward()
        right = gradients(model)
        model.zero_grad()
        inputs = shard(model, batch)
        output = model(**inputs)
        output.loss.backward()
        loss = huggingface.full_loss(output.loss, inputs)
        mine = gradients(model)
        for gradient in mine.values():
            dist.all_reduce(gradient)
        found[name] = error(loss, whole.loss)
        found[f"gradients of {name}"] = max(
            error(mine[key], right[key]) / max(right[key].abs().max().item(), 1e-3) for key in right
        )
    pooling = made("BertModel", bert)
    inputs = shard(pooling, padded)
    found["pooler"] = error(pooling(**inputs).pooler_output, pooling(**padded).pooler_output)
    return found


def _losses(model, batch, **options):
    whole = model(**batch, use_cache=False).loss
    inputs = shard(model, batch, **options)
    share = model(**inputs).loss.detach()
    dist.all_reduce(share)
    return error(share, whole)


def _cases():
    import transformers as hf

    ids = text()
    padded = torch.ones_like(ids)
    padded[1, :13] = 0
    labels = ids.masked_fill(padded.cumsum(1) <= 1, -100)
    places = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in ([9, 20, 12], [30, 11])])
    packed = {"input_ids": ids, "labels": ids.masked_fill(places == 0, -100), "position_ids": places}
    roberta = hf.RobertaConfig(**ENCODER, is_decoder=True, **STILL)
    opt, afmoe = (
        hf.OPTConfig(**OPT),
        hf.AfmoeConfig(**SIZES, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, num_dense_layers=1),
    )
    return {
        "roberta": ("RobertaForCausalLM", roberta, {"input_ids": ids, "labels": ids}),
        "padded opt": ("OPTForCausalLM", opt, {"input_ids": ids, "labels": labels, "attention_mask": padded}),
        "packed opt": ("OPTForCausalLM", opt, packed),
        "packed afmoe": ("AfmoeForCausalLM", afmoe, packed),
        "packed bert": ("BertLMHeadModel", hf.BertConfig(**ENCODER, is_decoder=True, **STILL), packed),
        "packed both ways": ("LlamaForCausalLM", hf.LlamaConfig(**SIZES, is_causal=False), packed),
    }


def positions():
    """How far models with positions of their own are off one device, where the batch says which."""
    import transformers as hf

    cases, found = _cases(), {}
    kind, config, batch = cases["roberta"]
    own = {**batch, "position_ids": (torch.arange(TOKENS) + 1 + config.pad_token_id).expand(2, -1)}
    model = made(kind, config)
    found["roberta, as it counts"] = error(model(**own).loss, model(**batch).loss)
    found["roberta"] = _losses(model, own)
    kind, config, batch = cases["padded opt"]
    own = {**batch, "position_ids": (batch["attention_mask"].cumsum(1) * batch["attention_mask"] - 1).clamp(min=0)}
    found["padded opt"] = _losses(made(kind, config), own)
    found["padded opt, as it counts"] = _losses(made(kind, config), batch)
    found["roberta, of which nobody says how it counts"] = _losses(made(*cases["roberta"][:2]), cases["roberta"][2])
    right = {**batch, "attention_mask": batch["attention_mask"].flip(1)}
    right["labels"] = right["input_ids"].masked_fill(right["attention_mask"] == 0, -100)
    found["opt padded at the end"] = _losses(made(kind, config), right)
    biogpt = hf.BioGptConfig(**ENCODER, **STILL, layerdrop=0.0)
    found["biogpt, which makes a mask of ones"] = _losses(made("BioGptForCausalLM", biogpt), cases["roberta"][2])
    for name in ("packed opt", "packed afmoe"):
        kind, config, batch = cases[name]
        numbers = (batch["position_ids"] == 0).cumsum(1)
        found[name] = _losses(made(kind, config), {**batch, "seq_idx": numbers})
    return found


# -- what is refused ---------------------------------------------------------------------------------------------------


def _message(function):
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def refusals():
    import transformers as hf

    ids, cases = text(), _cases()
    plain = {"input_ids": ids, "labels": ids}

    def other(kind, config, batch=plain, training=False):
        return lambda: shard(made(kind, config, training), batch)

    def unlisted():
        from longspan import huggingface

        class Mine(hf.LlamaPreTrainedModel):
            def __init__(self, config):
                super().__init__(config)
                self.model = hf.LlamaModel(config)

        huggingface.shard_inputs(made(Mine, hf.LlamaConfig(**SIZES)), {"input_ids": ids}, dist.group.WORLD)

    gemma = hf.RecurrentGemmaConfig(**SIZES, lru_width=32, attention_window_size=9)
    bart = hf.BartConfig(
        vocab_size=24, d_model=32, decoder_layers=2, encoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=32,
        encoder_attention_heads=4, encoder_ffn_dim=32, pad_token_id=0,
    )  # fmt: skip
    mobile = hf.MobileBertConfig(
        vocab_size=24,
        hidden_size=128,
        embedding_size=32,
        intra_bottleneck_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    tries = {
        "unlisted head": unlisted,
        "encoder and decoder": other("BartForConditionalGeneration", bart),
        "no position_ids": other("BartForCausalLM", bart),
        "recurrent layers": other("RecurrentGemmaForCausalLM", gemma),
        "trigrams": other("MobileBertForMaskedLM", mobile, {"input_ids": ids}),
        "layers left out": other("OPTForCausalLM", hf.OPTConfig(**OPT, layerdrop=0.1), training=True),
        "packed opt": other(*cases["packed opt"]),
        "packed afmoe": other(*cases["packed afmoe"]),
        "packed bert": other(*cases["packed bert"]),
        "packed both ways": other(*cases["packed both ways"]),
    }
    return {name: _message(function) for name, function in tries.items()}


# -- layers that do not listen -----------------------------------------------------------------------------------------


class Bypass(nn.Module):
    """Calls forward itself, as PEFT does: hooks of what is inside do not run."""

    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def forward(self, **inputs):
        return self.inside.forward(**inputs)


def _checkpointed(model, reentrant):
    checkpoint_layers(model, {"use_reentrant": reentrant})
    return model


WRAPPERS = {
    "none": lambda model: model,
    "ddp": DistributedDataParallel,
    "fsdp2": lambda model: fully_shard(model),
    "fsdp1": lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True),
    "bypass": Bypass,
    "checkpointed": lambda model: _checkpointed(model, False),
    "checkpointed anew": lambda model: _checkpointed(model, True),
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "compiled in place": lambda model: model.compile(backend="eager") or model,
    "shortened": lambda model: _shortened(model),
}


def _shortened(model):
    model.model.layers = model.model.layers[:1]  # as a stage of a pipeline, or a student
    return model


def _deaf(how):
    """A Llama of which no layer, or all but the first, get `longspan=` or a mask of ours."""

    model = llama(training=True)
    for layer in model.model.layers[int(how == "first") :]:
        layer.self_attn.forward = partial(_by_itself, layer.self_attn)
    return model


def _by_itself(attention, hidden_states, **_):
    """What a layer computes that asks nobody, on whatever tokens it is given."""
    q, k, v = (
        layer(hidden_states).unflatten(2, (-1, attention.head_dim)).transpose(1, 2)
        for layer in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return attention.o_proj(out.transpose(1, 2).flatten(2)), None


def listening(wrapper):
    """Messages of a model that listens (none), and of two that do not, in a loop that does not call full_loss."""
    found = []
    for how in ("all", "none", "first"):
        if how == "first" and wrapper == "shortened":
            continue
        model = WRAPPERS[wrapper](llama(training=True) if how == "all" else _deaf(how))
        trusted = {} if how == "all" else {"trust_model": True}
        said = [_message(partial(_step, model, repeat, **trusted)) for repeat in ((1, 2) if how == "all" else (1,))]
        if how != "all":
            said.append(_message(partial(_step, model)))
        found.append(", ".join(said))
        dist.barrier()
    return found


def _step(model, repeat=1, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # trust is loud
        inputs = shard(model, batch_of("plain"), **options)
    for _ in range(repeat):  # the same inputs again, as with several losses
        model(**inputs).loss.backward()
    assert any(gradient.any() for gradient in gradients(model).values())


def without_keywords():
    """How far types of transformers that do not hand `longspan=` down are off one device: their masks tell them."""
    import transformers as hf

    kinds = {
        "stablelm": ("StableLmForCausalLM", hf.StableLmConfig(**SIZES)),
        "nemotron": ("NemotronForCausalLM", hf.NemotronConfig(**SIZES)),
    }
    found = {}
    for name, kind in kinds.items():
        for checkpointing in (False, True):
            try:
                model = made(*kind, True)
            except KeyError:  # nemotron chose among classes of its own before transformers 5.13
                continue
            batch = batch_of("plain")
            model(**batch, use_cache=False).loss.backward()
            right = gradients(model)
            model.zero_grad()
            if checkpointing:
                checkpoint_layers(model, {"use_reentrant": False})
            model(**shard(model, batch)).loss.backward()
            mine = gradients(model)
            for gradient in mine.values():
                dist.all_reduce(gradient)
            found[name, checkpointing] = max(error(mine[key], right[key]) for key in right)
    return found
