"""A model with weights that show what it does: none of them zero, none of them one, the same for the same seed."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

AS_STARTED = re.compile(r"A_log|dt_bias|time_decay|time_first|time_mix|lambda|decay|a_param|alpha_log|inv_freq|slope")
"""Weights that are rates: they keep the values that the model's own code starts with, up to a tenth."""

REMOTE = "transformers_modules"
"""The package that transformers puts code of repositories into."""


class CannotShrinkError(ValueError):
    """No tiny copy of a model can be made."""


def build(kind: type, config: Any, seed: int = 0) -> nn.Module:
    """The model in float64 on the CPU, in train mode, its weights drawn from a generator of its own."""
    with own_randomness(seed):
        config = copy.deepcopy(config)  # models write to theirs
        config = fitting(kind, config)
        config._experts_implementation = "eager"  # the others have no float64
        try:
            model = kind._from_config(config, dtype=torch.float64)
        except Exception as error:
            remote = " (code of its own repository, trust_remote_code)" if kind.__module__.startswith(REMOTE) else ""
            raise CannotShrinkError(
                f"a tiny copy of {getattr(config, 'model_type', '')!r} was configured, but {kind.__name__}{remote}"
                f" could not be made from it: {type(error).__name__}: {error}"
            ) from error
        model = model.to("cpu", torch.float64).train()
        draw(model, torch.Generator().manual_seed(seed))
    return model


def fitting(kind: type, config: Any) -> Any:
    """The part of a configuration that a model is made from: all, or the text's."""
    wanted = getattr(kind, "config_class", None)
    text = config.get_text_config()
    return text if isinstance(wanted, type) and not isinstance(config, wanted) and isinstance(text, wanted) else config


@contextmanager
def own_randomness(seed: int) -> Iterator[None]:
    """What is drawn inside changes nothing outside: PyTorch's, NumPy's and Python's generators."""
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


@torch.no_grad()
def draw(model: nn.Module, generator: torch.Generator) -> None:
    """Draws every parameter anew. Norms are around what they start at, matrices keep the size of what goes through."""
    for name, weight in model.named_parameters():
        noise = torch.rand(weight.shape, generator=generator, dtype=torch.float64) * 2 - 1
        weight.copy_(drawn(name, weight, noise))


def drawn(name: str, weight: Tensor, noise: Tensor) -> Tensor:
    """New values of one parameter from noise between -1 and 1."""
    usual = bool(torch.isfinite(weight).all()) and weight.numel() > 0 and weight.abs().max() < 100
    if AS_STARTED.search(name) and usual:
        return weight + 0.1 * noise
    if usual and weight.ndim and bool((weight == 1).all()):
        return 1 + 0.2 * noise
    if weight.ndim < 2:
        return 0.2 * noise
    fan_in = weight[0].numel() if weight.ndim != 3 else max(weight.shape[1:])
    return noise * (3.0 / min(max(fan_in, 1), 64)) ** 0.5
