"""TRL's trainers over ranks: models that score tokens (DPO, GRPO, RLOO), and distillation.

TRL calls a model as `model(..., labels=labels, fused_lm_head=True)`, and takes log-probabilities and entropies from it,
one number a token. So a model receives whole sequences, runs on this rank's part of them, and its numbers are gathered:
every rank computes the loss and all metrics of whole sequences, as one process does. Gradients are those of the rank's
own tokens. DDP and FSDP2 average over ranks, where ranks of one sequence must be summed, so they are multiplied by the
number of these.

In distillation, student and teacher run on a rank's tokens. TRL's loss receives this rank's hidden states and a mask of
the tokens that count; the shares of all ranks are added up. No rank holds hidden states of whole sequences.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from longspan.huggingface.accelerate import WHOLE, Ranks, SequenceAccelerator, drop_cp_duplicates
from longspan.huggingface.attention import NAME
from longspan.huggingface.batches import IGNORE, LABELS, shifted_labels
from longspan.huggingface.first_use import broadcast_bytes
from longspan.huggingface.hooks import route_losses
from longspan.huggingface.inputs import shard_inputs
from longspan.huggingface.masks import enter, leave
from longspan.huggingface.sequence import ShardedSequence
from longspan.huggingface.structure import has_hook, text_model
from longspan.training import BatchError, gather_tokens, shift_tokens
from longspan.training.groups import all_summed, message_device, process_group
from longspan.training.loss import ValueWithGradOf

FUSED = "fused_lm_head"

_SCORED: WeakKeyDictionary[nn.Module, tuple[Any, Callable[[bool], dict[str, Any]]]] = WeakKeyDictionary()
"""The ranks of each model, and the further arguments of `shard_inputs`. Hooks are plain functions, which a copy of the
model may have too: it is not in here, so they do nothing."""
_CUT: WeakSet[ShardedSequence] = WeakSet()
"""Sequences that were sharded here, whose numbers are gathered here, too."""


def score_over_ranks(model: Any, group: Any, settings: Callable[[bool], dict[str, Any]]) -> None:
    """Register hooks that run calls with TRL's fused head over the ranks of the group; other calls, as those of
    `generate`, do not change. `settings(training)` returns further arguments of `shard_inputs`."""
    inner = text_model(model)
    if inner is None:
        raise BatchError(f"tokens are scored over ranks by a model of transformers, but got {type(model).__name__}.")
    _SCORED[inner] = group, settings
    if not has_hook(inner, _shard_arguments):
        inner.register_forward_pre_hook(_shard_arguments, with_kwargs=True)
        inner.register_forward_hook(_join, with_kwargs=True)
        inner.register_forward_hook(_end, with_kwargs=True, always_call=True)


def _shard_arguments(model: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return this rank's arguments, with labels that were shifted while the sequence was whole."""
    if model not in _SCORED or not kwargs.get(FUSED):
        return None
    if kwargs.get("output_router_logits") or getattr(model.config.get_text_config(), "output_router_logits", False):
        from transformers.models.mixtral import modeling_mixtral

        route_losses([modeling_mixtral])  # TRL calls Mixtral's function for models of all kinds
    if NAME in kwargs:  # a part already
        return None
    if args or kwargs.get("labels") is None:
        raise BatchError(
            f"{type(model).__name__} with {FUSED}=True takes all arguments by name, labels among them, but got"
            f" {len(args)} without names and labels = {kwargs.get('labels')}."
        )
    group, settings = _SCORED[model]
    kept = {name: kwargs[name] for name in (FUSED, "num_items_in_batch") if name in kwargs}
    batch = {name: value for name, value in kwargs.items() if name not in (*kept, *LABELS)}
    part = shard_inputs(model, batch, group, **settings(model.training))
    sequence = part[NAME]
    if sequence.rules.body is not None:
        raise BatchError(
            f"{type(model).__name__} is sharded inside, at {sequence.rules.body}, and TRL's fused head would score"
            f" whole sequences there. Train its text model, or use one process."
        )
    later = shifted_labels({"labels": kwargs["labels"]})
    part["shift_labels"] = sequence.layout.shard(later, sequence.rank, 1, IGNORE)
    sequence.arguments |= {"shift_labels"}
    _CUT.add(sequence)
    enter(sequence)  # for the loss of routers, which TRL computes after the model
    return (), {**part, **kept}


def _join(model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:  # noqa: ARG001
    """Return numbers of all tokens but the last, which has no next token, as TRL does. `loss` is dropped: each trainer
    has its own."""
    sequence = kwargs.get(NAME)
    if model not in _SCORED or not kwargs.get(FUSED) or sequence is None:
        return None
    if sequence not in _CUT:  # the trainer adds parts up, but takes a mean of the loss of routers
        if output.aux_loss is not None:
            output.aux_loss = _sum_shares(output.aux_loss, sequence)
        return None
    values = {field.name: getattr(output, field.name) for field in fields(output) if field.name != "loss"}
    for name, value in values.items():
        if isinstance(value, Tensor) and value.ndim == 0:
            values[name] = _sum_shares(value, sequence)
        elif isinstance(value, Tensor):
            sent = value.to(torch.uint8) if value.dtype == torch.bool else value
            whole = gather_tokens(sent, sequence.layout, sequence.group, 1, gradients="average")
            values[name] = whole.to(value.dtype)[:, :-1]
    return type(output)(**values)


def _sum_shares(share: Tensor, sequence: Any) -> Tensor:
    """Return a sum over all ranks, each with the gradient of its own share."""
    total = all_summed(share.detach().clone(), sequence.group)
    return ValueWithGradOf.apply(share * sequence.group.size(), total)  # type: ignore[return-value]


def _end(model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:  # noqa: ARG001
    if kwargs.get(NAME) in _CUT:
        _CUT.discard(kwargs[NAME])
        leave()


# -- Methods of `ContextParallelTrainer` that only TRL's trainers call -------------------------------------------------
# Generation stays the trainer's. All ranks of a sequence have the same prompts and the same random numbers, and then
# the completions of the first of them: they would hold parts of different sequences otherwise.


if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object


class TrlMethods(_Base):
    """Overrides of methods of TRL's trainers."""

    _ranks: Ranks | None
    _kind: str
    _running: Any = None
    """In distillation, the student, its arguments on this rank, and the whole batch, while a loss is computed."""

    def _join_ranks(self: Any) -> None:
        """Make ranks of one sequence one process to the trainer, and models score tokens over them."""
        from accelerate.utils import set_seed

        if self._ranks is None or self._kind == "plain":
            return
        for model in (self.model, getattr(self, "ref_model", None)):
            if model is not None and self._kind != "distills":
                score_over_ranks(model, self._ranks.cp, self._shard_settings)
        if self._kind in WHOLE and not isinstance(self.accelerator, SequenceAccelerator):
            self.accelerator = SequenceAccelerator(self.accelerator, self._ranks)
            if any("_generate" in vars(base) for base in type(self).__mro__ if base.__module__.startswith("trl.")):
                set_seed(self.args.seed + self.accelerator.process_index)  # TRL has set another one on every rank

    def _shard_settings(self: Any, training: bool) -> dict[str, Any]:
        return {**self._sharding, "dropout_seed": self._dropout_seed(training)}

    def _precompute_ref_logps(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._join_ranks()  # DPO calls this inside of its __init__
        return super()._precompute_ref_logps(*args, **kwargs)  # type: ignore[misc]

    def _generate(self: Any, prompts: list[Any]) -> Any:
        completions = super()._generate(prompts)  # type: ignore[misc]
        return completions if self._ranks is None else _broadcast_completions(completions, self._ranks.cp.get_group())

    def _generate_and_score_completions(self: Any, inputs: list[Any]) -> Any:
        if self._ranks is None:
            return super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        with _gather_sequences_once(type(self), self._ranks):
            outputs = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        # Samples are shuffled next, by the CPU generator of the first rank: dropout may have used it differently.
        group = self._ranks.cp.get_group()
        state = torch.get_rng_state().to(message_device(group))
        dist.broadcast(state, group=group, group_src=0)
        torch.set_rng_state(state.cpu())
        return outputs

    def _compute_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Return, for distillation, the loss of whole sequences, the entropy of their tokens and the number of these,
        from this rank's share."""
        if self._ranks is None or self._kind != "distills":
            return super()._compute_loss(*args, **kwargs)  # type: ignore[misc]
        student, inputs, num_items = args
        batch = {
            "input_ids": torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            "attention_mask": torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
        }
        counted = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        counts = torch.cat([torch.zeros_like(inputs["prompt_mask"]), counted], dim=1)  # tokens that count
        part = shard_inputs(student, batch, self._ranks.cp, **self._shard_settings(student.training))
        layout, group = part[NAME].layout, process_group(self._ranks.cp, "distillation")
        mine = layout.shard(shift_tokens(counts, 1, fill=0), group.rank(), 1)
        own = {name: value for name, value in inputs.items() if name != "tool_mask"} | {"completion_mask": mine}
        self._running = student, part, batch
        try:
            count = counts.sum().clamp(min=1) if num_items is None else num_items
            share, entropy, num_tokens = super()._compute_loss(student, own, count)  # type: ignore[misc]
        finally:
            self._running = None
        sums = all_summed(torch.stack([x.detach().double() for x in (share, entropy, num_tokens)]), group)
        loss = ValueWithGradOf.apply(share * group.size(), sums[0].to(share.dtype))  # DDP and FSDP2 average
        return loss, sums[1].to(entropy.dtype), sums[2].to(num_tokens.dtype)

    def _get_last_hidden_state(self: Any, unwrapped_model: Any, *args: Any, **images: Any) -> Tensor:
        """Return this rank's hidden states, of all of its tokens. The teacher has the layout of the student."""
        if self._running is None:
            return super()._get_last_hidden_state(unwrapped_model, *args, **images)  # type: ignore[misc]
        student, part, batch = self._running
        if images:
            raise BatchError(f"distillation over ranks does not support {', '.join(images)}. Use one process.")
        if unwrapped_model is not student:
            settings = {**self._shard_settings(unwrapped_model.training), "layout": part[NAME].layout}
            part = shard_inputs(unwrapped_model, batch, self._ranks.cp, **settings)
        return text_model(unwrapped_model).base_model(**part).last_hidden_state


def _broadcast_completions(completions: tuple[Any, ...], group: Any) -> tuple[Any, ...]:
    """Return the completions of the first rank. Images are each rank's own: they come with the prompts."""

    def has_images(item: Any) -> bool:
        return any(map(has_images, item)) if isinstance(item, list) else hasattr(item, "getbbox")  # of PIL

    try:
        message = json.dumps([None if has_images(item) else item for item in completions]).encode()
    except TypeError as error:
        raise BatchError(
            f"completions must be lists, dicts, texts and numbers, so that ranks of one sequence can train on the same,"
            f" but these cannot be sent ({error}). They are prompt_ids, completion_ids, masks of tools, completions,"
            f" log-probabilities and further fields of a rollout."
        ) from error
    first = json.loads(broadcast_bytes(message, group))
    return tuple(own if new is None else new for own, new in zip(completions, first, strict=True))


@contextlib.contextmanager
def _gather_sequences_once(kind: type, ranks: Ranks) -> Iterator[None]:
    """Gather rewards, and texts for logs, from one rank of each sequence: TRL gathers them by functions of accelerate,
    which are names in its modules."""
    modules = [sys.modules[base.__module__] for base in kind.__mro__ if base.__module__.startswith("trl.")]
    names = ("gather", "gather_object")
    originals = [(module, name, vars(module)[name]) for module in modules for name in names if name in vars(module)]
    for module, name, original in originals:
        setattr(module, name, lambda data, original=original: drop_cp_duplicates(original(data), ranks))
    try:
        yield
    finally:
        for module, name, original in reversed(originals):
            setattr(module, name, original)
