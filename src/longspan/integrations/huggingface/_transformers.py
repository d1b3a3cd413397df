"""What differs between versions of transformers, each piece with the version it is for.

Floor and tested versions are in `longspan.versions`. A piece goes when the floor reaches its version.
"""

from __future__ import annotations

from functools import cache
from types import CodeType
from typing import Any

import torch
from torch import nn

from longspan.training import BatchError
from longspan.versions import minor

HYBRIDS_SINCE = (5, 15)
"""Before it, layers keep their convolutions and recurrences as attributes or call nn.Conv1d: nothing has a name that
could be routed over ranks, and keyword arguments do not reach them."""
LATER_MIXERS = {
    "FalconH1Mixer": (5, 17), "NemotronHMamba2Mixer": (5, 17), "Lfm2ShortConv": (5, 21), "Lfm2MoeShortConv": (5, 21),
}  # fmt: skip
"""Layers that are handed no keyword arguments, or hand none to their functions, before these."""
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
    """Refuses models with convolutions over tokens where their layers do not let Longspan in."""
    text = model.get_decoder() if hasattr(model, "get_decoder") else model
    for name, part in text.named_modules() if isinstance(text, nn.Module) else ():
        since = LATER_MIXERS.get(type(part).__name__, HYBRIDS_SINCE)
        if installed() < since and any(_is_wide(child) for child in part.children()):
            raise BatchError(
                f"{name} ({type(part).__name__}) has a convolution over tokens, and the installed transformers is"
                f" {_word(installed())}, whose layers do not let Longspan in there. Those hybrid models that go over"
                f" ranks need transformers {_word(since)} or newer: update it, or use this model on one device."
            )


def _is_wide(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv1d) and module.kernel_size != (1,)


def _word(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def method_code(method: Any) -> CodeType | None:
    """The code of a method of a modeling file, below its decorators; None of what is no method. In 5.15 one of them
    (`force_accelerate_hooks`) does not say what it wraps, and holds it as `forward_func`."""
    method = getattr(method, "__wrapped__", method)
    code = getattr(method, "__code__", None)
    if isinstance(code, CodeType) and "forward_func" in code.co_freevars:
        method = method.__closure__[code.co_freevars.index("forward_func")].cell_contents
    found = getattr(method, "__code__", None)
    return found if isinstance(found, CodeType) else None


def masks_by_kind(config: Any) -> list[Any]:
    """The masks of two tokens that transformers makes for each kind of attention layer of a model."""
    from transformers import masking_utils as hf

    asked = {"inputs_embeds": torch.empty(1, 2, 0), "attention_mask": None, "past_key_values": None}
    text = config.get_text_config()
    if installed() >= CHUNKED_MASKS_SINCE or not hasattr(text, "layer_types"):
        made = hf.create_masks_for_generate(config, **asked)
        masks = list(made.values()) if isinstance(made, dict) else [made]
    else:
        known = hf.LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING
        kinds = dict.fromkeys(text.layer_types)
        named = [known[kind] for kind in kinds] if known.keys() >= kinds.keys() else []
        makers = [maker for one in named for maker in (one.values() if isinstance(one, dict) else [one])]
        masks = [maker(config=text, **asked) for maker in dict.fromkeys(makers)]
    return [mask for mask in masks if mask is not None]


def labels_of_sequences(counted: Any, accelerator: Any, num_parts: int) -> Any:
    """How many labels all sequences of a step have, from what the Trainer counted over all ranks: those that hold
    parts of one sequence have each counted the whole of it."""
    by_trainer = installed() >= PARTS_COUNTED_SINCE or getattr(accelerator, "parallelism_config", None) is not None
    return counted if counted is None or by_trainer else counted // num_parts
