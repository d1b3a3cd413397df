"""Liger's kernels on a rank's part: layers that take every token by itself, and a loss that takes shifted labels.

The Trainer puts them into the model when training begins, and some into the modeling file, for all models. A tiny copy
of the model could not be proved on a CPU after that, so models are proved before: with the first batch, and with what a
later one may have instead (no padding, one document).
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from longspan.integrations.huggingface.batches import read_batch
from longspan.integrations.huggingface.proving.first_use import rules_of
from longspan.integrations.huggingface.structure import text_model
from longspan.integrations.huggingface.trainers.kinds import WHOLE
from longspan.training import BatchError
from longspan.training.groups import process_group


def prove_before(trainer: Any) -> None:
    """Proves the model, which Liger has not changed yet, with batches like those to come."""
    if trainer._sharding["trust_model"]:
        return
    if trainer._kind in WHOLE:
        raise BatchError(
            "use_liger_kernel = True was asked for, with a trainer that makes its sequences itself: the model would be"
            " proved after Liger has changed it, which its tiny copy on a CPU cannot follow. Leave it out (TRL's fused"
            " head needs no logits), or compare with one process and pass trust_model=True."
        )
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    batch = next(iter(trainer.get_train_dataloader()))
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    model = text_model(trainer.model)
    for form in forms(batch):
        rules_of(model, read_batch(form), process_group(trainer._ranks.cp, "use_liger_kernel"), False)


def forms(batch: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The batch, and what later ones of its kind may look like.

    >>> [each["attention_mask"][0].tolist() for each in forms({"attention_mask": np.array([[1, 1, 0]])})]
    [[1, 1, 0], [1, 1, 1]]
    """
    yield dict(batch)
    mask, places = batch.get("attention_mask"), batch.get("position_ids")
    if mask is not None:
        yield {**batch, "attention_mask": mask * 0 + 1}
    if isinstance(mask, Tensor) and bool(mask.all()):
        padded = mask.clone()
        padded[0, -1] = 0
        yield {**batch, "attention_mask": padded}
    if isinstance(places, Tensor) and mask is None:
        yield {**batch, "position_ids": torch.arange(places.shape[-1], device=places.device).expand_as(places)}


def check_patched(model: nn.Module) -> None:
    """Refuses a loss of Liger's that would shift a rank's own labels."""
    inner = text_model(model)
    forward = vars(inner).get("forward") if inner is not None else None
    function = getattr(forward, "__func__", forward)
    if function is None or not (getattr(function, "__module__", None) or "").startswith("liger"):
        return
    if "shift_labels" not in inspect.getsource(function):
        raise BatchError(
            f"use_liger_kernel = True was asked for, and Liger's forward of {type(inner).__name__} takes no"
            f" shift_labels: it would shift a rank's own labels. Pass"
            f" liger_kernel_config={{'fused_linear_cross_entropy': False}}: Longspan computes the loss without logits,"
            f" too."
        )
