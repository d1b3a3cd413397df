"""TRL's trainers over ranks: models that score tokens, policies, and distillation.

In distillation, student and teacher run on a rank's tokens. TRL's loss receives this rank's hidden states and a mask of
the tokens that count; the shares of all ranks are added up. No rank holds hidden states of whole sequences.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from longspan.huggingface.accelerate import DISTILLS, PLAIN, WHOLE, Ranks, SequenceAccelerator, each_once
from longspan.huggingface.attention import NAME
from longspan.huggingface.batches import IGNORE, LABELS, shifted_labels
from longspan.huggingface.first_use import told
from longspan.huggingface.hooks import route_balancing
from longspan.huggingface.inputs import shard_inputs
from longspan.huggingface.masks import enter, leave
from longspan.huggingface.sequence import ShardedSequence
from longspan.huggingface.structure import has_hook, text_model
from longspan.training import BatchError, gather_tokens, shift_tokens
from longspan.training.groups import all_summed, message_device, process_group
from longspan.training.loss import Reported

# -- Models with TRL's fused head over ranks: whole sequences in, numbers of all tokens out ----------------------------
# TRL asks a model for `model(..., labels=labels, fused_lm_head=True)`, and takes from it log-probabilities and
# entropies, one number a token. So a model is called with whole sequences, runs on this rank's part of them, and what
# comes out is gathered: every rank computes the loss and all metrics of whole sequences, as one process does. Gradients
# are those of the rank's own tokens. DDP and FSDP2 average over ranks what must be added up over those of a sequence,
# so they are multiplied by the number of these.


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


# TRL's trainers that score whole sequences (DPO, GRPO, RLOO): methods of `ContextParallelTrainer` that only they call.
# Generation stays what the trainer does. All ranks of a sequence are given the same prompts and the same random
# numbers, and then what the first of them generated: they would hold parts of different sequences otherwise.


if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object

GATHERING = ("gather", "gather_object")
TEXTS = "prompt_ids, completion_ids, masks of tools, completions, log-probabilities and further fields of a rollout"


class WholeScores(_Base):
    """What differs for a trainer that computes its loss from numbers of all tokens, on every rank alike."""

    _ranks: Ranks | None
    _kind: str

    def _join_ranks(self: Any) -> None:
        """Ranks of one sequence are one process to the trainer from now on, and models score tokens over them."""
        from accelerate.utils import set_seed

        if self._ranks is None or self._kind == PLAIN:
            return
        for model in (self.model, getattr(self, "ref_model", None)):
            if model is not None and self._kind != DISTILLS:
                score_over_ranks(model, self._ranks.cp, self._shard_settings)
        if self._kind in WHOLE and not isinstance(self.accelerator, SequenceAccelerator):
            self.accelerator = SequenceAccelerator(self.accelerator, self._ranks)
            if any("_generate" in vars(base) for base in type(self).__mro__ if base.__module__.startswith("trl.")):
                set_seed(self.args.seed + self.accelerator.process_index)  # TRL has given every rank one of its own

    def _shard_settings(self: Any, training: bool) -> dict[str, Any]:
        return {**self._sharding, "dropout_seed": self._dropout_seed(training)}

    def _precompute_ref_logps(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._join_ranks()  # DPO asks for them before it is ready
        return super()._precompute_ref_logps(*args, **kwargs)  # type: ignore[misc]

    def _generate(self: Any, prompts: list[Any]) -> Any:
        found = super()._generate(prompts)  # type: ignore[misc]
        return found if self._ranks is None else _shared(found, self._ranks.cp.get_group())

    def _generate_and_score_completions(self: Any, inputs: list[Any]) -> Any:
        if self._ranks is None:
            return super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        with _each_sequence_once(type(self), self._ranks):
            found = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        _share_random_numbers(self._ranks.cp.get_group())  # samples are shuffled next
        return found


def _shared(found: tuple[Any, ...], group: dist.ProcessGroup) -> tuple[Any, ...]:
    """What the first rank generated. Images are each rank's own: they come with the prompts."""
    texts = [None if _is_images(item) else item for item in found]
    try:
        message = json.dumps(texts).encode()
    except TypeError as error:
        raise BatchError(
            f"ranks of one sequence must train on the same completions, and these cannot be sent ({error}): {TEXTS}"
            f" must be lists, dicts, texts and numbers."
        ) from error
    first = json.loads(told(message, group))
    return tuple(own if new is None else new for own, new in zip(found, first, strict=True))


def _is_images(item: Any) -> bool:
    """Whether it is a list of images, or of lists of images."""
    if isinstance(item, list):
        return any(_is_images(part) for part in item)
    return hasattr(item, "getbbox")  # of PIL


@contextlib.contextmanager
def _each_sequence_once(kind: type, ranks: Ranks) -> Iterator[None]:
    """Rewards, and texts for logs, from one rank of each sequence: TRL gathers them by functions of accelerate, which
    are names in its modules."""
    modules = [sys.modules[base.__module__] for base in kind.__mro__ if base.__module__.startswith("trl.")]
    found = [(module, name, vars(module)[name]) for module in modules for name in GATHERING if name in vars(module)]
    for module, name, original in found:
        setattr(module, name, lambda data, original=original: each_once(original(data), ranks))
    try:
        yield
    finally:
        for module, name, original in reversed(found):
            setattr(module, name, original)


def _share_random_numbers(group: dist.ProcessGroup) -> None:
    """The first rank's generator of CPUs on all ranks of a sequence; dropout may have used it differently on each."""
    state = torch.get_rng_state().to(message_device(group))
    dist.broadcast(state, group=group, group_src=0)
    torch.set_rng_state(state.cpu())


# -- Distillation ------------------------------------------------------------------------------------------------------


if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object


class Distilled(_Base):
    """What differs for TRL's DistillationTrainer."""

    _ranks: Ranks | None
    _kind: str
    _running: Any = None
    """The student, its arguments on this rank, and the whole batch, while a loss is computed."""

    def _compute_loss(self: Any, *given: Any, **named: Any) -> Any:
        """The loss of whole sequences, the entropy of their tokens and the number of these, from this rank's share."""
        if self._ranks is None or self._kind != DISTILLS:
            return super()._compute_loss(*given, **named)  # type: ignore[misc]
        student, inputs, num_items = given
        batch, counts = _whole(inputs)
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
        loss = Reported.apply(share * group.size(), sums[0].to(share.dtype))  # DDP and FSDP2 average
        return loss, sums[1].to(entropy.dtype), sums[2].to(num_tokens.dtype)

    def _get_last_hidden_state(self: Any, unwrapped_model: Any, *given: Any, **seen: Any) -> Tensor:
        """This rank's hidden states, of all of its tokens. The teacher's tokens are dealt out as the student's are."""
        if self._running is None:
            return super()._get_last_hidden_state(unwrapped_model, *given, **seen)  # type: ignore[misc]
        student, part, batch = self._running
        if seen:
            raise BatchError(f"{', '.join(seen)} were given: models that see images are distilled on one process only.")
        if unwrapped_model is not student:
            settings = {**self._shard_settings(unwrapped_model.training), "layout": part[NAME].layout}
            part = shard_inputs(unwrapped_model, batch, self._ranks.cp, **settings)
        return text_model(unwrapped_model).base_model(**part).last_hidden_state


def _whole(inputs: Mapping[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
    """Prompts with their completions, and which of their tokens count."""
    batch = {
        "input_ids": torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
        "attention_mask": torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
    }
    counted = inputs["completion_mask"] * inputs.get("tool_mask", 1)
    return batch, torch.cat([torch.zeros_like(inputs["prompt_mask"]), counted], dim=1)
