"""Numbers that TRL's trainers count over all ranks, where ranks of one sequence have the same samples."""

from __future__ import annotations

from typing import Any

import torch

from longspan.integrations.huggingface.accelerate import Ranks
from longspan.integrations.huggingface.batches import IGNORE, shifted_labels
from longspan.integrations.huggingface.trainers.accelerators import each_once
from longspan.training import BatchError


def count_generations(trainer: Any) -> None:
    """Sets how many completions are generated at once: TRL's configuration has counted each rank of a sequence."""
    args = trainer.args
    if getattr(args, "generation_batch_size", None) is None:
        return
    samples = args.world_size // trainer.get_cp_size()
    args.generation_batch_size = args.per_device_train_batch_size * samples * args.steps_per_generation
    for name, rows, group in (
        ("generation_batch_size", args.generation_batch_size, args.num_generations),
        ("the batch of an evaluation", args.per_device_eval_batch_size * samples, _evaluated(args)),
    ):
        if group and rows % group:
            raise BatchError(
                f"{name} is {rows}: ranks of one sequence have the same samples, so {args.world_size} ranks count as"
                f" {samples}. That cannot be cut into groups of num_generations = {group}. Make the batch per device a"
                f" multiple, or use fewer ranks for one sequence."
            )


def _evaluated(args: Any) -> int | None:
    return None if args.eval_strategy == "no" else getattr(args, "num_generations_eval", None) or args.num_generations


def count_evaluated(inputs: Any, ranks: Ranks) -> Any:
    """Labels of a batch that TRL evaluates: each process takes the mean of its own batch, and what is divided by this
    number is multiplied by all ranks."""
    labels = shifted_labels(inputs)
    if labels is None:
        return None
    return (labels != IGNORE).sum() * (1 if ranks.dp is None else ranks.dp.size())


def count_tokens(trainer: Any, inputs: Any, before: int) -> None:
    """Sets how many tokens TRL's SFTTrainer has seen: it counted those of each rank's part, and rows as one."""
    seen = inputs["attention_mask"].sum() if inputs.get("attention_mask") is not None else inputs["input_ids"].shape[1]
    counts = trainer.accelerator.gather(torch.as_tensor(seen, device=trainer.args.device))
    trainer._total_train_tokens = before + int(each_once(counts, trainer._ranks).sum())
    trainer._metrics["train"]["num_tokens"] = [trainer._total_train_tokens]
