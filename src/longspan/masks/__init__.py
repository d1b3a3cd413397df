"""Masks: which query position may attend to which key position, in global positions. No ranks, no devices, no torch.

`mask.py` holds the type and its algebra, `bands.py` the closed-form pieces. The builders are in `causal_and_window.py`,
`document_rows.py`, `builders.py` (per head, per row, functions) and `convert.py` (dense tables).
"""

from longspan.masks.bands import Band
from longspan.masks.builders import from_mask_mod, per_head, per_row
from longspan.masks.causal_and_window import causal, full, global_prefix, prefix_lm, sliding_window
from longspan.masks.convert import from_dense
from longspan.masks.document_rows import chunked, documents, from_cu_seqlens
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
