"""A whole step of a tiny model on Gloo ranks, beside transformers' own attention on one device: what a proof says, once
more with processes, another batch and another layout."""

from __future__ import annotations

import contextlib
import logging
import warnings
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.family_cases import Case, Step, batch_of, class_of, config_of, difference, gradients, said, step

LAYOUT = "balanced"
DTYPES = {"float64": torch.float64, "float32": torch.float32}


def step_on_ranks(case: Case) -> dict[str, Any]:
    """The differences of a step over all ranks from one device, by dtype, on every rank; or why there is none."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    errors: dict[str, float] = {}
    try:
        for name, dtype in DTYPES.items():
            errors[name] = _compared(case, dtype)
    except Exception as error:
        return {"failed": said(error)}
    return errors


def _compared(case: Case, dtype: torch.dtype) -> float:
    from longspan.integrations import huggingface
    from longspan.integrations.huggingface.proving.tiny import build, tiny_config

    huggingface.register()
    config = tiny_config(config_of(case))
    config._attn_implementation = "eager"
    model = build(class_of(case), config, seed=3).to(dtype)
    batch = batch_of(case, model.config, seed=11)
    with _precision(dtype):
        expected = step(model, batch)
        model.set_attn_implementation("longspan")
        found = _over_ranks(model, batch)
    # logits are spread over ranks: the loss and all gradients are what a step is
    return difference(Step(found.loss, expected.logits, found.grads), expected)


def _precision(dtype: torch.dtype) -> Any:
    """Float64 all through: what models compute in float32 would hide differences."""
    from longspan.integrations.huggingface.proving.wide import Wide

    return Wide() if dtype == torch.float64 else contextlib.nullcontext()


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
    return Step(loss.item(), torch.zeros(0), grads)
