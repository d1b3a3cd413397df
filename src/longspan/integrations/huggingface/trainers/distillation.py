"""TRL's distillation over ranks: student and teacher run on a rank's part, and their divergence is of its own tokens.

Hidden states of whole sequences are nowhere. TRL's loss is given this rank's hidden states, and a mask that says of
each of its tokens whether the next one counts; shares are added up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longspan.integrations.huggingface.accelerate import Ranks
from longspan.integrations.huggingface.attention import NAME
from longspan.integrations.huggingface.inputs import shard_inputs
from longspan.integrations.huggingface.structure import text_model
from longspan.integrations.huggingface.trainers.kinds import DISTILLS
from longspan.training import BatchError, shift_tokens
from longspan.training.groups import all_summed, process_group
from longspan.training.loss import Reported

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
