"""Which layers of a model its tiny copy has: one of every kind, in their order.

What a layer is follows from lists with an entry per layer (`layer_types`), lists of layers (`mlp_only_layers`), from
how many layers are of a kind at the start (`first_k_dense_replace`) or at the end (`num_kv_shared_layers`), and from
settings of single layers (`per_layer_config`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

NUM_LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "layers", "depth", "num_blocks", "encoder_layers",
    "decoder_layers", "num_decoder_layers", "num_encoder_layers", "num_layers_per_stack",
)  # fmt: skip
AT_START = (
    "first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "max_window_layers",
)  # fmt: skip
"""How many layers at the start are of one kind."""
LAST = ("moe_layer_end_index",)
"""The last layer of a kind."""
AT_END = ("num_kv_shared_layers",)
INDICES = re.compile(r"layers|layer_ids|layer_indices|idxs|indexes|indices")
"""Names of lists of numbers of layers."""
PERIODS = re.compile(
    r"(layer_period|_interval|every_n_layers|sparse_step|layer_step|layer_freq|window_pattern|_frequency|group_size)$"
)
EXPERTS = re.compile(r"moe|sparse|expert|mlp")
PATTERNS = ("block_types", "hybrid_override_pattern")
"""Lists that are repeated over the layers."""
MOST = 8
"""Kinds of layers that are told apart by all that is said of them; beyond, everything said is there once."""


def num_layers(given: Mapping[str, Any]) -> tuple[str, int] | None:
    """The name of the attribute that counts layers, and how many there are."""
    for name in NUM_LAYERS:
        if isinstance(given.get(name), int):
            return name, given[name]
    for name in ("layers_block_type", "layer_types"):
        if isinstance(given.get(name), list):
            return name, len(given[name])
    return None


def kept_layers(given: Mapping[str, Any]) -> list[int]:
    """The layers that the tiny copy keeps.

    >>> kept_layers({"num_hidden_layers": 6, "layer_types": ["near"] * 5 + ["far"], "first_k_dense_replace": 1})
    [0, 1, 5]
    >>> kept_layers({"num_hidden_layers": 6})
    [0, 1]
    """
    found = num_layers(given)
    if found is None:
        return []
    _, count = found
    said = [_said(given, count, layer) for layer in range(count)]
    kinds: dict[Any, int] = {}
    for layer, words in enumerate(said):
        kinds.setdefault(tuple(words), layer)
    kept = sorted(kinds.values())
    if len(kept) > MOST:
        kept = _covering(said)
    least = max([2, *(len(given[name]) for name in PATTERNS if isinstance(given.get(name), list))])
    if any(_counts_on(name, value, given) for name, value in given.items()):
        least = max(least, 4)
    for layer in range(count):
        if len(kept) >= least:
            break
        if layer not in kept:
            kept = sorted([*kept, layer])
    return kept


def _counts_on(name: str, value: Any, given: Mapping[str, Any]) -> bool:
    """Whether every so many layers are of a kind that no list names."""
    if not PERIODS.search(name) or type(value) is not int or value < 2:
        return False
    lists = ("mlp_layer_types", "moe_layers") if EXPERTS.search(name) else ("layer_types", "layers_block_type")
    return not any(isinstance(given.get(other), (list, tuple)) for other in lists)


def _covering(said: Sequence[Sequence[Any]]) -> list[int]:
    """The first layers that together have everything that is said of any layer."""
    seen: set[Any] = set()
    kept = []
    for layer, words in enumerate(said):
        if not seen.issuperset(words):
            kept.append(layer)
            seen.update(words)
    return kept


def _said(given: Mapping[str, Any], count: int, layer: int) -> list[Any]:
    """What the configuration says of a layer, in a form that can be compared."""
    words: list[Any] = []
    is_named = isinstance(given.get("layer_types"), (list, tuple))
    for name, value in given.items():
        if name == "max_window_layers" and is_named:  # said there already, if it is used at all
            continue
        if is_index_list(name, value, count):
            words.append((name, layer in value))
        elif is_per_layer(value, count):
            words.append((name, repr(value[layer])))
        elif name in AT_START and isinstance(value, int):
            words.append((name, layer < value))
        elif name in LAST and isinstance(value, int):
            words.append((name, layer <= value % count))
        elif name in AT_END and isinstance(value, int):
            words.append((name, layer >= count - value))
    spec = given.get("_heterogeneity_spec")
    if spec is not None:
        words.append(("per_layer_config", repr(sorted(spec.per_layer_overrides.get(layer, {}).items()))))
    return words


def is_per_layer(value: Any, count: int) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == count and count > 1


def is_index_list(name: str, value: Any, count: int) -> bool:
    """Rising numbers of layers, under a name that says so."""
    if not isinstance(value, (list, tuple)) or not INDICES.search(name):
        return False
    if not all(type(x) is int and 0 <= x < count for x in value):
        return False
    return all(a < b for a, b in itertools.pairwise(value))


def with_layers(given: Mapping[str, Any], kept: Sequence[int]) -> dict[str, Any]:
    """The attributes that change when these layers are kept.

    >>> config = {"num_hidden_layers": 6, "layer_types": list("aaaaab"), "mlp_only_layers": [0, 5]}
    >>> with_layers(config, [0, 1, 5])
    {'num_hidden_layers': 3, 'layer_types': ['a', 'a', 'b'], 'mlp_only_layers': [0, 2]}
    """
    found = num_layers(given)
    if found is None:
        return {}
    _, count = found
    changed: dict[str, Any] = {}
    for name, value in given.items():
        if name in NUM_LAYERS and isinstance(value, int):
            changed[name] = len(kept) if value == count else min(value, 2)
        elif is_index_list(name, value, count):
            changed[name] = type(value)(new for new, old in enumerate(kept) if old in value)
        elif is_per_layer(value, count):
            changed[name] = type(value)(value[layer] for layer in kept)
        elif name in AT_START and isinstance(value, int):
            changed[name] = sum(layer < value for layer in kept)
        elif name in LAST and isinstance(value, int):
            changed[name] = sum(layer <= value % count for layer in kept) - 1
        elif name in AT_END and isinstance(value, int):
            changed[name] = sum(layer >= count - value for layer in kept)
        elif PERIODS.search(name) and isinstance(value, int):
            changed[name] = min(value, 2)
    return changed
