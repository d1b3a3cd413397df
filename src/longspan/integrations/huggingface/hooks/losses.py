"""Losses that a model does not compute right on a rank's part: they are computed here, as shares that add up.

- Most models divide by the labels of all ranks, which they are told. Those that take a mean of their own labels are
  given none: cross-entropy of their logits is divided by all labels.
- A loss of whole sequences (classes, answers) is the same on all ranks, and each keeps one part in as many of it.
- A loss that balances experts is a product of means over all tokens, f_e * p_e for every expert. Counts f_e have no
  gradient, so it is linear in what does: with f_e of all ranks, each rank's share is f_e times its own part of p_e.
  Two ranks, two experts, f = (3/4, 1/4) of four tokens: rank 0 with probabilities (.9, .1), (.8, .2) has the share
  2 * (3/4 * 1.7/4 + 1/4 * .3/4), and rank 1 that of its own two tokens.
"""

from __future__ import annotations

import inspect
import sys
from functools import update_wrapper
from typing import Any

import torch
from torch import Tensor, nn

from longspan.execution.tile import wide
from longspan.integrations.huggingface.hooks.current import current
from longspan.integrations.huggingface.hooks.head import ended, replaced
from longspan.integrations.huggingface.rules import IN_PLACE, OWN, POOLED, SHIFTED
from longspan.training import BatchError
from longspan.training.groups import all_summed

BALANCING = "load_balancing_loss_func"


def with_loss(output: Any, sequence: Any) -> Any:
    """The model's output, with this rank's share of the loss; None where it has that already."""
    rule, work = sequence.rules.loss, sequence.at_head
    if work is not None:
        done = ended(output, work, rule == OWN)
        if done is not None:
            return done
    if rule == POOLED:
        loss = _item(output, "loss")
        return None if loss is None else replaced(output, loss=loss / sequence.group.size())
    if rule not in (SHIFTED, IN_PLACE) or sequence.labels is None:
        return None
    logits = _item(output, "logits")
    if not isinstance(logits, Tensor) or logits.shape[:2] != sequence.labels.shape:
        raise BatchError(
            f"labels of shape {tuple(sequence.labels.shape)} were given, but the model returned no logits for them"
            f" ({type(output).__name__}). Take labels out of the batch, or use a model with a head for tokens."
        )
    total = torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).to(wide(logits.dtype)),
        sequence.labels.reshape(-1).to(logits.device),
        reduction="sum",
    )
    return replaced(output, loss=total / sequence.num_items.to(total.device))


def _item(output: Any, name: str) -> Any:
    if isinstance(output, tuple):
        raise BatchError(
            f"the model returned a tuple, in which its {name} cannot be found. Leave out return_dict=False."
        )
    return getattr(output, name, None)


class BalancingLoss:
    """`load_balancing_loss_func` of a modeling file, over all tokens where a model is running on a part of them."""

    def __init__(self, original: Any) -> None:
        self.original = original
        update_wrapper(self, original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        sequence = current()
        return self.original(*args, **kwargs) if sequence is None else balancing_loss(sequence, *args, **kwargs)


def route_losses(model: nn.Module) -> None:
    """Replaces, once, the functions that balance experts where the model's classes call them by name."""
    for module in {sys.modules[type(part).__module__] for part in model.modules()}:
        original = vars(module).get(BALANCING)
        if original is not None and not isinstance(original, BalancingLoss) and _is_known(original):
            setattr(module, BALANCING, BalancingLoss(original))


def route_balancing() -> None:
    """The same for Mixtral's function, which TRL calls for models of all kinds."""
    from transformers.models.mixtral import modeling_mixtral

    original = vars(modeling_mixtral)[BALANCING]
    if not isinstance(original, BalancingLoss) and _is_known(original):
        setattr(modeling_mixtral, BALANCING, BalancingLoss(original))


def _is_known(function: Any) -> bool:
    return list(inspect.signature(function).parameters) == ["gate_logits", "num_experts", "top_k", "attention_mask"]


def balancing_loss(
    sequence: Any, gate_logits: Any, num_experts: Any = None, top_k: int = 2, attention_mask: Tensor | None = None
) -> Any:
    """This rank's share of `load_balancing_loss_func`: one all-reduce of counts."""
    if gate_logits is None or not isinstance(gate_logits, tuple):
        return 0
    device = gate_logits[0].device
    weights = _weights(sequence, attention_mask, gate_logits[0].shape[0], device)
    counts = torch.zeros(int(num_experts) + 1, dtype=torch.float64, device=device)
    shares = torch.zeros(int(num_experts), dtype=wide(gate_logits[0].dtype), device=device)
    for logits in gate_logits:
        routed = torch.nn.functional.softmax(logits.to(device), dim=-1)
        chosen = routed.detach().topk(top_k, dim=-1).indices
        counts.scatter_add_(0, chosen.reshape(-1), weights.repeat_interleave(top_k).double())
        counts[-1] += weights.sum()
        shares = shares + (routed.to(shares.dtype) * weights[:, None]).sum(dim=0)
    all_summed(counts, sequence.group)
    tokens = counts[-1]
    return ((counts[:-1] / tokens / tokens).to(shares.dtype) * shares).sum() * num_experts


def _weights(sequence: Any, attention_mask: Tensor | None, rows: int, device: Any) -> Tensor:
    """1 for real tokens of this rank, 0 for padding; what pads a rank's part has no token."""
    whole, layout, rank = sequence.whole, sequence.layout, sequence.rank
    real = torch.ones(whole.batch, whole.seq_len)
    if whole.padding is not None:
        real = torch.from_numpy(whole.padding).float()
    if attention_mask is not None and tuple(attention_mask.shape) != (whole.batch, whole.seq_len):
        raise BatchError(f"a router's loss was given a mask of shape {tuple(attention_mask.shape)} on a rank's part.")
    weights = layout.shard(real, rank, 1).reshape(-1).to(device)
    if weights.shape[0] != rows:
        raise BatchError(f"a router's loss was given {rows} tokens, but this rank holds {weights.shape[0]}.")
    return weights
