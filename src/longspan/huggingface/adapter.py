"""The facts about one model that every step needs, collected once by walks over its modules and classes.

The adapter is an attribute of the model, since it refers to the model's modules: both are freed together. It is made
before the first sharded step; what changes in a model after that is not looked for.
"""

from __future__ import annotations

import sys
from functools import cached_property
from typing import Any
from weakref import ref

import torch
from torch import nn

from longspan.huggingface import hooks
from longspan.huggingface.head import watch_head, why_logits
from longspan.huggingface.masks import Kind, LayerMask
from longspan.huggingface.mixers import check_mixers, is_hybrid, needs, route
from longspan.huggingface.rules import Rules
from longspan.huggingface.structure import masks_by_kind, modules_of, num_layers, padding_id, shows_positions
from longspan.training import BatchError

_ATTRIBUTE = "_longspan_adapter"


def adapter_of(model: nn.Module) -> ModelAdapter:
    """Return the adapter of a model of transformers."""
    adapter = vars(model).get(_ATTRIBUTE)
    if adapter is None or adapter.ref() is not model:
        adapter = vars(model)[_ATTRIBUTE] = ModelAdapter(model)
    return adapter


class ModelAdapter:
    """The facts about one model."""

    def __init__(self, model: nn.Module) -> None:
        self.ref = ref(model)
        self._has_checked_mixers = False
        self._installed: set[Any] = set()
        self._reasons: dict[Any, str] = {}
        self._kinds: tuple[dict[str, Any], list[Kind]] | None = None
        self.depends_on_largest = False
        """Whether rotary embeddings depend on the largest position."""
        self.geometries: dict[Any, Any] = {}
        """Layouts, masks and plans of the latest batches without documents and padding, by their size."""
        self.rules: dict[Any, Rules] = {}
        """Rules by form of batches and group."""

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of the model has no adapter."""

    def __reduce__(self) -> Any:
        return type(None), ()

    @property
    def model(self) -> Any:
        """The model, or the one that a shallow copy of it was made from."""
        return self.ref()

    def check_mixers(self) -> None:
        """Raise if a layer mixes tokens by means that do not work over ranks."""
        if not self._has_checked_mixers:
            check_mixers(self.model)
            self._has_checked_mixers = True

    # -- Facts ---------------------------------------------------------------------------------------------------------

    @cached_property
    def text_config(self) -> Any:
        return self.model.config.get_text_config()

    @cached_property
    def is_hybrid(self) -> bool:
        """Whether layers call other mixers than attention."""
        return is_hybrid(self.model)

    @cached_property
    def mixers(self) -> dict[str, tuple[str, frozenset[str]]]:
        """By name, the layers that mix tokens: their classes and the kinds of their mixers."""
        return needs(self.model)

    @cached_property
    def num_layers(self) -> int:
        return num_layers(self.model, self.text_config)

    @cached_property
    def padding_id(self) -> int | None:
        return padding_id(self.model)

    @cached_property
    def shows_positions(self) -> bool:
        """Whether the model passes position_ids to transformers' mask functions."""
        return shows_positions(self.model)

    def accepts(self, name: str) -> bool:
        return hooks.accepts_kwarg(type(self.model), name)

    def layer_kinds(self, config: Any) -> list[Kind]:
        """Return the kinds of attention layers, as transformers makes masks for them; full attention if it makes none
        before there are tokens."""
        if self._kinds is not None and self._kinds[0] == vars(config):
            return self._kinds[1]
        from transformers.masking_utils import create_causal_mask

        before = dict(vars(config))
        masks: Any = None
        try:
            masks = masks_by_kind(config)
            if not masks:  # there are layers of a kind that generate() knows no mask for, or none with attention
                masks = [create_causal_mask(config, torch.empty(1, 2, 0), None, None, None)]
        except Exception:  # transformers needs a value that this model does not have, or has for single layers
            kinds: list[Kind] = [("full",)]
        else:
            if not all(isinstance(mask, LayerMask) for mask in masks):
                raise BatchError("transformers' masks for this model must be Longspan's. Import longspan.huggingface.")
            kinds = sorted({mask.kind or ("full",) for mask in masks}, key=repr)
        self._kinds = before, kinds
        return kinds

    def why_logits(self, rules: Rules) -> str:
        """Return why the model needs its logits, or "" if it does not, after hooks on its head were registered."""
        model = self.model
        key = rules, type(vars(model).get("_loss_function"))
        if key not in self._reasons:
            reason = why_logits(model, rules)
            if not reason:
                watch_head(model, rules)
            self._reasons[key] = reason
        return self._reasons[key]

    # -- Hooks ---------------------------------------------------------------------------------------------------------

    def install_hooks(self, rules: Rules, wrapper: Any) -> None:
        """Register hooks on the model and on the module that wraps it, once."""
        model = self.model
        if rules not in self._installed:
            if not self._installed:
                hooks.route_losses({sys.modules[type(part).__module__] for part in modules_of(model)})
                hooks.hide_sequence(hooks.vision_encoders(model))
                self.depends_on_largest = hooks.watch_rotary(model)
                if self.is_hybrid:
                    route(model)
                    hooks.listen_to_layers(model, self.mixers)
            if rules.body is not None:
                hooks.watch_body(model, rules.body, rules.joined)
            hooks.listen(model, model.base_model)
            self._installed.add(rules)
        if wrapper is not None and wrapper is not model:
            hooks.listen(wrapper)
