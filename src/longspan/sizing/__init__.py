"""Sizes of a model and what a training step of it takes, from a `config.json`, without torch."""

from longspan.sizing.config import BUILT_IN, HUB, built_in_config
from longspan.sizing.families import FAMILIES as _ATTENTION
from longspan.sizing.families import HYBRID_FAMILIES as _HYBRIDS
from longspan.sizing.families import sizes_of
from longspan.sizing.memory import RESERVE, AttentionBytes, MemoryLine, Recipe, StepMemory, TrainingStep, step_memory
from longspan.sizing.modules import Block, Heads, LayerSizes, ModelSizes
from longspan.sizing.time import AttentionSeconds, StepCost, StepTime, TimeLine, model_flop, step_time, why_no_time

FAMILIES = (*_ATTENTION, *_HYBRIDS)
"""Every model_type that can be sized."""

__all__ = [
    "BUILT_IN",
    "FAMILIES",
    "HUB",
    "RESERVE",
    "AttentionBytes",
    "AttentionSeconds",
    "Block",
    "Heads",
    "LayerSizes",
    "MemoryLine",
    "ModelSizes",
    "Recipe",
    "StepCost",
    "StepMemory",
    "StepTime",
    "TimeLine",
    "TrainingStep",
    "built_in_config",
    "model_flop",
    "sizes_of",
    "step_memory",
    "step_time",
    "why_no_time",
]
