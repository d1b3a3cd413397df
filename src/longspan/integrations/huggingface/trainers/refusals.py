"""What `ContextParallelTrainer` refuses, each with what to do instead: what would be computed on a rank's part as if it
were the whole sequence, and ways to run it in which samples are counted once per rank."""

from __future__ import annotations

import os
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from longspan.integrations.huggingface.attention import NAME
from longspan.integrations.huggingface.structure import text_model
from longspan.integrations.huggingface.trainers.kinds import WHOLE
from longspan.training import BatchError


def check_bases(kind: type, mixin: type) -> bool:
    """Whether the class is a trainer; one that names the mixin behind a trainer, whose methods would then be called
    instead, is refused."""
    order = list(kind.__mro__)
    trainer = next((b for b in order if (b.__module__, b.__name__) == ("transformers.trainer", "Trainer")), None)
    if trainer is not None and order.index(trainer) < order.index(mixin):
        first = next(base.__name__ for base in kind.__bases__ if issubclass(base, trainer))
        raise BatchError(
            f"class {kind.__name__} names {mixin.__name__} behind {first}, whose methods would be called instead:"
            f" nothing would be split. Name the mixin first: class {kind.__name__}({mixin.__name__}, {first})."
        )
    return trainer is not None


def check_attention(model: Any) -> None:
    """Refuses a model whose attention is not Longspan's, which the trainer has registered by now."""
    config = getattr(text_model(model) or model, "config", None)
    name = NAME if config is None else config.get_text_config()._attn_implementation
    if name != NAME:
        raise BatchError(
            f"the model's attention is {name!r}, which knows nothing of other ranks. Load it with from_pretrained(...,"
            f" attn_implementation={NAME!r}), or call model.set_attn_implementation({NAME!r}) before it is given to the"
            f" trainer (which has called register() already)."
        )


def check_arguments(trainer: Any) -> None:
    """Refuses what would be computed on a rank's part as if it were the whole sequence."""
    losses = [] if trainer._kind in WHOLE else _refused_losses(trainer)
    for asked, applies, advice in (*losses, *_refused_setups(trainer)):
        if applies:
            raise BatchError(
                f"{asked} was asked for, with sequences split over {trainer.get_cp_size()} ranks. {advice}"
            )


def _refused_losses(trainer: Any) -> list[tuple[str, bool, str]]:
    """(what was asked, whether it was, what to do) of losses that parts of sequences would change."""
    args = trainer.args
    own = _own_loss(type(trainer))
    return [
        (
            f"compute_loss of {own}",
            own is not None and not trainer.own_loss_takes_shards,
            "It gets a rank's part: shift_labels instead of labels to shift, and num_items_in_batch labels in all."
            " If it handles these as it should, set own_loss_takes_shards = True in the class.",
        ),
        (
            "average_tokens_across_devices = False",
            not args.average_tokens_across_devices,
            "Ranks hold different numbers of labels, so their means must be weighted by these. Leave it at True.",
        ),
        (
            f"a model of class {type(trainer.model).__name__}, which takes no loss arguments,",
            trainer.model is not None and not trainer.model_accepts_loss_kwargs,
            "Its loss would be the mean of a rank's own labels. Use a model whose forward takes num_items_in_batch.",
        ),
    ]


def _refused_setups(trainer: Any) -> list[tuple[str, bool, str]]:
    """The same for ways to run it."""
    args = trainer.args
    return [
        (
            "eval_use_gather_object = True",
            args.eval_use_gather_object,
            "Objects are gathered from all ranks, so each sample would count once per rank. Leave it out.",
        ),
        ("DeepSpeed", trainer.is_deepspeed_enabled, "It is not supported here: use DDP or FSDP2."),
        (
            "tensor parallelism",
            trainer.get_tp_size() > 1,
            "Use longspan.training.make_mesh in a loop of your own, which has the recipe.",
        ),
        (
            "a collator that packs without position_ids",
            getattr(trainer.data_collator, "return_position_ids", True) is False
            and type(trainer.data_collator).__name__ == "DataCollatorWithFlattening",
            "Documents could not be told apart. Use DataCollatorWithFlattening(return_position_ids=True).",
        ),
    ]


def check_sharded(trainer: Any, model: nn.Module) -> None:
    """Refuse a model that is not sharded although FSDP was requested: on CPUs accelerate wraps it in DDP instead."""
    is_set = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    if not (trainer.args.fsdp or is_set):
        return
    if not any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in model.modules()):
        request = "TrainingArguments(fsdp=...)" if trainer.args.fsdp else "ACCELERATE_USE_FSDP=true"
        raise BatchError(
            f"the model must be sharded by FSDP, because of {request}, but got {type(model).__name__} with all"
            f" parameters on every rank. Accelerate does not shard on CPUs. Remove the request, or shard the model when"
            f" it is loaded: from_pretrained(..., distributed_config=DistributedConfig(fsdp_size=...))."
        )


def _own_loss(kind: type) -> str | None:
    """The class, neither of this package nor of transformers or TRL, that says how the loss is computed."""
    for base in kind.__mro__:
        if "compute_loss" in vars(base) and base.__module__.split(".")[0] not in ("longspan", "transformers", "trl"):
            return base.__name__
    return None
