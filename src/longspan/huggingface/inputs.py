"""`attn_implementation="longspan"` for models of Hugging Face transformers, on one device and over ranks.

`register()` once; then models that go through transformers' attention interface take the name. On one device nothing
else changes: masks, windows, packing, soft caps, sinks, caches and `generate()` mean what they mean to "eager". Over
ranks, `shard_inputs` turns a whole batch into this rank's arguments of `model(...)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from longspan.errors import renamed
from longspan.huggingface.attention import NAME
from longspan.huggingface.batches import IGNORE, read_batch
from longspan.huggingface.head import LOGITS, LOSS, SCORES
from longspan.huggingface.masks import LayerMask
from longspan.huggingface.sequence import ShardedSequence
from longspan.huggingface.sharding import Sharding, check_model, check_padding, register, sharded
from longspan.layouts import Layout
from longspan.training import BatchError
from longspan.training.groups import all_summed, process_group
from longspan.training.loss import Reported
from longspan.validate import Group

__all__ = ["NAME", "LayerMask", "ShardedSequence", "full_loss", "register", "shard_for_logprobs", "shard_inputs"]


@renamed(schedule="scheme")
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
    """This rank's arguments: `model(**shard_inputs(model, batch, mesh["cp"]))`.

    A model that is used for the first time is proved: rank 0 makes a tiny copy of its configuration, runs it whole and
    split over simulated ranks, and compares loss and gradients. That takes seconds, once: the result is remembered on
    disk, and told to the other ranks. A model that would compute something else over ranks is refused.

    Documents are found as transformers finds them: in `position_ids` that do not go on by one (without an
    `attention_mask`), in `cu_seq_lens_q`, or in `seq_idx`. `loss` of the model's output is this rank's share: shares
    add up to the loss, and gradients to gradients; `full_loss` says what the whole is.

    Args:
        model: the model, wrapped or not.
        batch: what the model would get on one device, the same on every rank.
        group: the ranks of the sequence: a process group or a mesh of one axis.
        layout: a `Layout`, or the name of one.
        positions: "sequence" or "document": how tokens are counted where documents come from `cu_seq_lens_q` or
            `seq_idx` and there are no `position_ids`.
        scheme: see `longspan.plan`.
        dropout_seed: decides which pairs attention dropout strikes.
        logits: with labels in the batch, the loss is computed without logits wherever the model's head is a plain
            linear layer: they would be the largest tensor of all. True has the model compute them as well. Without
            labels logits are the model's answer, and always there.
        trust_model: skip the proof. A layer that mixes tokens by other means than attention, or counts positions
            itself, would go wrong unnoticed.

    Returns:
        Arguments for the model.

        - `input_ids` (or `inputs_embeds`) and `position_ids` of this rank's tokens;
        - `shift_labels`, shifted while the sequence was whole, and `num_items_in_batch`, all labels of the batch unless
          it is given (with gradient accumulation). `labels` is empty: transformers only asks whether it is there, and a
          loss that would shift labels of this rank alone fails on it. Models whose loss is a mean of their own labels
          are given none; their loss is computed from their logits. A model that ignores `num_items_in_batch` on one
          device (BERT) ignores it here, too; one whose forward does not take it is refused with it;
        - `longspan`, a `ShardedSequence`; `use_cache=False`; and what else was in the batch and has nothing to do with
          tokens.

        Models that pool (classes of sequences), or that see images, are given whole sequences, which are cut inside.
    """
    asked = Sharding(layout, positions, scheme, dropout_seed, LOGITS if logits else LOSS)
    return _sharded(model, batch, process_group(group, "shard_inputs"), asked, trust_model)


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

    Labels are those of the batch, or its `input_ids` where there are none (padding is left out); they are shifted here.
    Logits are divided by `temperature`, and computed only where the head needs it. Reinforcement learning asks for this
    with and without gradients: of the policy, of a reference, of a teacher. `part["longspan"].layout` is what
    `longspan.training.gather_tokens` and `shard_like` take.
    """
    if not temperature > 0:
        raise BatchError(f"temperature = {temperature} was asked for. Logits are divided by it: give a number above 0.")
    if all(batch.get(name) is None for name in ("labels", "shift_labels")):
        batch = {**batch, "labels": _own_labels(batch)}
    asked = Sharding(layout, None, "auto", dropout_seed, SCORES, float(temperature))
    part = _sharded(model, batch, process_group(group, "shard_for_logprobs"), asked, trust_model)
    if part[NAME].at_head is None:
        raise BatchError(
            f"log-probabilities of tokens were asked for, but {type(model).__name__} predicts no tokens. Use a model"
            f" with a language model's head."
        )
    return part


def _own_labels(batch: Mapping[str, Any]) -> Tensor:
    ids = batch.get("input_ids")
    if ids is None:
        raise BatchError(
            "log-probabilities were asked for, but the batch has neither labels nor input_ids. Add labels."
        )
    mask = batch.get("attention_mask")
    return ids if mask is None else ids.masked_fill(mask == 0, IGNORE)


def _sharded(model: Any, batch: Mapping[str, Any], members: Any, asked: Sharding, trust_model: bool) -> dict[str, Any]:
    from longspan.huggingface.first_use import rules_of

    inner = check_model(model, batch)
    read = read_batch(batch)
    check_padding(inner, read)
    part = sharded(inner, read, members, rules_of(inner, read, members, trust_model), asked, model)
    part[NAME].checks_hooks = not trust_model
    return part


def full_loss(loss: Tensor, inputs: Mapping[str, Any], *, gradients: str = "sum") -> Tensor:
    """The loss of whole sequences, the same on every rank, from this rank's share; backward is that of the share.

    `gradients` says what happens to parameters' gradients over the group afterwards, as in `training.token_loss`:
    "sum" if they are added up, "average" if they are averaged, as FSDP and DDP do (shares are then multiplied by the
    number of ranks).
    """
    sequence = inputs.get(NAME)
    if not isinstance(sequence, ShardedSequence) or gradients not in ("sum", "average"):
        raise BatchError(
            f"full_loss takes a loss, the dict of shard_inputs that it was computed from, and gradients='sum' or"
            f" 'average', but {type(sequence).__name__} was found under {NAME!r}, and gradients = {gradients!r}."
        )
    sequence.check_seen("the model")
    value = all_summed(loss.detach().clone(), sequence.group)
    share = loss * sequence.group.size() if gradients == "average" else loss
    return Reported.apply(share, value)  # type: ignore[return-value]
