"""Hugging Face transformers with attention by Longspan: `register`, `shard_inputs` and `full_loss` (`inputs.py`), and
the `Trainer` (`trainer.py`), which imports more and is therefore not loaded here.

A model that cannot run over ranks is refused in `first_use.py`, after its check (`check.py`) found a difference, or
earlier in `sharding.check_model` (attention, structure), `mixers.py` (recurrences) and `structure.py` (versions).
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
