"""Hugging Face transformers with attention by Longspan: `register`, `shard_inputs`, `full_loss` (`inputs.py`), and the
`Trainer` (`trainer.py`), which imports more and is therefore not loaded here.
"""

from longspan.huggingface.inputs import (
    NAME,
    LayerMask,
    ShardedSequence,
    full_loss,
    register,
    shard_for_logprobs,
    shard_inputs,
)

__all__ = ["NAME", "LayerMask", "ShardedSequence", "full_loss", "register", "shard_for_logprobs", "shard_inputs"]
