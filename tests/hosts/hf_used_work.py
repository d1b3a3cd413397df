"""Models that have been used over ranks: copied, changed, called with more than their inputs; importable by name."""

import copy
import gc
import types
import weakref

import torch
from torch import nn
from transformers import BertConfig, LlamaConfig

from tests.hosts import hf_hybrid_work, hf_versions
from tests.hosts.hf_structure_work import ENCODER, STILL, llama, made, shard, text
from tests.hosts.hf_work import SIZES, gradients

DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}


def cases():
    """A model and its labels, for every kind of hook."""
    ids, classes = text(), torch.tensor([1, 2])
    dynamic = LlamaConfig(**{**SIZES, "max_position_embeddings": 16}, rope_parameters=DYNAMIC)
    bert = BertConfig(**ENCODER, **STILL, num_labels=3)
    made_of = {
        "head": (llama(), ids),
        "rotary": (made("LlamaForCausalLM", dynamic), ids),
        "last token": (llama("LlamaForSequenceClassification", num_labels=3), classes),
        "pooler": (made("BertForSequenceClassification", bert), classes),
    }
    if hf_versions.HAS_HYBRIDS:
        made_of["hybrid"] = hf_hybrid_work.model_of("bamba"), ids
    return made_of


def step(model, labels):
    model.zero_grad()
    loss = model(**shard(model, {"input_ids": text(), "labels": labels})).loss
    loss.backward()
    return {"loss": loss.detach(), **gradients(model)}


def copies():
    """By kind of hook: what of a copy's step, or of a copy's copy, is not the model's own, to the last bit."""
    found = {}
    for name, (model, labels) in cases().items():
        expected = step(model, labels)
        once = copy.deepcopy(model)
        steps = {"copy": step(once, labels), "copy of the copy": step(copy.deepcopy(once), labels)}
        found[name] = [
            f"{key} of the {which}" for which, got in steps.items() for key in got if not got[key].equal(expected[key])
        ]
    return found


class Mean(nn.Module):
    """Mixes tokens; the layers of no model do it like that."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) + x.mean(1, keepdim=True)


def changed():
    """What is said of a model that was changed before its first use, and after it was put back."""
    model, ids = llama(), text()
    layer, said = model.model.layers[0], {}
    inner, layer.mlp = layer.mlp, Mean(layer.mlp)
    said["a layer of the user's"] = refusal(step, model, ids)
    layer.mlp = inner
    forward = inner.forward
    inner.forward = lambda x: forward(x) + x.mean(1, keepdim=True)
    said["another forward"] = refusal(step, model, ids)
    del inner.forward
    layer.mlp.act_fn = nn.Sequential(layer.mlp.act_fn, nn.Dropout(0.0))
    said["token by token"] = refusal(step, model, ids)
    return said


def is_let_go():
    """Whether a model that was used is freed, also one whose forward somebody has wrapped, as accelerate does."""
    model = llama()
    model.forward = types.MethodType(type(model).forward, model)
    step(model, text())
    seen = weakref.ref(model)
    del model
    gc.collect()
    return seen() is None


def beside():
    """What is said when a model is given more than `shard_inputs` has made."""
    model, pooled = llama(), llama("LlamaForSequenceClassification", num_labels=3)
    inputs, of_pooled = shard(model, {"input_ids": text()}), shard(pooled, {"input_ids": text()})
    tokens = inputs["input_ids"]
    tries = {
        "labels": {"labels": tokens},
        "shift_labels": {"shift_labels": tokens},
        "seq_idx": {"seq_idx": torch.zeros_like(tokens)},
        "logits_to_keep": {"logits_to_keep": 1},
        "output_attentions": {"output_attentions": True},
        "hidden states": {"output_hidden_states": True},
        "all logits": {"logits_to_keep": 0},
    }
    said = {name: refusal(model, **inputs, **more) for name, more in tries.items()}
    said["labels of sequences"] = refusal(pooled, **of_pooled, labels=torch.tensor([1, 2]))
    said["after refusals"] = refusal(model, **inputs)
    return said


def refusal(call, *args, **kwargs):
    """What was said, or "" where the call was taken."""
    try:
        call(*args, **kwargs)
    except ValueError as error:
        return str(error)
    return ""
