"""A whole step of a tiny model on Gloo ranks, beside transformers' own attention on one device: what a proof says, once
more with processes, another batch and another layout."""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.family_cases import Case, Step, batch_of, class_of, config_of, difference, gradients, said, step

LAYOUT = "balanced"


def step_on_ranks(case: Case) -> dict[str, Any]:
    """How far a step over all ranks is off from one device in float64: computed in float64 and in float32, and one
    device's own in float32 beside it. Or why there is none."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    try:
        return _compared(case)
    except Exception as error:
        return {"failed": said(error)}


def _compared(case: Case) -> dict[str, Any]:
    from longspan.integrations import huggingface
    from longspan.integrations.huggingface.proving.tiny import build, tiny_config
    from longspan.integrations.huggingface.proving.wide import Wide

    huggingface.register()
    config = tiny_config(config_of(case))
    config._attn_implementation = "eager"
    model = build(class_of(case), config, seed=3).float()  # weights that both precisions have
    batch = batch_of(case, model.config, seed=11)
    narrow = step(model, batch)
    model.double()
    with Wide():  # what models compute in float32 would hide differences
        expected = step(model, batch)
        model.set_attn_implementation("longspan")
        errors = {"float64": difference(_over_ranks(model, batch), expected)}
    model.float()
    errors["float32"] = difference(_over_ranks(model, batch), expected)
    errors["one device, float32"] = difference(replace(narrow, logits=expected.logits), expected)
    return errors


def _over_ranks(model: Any, batch: dict[str, Any]) -> Step:
    from longspan.integrations import huggingface

    model.zero_grad()
    inputs = huggingface.shard_inputs(model, batch, dist.group.WORLD, layout=LAYOUT)
    out = model(**inputs)
    loss = huggingface.full_loss(out.loss, inputs)
    loss.backward()
    names = sorted(name for name, p in model.named_parameters() if p.requires_grad)
    own = gradients(model)
    grads = {}
    for name in names:  # experts may have had no token on this rank
        used = torch.tensor(float(name in own))
        dist.all_reduce(used)
        if used:
            grads[name] = own[name] if name in own else torch.zeros_like(model.get_parameter(name))
            dist.all_reduce(grads[name])
    return Step(loss.item(), None, grads)
