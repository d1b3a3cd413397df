"""Layers of torchtitan's models that carry something from token to token beside attention. They are refused by name: on
a rank's tokens alone each would start from nothing, and no loss curve would show it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from longspan.integrations.torchtitan.masks import TitanError

_RECURRENT = re.compile("Delta|Mamba|SSM|Recurr|RWKV|KDA|LinearAttention|Lightning|LSTM|GRU")


def mixes_tokens(layer: Any) -> bool:
    """Whether a module, or the config of one, is known to be a recurrence or a convolution along tokens.

    >>> from torch import nn
    >>> [mixes_tokens(layer) for layer in (nn.GRU(1, 1), nn.Conv1d(1, 1, 4), nn.Conv1d(1, 1, 1), nn.Linear(1, 1))]
    [True, True, False, False]
    """
    names = {base.__qualname__.removesuffix(".Config").rpartition(".")[2] for base in type(layer).__mro__}
    if "Conv1d" in names:
        return getattr(layer, "kernel_size", 1) not in (1, (1,))
    return any(map(_RECURRENT.search, names))


def check_mixers(model: str, layers: Iterable[tuple[str, Any]]) -> None:
    """Refuses models with such layers, whatever was promised for them."""
    for name, layer in layers:
        if mixes_tokens(layer):
            kind = type(layer).__qualname__.removesuffix(".Config")
            raise TitanError(
                f"model {model!r} was given, whose {name} is a {kind}: it carries something from token to token, and"
                f" would start from nothing on every rank. In torchtitan Longspan computes attention alone over ranks;"
                f" for hybrid models see its Hugging Face integration, or longspan.gated_delta_rule and its companions."
            )


def family_of(config: str, models: Iterable[str]) -> tuple[str, list[str]] | None:
    """The one of torchtitan's models whose registry has a config of this name, and its classes that mix tokens. No
    model is imported for it: some want packages that others do not."""
    for folder in map(Path, models):
        for registry in sorted(folder.glob("*/config_registry.py")):
            if f"\ndef {config}()" in registry.read_text(encoding="utf-8"):
                model = registry.with_name("model.py")
                text = model.read_text(encoding="utf-8") if model.is_file() else ""
                return registry.parent.name, list(filter(_RECURRENT.search, re.findall(r"^class (\w+)", text, re.M)))
    return None
