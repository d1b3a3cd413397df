"""What differs between versions of transformers, each piece with the version it is for.

Floor and tested versions are in `longspan.versions`. A piece goes when the floor reaches its version.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

from longspan.training import BatchError
from longspan.versions import minor

HYBRIDS_SINCE = (5, 15)
"""Before it, layers keep their convolutions and recurrences as attributes or call nn.Conv1d: nothing has a name that
could be routed over ranks, and keyword arguments do not reach them."""
CHUNKED_MASKS_SINCE = (5, 20)
"""Before it, `create_masks_for_generate` fails for chunked layers (Llama 4), and for kinds that it has no mask for."""
PARTS_COUNTED_SINCE = (5, 19)
"""Before it, the Trainer divides the number of labels by the ranks of a sequence only if accelerate's
ParallelismConfig says how many there are."""


@cache
def installed() -> tuple[int, int]:
    """The version of transformers that is imported."""
    import transformers

    return minor(transformers.__version__)


def check_hybrid(model: Any) -> None:
    """Refuses models with convolutions over tokens where their layers do not call them by name."""
    if installed() >= HYBRIDS_SINCE:
        return
    text = model.get_decoder() if hasattr(model, "get_decoder") else model
    for name, part in text.named_modules() if isinstance(text, nn.Module) else ():
        if isinstance(part, nn.Conv1d) and part.kernel_size != (1,):
            raise BatchError(
                f"{name} is a convolution over tokens ({type(model).__name__}), and the installed transformers is"
                f" {_word(installed())}, whose layers do not let Longspan in there. Those hybrid models that go over"
                f" ranks need transformers {_word(HYBRIDS_SINCE)} or newer: update it, or use this model on one device."
            )


def _word(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def masks_by_kind(config: Any) -> list[Any]:
    """The masks of two tokens that transformers makes for each kind of attention layer of a model."""
    from transformers import masking_utils as hf

    tokens = torch.empty(1, 2, 0), None, None, None
    if installed() >= CHUNKED_MASKS_SINCE or not hasattr(config, "layer_types"):
        made = hf.create_masks_for_generate(config, *tokens)
    else:
        makers = hf.LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING
        made = {kind: makers[kind](config, *tokens) for kind in dict.fromkeys(config.layer_types) if kind in makers}
    return [mask for mask in (made.values() if isinstance(made, dict) else [made]) if mask is not None]


def labels_of_sequences(counted: Any, accelerator: Any, num_parts: int) -> Any:
    """How many labels all sequences of a step have, from what the Trainer counted over all ranks: those that hold
    parts of one sequence have each counted the whole of it."""
    by_trainer = installed() >= PARTS_COUNTED_SINCE or getattr(accelerator, "parallelism_config", None) is not None
    return counted if counted is None or by_trainer else counted // num_parts
