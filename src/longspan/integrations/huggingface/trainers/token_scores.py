"""Models with TRL's fused head over ranks: whole sequences in, numbers of all tokens out.

TRL asks a model for `model(..., labels=labels, fused_lm_head=True)`, and takes from it log-probabilities and
entropies, one number a token. So a model is called with whole sequences, runs on this rank's part of them, and what
comes out is gathered: every rank computes the loss and all metrics of whole sequences, as one process does. Gradients
are those of the rank's own tokens. DDP and FSDP2 average over ranks what must be added up over those of a sequence, so
they are multiplied by the number of these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from longspan.integrations.huggingface.attention import NAME
from longspan.integrations.huggingface.batches import IGNORE, LABELS, shifted_labels
from longspan.integrations.huggingface.hooks.current import enter, leave
from longspan.integrations.huggingface.hooks.losses import route_balancing
from longspan.integrations.huggingface.hooks.placed import has_hook
from longspan.integrations.huggingface.inputs import shard_inputs
from longspan.integrations.huggingface.sequence import ShardedSequence
from longspan.integrations.huggingface.structure import text_model
from longspan.training import BatchError, gather_tokens
from longspan.training.groups import all_summed
from longspan.training.loss import Reported

FUSED = "fused_lm_head"

_SCORED: WeakKeyDictionary[nn.Module, tuple[Any, Callable[[bool], dict[str, Any]]]] = WeakKeyDictionary()
"""The ranks of each model, and the further arguments of `shard_inputs`. Hooks are plain functions, which a copy of the
model may take along: it is not in here, so they do nothing."""
_CUT: WeakSet[ShardedSequence] = WeakSet()
"""Sequences that were cut here, whose numbers are gathered here, too."""


def score_over_ranks(model: Any, group: Any, settings: Callable[[bool], dict[str, Any]]) -> None:
    """Runs calls with TRL's fused head over the ranks of the group, from now on; other calls, as those of `generate`,
    stay what they are. `settings(training)` has further arguments of `shard_inputs`."""
    inner = text_model(model)
    if inner is None:
        raise BatchError(f"{type(model).__name__} is no model of transformers, which is what scores tokens over ranks.")
    _SCORED[inner] = group, settings
    if not has_hook(inner, _cut):
        inner.register_forward_pre_hook(_cut, with_kwargs=True)
        inner.register_forward_hook(_join, with_kwargs=True)
        inner.register_forward_hook(_end, with_kwargs=True, always_call=True)


def _cut(model: nn.Module, args: Any, given: dict[str, Any]) -> Any:
    """This rank's arguments, with labels that were shifted while the sequence was whole."""
    if model not in _SCORED or not given.get(FUSED):
        return None
    if given.get("output_router_logits") or getattr(_text_config(model), "output_router_logits", False):
        route_balancing()
    if NAME in given:  # a part already
        return None
    if args or given.get("labels") is None:
        raise BatchError(
            f"{type(model).__name__} was called with {FUSED}=True, {len(args)} arguments without names and labels ="
            f" {given.get('labels')}. Give all arguments by name, labels among them: they are what is scored."
        )
    group, settings = _SCORED[model]
    kept = {name: given[name] for name in (FUSED, "num_items_in_batch") if name in given}
    batch = {name: value for name, value in given.items() if name not in (*kept, *LABELS)}
    part = shard_inputs(model, batch, group, **settings(model.training))
    sequence = part[NAME]
    if sequence.rules.body is not None:
        raise BatchError(
            f"{type(model).__name__} is cut inside, at {sequence.rules.body}, and TRL's fused head would score whole"
            f" sequences there. Train its text model, or use one process."
        )
    later = shifted_labels({"labels": given["labels"]})
    part["shift_labels"] = sequence.layout.shard(later, sequence.rank, 1, IGNORE)
    sequence.arguments |= {"shift_labels"}
    _CUT.add(sequence)
    enter(sequence)  # for the loss of routers, which TRL computes behind the model
    return (), {**part, **kept}


def _join(model: nn.Module, args: Any, given: dict[str, Any], output: Any) -> Any:  # noqa: ARG001
    """Numbers of all tokens but the last, whose next token nobody knows, as TRL has them. There is no `loss`: each
    trainer has its own."""
    sequence = given.get(NAME)
    if model not in _SCORED or not given.get(FUSED) or sequence is None:
        return None
    if sequence not in _CUT:  # the trainer adds parts up, but for the loss of routers, of which it takes a mean
        if output.aux_loss is not None:
            output.aux_loss = _total(output.aux_loss, sequence)
        return None
    found = {field.name: getattr(output, field.name) for field in fields(output) if field.name != "loss"}
    for name, value in found.items():
        if isinstance(value, Tensor):
            found[name] = _total(value, sequence) if value.ndim == 0 else _of_all(value, sequence)[:, :-1]
    return type(output)(**found)


def _end(model: nn.Module, args: Any, given: dict[str, Any], output: Any) -> None:  # noqa: ARG001
    if given.get(NAME) in _CUT:
        _CUT.discard(given[NAME])
        leave()


def _text_config(model: Any) -> Any:
    return model.config.get_text_config()


def _of_all(value: Tensor, sequence: Any) -> Tensor:
    """One number for every token of whole sequences."""
    sent = value.to(torch.uint8) if value.dtype == torch.bool else value
    return gather_tokens(sent, sequence.layout, sequence.group, 1, gradients="average").to(value.dtype)


def _total(share: Tensor, sequence: Any) -> Tensor:
    """A sum over all ranks, each with the gradient of its own share."""
    total = all_summed(share.detach().clone(), sequence.group)
    return Reported.apply(share * sequence.group.size(), total)  # type: ignore[return-value]
