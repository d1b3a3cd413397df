"""Which module is the first that computes something else over ranks: every module's outputs and inputs, both ways."""

from __future__ import annotations

from contextlib import suppress

from longspan import layouts
from longspan.integrations.huggingface.proving.trial import Trial
from longspan.integrations.huggingface.rules import Rules
from longspan.testing.modules import SeenModules, first_different, titled


def first_module(trial: Trial, rules: Rules, name: str, world_size: int) -> str | None:
    """The name and class of the module, or None where all that can be compared is the same."""
    whole, parts = SeenModules(), [SeenModules() for _ in range(world_size)]
    handles = whole.attach(trial.model)
    try:
        trial.forward()
    finally:
        for handle in handles:
            handle.remove()
    with suppress(Exception):  # it may be the reason for asking: what was seen until then is compared
        trial.split(rules, name, world_size, lambda model, rank: parts[rank].attach(model))
    layout = getattr(layouts, name)(trial.length, world_size)
    first = first_different(whole, parts, layout)
    return None if first is None else titled(trial.model, first)
