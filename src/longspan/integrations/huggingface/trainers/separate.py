"""Packed documents of hybrid models on one process: kept apart there as they are over ranks.

transformers alone lets convolutions and recurrences run on from one document to the next. So a packed batch of such a
model is sharded over a group of one rank: the only part is the whole batch, in order, and labels stay what they were.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from longspan.execution.simulated import OnlyRank
from longspan.integrations.huggingface.attention import NAME
from longspan.integrations.huggingface.batches import LABELS, PACKED, read_batch
from longspan.integrations.huggingface.hooks.mixers import is_hybrid
from longspan.integrations.huggingface.inputs import shard_inputs
from longspan.integrations.huggingface.structure import text_model
from longspan.training import BatchError

KEPT = (*LABELS, "num_items_in_batch")
"""Arguments of the loss, which on a group of one is the model's own."""


class Separator:
    """Turn packed batches of hybrid models into arguments with which documents do not see each other."""

    def __init__(self) -> None:
        self._is_hybrid: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
        self._has_warned = False

    def apply(self, model: Any, batch: Mapping[str, Any], settings: dict[str, Any]) -> Mapping[str, Any]:
        """Return the model's arguments: `batch` itself where there is nothing to keep apart."""
        inner = text_model(model)
        if inner is None or all(batch.get(name) is None for name in ("position_ids", *PACKED)):
            return batch
        if inner not in self._is_hybrid:
            self._is_hybrid[inner] = is_hybrid(inner)
        if not self._is_hybrid[inner]:
            return batch
        kept = {name: value for name, value in batch.items() if name in KEPT}
        tokens = {name: value for name, value in batch.items() if name not in KEPT}
        try:
            if read_batch(tokens).documents is None:
                return batch
            part = shard_inputs(model, tokens, OnlyRank(), layout="contiguous", logits=True, **settings)  # type: ignore[arg-type]
        except BatchError as error:
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"documents of packed batches are not kept apart on one process: convolutions and recurrences of"
                    f" {type(inner).__name__} run on from one document to the next, as they do in transformers. Over"
                    f" ranks they do not, and losses differ. The reason: {error}",
                    stacklevel=2,
                )
            return batch
        part[NAME].arguments |= kept.keys()
        return {**part, **kept}
