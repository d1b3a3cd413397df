"""How large a model is and what a training step of it takes, before anything runs: from a `config.json`, with numpy
alone."""

from longspan.sizing.families import FAMILIES as _ATTENTION
from longspan.sizing.families import sizes_of
from longspan.sizing.hybrid_families import FAMILIES as _HYBRIDS
from longspan.sizing.modules import Block, Heads, LayerSizes, ModelSizes

FAMILIES = (*_ATTENTION, *_HYBRIDS)
"""Every model_type that can be sized."""

__all__ = ["FAMILIES", "Block", "Heads", "LayerSizes", "ModelSizes", "sizes_of"]
