"""Helpers for training loops: shard one batch over ranks, and get the same gradients as on one device.

A step, in this order: `check_same` (do all ranks of the sequence have the same batch?), `shard_batch` (the rank's part,
with labels that were shifted before sharding), the model, `token_loss` (with the model's `Head`, without logits of all
tokens; `token_logprobs` gives the log-probability of each token, for reinforcement learning). `prefetch` plans and
shards the next batch in a thread while a step runs, and `DocumentLoader` reads the documents of `longspan.batches`.
`relayout` is for layers that need another layout than attention, `gather_outputs` for evaluation, `make_mesh` for the
ranks. `tile` runs MLPs and norms over a few tokens at a time, to save memory.

Custom losses (reinforcement learning, preferences, distillation): `shard_like` shards per-token tensors as the batch
was sharded, `per_sequence` reduces tokens of all ranks to one number per document, `per_token` is the reverse, and
`gather_tokens` gathers whole sequences for a loss that every rank computes.
"""

from longspan.training.batch import Batch, prefetch, shard_batch, shift_tokens
from longspan.training.groups import BatchError, Mesh, attempt_store, check_same, make_mesh
from longspan.training.loader import DocumentLoader, TokenFile
from longspan.training.loss import TokenLogprobs, token_logprobs, token_loss
from longspan.training.loss_without_logits import Head
from longspan.training.tiles import tile
from longspan.training.tokens import gather_outputs, gather_tokens, per_sequence, per_token, relayout, shard_like

__all__ = [
    "Batch",
    "BatchError",
    "DocumentLoader",
    "Head",
    "Mesh",
    "TokenFile",
    "TokenLogprobs",
    "attempt_store",
    "check_same",
    "gather_outputs",
    "gather_tokens",
    "make_mesh",
    "per_sequence",
    "per_token",
    "prefetch",
    "relayout",
    "shard_batch",
    "shard_like",
    "shift_tokens",
    "tile",
    "token_logprobs",
    "token_loss",
]
