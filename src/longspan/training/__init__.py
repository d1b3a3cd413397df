"""What a training loop needs around attention: one batch for all ranks in, the same gradients as on one device out.

A step, in this order: `check_same` (were all ranks of the sequence fed one batch?), `shard_batch` (the rank's part,
with labels that were shifted while the sequence was whole), the model, `token_loss` (given the model's `Head`, without
logits of all tokens; `token_logprobs` is for what reinforcement learning wants of each). `relayout` is for layers that
need other tokens than attention does, `gather_outputs` for evaluation, `make_mesh` for the ranks, `watch` for knowing
who failed.

Losses of one's own (reinforcement learning, preferences, distillation): `shard_like` cuts what belongs to tokens as the
batch was cut, `per_sequence` makes one number per document of all ranks' tokens, `per_token` is its way back, and
`gather_tokens` gives whole sequences to a loss that every rank computes alike.
"""

from longspan.training.batch import Batch, shard_batch, shift_tokens
from longspan.training.groups import BatchError, check_same
from longspan.training.head import Head
from longspan.training.loss import TokenLogprobs, token_logprobs, token_loss
from longspan.training.mesh import Mesh, make_mesh
from longspan.training.tokens import gather_outputs, gather_tokens, per_sequence, per_token, relayout, shard_like
from longspan.training.watching import Watching, attempt_store, watch

__all__ = [
    "Batch",
    "BatchError",
    "Head",
    "Mesh",
    "TokenLogprobs",
    "Watching",
    "attempt_store",
    "check_same",
    "gather_outputs",
    "gather_tokens",
    "make_mesh",
    "per_sequence",
    "per_token",
    "relayout",
    "shard_batch",
    "shard_like",
    "shift_tokens",
    "token_logprobs",
    "token_loss",
    "watch",
]
