"""A tiny copy of a model's configuration, and a model made from it: the same code, computed in a moment on a CPU.

    tiny = tiny_config(config)         # of the same class: a layer of every kind, small sizes, no dropout
    model = build(LlamaForCausalLM, tiny)

What decides *what* is computed (activations, soft caps, scales, biases, rotary embeddings, tied weights) stays. What
decides *how much* becomes small, by the names of attributes and by how their values are related, so that families that
nobody has heard of work too; `tiny_exceptions` has those where names and relations do not tell.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

from longspan.integrations.huggingface.proving.tiny_exceptions import EXCEPTIONS
from longspan.integrations.huggingface.proving.tiny_layers import kept_layers, with_layers
from longspan.integrations.huggingface.proving.tiny_rope import SWITCH, moves_by_table, tiny_rope
from longspan.integrations.huggingface.proving.tiny_sizes import HEADS, VOCABULARY, TinySizes, first
from longspan.integrations.huggingface.proving.tiny_weights import CannotShrinkError, build

__all__ = ["CannotShrinkError", "build", "special_tokens", "tiny_config"]

DROPOUT = re.compile(r"dropout|pdrop|drop_path|layerdrop|jitter|mask_time_prob|mask_feature_prob")
TOKENS = re.compile(r"(token_id|token_ids|token_index|token_indices|_start_id|_end_id|_newline_id|_patch_id)$")
FEATURES = re.compile(r"^(vision_feature_layers?|feature_layer)$")
ON_CPU = (None, "eager", "sdpa")
"""Attention that any part can be built with; others, Longspan's too, are set when the model is there."""
ORDINARY = 64
"""Special tokens below it keep their number."""


def tiny_config(config: Any) -> Any:
    """A configuration of the same class for a model of a few thousand weights."""
    if not hasattr(config, "get_text_config"):
        raise CannotShrinkError(
            f"a tiny copy is made of a configuration of transformers, but {type(config).__name__} was given."
        )
    tiny = copy.deepcopy(config)
    parts = list(_parts(config, tiny, vars(config.get_text_config())))
    known = {sizes.hidden_then: sizes.hidden for _, _, sizes in reversed(parts) if sizes.hidden_then}
    text = next((sizes.hidden for given, _, sizes in parts if given is vars(config.get_text_config())), None)
    tokens = Tokens(min(VOCABULARY, getattr(config.get_text_config(), "vocab_size", None) or VOCABULARY))
    for given, made, sizes in parts:
        sizes.elsewhere, sizes.text = known, text if given is not vars(config.get_text_config()) else None
        made.update(_small(given, sizes, tokens))
        made.pop("quantization_config", None)  # of weights that a tiny copy does not have
        if made.get("_attn_implementation_internal") not in ON_CPU:
            made["_attn_implementation_internal"] = None
    for part in _configs(tiny):
        change = EXCEPTIONS.get(part.model_type)
        if change is not None:
            change(part)
    _check(tiny)
    return tiny


def special_tokens(config: Any) -> set[int]:
    """Numbers of tokens that stand for something else than text: ends, padding, places of images."""
    found: set[int] = set()
    for part in _configs(config):
        for name, value in vars(part).items():
            if TOKENS.search(name):
                found.update(x for x in (value if isinstance(value, (list, tuple)) else [value]) if type(x) is int)
    return found


def _configs(config: Any) -> Iterator[Any]:
    """The configuration and all that it is made of."""
    yield config
    for value in vars(config).values():
        if hasattr(value, "get_text_config"):
            yield from _configs(value)


def _parts(
    config: Any, tiny: Any, around: dict[str, Any]
) -> Iterator[tuple[dict[str, Any], dict[str, Any], TinySizes]]:
    """Attributes of every part, then and now, and its sizes; parts without heads are as the one around them."""
    own = vars(config)
    known = {"ignore_keys_at_rope_validation": getattr(config, "ignore_keys_at_rope_validation", None)}
    given = {**({} if first(own, HEADS) else _counts(around)), **known, **own}
    yield own, vars(tiny), TinySizes(given)
    for name, value in own.items():
        if hasattr(value, "get_text_config"):
            yield from _parts(value, vars(tiny)[name], own)


def _counts(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if type(value) is int}


class Tokens:
    """New numbers of special tokens: large ones become the last ones of the vocabulary, equal ones equal.

    >>> tokens = Tokens(100)
    >>> tokens.number(128000), tokens.number([128001, 128000]), tokens.number(2), tokens.number(None)
    (99, [98, 99], 2, None)
    """

    def __init__(self, vocabulary: int):
        self.vocabulary = vocabulary
        self.known: dict[int, int] = {}

    def number(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(self.number(x) for x in value)
        if type(value) is not int or value < min(ORDINARY, self.vocabulary):
            return value
        return self.known.setdefault(value, self.vocabulary - 1 - len(self.known))


def _small(given: dict[str, Any], sizes: TinySizes, tokens: Tokens) -> dict[str, Any]:
    """The attributes of one part that get another value."""
    changed = {name: new for name, new in sizes.changed().items() if name in given}
    layers = {**given, **changed}
    kept = kept_layers(given)
    changed.update(with_layers(layers, kept))
    if given.get("_heterogeneity_spec") is not None:
        changed["_heterogeneity_spec"] = _single_layers(given["_heterogeneity_spec"], kept, sizes)
    for name, value in given.items():
        if DROPOUT.search(name) and type(value) in (int, float):
            changed[name] = type(value)(0)
        elif FEATURES.search(name):
            changed[name] = _near(value)
        elif TOKENS.search(name):
            changed[name] = tokens.number(value)
    if "rope_parameters" in given:
        rotated = changed.get("head_dim") or sizes.head_dim
        changed["rope_parameters"] = tiny_rope(given["rope_parameters"], rotated, sizes.axes)
        if moves_by_table(given) and "max_position_embeddings" in given:
            changed["max_position_embeddings"] = SWITCH
    return changed


def _near(value: Any) -> Any:
    """Layers of a part for images whose outputs are taken: a tiny copy has two, and the outputs before and after."""
    if isinstance(value, (list, tuple)):
        return type(value)(_near(x) for x in value)
    return value if type(value) is not int else max(value, -2) if value < 0 else min(value, 1)


def _single_layers(spec: Any, kept: list[int], sizes: TinySizes) -> Any:
    """What single layers have of their own (`per_layer_config`), for those that are kept."""
    made = copy.deepcopy(spec)
    made.per_layer_overrides = {
        new: {name: sizes.own_number(name, value) for name, value in spec.per_layer_overrides[old].items()}
        for new, old in enumerate(kept)
        if old in spec.per_layer_overrides
    }
    return made


def _check(tiny: Any) -> None:
    """Asks the configuration's own code whether its values fit together."""
    for part in _configs(tiny):
        for name in ("validate_architecture", "validate_layer_type"):
            check = getattr(type(part), name, None)
            try:
                if check is not None:
                    check(part)
            except Exception as error:
                raise CannotShrinkError(
                    f"a tiny copy of {type(tiny).__name__} ({tiny.model_type}) was made, but its own {name} refuses it:"
                    f" {error}"
                ) from error
