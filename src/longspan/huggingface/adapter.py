"""The facts about one model that every step needs, collected once by walks over its modules and classes.

The adapter is an attribute of the model, since it refers to the model's modules: both are freed together. A new adapter
replaces it when a module, a forward or a hook has changed (LoRA, FSDP, a hook of the user): a step compares lists of
addresses, and walks over no modules.
"""

from __future__ import annotations

import sys
from functools import cached_property
from itertools import chain
from operator import methodcaller
from typing import Any
from weakref import ref

import torch
from torch import nn

from longspan._torch import children_of, global_hooks, hooks_of
from longspan.huggingface import hooks
from longspan.huggingface.head import watch_head, why_logits
from longspan.huggingface.masks import Kind, LayerMask
from longspan.huggingface.mixers import check_mixers, is_hybrid, needs, route
from longspan.huggingface.structure import Rules, masks_by_kind, num_layers, padding_id, shows_positions
from longspan.training import BatchError

_ATTRIBUTE = "_longspan_adapter"
_values, _own_forward = methodcaller("values"), methodcaller("get", "forward")


def adapter_of(model: nn.Module, *, compare: bool = True) -> ModelAdapter:
    """Return the adapter of a model of transformers, a new one if its modules or hooks have changed.

    `compare=False` is for calls shortly after another one: changes are not looked for.
    """
    adapter = vars(model).get(_ATTRIBUTE)
    if adapter is None or adapter.ref() is not model or (compare and adapter.state() != adapter.recorded):
        adapter = vars(model)[_ATTRIBUTE] = ModelAdapter(model)
    return adapter


class ModelAdapter:
    """The facts about one model."""

    def __init__(self, model: nn.Module) -> None:
        self.ref = ref(model)
        self._modules = list(model.modules())[1:]  # without the model itself, which would be a reference cycle
        self._has_checked_mixers = False
        self._installed: set[Any] = set()
        self._reasons: dict[Any, str] = {}
        self._kinds: tuple[dict[str, Any], list[Kind]] | None = None
        self.depends_on_largest = False
        """Whether rotary embeddings depend on the largest position."""
        self.geometries: dict[Any, Any] = {}
        """Layouts, masks and plans of the latest batches without documents and padding, by their size."""
        self.record()

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

    def state(self) -> tuple[Any, ...]:
        """Return the class, children, own forward and hooks of every module, and hooks for all modules, by address."""
        modules = (self.ref(), *self._modules)
        tables = [
            *map(children_of, modules),
            *chain.from_iterable(map(hooks_of, modules)),
            *global_hooks(torch.nn.modules.module),
        ]
        return (
            list(map(type, modules)),
            list(map(id, map(_own_forward, map(vars, modules)))),
            list(map(len, tables)),
            list(map(id, chain.from_iterable(map(_values, tables)))),
        )

    def record(self) -> None:
        """Accept the modules and hooks as they are now."""
        self.recorded = self.state()

    # -- Facts ---------------------------------------------------------------------------------------------------------

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
        return num_layers(self.model, self.model.config.get_text_config())

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
                raise BatchError("transformers' masks for this model must be Longspan's. Call register() first.")
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
                self.record()
            self._reasons[key] = reason
        return self._reasons[key]

    # -- Hooks ---------------------------------------------------------------------------------------------------------

    def install_hooks(self, rules: Rules, wrapper: Any) -> None:
        """Register hooks on the model and on the module that wraps it, once."""
        model = self.model
        if rules not in self._installed:
            if not self._installed:
                hooks.route_losses({sys.modules[type(part).__module__] for part in (model, *self._modules)})
                hooks.hide_sequence(hooks.vision_encoders(model))
                self.depends_on_largest = hooks.watch_rotary(model)
                if self.is_hybrid:
                    route(model)
                    hooks.listen_to_layers(model, self.mixers)
            if rules.body is not None:
                hooks.watch_body(model, rules.body, rules.joined)
            hooks.listen(model, model.base_model)
            self._installed.add(rules)
            self.record()
        if wrapper is not None and wrapper is not model:
            hooks.listen(wrapper)
