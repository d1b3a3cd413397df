"""NEFTune over ranks: noise of embeddings is that of whole sequences, and a rank adds the rows of its own tokens.

The scale is that of the whole sequence's length. Noise is drawn for all tokens, by every rank: where the ranks'
generators agree (no dropout), it is what one process would have drawn; where they do not, rows of different ranks are
independent.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from longspan.integrations.huggingface.hooks.current import current
from longspan.integrations.huggingface.structure import text_model
from longspan.layouts import Layout

DRAWN_AT_ONCE = 2**26
"""Numbers. More are drawn piece by piece, so that no rank holds noise of the whole sequence: on CPUs these are the same
numbers, on GPUs others of the same kind."""


def spread_noise(module: nn.Module, _: Any, output: Tensor) -> Tensor:
    """A forward hook in place of transformers' `neftune_post_forward_hook`, which knows this rank's tokens alone."""
    if not module.training:
        return output
    sequence = current()
    alpha: Any = module.neftune_noise_alpha
    if sequence is None or not sequence.is_cut:  # the module was given whole sequences
        bound = _bound(alpha, output.shape[1], output.shape[2])
        return output + torch.zeros_like(output).uniform_(-bound, bound)
    return output + own_noise(output, alpha, sequence.layout, sequence.rank)


def own_noise(like: Tensor, alpha: float, layout: Layout, rank: int) -> Tensor:
    """This rank's rows of noise that is drawn for whole sequences, in the order in which transformers draws it."""
    rows, width, seq_len = like.shape[0], like.shape[2], layout.seq_len
    bound = _bound(alpha, seq_len, width)
    if rows * seq_len * width <= DRAWN_AT_ONCE:
        return layout.shard(like.new_empty(rows, seq_len, width).uniform_(-bound, bound), rank, 1)
    places = torch.as_tensor(layout.positions(rank)[: int(layout.num_tokens[rank])], device=like.device)
    noise = torch.zeros_like(like)
    step = max(1, DRAWN_AT_ONCE // width)
    for row in range(rows):
        for start in range(0, seq_len, step):
            piece = like.new_empty(min(step, seq_len - start), width).uniform_(-bound, bound)
            mine = ((places >= start) & (places < start + step)).nonzero()[:, 0]
            noise[row, mine] = piece[places[mine] - start]
    return noise


def _bound(alpha: float, seq_len: int, width: int) -> float:
    return float(alpha / torch.sqrt(torch.tensor(seq_len * width)))  # rounded as transformers rounds it


def replace_noise(trainer: Any, known: Any) -> Any:
    """The handle of the hook that adds noise, after the Trainer's own was replaced. That one is made when training
    begins; when it ends, the Trainer removes whatever is there."""
    made = getattr(trainer, "neftune_hook_handle", None)
    if trainer.neftune_noise_alpha is None or made is None or made is known:
        return known
    model = trainer.accelerator.unwrap_model(trainer.model)
    embeddings = (text_model(model) or model).get_input_embeddings()
    made.remove()
    trainer.neftune_hook_handle = embeddings.register_forward_hook(spread_noise)
    return trainer.neftune_hook_handle
