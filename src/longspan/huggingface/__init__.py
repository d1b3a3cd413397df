"""Hugging Face transformers with attention by Longspan: `shard_inputs` and `full_loss` (`inputs.py`), and the `Trainer`
(`trainer.py`), which imports more and is therefore not loaded here. Importing this package registers
`attn_implementation="longspan"`.

A model that cannot run over ranks is refused in `first_use.py`, if neither `rules.json` has its rules nor a proof
(`prove/`) finds any, or earlier in `sharding.check_model` (attention, structure), `mixers.py` (recurrences) and
`structure.py` (versions).
"""

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from longspan.huggingface.attention import longspan_attention
from longspan.huggingface.inputs import (
    NAME,
    LayerMask,
    ShardedSequence,
    full_loss,
    shard_for_logprobs,
    shard_inputs,
)
from longspan.huggingface.masks import layer_mask

__all__ = ["NAME", "LayerMask", "ShardedSequence", "full_loss", "shard_for_logprobs", "shard_inputs"]

# Masks and plans are values, not tensors: graph breaks around them.
AttentionInterface.register(NAME, torch.compiler.disable(longspan_attention))
AttentionMaskInterface.register(NAME, torch.compiler.disable(layer_mask))
