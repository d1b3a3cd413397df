"""Compare a whole step of a tiny model on Gloo ranks with transformers' own attention on one device: the check at first
use again, with processes, another batch and another layout."""

from __future__ import annotations

import copy
import logging
import warnings
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.family_cases import Case, Step, batch_of, class_of, config_of, difference, gradients, one_line, step

LAYOUT = "balanced"
WORLDS = (2, 3)


def step_on_ranks(case: Case) -> dict[int, dict[str, Any]]:
    """Return, by number of ranks, the error of a step against one device in float64: computed in float64, in float32,
    and by one device in float32. Or the reason why there is none."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    groups = _groups()
    try:
        model, batch, narrow, expected = _prepared(case)
    except Exception as error:
        return {world: {"failed": one_line(error)} for world in WORLDS}
    result: dict[int, dict[str, Any]] = {}
    for world in WORLDS:
        if dist.get_rank() < world:
            try:
                result[world] = _compared(copy.deepcopy(model), batch, narrow, expected, groups[world])
            except Exception as error:
                result[world] = {"failed": one_line(error)}
    return result


@lru_cache(maxsize=1)
def _groups() -> dict[int, Any]:
    """Return groups of the first ranks, by their number."""
    return {world: dist.new_group(list(range(world))) for world in WORLDS}


def _prepared(case: Case) -> tuple[Any, dict[str, Any], Step, Step]:
    """Return the model with weights that are exact in both precisions, a batch, and a step on one device in both."""
    import longspan.huggingface  # noqa: F401  (registers the attention)
    from longspan.huggingface.prove.tiny import build, tiny_config
    from longspan.huggingface.prove.trials import Float64Mode

    config = tiny_config(config_of(case))
    config._attn_implementation = "eager"
    model: Any = build(class_of(case), config, seed=3).float()
    model.config.use_cache = False
    batch = batch_of(case, model.config, seed=11)
    narrow = step(model, batch)
    model.double()
    with Float64Mode():  # parts that models compute in float32 would hide differences
        expected = step(model, batch)
    model.set_attn_implementation("longspan")
    return model, batch, narrow, expected


def _compared(model: Any, batch: dict[str, Any], narrow: Step, expected: Step, group: Any) -> dict[str, Any]:
    from longspan.huggingface.prove.trials import Float64Mode

    model.double()
    with Float64Mode():
        errors = {"float64": difference(_over_ranks(model, batch, group), expected)}
    model.float()
    errors["float32"] = difference(_over_ranks(model, batch, group), expected)
    errors["one device, float32"] = difference(replace(narrow, logits=None), expected)
    return errors


def _over_ranks(model: Any, batch: dict[str, Any], group: Any) -> Step:
    from longspan import huggingface

    model.zero_grad()
    inputs = huggingface.shard_inputs(model, batch, group, layout=LAYOUT)
    out = model(**inputs)
    loss = huggingface.full_loss(out.loss, inputs)
    loss.backward()
    own, grads = gradients(model), {}
    for name, weight in model.named_parameters():  # experts may have no token on this rank
        used = torch.tensor(float(name in own))
        dist.all_reduce(used, group=group)
        if used:
            grads[name] = own[name] if name in own else torch.zeros_like(weight)
            dist.all_reduce(grads[name], group=group)
    return Step(loss.item(), None, grads)
