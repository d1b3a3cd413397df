"""Masks: which query position may attend to which key position, in global positions. No ranks, no devices, no torch.

`mask.py` holds the type and its algebra, `bands.py` the closed-form pieces beneath it, `builders.py` the functions that
make masks.
"""

from longspan._compile import untraced
from longspan.masks.bands import Band
from longspan.masks.builders import (
    causal,
    chunked,
    documents,
    from_cu_seqlens,
    from_mask_mod,
    full,
    global_prefix,
    per_head,
    per_row,
    prefix_lm,
    sliding_window,
)
from longspan.masks.convert import from_dense
from longspan.masks.mask import Mask
from longspan.masks.plane import Plane, Predicate
from longspan.masks.tiles import Classifier

__all__ = [
    "Band",
    "Classifier",
    "Mask",
    "Plane",
    "Predicate",
    "causal",
    "chunked",
    "documents",
    "from_cu_seqlens",
    "from_dense",
    "from_mask_mod",
    "full",
    "global_prefix",
    "per_head",
    "per_row",
    "prefix_lm",
    "sliding_window",
]

# Compiled code calls these without tracing them.
causal = untraced(causal)
chunked = untraced(chunked)
documents = untraced(documents)
from_cu_seqlens = untraced(from_cu_seqlens)
from_dense = untraced(from_dense)
from_mask_mod = untraced(from_mask_mod)
full = untraced(full)
global_prefix = untraced(global_prefix)
per_head = untraced(per_head)
per_row = untraced(per_row)
prefix_lm = untraced(prefix_lm)
sliding_window = untraced(sliding_window)
