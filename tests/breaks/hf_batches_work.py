"""Families of transformers with batches of many kinds, over ranks against one device; importable by name."""

import itertools
import logging
import warnings

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 256,
}  # fmt: skip
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
WINDOWS = ["sliding_attention", "full_attention"]
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
FAMILIES = {
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "bert": STILL,
    "roberta": STILL,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "gemma3_text": {"head_dim": 8, "sliding_window": 9, "layer_types": WINDOWS},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "llama": {"tie_word_embeddings": True},
    "biogpt": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "layerdrop": 0.0},
    "modernbert": {
        "global_attn_every_n_layers": 2, "local_attention": 8, "cls_token_id": 1, "sep_token_id": 2,
        "attention_dropout": 0.0, "embedding_dropout": 0.0, "mlp_dropout": 0.0,
    },
    "mistral": {"head_dim": 8, "sliding_window": 7},
    "llama4_text": {
        "head_dim": 8, "attention_chunk_size": 9, "num_local_experts": 2, "intermediate_size_mlp": 32, "moe_layers": [1]
    },
    "mixtral": {**EXPERTS, "output_router_logits": True, "router_aux_loss_coef": 0.5},
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 2.0},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8},
    "falcon_h1": {
        "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_d_ssm": 64,
        "mamba_chunk_size": 16,
    },
}  # fmt: skip
ENCODERS = ("bert", "modernbert", "roberta")
HYBRIDS = ("lfm2", "bamba", "falcon_h1")
TOKENS = 37
REAL = {
    "left": [(1, slice(0, 13))],
    "right": [(1, slice(20, None))],
    "both": [(1, slice(0, 5)), (1, slice(30, None)), (0, slice(0, 2))],
    "row": [(1, slice(None))],
    "hole": [(0, slice(11, 17))],
    "left and hole": [(0, slice(0, 3)), (0, slice(11, 17))],
}
"""Where tokens are padding, by name of the mode: batch row, and which tokens of it."""
PACKED = {
    "packed": [torch.cat([torch.arange(n) for n in (16, 1, 14, 6)])],
    "packed in two rows": [torch.cat([torch.arange(n) for n in row]) for row in ((25, 12), (3, 34))],
    "strided": [torch.arange(TOKENS) * 2] * 2,
}
MODES = (
    "plain", *REAL, "left, labels everywhere", "right, labels everywhere", *PACKED, "offset", "one label", "number",
    "number as a tensor", "embeddings",
)  # fmt: skip


def model_of(family):
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    import longspan.huggingface  # noqa: F401  (registers the attention)

    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family]})
    config._experts_implementation = "eager"  # grouped matrix products do not take float64
    kind = AutoModelForMaskedLM if family in ENCODERS else AutoModelForCausalLM
    model = kind.from_config(config, attn_implementation="sdpa", dtype=torch.float64)
    model.config.use_cache = False
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim >= 2:
                weight.normal_(0, weight.shape[-1] ** -0.5)
    return model.eval()


def batch_of(mode, family, seed=5):
    """A batch as collators make it: -100 at padding, and at no other token of a language model."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, SIZES["vocab_size"], (2, TOKENS), generator=draw)
    labels = ids.clone()
    if family in ENCODERS:
        labels[torch.rand(labels.shape, generator=draw) < 0.6] = -100
    padding, _, everywhere = mode.partition(", labels ")
    if padding in REAL:
        mask = torch.ones_like(ids)
        for row, tokens in REAL[padding]:
            mask[row, tokens] = 0
        if not everywhere:
            labels = labels.masked_fill(mask == 0, -100)
        return {"input_ids": ids.masked_fill(mask == 0, 0), "labels": labels, "attention_mask": mask}
    batch = {"input_ids": ids, "labels": labels}
    if mode in PACKED:
        rows = len(PACKED[mode])
        batch = {name: value[:rows] for name, value in batch.items()}
        return {**batch, "position_ids": torch.stack(PACKED[mode])}
    match mode:
        case "offset":
            batch["position_ids"] = torch.arange(11, 11 + TOKENS).expand(2, -1).contiguous()
        case "one label":
            labels.fill_(-100)[0, -1] = 5
        case "number" | "number as a tensor":
            batch["num_items_in_batch"] = 123 if mode == "number" else torch.tensor(123)
        case "embeddings":
            batch["inputs_embeds"] = torch.randn(2, TOKENS, SIZES["hidden_size"], generator=draw, dtype=torch.float64)
            del batch["input_ids"]
    return batch


def on_one_device(model, batch, family):
    """Loss and gradients of transformers' own attention; for hybrids, of documents one after another."""
    from longspan.huggingface.prove.trials import Float64Mode

    model.zero_grad()
    with Float64Mode():  # what models compute in float32 would hide differences
        documents = "position_ids" in batch and "attention_mask" not in batch and family in HYBRIDS
        loss = _of_documents(model, batch) if documents else model(**batch).loss
    loss.backward()
    return float(loss.detach()), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _of_documents(model, batch):
    rows = []
    for ids, positions in zip(batch["input_ids"], batch["position_ids"], strict=True):
        edges = [0, *(n for n in range(1, TOKENS) if positions[n] != positions[n - 1] + 1), TOKENS]
        spans = itertools.pairwise(edges)
        rows.append(torch.cat([model(input_ids=ids[None, a:b], position_ids=positions[None, a:b]).logits for a, b in spans], 1))  # fmt: skip  # noqa: E501
    logits, labels = torch.cat(rows), batch["labels"]
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def over_ranks(model, batch, trust_model=False):
    from longspan import huggingface
    from longspan.huggingface.prove.trials import Float64Mode

    model.zero_grad()
    inputs = huggingface.shard_inputs(model, batch, dist.group.WORLD, trust_model=trust_model)
    with Float64Mode():
        share = model(**inputs).loss
    loss = huggingface.full_loss(share, inputs)
    loss.backward()
    grads = {}
    for name, weight in model.named_parameters():
        grads[name] = torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
        dist.all_reduce(grads[name])
    return float(loss.detach()), grads


def difference(found, expected):
    """The largest difference of loss and gradients, of the loss and of the largest gradient."""
    (loss, grads), (right, wanted) = found, expected
    largest = max(float(grad.abs().max()) for grad in wanted.values())
    errors = [float((grads[name] - grad).abs().max()) / largest for name, grad in wanted.items()]
    errors += [float(grad.abs().max()) / largest for name, grad in grads.items() if name not in wanted]
    worst = max(abs(loss - right) / abs(right), *errors)
    return worst if worst == worst else float("inf")


def compare(family, modes):
    """By mode: how far two ranks are from one device, or why the batch is refused."""
    from longspan import LongspanError

    warnings.simplefilter("ignore")
    model, results = model_of(family), {}
    for mode in modes:
        batch = batch_of(mode, family)
        model.set_attn_implementation("sdpa")
        expected = on_one_device(model, batch, family)
        model.set_attn_implementation("longspan")
        try:
            results[mode] = difference(over_ranks(model, batch), expected)
        except LongspanError as error:
            results[mode] = str(error)
    return results


def opt_with_wrong_rule():
    """OPT, padding on the left, by a rule that places padding elsewhere than OPT does: what the proof says
    of it, the refusal of a label at the first real token, and the differences of a batch without it and of one with it
    that is not checked."""
    from unittest import mock

    from longspan.huggingface import batches, first_use, sharding
    from longspan.huggingface.adapter import adapter_of
    from longspan.huggingface.prove import detect

    right_rule = batches.count_without_padding

    def wrong_rule(*args):
        return right_rule(*args).clamp(min=0)

    model, batch = model_of("opt"), batch_of("left", "opt")
    later = {**batch, "labels": batch["labels"].clone()}
    later["labels"][1, 13] = -100
    name = "count_without_padding"
    with (
        mock.patch.object(detect, name, wrong_rule),
        mock.patch.object(batches, name, wrong_rule),
        mock.patch.object(first_use, "find_entry", return_value=None),
        mock.patch.object(first_use, "_PROOFS", {}),
    ):
        expected = [on_one_device(model, one, "opt") for one in (batch, later)]
        model.set_attn_implementation("longspan")
        refused = None
        try:
            over_ranks(model, batch)
        except ValueError as error:
            refused = str(error)
        (rules,) = adapter_of(model).rules.values()
        right = difference(over_ranks(model, later), expected[1])
        with mock.patch.object(sharding, "_check_predicted", return_value=None):
            unchecked = difference(over_ranks(model, batch), expected[0])
    return rules.exact_at_padding, refused, right, unchecked


def planted():
    """A model of the user's own that gives padding positions in a way that no rule knows, and one that does not take
    num_items_in_batch: refusals, and differences of the batches that are accepted."""
    from transformers import LlamaConfig

    from tests.hosts.planted_models import PositionsFromMask

    results = []
    for kind, modes in ((PositionsFromMask, ("both", "plain")), (without_number(), ("number", "plain"))):
        torch.manual_seed(0)
        model = kind._from_config(LlamaConfig(**SIZES), attn_implementation="sdpa", dtype=torch.float64).eval()
        for mode in modes:
            batch = batch_of(mode, "llama")
            model.set_attn_implementation("longspan")
            try:
                found = over_ranks(model, batch)
                model.set_attn_implementation("sdpa")
                results.append(difference(found, on_one_device(model, batch, "llama")))
            except ValueError as error:
                results.append(str(error))
    return results


def without_number():
    from transformers import LlamaForCausalLM

    class TakesNoNumber(LlamaForCausalLM):
        def forward(
            self, input_ids=None, attention_mask=None, position_ids=None, labels=None, longspan=None, use_cache=None
        ):
            given = {} if longspan is None else {"longspan": longspan}
            out = super().forward(input_ids, attention_mask, position_ids, use_cache=False, **given)
            if labels is not None:
                out.loss = cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            return out

    return TakesNoNumber
