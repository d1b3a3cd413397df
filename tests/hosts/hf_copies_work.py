"""Copies of models that have been used over ranks, as an EMA or a reference model is made; importable by name."""

import copy

import torch
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
