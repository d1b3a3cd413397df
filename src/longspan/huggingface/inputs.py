"""`attn_implementation="longspan"` for models of Hugging Face transformers, on one device and over ranks.

Importing the package registers the name, for models that use transformers' attention interface. On one device nothing
else changes: masks, windows, packing, soft caps, sinks, caches and `generate()` mean the same as with "eager". Over
ranks, `shard_inputs` turns a whole batch into this rank's arguments of `model(...)`, by the rules of the model.
Attention is exact for any model; the rest of the model decides whether it can run over ranks: layers that mix tokens by
other means, positions that a rank counts from its own first token, losses that are no sum over tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from longspan.huggingface.adapter import adapter_of
from longspan.huggingface.attention import NAME
from longspan.huggingface.batches import IGNORE, is_between, read_batch
from longspan.huggingface.first_use import get_rules
from longspan.huggingface.masks import LayerMask
from longspan.huggingface.sequence import ShardedSequence
from longspan.huggingface.sharding import Sharding, build_arguments, check_model
from longspan.layouts import Layout
from longspan.training import BatchError
from longspan.training.groups import all_summed, process_group
from longspan.training.loss import ValueWithGradOf
from longspan.validate import Group

__all__ = ["NAME", "LayerMask", "ShardedSequence", "full_loss", "shard_for_logprobs", "shard_inputs"]


def shard_inputs(
    model: nn.Module,
    batch: Mapping[str, Any],
    group: Group,
    *,
    layout: str | Layout = "balanced",
    positions: str | None = None,
    scheme: str = "auto",
    dropout_seed: int | None = None,
    logits: bool = False,
    trust_model: bool = False,
) -> dict[str, Any]:
    """Return this rank's arguments: `model(**shard_inputs(model, batch, mesh["cp"]))`.

    Models run by rules. Those of the families that were proved ship with the package. For any other, rank 0 makes a
    tiny copy of its configuration when it is first used, runs it whole and split over simulated ranks, and compares
    loss and gradients, which takes seconds. A model that would compute something else over ranks is refused.

    Documents are detected as in transformers: in `position_ids` that do not go on by one (without an
    `attention_mask`), in `cu_seq_lens_q`, or in `seq_idx`. `loss` of the model's output is this rank's share: shares
    add up to the loss, and gradients to gradients; `full_loss` returns the whole.

    Args:
        model: the model, wrapped or not.
        batch: the arguments of the model on one device, the same on every rank.
        group: the ranks of the sequence: a process group or a mesh of one axis.
        layout: a `Layout`, or the name of one.
        positions: "sequence" or "document": how tokens are counted if documents come from `cu_seq_lens_q` or `seq_idx`
            and there are no `position_ids`.
        scheme: see `longspan.plan`.
        dropout_seed: decides which pairs attention dropout drops.
        logits: with labels in the batch, the loss is computed without logits if the model's head is a plain linear
            layer: they would be the largest tensor of all. True has the model compute them as well. Without labels
            logits are always computed.
        trust_model: skip the check. A layer that mixes tokens by other means than attention, or counts positions
            itself, would be wrong without an error.

    Returns:
        Arguments for the model.

        - `input_ids` (or `inputs_embeds`) and `position_ids` of this rank's tokens;
        - `shift_labels`, shifted while the sequence was whole, and `num_items_in_batch`, all labels of the batch unless
          it is in the batch (with gradient accumulation). `labels` is empty: transformers only checks whether it is
          there, and a loss that would shift labels of this rank alone fails on it. Models whose loss is a mean of their
          own labels receive none; their loss is computed from their logits. A model that ignores `num_items_in_batch`
          on one device (BERT) ignores it here, too; one whose forward does not take it is refused with it;
        - `longspan`, a `ShardedSequence`; `use_cache=False`; and all other arguments of the batch that have no dim of
          tokens.

        Models that pool (classes of sequences), or that see images, receive whole sequences, which are sharded inside.
    """
    options = Sharding(layout, positions, scheme, dropout_seed, "logits" if logits else "loss")
    return _shard(model, batch, process_group(group, "shard_inputs"), options, trust_model)


def shard_for_logprobs(
    model: nn.Module,
    batch: Mapping[str, Any],
    group: Group,
    *,
    temperature: float = 1.0,
    layout: str | Layout = "balanced",
    dropout_seed: int | None = None,
    trust_model: bool = False,
) -> dict[str, Any]:
    """Like `shard_inputs`, for log-probabilities: `logits` of the model's output are `TokenLogprobs` instead, the
    log-probability of each of this rank's labels and the entropy of each prediction, (batch, this rank's tokens).

    Labels are those of the batch, or its `input_ids` if there are none (without padding); they are shifted here. Logits
    are divided by `temperature`, and computed only if the head needs it. Reinforcement learning uses this with and
    without gradients: of the policy, of a reference, of a teacher. `part["longspan"].layout` is an argument of
    `longspan.training.gather_tokens` and `shard_like`.
    """
    if not temperature > 0:
        raise BatchError(f"temperature must be above 0, but got {temperature}. Logits are divided by it.")
    if batch.get("labels") is None and batch.get("shift_labels") is None:
        labels, mask = batch.get("input_ids"), batch.get("attention_mask")
        if labels is None:
            raise BatchError("log-probabilities need labels or input_ids, but the batch has neither. Add labels.")
        batch = {**batch, "labels": labels if mask is None else labels.masked_fill(mask == 0, IGNORE)}
    options = Sharding(layout, None, "auto", dropout_seed, "scores", float(temperature))
    part = _shard(model, batch, process_group(group, "shard_for_logprobs"), options, trust_model)
    if part[NAME].at_head is None:
        raise BatchError(
            f"log-probabilities of tokens need a language model's head, but {type(model).__name__} predicts no tokens."
        )
    return part


def full_loss(loss: Tensor, inputs: Mapping[str, Any], *, gradients: str = "sum") -> Tensor:
    """Return the loss of whole sequences, the same on every rank, from this rank's share; backward is the share's.

    `gradients` is what happens to parameters' gradients over the group afterwards, as in `training.token_loss`: "sum"
    if they are added up, "average" if they are averaged, as FSDP and DDP do (shares are then multiplied by the number
    of ranks).
    """
    sequence = inputs.get(NAME)
    if not isinstance(sequence, ShardedSequence) or gradients not in ("sum", "average"):
        raise BatchError(
            f"full_loss takes a loss, the dict of shard_inputs that it was computed from, and gradients='sum' or"
            f" 'average', but got {type(sequence).__name__} under {NAME!r}, and gradients = {gradients!r}."
        )
    sequence.check_seen("the model")
    value = all_summed(loss.detach().clone(), sequence.group)
    share = loss * sequence.group.size() if gradients == "average" else loss
    return ValueWithGradOf.apply(share, value)  # type: ignore[return-value]


def _shard(model: Any, batch: Mapping[str, Any], group: Any, options: Sharding, trust_model: bool) -> dict[str, Any]:
    inner = check_model(model, batch)
    info = read_batch(batch)
    if is_between(info.padding) and adapter_of(inner).is_hybrid:
        raise BatchError(
            "attention_mask must not have padding between real tokens for this model, whose recurrences would carry"
            " their state across it. Move padding to the front or the end of each row."
        )
    rules = get_rules(inner, info, group, trust_model)
    return build_arguments(inner, info, group, rules, options, model)
