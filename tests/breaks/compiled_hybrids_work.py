"""Compiled models of transformers over ranks, compared with the same model before it was compiled."""

import torch
import torch.distributed as dist
from torch import nn

from tests.breaks.hf_models_work import batch_of, errors_of, model_of, over_ranks, said

BATCHES = (("plain", 40), ("packed", 33), ("left", 29), ("plain", 31), ("cu_seq_lens", 37))
"""Every batch has another length or another kind than the one before it."""
WRAPPER_SHARDED, MODEL_SHARDED, IN_PLACE = "shard_inputs(compiled)", "shard_inputs(model)", "model.compile()"
WAYS = {WRAPPER_SHARDED: (True, True), MODEL_SHARDED: (True, False), IN_PLACE: (False, False)}
"""By name: whether `torch.compile` wraps the model, and whether shard_inputs gets the wrapper."""


def step_errors(family, way, backend, is_used_before, num_batches):
    """For every batch: errors of loss and gradients of the compiled model, of those of the model itself.

    is_used_before: whether the model has run over ranks, uncompiled, before it is compiled.
    """
    torch.compiler.reset()
    wraps, shards_wrapper = WAYS[way]
    batches = [batch_of(case, seed, tokens)[0] for seed, (case, tokens) in enumerate(BATCHES[:num_batches])]
    reference = model_of(family)
    wanted = [over_ranks(reference, batch, wide=False) for batch in batches]
    model = model_of(family)
    if is_used_before:
        over_ranks(model, batches[0], wide=False)
    if wraps:
        called = torch.compile(model, backend=backend)
    else:
        model.compile(backend=backend)
        called = model
    found = [over_ranks(model, batch, called if shards_wrapper else model, called, wide=False) for batch in batches]
    return [errors_of(mine, right)[:2] for mine, right in zip(found, wanted, strict=True)]


class Deaf(nn.Module):
    """A wrapper that takes the arguments it knows, and no others."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, position_ids=None):
        return self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False)


def deaf_wrapper():
    from longspan import huggingface

    wrapper = Deaf(model_of("lfm2"))
    batch = {"input_ids": batch_of("plain")[0]["input_ids"]}
    inputs = huggingface.shard_inputs(wrapper, batch, dist.group.WORLD)
    inputs.pop("use_cache")
    return said(lambda: wrapper(**inputs))
