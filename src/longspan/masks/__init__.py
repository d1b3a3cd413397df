"""What may attend to what, in global positions. No ranks, no devices, no torch.

One file per idea; `mask.py` holds the type and its algebra, `bands.py` the closed-form pieces beneath it.
"""

from longspan.masks.bands import Band
from longspan.masks.causal_masks import causal, full, sliding_window
from longspan.masks.classifier import Classifier
from longspan.masks.document_masks import chunked, documents, from_cu_seqlens
from longspan.masks.functions.opaque import from_mask_mod
from longspan.masks.given.dense import from_dense
from longspan.masks.mask import Mask
from longspan.masks.plane import Plane, Predicate
from longspan.masks.prefix import global_prefix, prefix_lm
from longspan.masks.vary import per_head, per_row
from longspan.untraced import untraced

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

# Called inside of compiled code, they are not traced.
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
